"""LMCache's second-level adapters: fs, fs_native and raw_block, driven as its engine drives them.

An adapter is asked by submitting a task and waiting on an event descriptor until its result can be
taken. Chunks are 128 tokens, so that a chunk is a block (its default is 256).
"""

from __future__ import annotations

import os
import select
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import (
    fs_l2_adapter,
    fs_native_l2_adapter,
    raw_block_l2_adapter,
)
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.multiprocess.token_hasher import TokenHasher

from kvfs.bench.peers.contract import Peer
from kvfs.bench.peers.work import BLOCK_TOKENS, Work

_TINY = 4096
_AT_ONCE = 1000
_TIMEOUT = 120.0
_WORKERS = 4


class Adapter(Peer):
    """What the three have in common."""

    api = {
        "match": "TokenHasher (blake3), submit_lookup_and_lock_task, count of leading ones",
        "put": "submit_store_task",
        "fetch": "submit_load_task",
        "remove": "delete, until a lookup misses",
    }  # fmt: skip
    packages: ClassVar[tuple[str, ...]] = ("lmcache", "torch")

    def __init__(self, work: Work, place: Path) -> None:
        super().__init__(work, place)
        torch.set_num_threads(1)
        self._hasher = TokenHasher(BLOCK_TOKENS, "blake3")
        self._from = self._objects(work.payload)
        self._to = self._objects(work.into)
        self._tiny = _object(torch.zeros(_TINY, dtype=torch.uint8), 0)
        self._adapter = self._made()

    @abstractmethod
    def _made(self) -> Any:
        """The adapter, open."""

    def _objects(self, buffer: memoryview) -> list[Any]:
        whole, size = torch.frombuffer(buffer, dtype=torch.uint8), self.work.block_bytes
        return [
            _object(whole[i * size : (i + 1) * size], i * size) for i in range(self.work.blocks)
        ]

    def keys(self, tokens: Any) -> Sequence[Any]:
        hashes = self._hasher.compute_chunk_hashes(tokens)
        return [ObjectKey(chunk_hash=h, model_name="m", kv_rank=0) for h in hashes]

    def as_array(self, tokens: Any) -> None:
        """The hasher takes lists."""

    def found(self, keys: Sequence[Any]) -> int:
        adapter = self._adapter
        task = adapter.submit_lookup_and_lock_task(keys, {})
        there = _wait(
            adapter.get_lookup_and_lock_event_fd(),
            lambda: adapter.query_lookup_and_lock_result(task),
        )
        adapter.submit_unlock(keys)
        return int(there.count_leading_ones())

    def plant(self, keys: Sequence[Any]) -> None:
        for first in range(0, len(keys), _AT_ONCE):
            some = keys[first : first + _AT_ONCE]
            self._store(some, [self._tiny] * len(some))

    def put(self, keys: Sequence[Any], *, durable: bool = False) -> None:
        self._store(keys, self._from)

    def _store(self, keys: Sequence[Any], objects: Sequence[Any]) -> None:
        adapter, done = self._adapter, {}
        task = adapter.submit_store_task(list(keys), list(objects))

        def result() -> Any:
            done.update(adapter.pop_completed_store_tasks())
            return done.get(task)

        _wait(adapter.get_store_event_fd(), result)

    def fetch(self, keys: Sequence[Any]) -> None:
        adapter = self._adapter
        task = adapter.submit_load_task(list(keys), self._to)
        there = _wait(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
        if there.count_leading_ones() != len(keys):
            raise RuntimeError("not all blocks were loaded")

    def remove(self, keys: Sequence[Any]) -> None:
        self._adapter.delete(list(keys))
        end = time.monotonic() + _TIMEOUT
        while self.found(keys[-1:]):
            if time.monotonic() > end:
                raise TimeoutError("deleted blocks are still there")
            time.sleep(0.001)

    def close(self) -> None:
        self._adapter.close()


class Fs(Adapter):
    note = "the adapter in Python: asyncio, a file per block"

    def _made(self) -> Any:
        config = fs_l2_adapter.FSL2AdapterConfig(str(self.place))
        return fs_l2_adapter.FSL2Adapter(config)


class FsNative(Adapter):
    note = "the adapter in C++, 4 threads, a file per block"

    def _made(self) -> Any:
        config = fs_native_l2_adapter.FSNativeL2AdapterConfig(str(self.place), num_workers=_WORKERS)
        return fs_native_l2_adapter._create_fs_native_l2_adapter(config)


class RawBlock(Adapter):
    note = "the adapter in Rust on one file of 8 GB, allocated before; blocks of 114,688 bytes"
    packages = ("lmcache", "lmcache_rust_raw_block_io", "torch")
    align = 4096
    direct = False

    def _made(self) -> Any:
        path = self.place / "device"
        fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(fd, 0, 8 << 30)
        finally:
            os.close(fd)
        config = raw_block_l2_adapter.RawBlockL2AdapterConfig(
            device_path=str(path), slot_bytes=self.work.block_bytes + self.align,
            use_odirect=self.direct, load_checkpoint_on_init=False, meta_enable_periodic=False,
        )  # fmt: skip
        return raw_block_l2_adapter.RawBlockL2Adapter(config)


class RawBlockDirect(RawBlock):
    direct = True


def _object(view: Any, address: int) -> Any:
    metadata = MemoryObjMetadata(
        shape=view.shape, dtype=torch.uint8, address=address, phy_size=len(view), ref_count=1,
        fmt=MemoryFormat.KV_2LTD,
    )  # fmt: skip
    return TensorMemoryObj(view, metadata, None)


def _wait(event: int, result: Callable[[], Any]) -> Any:
    """Waits on an adapter's event descriptor until a task has a result. Raises TimeoutError."""
    end = time.monotonic() + _TIMEOUT
    while True:
        got = result()
        if got is not None and got is not False and got != {}:
            return got
        if time.monotonic() > end:
            raise TimeoutError("a task of the adapter has no result")
        if select.select([event], [], [], 0.5)[0]:
            os.read(event, 8)
