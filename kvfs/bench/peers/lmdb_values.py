"""LMDB with the blocks as its values. One host alone: a shared file system may not hold it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lmdb

from kvfs.bench.peers.contract import Peer, chain
from kvfs.bench.peers.work import Work

_MAP_BYTES = 64 << 30
_TINY = bytes(32)


class LmdbValues(Peer):
    api = {
        "match": "Transaction.get per block up to the first miss; keys: chain of xxh3-128",
        "put": "Transaction.put per block, one transaction, environment opened with sync=False",
        "put.durable": "the same, then Environment.sync(True)",
        "fetch": "Transaction.get per block, without a copy, and one copy into place",
        "remove": "Transaction.delete per block, one transaction",
    }  # fmt: skip
    packages = ("lmdb",)
    note = "planted values: 32 bytes, among a million; cold: the environment is opened anew"
    durable = True
    background = True

    def __init__(self, work: Work, place: Path) -> None:
        super().__init__(work, place)
        self._env = self._open()

    def _open(self) -> Any:
        return lmdb.open(str(self.place), map_size=_MAP_BYTES, sync=False, readahead=True)

    def keys(self, tokens: Any) -> Sequence[bytes]:
        return list(chain(tokens))

    def found(self, keys: Any) -> int:
        n = 0
        with self._env.begin(buffers=True) as txn:
            for key in keys:
                if txn.get(key) is None:
                    break
                n += 1
        return n

    def match(self, tokens: Any) -> int:
        return self.found(chain(tokens))

    def plant(self, keys: Sequence[bytes]) -> None:
        with self._env.begin(write=True) as txn:
            for key in keys:
                txn.put(key, _TINY)

    def put(self, keys: Sequence[bytes], *, durable: bool = False) -> None:
        with self._env.begin(write=True) as txn:
            for i, key in enumerate(keys):
                txn.put(key, self.work.part(self.work.payload, i))
        if durable:
            self._env.sync(True)

    def fetch(self, keys: Sequence[bytes]) -> None:
        work = self.work
        with self._env.begin(buffers=True) as txn:
            for i, key in enumerate(keys):
                work.part(work.into, i)[:] = txn.get(key)

    def drop(self) -> None:
        self._env.close()  # pages that are mapped stay
        super().drop()
        self._env = self._open()

    def remove(self, keys: Sequence[bytes]) -> None:
        with self._env.begin(write=True) as txn:
            for key in keys:
                txn.delete(key)

    def metadata_bytes(self) -> float:
        stat = self._env.stat()
        pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return float(pages * stat["psize"] / stat["entries"] - len(_TINY))

    def close(self) -> None:
        self._env.close()
