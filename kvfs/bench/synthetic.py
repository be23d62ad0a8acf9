"""An index of millions of blocks, made in seconds: journal entries of random hashes are applied as
if they had come from other hosts. No segment is written: `check` never opens one.

Runs are as long as those of real requests are new: their lengths are geometric around 32 blocks.
In the traces under kvfs/sim/data a request brings 49 (coding agent) and 78 (chat) new blocks in the
mean, most of them far fewer; shorter runs are the harder case, with more rows for the same blocks.
Three of four runs continue the one before, the others begin a conversation.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvfs.bench.timing import Progress
from kvfs.chain import HASH_BYTES
from kvfs.frames import Entry, RunEntry, SegmentEntry
from kvfs.index.apply import Applier
from kvfs.namespace import Namespace
from kvfs.segment import WRITER_BYTES, Geometry, segment_id, segment_path
from kvfs.store import Store

MEAN_RUN = 32
CONTINUED = 0.75
_BATCH = 1000  # runs in a transaction
_TTL_CLASS, _TTL_SECONDS = "agent", 3 * 86400
_SEGMENT_BYTES = 256 << 20


class Filler:
    """Hands out places in made-up segments, and the entries that go with them."""

    def __init__(self, store: Store, ns: Namespace) -> None:
        self._ns = ns
        self._writer = secrets.token_bytes(WRITER_BYTES)
        self._geometry = Geometry.fit(ns.stride, store.config.extent)
        self._slots = self._geometry.slots_within(_SEGMENT_BYTES)
        self.now = store.now_ms()
        self._number, self._slot = -1, self._slots

    def run(self, block: int, parent: bytes, heads: bytes, hashes: bytes) -> Iterator[Entry]:
        """The entries of one run, after its segment's if that is new."""
        if self._slot + len(hashes) // HASH_BYTES > self._slots:
            self._number, self._slot = self._number + 1, 0
            yield self._segment()
        segment = segment_id(self._writer, self._number)
        expires = self.now + _TTL_SECONDS * 1000
        yield RunEntry(
            self._ns.nsid, segment, self._slot, block, self.now, expires, parent, heads, hashes
        )
        self._slot += len(hashes) // HASH_BYTES

    def _segment(self) -> SegmentEntry:
        g, writer = self._geometry, f"host-01234567-{self._writer.hex()}"
        path = segment_path(_TTL_CLASS, "20260101", self._ns.name, writer, self._number)
        return SegmentEntry(
            segment_id(self._writer, self._number), self._ns.nsid, g.stride, g.extent, g.first,
            self.now, _TTL_SECONDS, _TTL_CLASS, path,
        )  # fmt: skip


def fill(store: Store, ns: Namespace, blocks: int, progress: Progress) -> None:
    """Adds runs of random hashes, `blocks` blocks in all, to the index of a store."""
    rng = np.random.default_rng(1)
    filler, done = Filler(store, ns), 0
    entries: list[Entry] = []
    parent, heads, at = b"", b"", 0
    while done < blocks:
        for length in rng.geometric(1 / MEAN_RUN, _BATCH).tolist():
            n = min(length, blocks - done)
            if not n:
                break
            if not heads or rng.random() >= CONTINUED:
                parent, heads, at = ns.root, b"", 0
            hashes = os.urandom(n * HASH_BYTES)
            entries += filler.run(at, parent, heads, hashes)
            parent, heads, at = hashes[-HASH_BYTES:], hashes[:HASH_BYTES], at + n
            done += n
        _apply(store, entries)
        progress(f"filling the index: {done:,} of {blocks:,} blocks")


def plant(store: Store, ns: Namespace, tokens: npt.NDArray[np.int32], runs: int) -> None:
    """Makes a prompt stored, in as many runs of equal length."""
    hasher = ns.hasher(tokens)
    hashes, n = hasher.hashes(), hasher.n_blocks
    filler, heads, parent = Filler(store, ns), b"", ns.root
    entries: list[Entry] = []
    for i in range(runs):
        first, end = i * n // runs, (i + 1) * n // runs
        own = hashes[first * HASH_BYTES : end * HASH_BYTES]
        entries += filler.run(first, parent, heads, own)
        heads, parent = heads + own[:HASH_BYTES], own[-HASH_BYTES:]
    _apply(store, entries)


def _apply(store: Store, entries: list[Entry]) -> None:
    def work(applier: Applier) -> None:
        for entry in entries:
            applier.apply(entry)

    store.index.write(work)
    entries.clear()
