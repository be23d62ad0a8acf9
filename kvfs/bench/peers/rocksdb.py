"""RocksDB with the blocks as its values, through rocksdict; plain, and with blob files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rocksdict import (
    BlockBasedOptions,
    DBCompressionType,
    Options,
    Rdict,
    WriteBatch,
    WriteOptions,
)

from kvfs.bench.peers.contract import Peer, chain
from kvfs.bench.peers.disk import files_below
from kvfs.bench.peers.work import Work

_TINY = bytes(32)
_BUFFER_BYTES = 256 << 20


class RocksDb(Peer):
    api = {
        "match": "Rdict[list of keys] (MultiGet, bloom filter); keys: chain of xxh3-128",
        "put": "one WriteBatch, logged and not synced",
        "put.durable": "one WriteBatch with sync",
        "fetch": "Rdict[list of keys] from table files, one copy into place",
        "remove": "one WriteBatch of deletes per 1,022 blocks, then flush",
    }  # fmt: skip
    packages = ("rocksdict",)
    note = "planted values: 32 bytes, among a million; fetched after a flush, without compression"
    durable = True
    background = True
    blobs = False

    def __init__(self, work: Work, place: Path) -> None:
        super().__init__(work, place)
        self._db = Rdict(str(place), options=self._options())
        self._planted = 0

    def _options(self) -> Any:
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_compression_type(DBCompressionType.none())
        options.set_write_buffer_size(_BUFFER_BYTES)
        table = BlockBasedOptions()
        table.set_bloom_filter(10, False)
        options.set_block_based_table_factory(table)
        if self.blobs:
            options.set_enable_blob_files(True)
            options.set_min_blob_size(4096)
        return options

    def keys(self, tokens: Any) -> Sequence[bytes]:
        return list(chain(tokens))

    def found(self, keys: Sequence[bytes]) -> int:
        n = 0
        for value in self._db[keys]:
            if value is None:
                break
            n += 1
        return n

    def plant(self, keys: Sequence[bytes]) -> None:
        self._write([(key, _TINY) for key in keys])
        self._planted += len(keys)

    def plant_background(self, count: int, batch: int) -> None:
        super().plant_background(count, batch)
        self._db.flush()
        self._db.compact_range(None, None)

    def _write(self, pairs: Sequence[tuple[bytes, bytes]], sync: bool = False) -> None:
        batch, how = WriteBatch(raw_mode=True), WriteOptions()
        for key, value in pairs:
            batch.put(key, value)
        how.sync = sync
        self._db.write(batch, how)

    def put(self, keys: Sequence[bytes], *, durable: bool = False) -> None:
        batch, how = WriteBatch(raw_mode=True), WriteOptions()
        for i, key in enumerate(keys):
            batch.put(key, bytes(self.work.part(self.work.payload, i)))
        how.sync = durable
        self._db.write(batch, how)

    def settle(self) -> None:
        self._db.flush()

    def fetch(self, keys: Sequence[bytes]) -> None:
        for i, value in enumerate(self._db[keys]):
            self.work.part(self.work.into, i)[:] = value

    def drop(self) -> None:
        self._db.close()
        super().drop()
        self._db = Rdict(str(self.place), options=self._options())

    def remove(self, keys: Sequence[bytes]) -> None:
        batch = WriteBatch(raw_mode=True)
        for key in keys:
            batch.delete(key)
        self._db.write(batch)
        self._db.flush()

    def metadata_bytes(self) -> float:
        tables = sum(f.stat().st_size for f in files_below(self.place) if f.suffix == ".sst")
        return tables / self._planted - len(_TINY)

    def close(self) -> None:
        self._db.close()


class RocksDbBlob(RocksDb):
    blobs = True
