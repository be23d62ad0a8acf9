"""Plain reads of what a plan names: the limit that a fetch through the fetcher is compared with.

The same bytes of the same files, by as many threads, into shared memory of the same kind, touched
already. Files are opened, and threads started, before anything is timed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvfs.arena import Arena
from kvfs.bench.place import drop_cache
from kvfs.fetcher.wire import Piece
from kvfs.namespace import Namespace

_Part = tuple[int, int, int, int]  # (descriptor, offset, bytes, where they go)


class PlainReader:
    """Reads pieces of a store's files; a context manager. One thread calls it."""

    def __init__(self, store: str, ns: Namespace, threads: int, memory: int) -> None:
        """store: its directory; memory: bytes of the most that is read at once."""
        self.store = Path(store)
        self.stride = ns.stride
        self.threads = threads
        self.arena = Arena.create(memory)
        self._files: dict[str, int] = {}
        self._pool = ThreadPoolExecutor(threads)

    def paths(self, pieces: Sequence[Piece]) -> list[Path]:
        """The files that the pieces lie in."""
        return [self.store / path for path in dict.fromkeys(p.path for p in pieces)]

    def drop(self, pieces: Sequence[Piece]) -> None:
        """Takes the files out of the page cache."""
        for path in self.paths(pieces):
            drop_cache(path)

    def open(self, pieces: Sequence[Piece]) -> None:
        for p in pieces:
            if p.path not in self._files:
                self._files[p.path] = os.open(self.store / p.path, os.O_RDONLY)

    def read(self, pieces: Sequence[Piece]) -> None:
        """Reads all pieces; each thread an equal share, one after the other."""
        shares = self._shares(pieces)
        if self.threads == 1:
            self._read_share(shares[0])
        else:
            list(self._pool.map(self._read_share, shares))

    def _shares(self, pieces: Sequence[Piece]) -> list[list[_Part]]:
        total = sum(p.count for p in pieces) * self.stride
        most = -(-total // self.threads)
        shares: list[list[_Part]] = [[]]
        room, place = most, 0
        for p in pieces:
            offset, left = p.offset, p.count * self.stride
            while left:
                if not room:
                    shares.append([])
                    room = most
                n = min(left, room)
                shares[-1].append((self._files[p.path], offset, n, place))
                offset, left, room, place = offset + n, left - n, room - n, place + n
        return shares

    def _read_share(self, parts: list[_Part]) -> None:
        for fd, offset, size, place in parts:
            done = 0
            while done < size:
                view = self.arena.view[place + done : place + size]
                n = os.preadv(fd, [view], offset + done)
                if not n:
                    raise AssertionError("a segment is too short")
                done += n

    def __enter__(self) -> PlainReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown()
        for fd in self._files.values():
            os.close(fd)
        self.arena.close()
