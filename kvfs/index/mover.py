"""Where the blocks of a run that was moved go: they take the place of whatever shows them.

Other than a new run, which gives way to what is visible (kvfs.index.placer), a moved one is what
every host has to show from now on: the place it was copied from is about to be removed. Whatever
runs show its blocks here, however this index cut them, lose those blocks; what is in front and
behind in them stays visible as runs of their own. The moved run lives as long as the longest of
them.

A run whose parent block is in no run waits, as a new one does. Belongs to one write transaction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfs.chain import HASH_BYTES
from kvfs.frames import RunEntry
from kvfs.index.placer import Placer
from kvfs.index.schema import ALIAS, Run, Segment, alias_key, common, part

if TYPE_CHECKING:
    from kvfs.index.apply import Applier


class Mover:
    """Puts the blocks of one moved run into the index."""

    def __init__(self, applier: Applier, segment: Segment, entry: RunEntry, kept: int) -> None:
        """kept: how many leading blocks of the entry are to be seen."""
        self.a = applier
        self.segment = segment
        self.entry = entry
        self.n = kept
        self.hashes = entry.hashes[: kept * HASH_BYTES]
        self.expires_ms = entry.expires_ms
        self.class_id = segment.class_id

    def place(self) -> list[Run] | None:
        """Returns the runs that are new, or None if the parent block is in no run."""
        run, first = self.a.holding(self.segment.ns, self._hash(0))
        if run is None and self.entry.block and not self.a.keyed(self.segment.ns):
            placer = Placer(self.a, self.segment, self.entry, self.n)
            # It must not wait where its parent is there: the place it was in goes.
            run = placer.parent_run(thorough=True)
            if run is None:
                return None
            first = self.entry.block - run.block
        at, made = 0, []
        while at < self.n:
            if run is not None:
                shown = common(run.hashes[first * HASH_BYTES :], self.hashes[at * HASH_BYTES :])
                if shown:
                    made += self._take(run, first, shown, at)
                at += shown
            # A block is in the run of the one before, or the first of its own.
            if at < self.n:
                run, first = self.a.holding(self.segment.ns, self._hash(at))
                at += run is None
        self.a.insert(self._moved())
        self.a.count("blocks_moved", self.n)
        return [self._moved(), *made]

    def _hash(self, i: int) -> bytes:
        return self.hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]

    def _take(self, run: Run, first: int, count: int, at: int) -> list[Run]:
        """Takes blocks first.. out of a run, which are ours from `at` on. Returns what is left
        behind them."""
        if run.expires_ms > self.expires_ms:
            self.expires_ms, self.class_id = run.expires_ms, run.class_id
        self.a.remove(run)
        if first:
            self.a.insert(part(run, 0, first))
        elif at:
            self.alias(run.head, at)
        if first + count == run.count:
            return []
        rest = part(run, first + count, run.count)
        self.a.insert(rest)
        return [rest]

    def alias(self, head: bytes, at: int) -> None:
        """Notes that a run of others begins with our block `at`: they renew it by that name."""
        value = ALIAS.pack(self.segment.segment, self.entry.slot + at)
        self.a.txn.put(alias_key(self.segment.ns, head), value)

    def _moved(self) -> Run:
        e, s = self.entry, self.segment
        return Run(
            s.ns, self._hash(0), s.number, e.slot, self.n, e.block, e.written_ms, self.expires_ms,
            self.class_id, e.parent, self.hashes,
        )  # fmt: skip
