"""The main line of a folder, and what forks off it: how runs in the index become one directory.

A main line begins with a run. Where a run ends, the child of its last block that was written
earliest (then the one with the lower hash) continues it; all other children, and all children of
blocks further up, are forks. A child that repeats the next block of the line is no fork. What has
expired, and what follows it, is not there, as for `check`.

Reads the local index only, in short transactions. Thread-safe.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

from kvfs.chain import HASH_BYTES
from kvfs.errors import IndexFault
from kvfs.index import Index
from kvfs.index.schema import RUN, child_key, run_key, scan

log = logging.getLogger(__name__)

# A line found in the cache is believed for so long even if the index changed meanwhile: walking
# the 7,812 runs of the longest chains takes some 40 ms, and every block is looked up again anyway.
_FRESH_SECONDS = 1.0
_CACHED_BLOCKS = 2_000_000
_CACHED_LINES = 10_000


class Piece(NamedTuple):
    """A run's row without its hashes."""

    head: bytes
    seg: int
    slot: int
    blocks: int
    block: int
    written_ms: int
    expires_ms: int
    class_id: int
    parent: bytes

    @classmethod
    def decode(cls, head: bytes, value: Any) -> Piece:
        """Raises IndexFault for a row that cannot be a run."""
        try:
            piece = cls(head, *RUN.unpack_from(value))
        except struct.error as e:
            raise _damaged(head, str(e)) from None
        if not piece.blocks or len(value) != RUN.size + piece.blocks * HASH_BYTES:
            raise _damaged(head, f"{piece.blocks} blocks in {len(value)} bytes")
        return piece


def _damaged(head: bytes, what: str) -> IndexFault:
    return IndexFault(f"damaged run {head.hex()} in the index: {what}; `kvctl rebuild` repairs it")


class Stretch(NamedTuple):
    """A run on a line, with its hashes."""

    piece: Piece
    hashes: bytes

    def hash(self, i: int) -> bytes:
        return self.hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]

    def parent(self, i: int) -> bytes:
        """The hash of the block before the run's i-th."""
        return self.hash(i - 1) if i else self.piece.parent


class Line:
    """The runs of a main line, as one snapshot of the index has them."""

    __slots__ = ("_starts", "built", "snapshot", "stretches", "until_ms")

    def __init__(self, stretches: list[Stretch], snapshot: int) -> None:
        self.stretches = stretches
        self.snapshot = snapshot
        self.built = time.monotonic()
        self.until_ms = min(s.piece.expires_ms for s in stretches)
        self._starts = [s.piece.block for s in stretches]

    @property
    def first(self) -> int:
        return self._starts[0]

    @property
    def end(self) -> int:
        """The number behind the last block."""
        last = self.stretches[-1].piece
        return last.block + last.blocks

    @property
    def last_hash(self) -> bytes:
        return self.stretches[-1].hashes[-HASH_BYTES:]

    def find(self, number: int) -> tuple[Stretch, int] | None:
        """The run that holds a block of the chain, and the block's place in it."""
        if not self.first <= number < self.end:
            return None
        stretch = self.stretches[bisect_right(self._starts, number) - 1]
        return stretch, number - stretch.piece.block

    def hash_before(self, number: int) -> bytes | None:
        """The hash of block number-1 if it is on the line, else None."""
        found = self.find(number - 1)
        return None if found is None else found[0].hash(found[1])


def children(
    txn: Any, ns: int, parent: bytes, block: int, now_ms: int, prefix: bytes = b""
) -> list[Piece]:
    """The unexpired runs that follow a block, by hash. prefix: only those whose hash begins so.

    Rows that make no sense are logged.
    """
    out = []
    for key, _ in scan(txn, child_key(ns, parent, prefix)):
        head = bytes(key[-HASH_BYTES:])
        try:
            piece = get(txn, ns, head)
        except IndexFault as e:
            log.warning("%s", e)
            continue
        if piece is not None and piece.block == block and piece.expires_ms > now_ms:
            out.append(piece)
    return out


def get(txn: Any, ns: int, head: bytes) -> Piece | None:
    """A run's row by the hash of its first block. Raises IndexFault if it is damaged."""
    value = txn.get(run_key(ns, head))
    return None if value is None else Piece.decode(head, value)


