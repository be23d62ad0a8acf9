"""Where the blocks of a run that comes in go: the rule that keeps every stored prefix findable.

`check` goes from the last block of one run to the first of the next. That finds everything as long
as a block is in one run only and follows its parent there, or is a run's first. So:

- blocks that a run shows already are trimmed from the new one, wherever they are in either;
- a new run ends where a block comes with which a run begins that was there before its parent;
- a run whose parent block is in no run waits (kvfs.index.apply): nobody could find it yet, and
  where it overlaps others is only known once its parent is there;
- where an engine keys the blocks each is found by itself (kvfs.index.keyed): nothing waits.

The parent's run is found from the path heads that the entry carries (kvfs.index.finder). Belongs to
one write transaction.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvfs.chain import HASH_BYTES
from kvfs.frames import RunEntry
from kvfs.index.finder import holder
from kvfs.index.schema import Run, Segment, common, key_key, run_key

if TYPE_CHECKING:
    from kvfs.index.apply import Applier


class Placer:
    """Puts the blocks of one run that are not visible yet into the index."""

    def __init__(self, applier: Applier, segment: Segment, entry: RunEntry, kept: int) -> None:
        """kept: how many leading blocks of the entry are to be seen."""
        self.a = applier
        self.segment = segment
        self.entry = entry
        self.n = kept
        self.hashes = entry.hashes[: kept * HASH_BYTES]
        # A put whose time was lifted above that of a removal (kvfs.put) was made before that time.
        self.made_ms = min(entry.written_ms, entry.expires_ms - segment.ttl_seconds * 1000)

    def place(self) -> list[Run] | None:
        """Returns the runs that were made of it, or None if its parent block is in no run."""
        at = self._skip_visible(0)
        if at == 0 and self.entry.block and not self.a.keyed(self.segment.ns):
            parent = self.parent_run()
            if parent is None:
                return None
            at = self._skip_visible(self._shown_by(parent, self.entry.block - parent.block, 0))
        made = []
        while at < self.n:
            end = self._next_first(at + 1)
            made.append(self._make(at, end))
            self.a.insert(made[-1])
            at = self._skip_visible(end)
        self.a.count("blocks_trimmed", self.n - sum(run.count for run in made))
        return made

    # what is visible already

    def _hash(self, i: int) -> bytes:
        return self.hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]

    def _expired(self, run: Run) -> bool:
        return run.expires_ms <= self.made_ms

    def _live(self, i: int) -> tuple[Run | None, int]:
        """The run that begins with our block i, or, where blocks are keyed, holds it, and the
        block's place in it. An expired one makes room for ours."""
        run, place = self.a.holding(self.segment.ns, self._hash(i))
        if run is not None and self._expired(run):
            self.a.remove(run)
            return None, 0
        return run, place

    def _skip_visible(self, at: int) -> int:
        """The first block from `at` on that no run met on the way shows."""
        while at < self.n:
            run, place = self._live(at)
            if run is None:
                break
            at += self._shown_by(run, place, at)
        return at

    def _shown_by(self, run: Run, first: int, at: int) -> int:
        """How many of our blocks from `at` on a run shows from its block `first` on.

        Their writer was told that they are stored for its whole time to live, so they must be.
        """
        shown = common(run.hashes[first * HASH_BYTES :], self.hashes[at * HASH_BYTES :])
        if shown and self.entry.written_ms > run.written_ms:
            # A removal of what is older leaves these blocks, as where our copy is shown.
            run = self.a.split(run, first, shown) if shown < run.count else run
            run = replace(run, written_ms=self.entry.written_ms)
            self.a.txn.put(run.key(), run.value())
        if shown and self.entry.expires_ms > run.expires_ms:
            self.a.prolong(run, self.entry.expires_ms, self.segment.class_id)
        return shown

    def _next_first(self, at: int) -> int:
        """The first block from `at` on with which a visible run begins; where blocks are keyed,
        that any visible run holds."""
        # For every block that ever comes in, so no more than a get a block.
        key = key_key if self.a.keyed(self.segment.ns) else run_key
        get, prefix, hashes = self.a.txn.get, key(self.segment.ns, b""), self.hashes
        for i in range(at, self.n):
            if get(prefix + hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]) and self._live(i)[0]:
                return i
        return self.n

    # the parent

    def parent_run(self, *, thorough: bool = False) -> Run | None:
        """The live run that holds the block before our first; thorough: also if no path head is
        known here, which takes a look at all runs."""
        e = self.entry
        run = holder(
            self.a, self.segment.ns, e.block - 1, e.parent, e.heads, thorough=thorough
        )  # fmt: skip
        return None if run is None or self._expired(run) else run

    # the rows

    def _make(self, at: int, end: int) -> Run:
        e, s = self.entry, self.segment
        parent = self._hash(at - 1) if at else e.parent
        hashes = self.hashes[at * HASH_BYTES : end * HASH_BYTES]
        return Run(
            s.ns, self._hash(at), s.number, e.slot + at, end - at, e.block + at,
            e.written_ms, e.expires_ms, s.class_id, parent, hashes,
        )  # fmt: skip
