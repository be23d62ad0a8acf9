"""Erasing: blocks that were taken out of sight also go from the disk, now, with a receipt.

1. the hashes of the blocks are noted, then they are cut: no check of any host finds them from the
   moment it has read the journal on
2. every segment of the namespace that was written with one of them is found by its own account,
   also those in which another host or an earlier copy left them, and they are cut there as well:
   another host may show them from there
3. what else is of use in these segments is copied forward, and they are dropped
4. after the grace their files are removed, and looked for once more

A segment that a living writer of another process still has open cannot be copied yet: the receipt
names it as pending, and the same command later finishes. Journals and checkpoints keep hashes, not
contents. Blocking; holds the collector's lease throughout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from kvfs.chain import HASH_BYTES
from kvfs.frames import CutEntry, Entry, RunEntry
from kvfs.gc.cleaner import Cleaner
from kvfs.gc.expiry import Expiry
from kvfs.gc.lease import SECONDS, Lease
from kvfs.gc.occupancy import Occupied, occupied
from kvfs.gc.pace import Pace
from kvfs.index.schema import DROPPED, GONE, LIVE, Run, Segment
from kvfs.index.wipe import mark_gone
from kvfs.namespace import Namespace
from kvfs.removal import descendants
from kvfs.store import Store
from kvfs.writer import Writer

_BATCH = 1000


@dataclass(frozen=True, slots=True)
class Erased:
    """A file that is gone, or why it is not yet."""

    path: str
    bytes: int
    removed_ms: int | None
    """When it was removed; None: pending."""
    pending: str | None = None


@dataclass(slots=True)
class Receipt:
    """What was erased."""

    namespace: str
    blocks: int = 0
    """Blocks that were taken out of sight."""
    started_ms: int = 0
    ended_ms: int = 0
    files: list[Erased] = field(default_factory=list)
    copied_bytes: int = 0
    """Of other blocks, which were in the same files."""
    problems: list[str] = field(default_factory=list)

    @property
    def removed_bytes(self) -> int:
        return sum(f.bytes for f in self.files if f.removed_ms is not None)

    @property
    def complete(self) -> bool:
        """No byte of the blocks is left in the store."""
        return all(f.removed_ms is not None for f in self.files) and not self.problems

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self), "removed_bytes": self.removed_bytes, "complete": self.complete,
        }  # fmt: skip


class Purge:
    """Erases blocks of one namespace."""

    def __init__(
        self, store: Store, ns: Namespace, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.store = store
        self.ns = ns
        self.sleep = sleep
        self.receipt = Receipt(ns.name)
        self._hashes: set[bytes] = set()

    def run(self, heads: Iterable[tuple[bytes, int]]) -> Receipt:
        """Erases runs, by the hash of their first block and how many blocks of each stay, and all
        that follows. Raises BusyError, NoStoreError, BackendError, SpaceError, IndexFault."""
        store, receipt = self.store, self.receipt
        receipt.started_ms = store.now_ms()
        with Lease.acquire(store.backend, store.now_ms) as lease:
            store.catch_up()
            self._cut(heads)
            found = self._holding()
            self._clean([s for s in found if s.state == LIVE], lease)
            grace = store.config.grace_seconds
            lease.prolong(grace + SECONDS)
            self.sleep(grace)
            self._remove(found)
        receipt.ended_ms = store.now_ms()
        return receipt

    def _cut(self, heads: Iterable[tuple[bytes, int]]) -> None:
        """Takes the blocks out of sight, and notes their hashes."""
        index, now_ms = self.store.index, self.store.now_ms()
        cut: dict[bytes, tuple[Run, int]] = {}
        for head, keep in heads:
            run, place = index.holding(self.ns.number, head)
            keep += place
            if run is None or keep >= run.count:
                continue
            for r, first in [
                (run, keep),
                *((d, 0) for d in descendants(index, self.ns, run, keep)),
            ]:
                if r.head not in cut or first < cut[r.head][1]:
                    cut[r.head] = r, first
        entries: list[Entry] = []
        for r, first in cut.values():
            self._hashes |= {r.hash(i) for i in range(first, r.count)}
            segment = index.segment(r.seg).segment
            entries.append(CutEntry(self.ns.nsid, segment, r.slot + first, r.count - first, now_ms))
        self._publish(entries)
        self.receipt.blocks = len(self._hashes)

    def _holding(self) -> list[Segment]:
        """The segments of the namespace that were written with one of the blocks."""
        store = self.store
        store.writer().retire({s.segment for s in store.index.segments()})
        expiry = Expiry(store)
        found: list[Segment] = []
        cuts: list[Entry] = []
        for segment in store.index.segments():
            if segment.state == GONE or segment.ns != self.ns.number:
                continue
            places = [p for p in map(self._place, expiry.published(segment)) if p is not None]
            if places:
                found.append(segment)
                cuts += places
        self._publish(cuts)
        return found

    def _place(self, run: RunEntry) -> CutEntry | None:
        """The cut of a run from the first of the blocks on: all that follows goes as well."""
        for i in range(run.count):
            if run.hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES] in self._hashes:
                now_ms = self.store.now_ms()
                return CutEntry(self.ns.nsid, run.segment, run.slot + i, run.count - i, now_ms)
        return None

    def _publish(self, entries: list[Entry]) -> None:
        for at in range(0, len(entries), _BATCH):
            self.store.writer().publish([], entries[at : at + _BATCH])

    def _clean(self, segments: list[Segment], lease: Lease) -> None:
        """Copies forward what else is in these segments, and drops them."""
        store = self.store
        expiry = Expiry(store)
        numbers = {s.number for s in segments if expiry.quiet(s)}
        victims: list[Occupied] = [s for s in occupied(expiry) if s.segment.number in numbers]
        pace = Pace(store.backend)
        pace.refresh()
        writer = Writer(store.backend, store.index, store.config, store.clock)
        try:
            done = Cleaner(store, writer, expiry, pace.copies, lease.check).clean(victims)
        finally:
            writer.close()
        self.receipt.copied_bytes = done.copied_bytes
        self.receipt.problems += done.problems

    def _remove(self, segments: list[Segment]) -> None:
        """Removes the files of what is dropped by now; the others are pending."""
        store, now_ms = self.store, self.store.now_ms()
        expiry = Expiry(store)
        for old in segments:
            size = expiry.size(old.path)
            segment = store.index.query(lambda a, n=old.number: a.segment(n))  # type: ignore[misc]
            if segment is not None and segment.state == LIVE:
                why = "a writer still has it open, or it could not be copied"
                self.receipt.files.append(Erased(old.path, size, None, why))
                continue
            try:
                store.reader().forget(old.path)
                store.backend.unlink(old.path)
            except OSError as e:
                self.receipt.files.append(Erased(old.path, size, None, e.strerror or str(e)))
                continue
            self.receipt.files.append(Erased(old.path, size, now_ms))
            if segment is not None and segment.state == DROPPED:
                store.index.write(lambda a, s=segment: mark_gone(a, s))  # type: ignore[misc]
