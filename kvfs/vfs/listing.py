"""A directory as it was when it was opened: entries at fixed positions, made when asked for.

A block's entry is cut from its run's row when the reader gets there, so a directory of 100,000
blocks costs its forks and no more. Immutable; no I/O; any thread may read it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from kvfs.vfs.line import Stretch
from kvfs.vfs.node import BlockFile, Entry, Folder, Stat, block_ino, block_name


class Blocks:
    """Consecutive blocks of one run, from its i-th on."""

    __slots__ = ("_first", "_folder", "_segment", "_size", "_stretch", "_used_ms", "count")

    def __init__(
        self, folder: Folder, stretch: Stretch, first: int, count: int, segment: bytes, used_ms: int
    ) -> None:
        self._folder = folder
        self._stretch = stretch
        self._first = first
        self.count = count
        self._segment = segment
        self._size = folder.ns.row_bytes
        self._used_ms = used_ms

    def entry(self, i: int) -> Entry:
        at = self._first + i
        piece = self._stretch.piece
        number = piece.block + at
        nsid, hash_ = self._folder.ns.nsid, self._stretch.hash(at)
        ino = block_ino(nsid, hash_, self._segment, piece.slot + at)
        stat = Stat(ino, False, self._size, piece.written_ms, self._used_ms)
        return Entry(block_name(number), BlockFile(self._folder, number), stat)


class Single:
    """One entry."""

    __slots__ = ("_entry",)
    count = 1

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    def entry(self, i: int) -> Entry:
        return self._entry


class Listing:
    """The entries of one directory, in a fixed order."""

    def __init__(self, parts: Sequence[Blocks | Single]) -> None:
        self._parts = parts
        self._starts: list[int] = []
        total = 0
        for part in parts:
            self._starts.append(total)
            total += part.count
        self._total = total

    def __len__(self) -> int:
        return self._total

    def entries(self, start: int = 0) -> Iterator[Entry]:
        """Yields the entries from position `start` on."""
        if start >= self._total:
            return
        at = bisect_right(self._starts, start) - 1
        skip = start - self._starts[at]
        for part in self._parts[at:]:
            for i in range(skip, part.count):
                yield part.entry(i)
            skip = 0