def _stretch(txn: Any, ns: int, piece: Piece) -> Stretch:
    return Stretch(piece, bytes(txn.get(run_key(ns, piece.head))[RUN.size :]))


def _next(txn: Any, ns: int, stretch: Stretch, now_ms: int) -> Piece | None:
    piece = stretch.piece
    last = stretch.hashes[-HASH_BYTES:]
    found = children(txn, ns, last, piece.block + piece.blocks, now_ms)
    return min(found, key=lambda p: (p.written_ms, p.head), default=None)


def walk(txn: Any, ns: int, head: bytes, block: int, now_ms: int) -> list[Stretch]:
    """The main line that begins with a run; empty if it is not there or has expired."""
    piece = get(txn, ns, head)
    if piece is None or piece.block != block or piece.expires_ms <= now_ms:
        return []
    line = [_stretch(txn, ns, piece)]
    while (piece := _next(txn, ns, line[-1], now_ms)) is not None:
        line.append(_stretch(txn, ns, piece))
    return line


def forks(txn: Any, ns: int, line: Line, now_ms: int) -> Iterator[tuple[int, list[Piece]]]:
    """Yields (number of the fork's first block, forks by hash) in the order of the line."""
    prefix = child_key(ns, b"")
    stretches = line.stretches
    with txn.cursor() as cursor:
        for at, stretch in enumerate(stretches):
            piece = stretch.piece
            after = stretches[at + 1].hash(0) if at + 1 < len(stretches) else b""
            for i in range(piece.blocks):
                key = prefix + stretch.hash(i)
                if not cursor.set_range(key) or cursor.key()[: len(key)] != key:
                    continue
                onward = stretch.hash(i + 1) if i + 1 < piece.blocks else after
                number = piece.block + i + 1
                found = children(txn, ns, key[len(prefix) :], number, now_ms)
                found = [p for p in found if p.head != onward]
                if found:
                    yield number, found


class Lines:
    """Main lines, cached: a name is looked up far more often than a chain grows."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._cache: OrderedDict[tuple[int, bytes], Line] = OrderedDict()
        self._blocks = 0
        self._lock = threading.Lock()

    def get(
        self, ns: int, head: bytes, block: int, now_ms: int, *, fresh: bool = False
    ) -> Line | None:
        """The main line that begins with a run, or None if that is not there.

        fresh: exactly what the index has now; else the line may lack what came in during the last
        second.
        """
        line = self._cached(ns, head)
        if line is not None and line.until_ms > now_ms and line.first == block:
            if not fresh and time.monotonic() - line.built < _FRESH_SECONDS:
                return line
            if line.snapshot == self._snapshot():
                return line
        with self.index.env().read() as txn:
            return self._walk(txn, ns, head, block, now_ms)

    def with_forks(
        self, ns: int, head: bytes, block: int, now_ms: int
    ) -> tuple[Line, list[tuple[int, list[Piece]]]] | None:
        """The main line as it is now, and the forks off it (see `forks`), of one snapshot."""
        with self.index.env().read() as txn:
            line = self._walk(txn, ns, head, block, now_ms)
            return None if line is None else (line, list(forks(txn, ns, line, now_ms)))

    def _walk(self, txn: Any, ns: int, head: bytes, block: int, now_ms: int) -> Line | None:
        stretches = walk(txn, ns, head, block, now_ms)
        line = Line(stretches, txn.id()) if stretches else None
        self._keep(ns, head, line)
        return line

    def is_cached(self, ns: int, head: bytes) -> bool:
        return self._cached(ns, head) is not None

    def _snapshot(self) -> int:
        with self.index.env().read() as txn:
            return int(txn.id())

    def _cached(self, ns: int, head: bytes) -> Line | None:
        with self._lock:
            line = self._cache.get((ns, head))
            if line is not None:
                self._cache.move_to_end((ns, head))
            return line

    def _keep(self, ns: int, head: bytes, line: Line | None) -> None:
        with self._lock:
            old = self._cache.pop((ns, head), None)
            if old is not None:
                self._blocks -= old.end - old.first
            if line is not None:
                self._cache[ns, head] = line
                self._blocks += line.end - line.first
            while len(self._cache) > _CACHED_LINES or (
                self._blocks > _CACHED_BLOCKS and len(self._cache) > 1
            ):
                _, old = self._cache.popitem(last=False)
                self._blocks -= old.end - old.first
