"""Caches of transformers models through a real store, and back in another process.

What is compared is the logits of the continuation, bit by bit: a cache that went through the store
must continue exactly as the one that never left memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny_models
import torch

from kvfs import Store
from kvfs.connectors import hf_copy
from kvfs.connectors.transformers import CacheStore, digest_weights

BLOCK = 128
LENGTH = 333  # two whole blocks, and 77 tokens to compute
HELD = LENGTH // BLOCK * BLOCK


class Child:
    """The process that restores: see tiny_models.py."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, tiny_models.__file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def restored(
        self, name: str, store: Path, ids: Any, state: bytes | None = None
    ) -> tuple[int, Any]:
        """(tokens the child loaded, its logits of all others)."""
        assert self.process.stdin is not None and self.process.stdout is not None
        if not getattr(self, "ready", False):
            assert self.process.stdout.readline() == "ready\n"
            self.ready = True
        work = store.parent
        if state is not None:
            (work / "state").write_bytes(state)
        request = {
            "name": name, "store": str(store), "index": str(work / "index-of-child"),
            "tokens": ids[0].tolist(), "state": str(work / "state") if state else None,
            "out": str(work / "logits"),
        }  # fmt: skip
        print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        data = torch.frombuffer(bytearray((work / "logits").read_bytes()), dtype=torch.float32)
        return answer["tokens"], data.view(-1, tiny_models.VOCABULARY)

    def close(self) -> None:
        self.process.communicate()
        assert self.process.returncode == 0


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.close()


@pytest.fixture
def store(store_dir: Path) -> Iterator[Store]:
    with Store.init(store_dir) as store:
        yield store


def cache_store(store: Store, model: Any, **fields: Any) -> CacheStore:
    given = {"weights": digest_weights(model), "tokenizer": "none", **fields}
    return CacheStore(store, model, **given)


def noise(row: Any) -> Any:
    """A row of other bytes, that are plausible numbers."""
    numbers = torch.randn(row.numel() // 4, generator=torch.Generator().manual_seed(7))
    return numbers.view(torch.uint8)


def overwrite(store_dir: Path, row: Any, by: Any) -> None:
    """Replaces the payload of a stored block, on disk."""
    old = row.numpy().tobytes()
    (path,) = [p for p in store_dir.rglob("*.seg") if old in p.read_bytes()]
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(old))
        file.write(by.numpy().tobytes())


def test_llama_comes_back_in_a_new_process(child: Child, store: Store, store_dir: Path) -> None:
    model, ids = tiny_models.build("llama"), tiny_models.prompt(LENGTH)
    cs = cache_store(store, model)
    cache = cs.load(ids)[0]
    tiny_models.logits(model, ids[:, :HELD], cache)
    assert cs.save(ids, cache) == HELD
    in_memory = tiny_models.logits(model, ids, cache)

    tokens, logits = child.restored("llama", store_dir, ids)
    assert tokens == HELD
    assert torch.equal(logits, in_memory)


def test_noise_in_a_block_is_not_served(child: Child, store: Store, store_dir: Path) -> None:
    model, ids = tiny_models.build("llama"), tiny_models.prompt(LENGTH)
    cs = cache_store(store, model)
    cache, _, _ = cs.prefill(ids)
    rows = hf_copy.gather(cs.layout, cache, 0, 2)
    overwrite(store_dir, rows[1], noise(rows[1]))
    one_block = hf_copy.build(model.config, hf_copy.scatter(cs.layout, rows[:1]), BLOCK)
    recomputed = tiny_models.logits(model, ids, one_block)

    tokens, logits = child.restored("llama", store_dir, ids)
    assert tokens == BLOCK, "the good block, and nothing of the bad one"
    assert torch.equal(logits, recomputed)
    in_memory = tiny_models.logits(model, ids, cache)
    assert torch.allclose(logits[BLOCK:], in_memory, atol=1e-5)

    # Would the noise have been noticed, had it been served?
    rows[1] = noise(rows[1])
    noisy = hf_copy.build(model.config, hf_copy.scatter(cs.layout, rows), HELD)
    assert (tiny_models.logits(model, ids, noisy) - in_memory).abs().max() > 0.01
