"""What the tests of SGLang share: engine processes, and host pools as SGLang makes them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import sglang_tiny
from vllm_support import Place

END_SECONDS = 60


def settings(place: Place, **more: Any) -> dict[str, Any]:
    """--hicache-storage-backend-extra-config of a store."""
    return {
        "backend_name": "kvfs", "module_path": "kvfs.connectors.sglang",
        "class_name": "KvfsHiCache", "interface_v1": 1, "store": str(place.store),
        "index": str(place.index), "arena_bytes": 64 << 20, "fetch_seconds": 30.0,
        "prefetch_threshold": sglang_tiny.PAGE, "hicache_storage_pass_prefix_keys": True, **more,
    }  # fmt: skip


class Sglang:
    """An engine in a process group of its own, which SGLang kills whole when something fails: see
    sglang_tiny.py."""

    def __init__(
        self, model: Path, storage: dict[str, Any] | None, environment: dict[str, str], **more: Any
    ) -> None:  # fmt: skip
        """more: arguments of sglang.Engine."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._before = _shared_memory()
        self.process = subprocess.Popen(
            [sys.executable, sglang_tiny.__file__], env=sglang_tiny.environment(environment),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            self.ask(model=str(model), storage=storage, more=more)
        except BaseException:
            self.close()
            raise

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("RESULT"):
                answer: dict[str, Any] = json.loads(line.removeprefix("RESULT"))
                return answer
        raise AssertionError(f"SGLang ended:\n{self.log()[-4000:]}")

    def generate(self, ids: list[int]) -> tuple[list[int], int]:
        """Greedy tokens behind a prompt, and how many of its tokens came from the storage."""
        out = self.ask(ids=ids)
        return out["ids"], (out["details"] or {}).get("storage", 0)

    def flush(self) -> None:
        """Lets SGLang forget what it has in memory; what is stored stays."""
        assert self.ask(flush=True)["flushed"]

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._log.close()
        # SGLang ends its processes by SIGKILL, that which would have removed these as well.
        for path in _shared_memory() - self._before - _mapped():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def __enter__(self) -> Sglang:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _shared_memory() -> set[str]:
    """What there is in /dev/shm of SGLang's and of multiprocessing's."""
    return {str(p) for kind in ("sglang_*", "sem.mp-*") for p in Path("/dev/shm").glob(kind)}


def _mapped() -> set[str]:
    """What of it some process uses."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            found.update(re.findall(r"/dev/shm/\S+", maps.read_text()))
    return found


def host_pool(kind: str, layout: str, *, page: int = 16, layers: int = 3, tokens: int = 256) -> Any:
    """A host pool of SGLang's own: "mha" or "mla"."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    common = {
        "pin_memory": False, "device": "cpu", "device_capacity_tokens": tokens, "start_layer": 0,
        "end_layer": layers, "host_token_capacity": tokens,
    }  # fmt: skip
    if kind == "mha":
        of_mha = MHATokenToKVPool(tokens, page, torch.float32, 2, 32, layers, "cpu", False)
        return MHATokenToKVPoolHost(of_mha._mha_buffer_info(), 1.0, 0, page, layout, **common)
    of_mla = MLATokenToKVPool(tokens, page, torch.bfloat16, 64, 16, layers, "cpu", False)
    return MLATokenToKVPoolHost(
        of_mla._mla_buffer_info(), 1.0, 0, page, layout, target_layer_num=layers, **common
    )
