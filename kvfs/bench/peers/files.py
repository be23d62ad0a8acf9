"""One file per block: what the file tiers of the inference engines do, with the least around it.

256 directories by the first byte of the key, as caches of small files are laid out. A block is
written under another name and renamed, so that nobody reads half of it. Durable: all are written,
then all are synced, then all are renamed, then the directories are synced: fewer commits of the
file system's journal than file after file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvfs.bench.peers.contract import Peer, chain
from kvfs.bench.peers.work import Work


class Files(Peer):
    api = {
        "match": "os.path.exists per block up to the first miss; keys: chain of xxh3-128",
        "put": "open, write, rename per block",
        "put.durable": "the same; fdatasync of each before it is renamed, fsync of directories",
        "fetch": "open, preadv into place, close per block",
        "remove": "unlink per block",
    }  # fmt: skip
    note = "metadata: directory entries alone; an inode (256 bytes on ext4) comes on top"
    durable = True

    def __init__(self, work: Work, place: Path) -> None:
        super().__init__(work, place)
        self._planted = 0
        for i in range(256):
            (place / f"{i:02x}").mkdir()

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self.place}/{name[:2]}/{name}"

    def keys(self, tokens: Any) -> Sequence[bytes]:
        return list(chain(tokens))

    def found(self, keys: Any) -> int:
        n, exists = 0, os.path.exists
        for key in keys:
            if not exists(self._path(key)):
                break
            n += 1
        return n

    def match(self, tokens: Any) -> int:
        return self.found(chain(tokens))

    def plant(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            Path(self._path(key)).write_bytes(b"x")
        self._planted += len(keys)

    def put(self, keys: Sequence[bytes], *, durable: bool = False) -> None:
        paths = [self._path(key) for key in keys]
        for i, path in enumerate(paths):
            self._write(i, path + ".new", None if durable else path)
        if durable:
            self._sync_and_rename(paths)

    def _write(self, i: int, path: str, final: str | None) -> None:
        fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            os.write(fd, self.work.part(self.work.payload, i))
        finally:
            os.close(fd)
        if final is not None:
            os.rename(path, final)

    def _sync_and_rename(self, paths: Sequence[str]) -> None:
        for path in paths:
            _sync_one(path + ".new", os.fdatasync)
        for path in paths:
            os.rename(path + ".new", path)
        for directory in {os.path.dirname(path) for path in paths}:
            _sync_one(directory, os.fsync)

    def fetch(self, keys: Sequence[bytes]) -> None:
        for i, key in enumerate(keys):
            into = self.work.part(self.work.into, i)
            fd = os.open(self._path(key), os.O_RDONLY)
            try:
                if os.preadv(fd, [into], 0) != len(into):
                    raise AssertionError("a block is too short")
            finally:
                os.close(fd)

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            os.unlink(self._path(key))

    def metadata_bytes(self) -> float:
        return sum(d.stat().st_size for d in self.place.iterdir()) / self._planted


def _sync_one(path: str, how: Any) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        how(fd)
    finally:
        os.close(fd)
