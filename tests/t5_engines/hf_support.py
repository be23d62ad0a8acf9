"""What the tests of transformers share: the process that restores, caches, damage on disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import tiny_models
import torch
from transformers import DynamicCache

from kvfs import Store
from kvfs.connectors.transformers import CacheStore, digest_weights

BLOCK = 128
LENGTH = 333  # two whole blocks, and 77 tokens to compute
HELD = LENGTH // BLOCK * BLOCK
HYBRID = ["mistral", "gemma3_text", "gpt_oss", "deepseek_v4"]
LOGGER = "kvfs.connectors.transformers"
IDS = tiny_models.prompt(LENGTH)


def cache_store(store: Store, model: Any, **fields: Any) -> CacheStore:
    given = {"weights": digest_weights(model), "tokenizer": "none", **fields}
    return CacheStore(store, model, **given)


def filled(model: Any, ids: Any) -> Any:
    """A cache that holds these tokens and has never seen a store."""
    cache = DynamicCache(config=model.config)
    tiny_models.logits(model, ids, cache)
    return cache


def noise(row: Any) -> Any:
    """A row of other bytes, that are plausible numbers."""
    numbers = torch.randn(row.numel() // 4, generator=torch.Generator().manual_seed(7))
    return numbers.view(torch.uint8)


def overwrite(store_dir: Path, old: Any, new: Any) -> None:
    """Replaces bytes of a stored block, on disk."""
    data = old.numpy().tobytes()
    (path,) = [p for p in store_dir.rglob("*.seg") if data in p.read_bytes()]
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(data))
        file.write(new.numpy().tobytes())


class Child:
    """The process that restores: see tiny_models.py."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, tiny_models.__file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.ready = False
        self.loaded: bytes | None = None

    def restored(
        self, name: str, store: Path, ids: Any, state: bytes | None = None,
        slots: Path | None = None, replay: str = "exact", **options: Any,
    ) -> tuple[int, Any]:  # fmt: skip
        """(tokens the child loaded, its logits of all others). slots: directory of a slot pool;
        options: of tiny_models.build. `loaded` is the state it goes on with."""
        assert self.process.stdin is not None and self.process.stdout is not None
        if not self.ready:
            assert self.process.stdout.readline() == "ready\n"
            self.ready = True
        work = store.parent
        if state is not None:
            (work / "state").write_bytes(state)
        request = {
            "name": name, "store": str(store), "index": str(work / "index-of-child"),
            "tokens": ids[0].tolist(), "state": str(work / "state") if state else None,
            "slots": str(slots) if slots else None, "out": str(work / "logits"),
            "replay": replay, "options": options, "loaded": str(work / "loaded"),
        }  # fmt: skip
        (work / "loaded").unlink(missing_ok=True)
        print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        self.loaded = (work / "loaded").read_bytes() if (work / "loaded").exists() else None
        data = torch.frombuffer(bytearray((work / "logits").read_bytes()), dtype=torch.float32)
        return answer["tokens"], data.view(-1, tiny_models.VOCABULARY)

    def close(self) -> None:
        self.process.communicate()
        assert self.process.returncode == 0
