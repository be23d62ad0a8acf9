"""Journal entries into index rows: the only code that changes what the index says.

Applying is idempotent and, for the runs of one chain, ends in the same lookups whatever order the
journals of different writers come in:

- first applied wins: blocks of a run that are visible already are trimmed from it, and what shows
  them lives on for as long as the newer run would have;
- a run whose parent block is not visible yet waits until it is;
- what is renewed or removed by its hashes (kvfs.index.told) is so in every copy, whenever it comes;
- a moved run takes the place of what shows its blocks; where they were is remembered, so that what
  is cut or renewed there by somebody who has not heard of the move is so in the new place;
- what was cut or dropped stays out of sight even when its run comes in later.

How a run is placed is in kvfs.index.placer, a moved one in kvfs.index.mover. An expired run does
not count as visible: a newer one takes its place. Everything here happens in the write transaction
that was handed in; nothing is cached across transactions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from kvfs.chain import HASH_BYTES
from kvfs.chain_entries import KeepEntry, RemoveEntry
from kvfs.frames import (
    ClassEntry,
    CutEntry,
    DropEntry,
    Entry,
    MovedEntry,
    MoveEntry,
    NamespaceEntry,
    RenewEntry,
    RunEntry,
    SealEntry,
    SegmentEntry,
)
from kvfs.geometry import Geometry
from kvfs.index import keyed, moves, told, waiting
from kvfs.index.mover import Mover
from kvfs.index.placer import Placer
from kvfs.index.schema import (
    CLASS,
    CLASSES,
    CUTS,
    DROPPED,
    KEYED,
    LIVE,
    META,
    NS,
    PREFIX,
    RUNS,
    SEGIDS,
    SEGMENTS,
    U32,
    U64,
    Run,
    Segment,
    child_key,
    part,
    place_key,
    run_key,
    scan,
)
from kvfs.index.slots import apply_slot, apply_slot_gone
from kvfs.slot_entries import SlotEntry, SlotGoneEntry

_WHOLE_SEGMENT = 0xFFFFFFFF
_BY_ID = 1 << 31
"""In numbers of namespaces that were made of their ids; those without it were counted."""
CLOCKS_MS = 60_000
"""Clocks of hosts are taken to differ by less."""
NEWEST = "newest_ms"
"""In `meta`: when the last of all runs that came in was written."""


class Applier:
    """Applies entries within one write transaction. `counts` says what was done."""

    def __init__(self, txn: Any) -> None:
        self.txn = txn
        self.counts: dict[str, int] = {}
        self.refresh()

    def refresh(self) -> None:
        """Looks again at what decides how runs are placed, after rows were changed directly."""
        self._cuts = self.meta_int("cuts") > 0
        self._waiting = self.meta_int("orphans") > 0
        self._moves = moves.any_noted(self)
        self._keyed: dict[int, bool] = {}
        self.latest_told: dict[int, int] = {}
        """Namespace -> when the last of what is remembered of it was told (kvfs.index.told)."""
        self.told: dict[int, told.Memory] = {}
        """Namespace -> what that is, as far as it was read."""
        self._newest = 0

    def count(self, name: str, n: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + n

    def meta_int(self, name: str) -> int:
        value = self.txn.get(META + name.encode())
        return 0 if value is None else int(U64.unpack(value)[0])

    def add_meta(self, name: str, n: int) -> None:
        if n:
            self.txn.put(META + name.encode(), U64.pack(max(0, self.meta_int(name) + n)))

    def apply(self, entry: Entry) -> None:
        """Applies one entry. What refers to things unknown here is counted and left out."""
        _HANDLERS[type(entry)](self, entry)

    def finish(self) -> None:
        """Writes the counters of this transaction; call once, before the commit."""
        blocks = self.counts.get("blocks_added", 0) - self.counts.get("blocks_removed", 0)
        self.add_meta("blocks", blocks)
        self.add_meta(NEWEST, max(0, self._newest - self.meta_int(NEWEST)))

    # namespaces, classes and segments

    def namespace(self, nsid: bytes) -> int | None:
        value = self.txn.get(NS + nsid)
        return None if value is None else int(U32.unpack_from(value)[0])

    def _next(self, name: str) -> int:
        self.add_meta(name, 1)
        return self.meta_int(name)

    def apply_namespace(self, entry: NamespaceEntry) -> None:
        if self.txn.get(NS + entry.nsid) is None:
            number = self._number_for(entry.nsid)
            self.txn.put(NS + entry.nsid, U32.pack(number) + entry.json.encode())
            if keyed.is_keyed(entry.json):
                self.add_meta(f"{KEYED}{number}", 1)
            self.count("namespaces")

    def _number_for(self, nsid: bytes) -> int:
        """A free number for a namespace: whoever makes the index anew gives nearly all of them the
        same ones, in whatever order they come in."""
        number = PREFIX.unpack_from(nsid)[0] | _BY_ID
        alike = (NS + PREFIX.pack(n) for n in (number, number ^ _BY_ID))
        if all(next(scan(self.txn, prefix), None) is None for prefix in alike):
            return int(number)
        return self._next("last_ns")

    def keyed(self, ns: int) -> bool:
        """Says whether a namespace's blocks are found by keys of their engine, each by itself."""
        if ns not in self._keyed:
            self._keyed[ns] = self.meta_int(f"{KEYED}{ns}") > 0
        return self._keyed[ns]

    def class_id(self, name: str, seconds: int) -> int:
        """The number of a TTL class; made with these seconds if it is new."""
        value = self.txn.get(CLASSES + name.encode())
        if value is not None:
            return int(CLASS.unpack(value)[0])
        number = self._next("last_class")
        self.txn.put(CLASSES + name.encode(), CLASS.pack(number, seconds, 0))
        return number

    def apply_class(self, entry: ClassEntry) -> None:
        number = self.class_id(entry.name, entry.seconds)
        key = CLASSES + entry.name.encode()
        # The later definition counts, on every host, in whatever order the journals come in.
        if entry.when_ms >= CLASS.unpack(self.txn.get(key))[2]:
            self.txn.put(key, CLASS.pack(number, entry.seconds, entry.when_ms))

    def segment_number(self, segment: bytes) -> int | None:
        value = self.txn.get(SEGIDS + segment)
        return None if value is None else int(U32.unpack(value)[0])

    def segment(self, number: int) -> Segment | None:
        value = self.txn.get(SEGMENTS + PREFIX.pack(number))
        return None if value is None else Segment.decode(number, value)

    def apply_segment(self, entry: SegmentEntry) -> None:
        if self.segment_number(entry.segment) is not None:
            return
        ns = self.namespace(entry.nsid)
        if ns is None:
            self.count("unknown_namespace")
            return
        number = self._next("last_segment")
        row = Segment(
            number, entry.segment, ns, self.class_id(entry.ttl_class, entry.ttl_seconds), LIVE,
            Geometry(entry.stride, entry.extent, entry.first), entry.created_ms,
            entry.ttl_seconds, 0, entry.path,
        )  # fmt: skip
        self.txn.put(SEGIDS + entry.segment, U32.pack(number))
        self.txn.put(SEGMENTS + PREFIX.pack(number), row.value())
        self.count("segments")

    # runs

    def run(self, ns: int, head: bytes) -> Run | None:
        key = run_key(ns, head)
        value = self.txn.get(key)
        return None if value is None else Run.decode(key, value)

    def holding(self, ns: int, hash_: bytes) -> tuple[Run | None, int]:
        """The visible run that holds a block, and the block's place in it.

        Where tokens are the keys only the first block of a run is found so.
        """
        if not self.keyed(ns):
            return self.run(ns, hash_), 0
        head, place = keyed.find(self.txn.get, ns, hash_) or (hash_, 0)
        run = self.run(ns, head)
        return (run, place) if run is not None and run.hash(place) == hash_ else (None, 0)

    def apply_run(self, entry: RunEntry) -> None:
        self._newest = max(self._newest, entry.written_ms)
        told.place(self, entry, entry.written_ms, moved=False)

    def place(self, entry: RunEntry, *, moved: bool) -> None:
        """Places a run, and then those that have waited for a block of it."""
        queue = self._place(entry, entry.count, moved)
        while queue:
            woken, moved = queue.pop()
            queue += self._place(woken, woken.count, moved)

    def _place(self, entry: RunEntry, count: int, moved: bool) -> list[tuple[RunEntry, bool]]:
        """Places one run; returns those that have waited for a block of it."""
        if moved and self._moves:
            parts = list(moves.settled(self, entry))
            if parts != [entry]:
                return [(part, True) for part in reversed(parts)]  # the first one is taken first
        number = self.segment_number(entry.segment)
        segment = None if number is None else self.segment(number)
        if segment is None or segment.state != LIVE:
            self.count("runs_without_segment")
            return []
        kept = self._uncut(entry.segment, entry.slot, count) if self._cuts else count
        if self._moves and kept:  # what was moved away shows where it is now
            gone = next(moves.away(self, entry.segment, entry.slot, kept), None)
            kept = kept if gone is None else gone.slot - entry.slot
        if kept <= 0:
            return []
        placer = (Mover if moved else Placer)(self, segment, entry, kept)
        placed = placer.place()
        if placed is None:
            waiting.wait(self, segment, entry, kept, moved)
            self._waiting = True
            return []
        return [w for run in placed for w in waiting.wake(self, run)] if self._waiting else []

    def _uncut(self, segment: bytes, first: int, count: int, *, dropped: bool = True) -> int:
        """How many of `count` slots from `first` on no earlier cut has taken; dropped: a DROP of
        an unknown segment counts."""
        kept = count
        for key, value in scan(self.txn, CUTS + segment):
            slot, n = int.from_bytes(key[-4:], "big"), U32.unpack(value)[0]
            if n == _WHOLE_SEGMENT and not dropped:
                continue
            if slot < first + kept and slot + n > first:
                kept = max(0, slot - first)
        return kept

    def is_cut(self, segment: bytes, slot: int) -> bool:
        """A record was taken out of sight, or moved."""
        moved = next(moves.away(self, segment, slot, 1), None)
        return moved is not None or self._uncut(segment, slot, 1) == 0

    def apply_move(self, entry: MoveEntry) -> None:
        run = entry.run
        ns = self.namespace(run.nsid)
        if ns is None:
            self.count("unknown_namespace")
            return
        kept = run.count
        for at, moved in moves.sources_of(entry):
            source = moved.source
            if self._cuts:  # by somebody whom the copier had not heard of
                uncut = self._uncut(*source, dropped=False)
                kept = min(kept, at + uncut) if uncut < source.count else kept
            self._note_moved(ns, moved)
        if kept > 0:
            seen = dataclasses.replace(run, hashes=run.hashes[: kept * HASH_BYTES])
            # Whoever copied them had heard of what was told a minute before.
            since_ms = max(run.written_ms, entry.when_ms - CLOCKS_MS)
            told.place(self, seen, since_ms, moved=True)

    def apply_moved(self, entry: MovedEntry) -> None:
        ns = self.namespace(entry.nsid)
        if ns is not None:
            self._note_moved(ns, entry)

    def _note_moved(self, ns: int, entry: MovedEntry) -> None:
        moves.note(self, ns, entry)
        self._moves = True

    def insert(self, run: Run) -> None:
        self._newest = max(self._newest, run.written_ms)
        key = run.key()
        self.txn.put(key, run.value())
        self.txn.put(place_key(run.seg, run.slot), key[1:])
        self.txn.put(child_key(run.ns, run.parent, run.head), b"")
        if self.keyed(run.ns):
            keyed.note(self.txn, run)
        self.count("runs")
        self.count("blocks_added", run.count)

    def remove(self, run: Run) -> None:
        self.txn.delete(run.key())
        self.txn.delete(place_key(run.seg, run.slot))
        self.txn.delete(child_key(run.ns, run.parent, run.head))
        if self.keyed(run.ns):
            keyed.forget(self.txn, run)
        self.count("runs_removed")
        self.count("blocks_removed", run.count)

    def split(self, run: Run, first: int, count: int) -> Run:
        """Makes blocks first.. of a run one of their own, and of those around them as well."""
        self.remove(run)
        for start, end in ((0, first), (first + count, run.count)):
            if start < end:
                self.insert(part(run, start, end))
        middle = part(run, first, first + count)
        self.insert(middle)
        return middle

    def children(self, ns: int, parent: bytes, limit: int) -> list[Run]:
        """At most `limit` of the runs that follow the block with hash `parent`."""
        keys = islice(scan(self.txn, child_key(ns, parent)), limit)
        runs = (self.run(ns, head) for head in [bytes(key[-HASH_BYTES:]) for key, _ in keys])
        return [run for run in runs if run is not None]

    def prolong(self, run: Run, expires_ms: int, class_id: int) -> None:
        """Lets a run expire later; it takes the class if that is the longer one."""
        if self._class_seconds(class_id) <= self._class_seconds(run.class_id):
            class_id = run.class_id
        longer = dataclasses.replace(run, expires_ms=expires_ms, class_id=class_id)
        self.txn.put(run.key(), longer.value())

    def _class_seconds(self, class_id: int) -> int:
        rows = (CLASS.unpack(value) for _, value in scan(self.txn, CLASSES))
        return next((seconds for number, seconds, _ in rows if number == class_id), 0)

    def shorten(self, run: Run, keep: int) -> None:
        """Leaves the first `keep` blocks of a run in sight."""
        if keep <= 0:
            self.remove(run)
        elif keep < run.count:
            hashes = run.hashes[: keep * HASH_BYTES]
            self.txn.put(run.key(), dataclasses.replace(run, count=keep, hashes=hashes).value())
            if self.keyed(run.ns):
                keyed.forget(self.txn, run, keep)
            self.count("blocks_removed", run.count - keep)

    # renewals and removals

    def apply_renew(self, entry: RenewEntry) -> None:
        ns = self.namespace(entry.nsid)
        run = None
        if ns is not None:
            run = self.holding(ns, entry.head)[0] or moves.run_of(self, ns, entry.head)
        if run is None:
            self.count("renewed_nothing")
            return
        if not entry.force and (
            entry.expires_ms <= run.expires_ms or run.expires_ms <= entry.when_ms
        ):
            return
        class_id = self.class_id(entry.ttl_class, 0) if entry.ttl_class else run.class_id
        renewed = dataclasses.replace(run, expires_ms=entry.expires_ms, class_id=class_id)
        self.txn.put(run.key(), renewed.value())
        self.count("renewed")

    def apply_cut(self, entry: CutEntry) -> None:
        self.note_cut(entry.segment, entry.slot, entry.count)
        for moved in list(moves.away(self, entry.segment, entry.slot, entry.count)):
            cut = CutEntry(entry.nsid, moved.segment, moved.at, moved.count, entry.when_ms)
            self.apply_cut(cut)
        number = self.segment_number(entry.segment)
        if number is None:
            return
        for run in list(self.runs_of(number)):
            if run.slot < entry.slot + entry.count and run.slot + run.count > entry.slot:
                self.shorten(run, entry.slot - run.slot)

    def note_cut(self, segment: bytes, slot: int, count: int) -> None:
        """Remembers a cut for runs that come in later."""
        key = CUTS + segment + slot.to_bytes(4, "big")
        known = self.txn.get(key)
        if known is None:
            self.add_meta("cuts", 1)
        if known is None or U32.unpack(known)[0] < count:
            self.txn.put(key, U32.pack(count))
        self._cuts = True

    def runs_of(self, number: int) -> Iterator[Run]:
        """Yields the visible runs of a segment in slot order."""
        for _, key in scan(self.txn, place_key(number)):
            run_at = RUNS + bytes(key)
            value = self.txn.get(run_at)
            if value is not None:
                yield Run.decode(run_at, value)

    def apply_drop(self, entry: DropEntry) -> None:
        number = self.segment_number(entry.segment)
        segment = None if number is None else self.segment(number)
        if segment is None:
            self.note_cut(entry.segment, 0, _WHOLE_SEGMENT)
            return
        if segment.state != LIVE:
            return
        for run in list(self.runs_of(segment.number)):
            self.remove(run)
        if self._waiting:
            waiting.drop(self, segment)
        dropped = dataclasses.replace(segment, state=DROPPED, dropped_ms=entry.when_ms)
        self.txn.put(SEGMENTS + PREFIX.pack(segment.number), dropped.value())
        self.count("segments_dropped")

    def apply_seal(self, entry: SealEntry) -> None:
        """The end of a journal is noted by whoever keeps its offset."""


_HANDLERS: dict[type[Any], Callable[[Applier, Any], None]] = {
    NamespaceEntry: Applier.apply_namespace,
    ClassEntry: Applier.apply_class,
    SegmentEntry: Applier.apply_segment,
    RunEntry: Applier.apply_run,
    RenewEntry: Applier.apply_renew,
    CutEntry: Applier.apply_cut,
    DropEntry: Applier.apply_drop,
    SealEntry: Applier.apply_seal,
    MoveEntry: Applier.apply_move,
    MovedEntry: Applier.apply_moved,
    SlotEntry: apply_slot,
    SlotGoneEntry: apply_slot_gone,
    KeepEntry: told.apply_keep,
    RemoveEntry: told.apply_remove,
}
