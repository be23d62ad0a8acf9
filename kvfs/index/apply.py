"""Journal entries into index rows: the only code that changes what the index says.

Applying is idempotent and, for the runs of one chain, ends in the same lookups whatever order the
journals of different writers come in:

- first applied wins: the blocks of a run that are visible already are trimmed from it;
- a run whose index place is unknown (its writer saw the chain cut into other runs) is found through
  the path heads it carries; if its ancestors are not here at all it is kept whole, as an orphan;
- what was cut or dropped stays out of sight even when its run comes in later.

An expired run does not count as visible: a newer one takes its place. Everything here happens in
the write transaction that was handed in; nothing is cached across transactions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from kvfs.chain import HASH_BYTES
from kvfs.frames import (
    ClassEntry,
    CutEntry,
    DropEntry,
    Entry,
    NamespaceEntry,
    RenewEntry,
    RunEntry,
    SealEntry,
    SegmentEntry,
)
from kvfs.index.schema import (
    CLASS,
    CLASSES,
    CUTS,
    DROPPED,
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
    place_key,
    run_key,
    scan,
)
from kvfs.segment import Geometry

# How many runs a search for a parent looks at before it settles for an orphan.
_SEARCH_LIMIT = 256


class Applier:
    """Applies entries within one write transaction. `counts` says what was done."""

    def __init__(self, txn: Any) -> None:
        self.txn = txn
        self.counts: dict[str, int] = {}
        self._cuts = self.meta_int("cuts") > 0
        self._orphans = self.meta_int("orphans") > 0

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
        self.add_meta("orphans", self.counts.get("orphans", 0))

    # namespaces, classes and segments

    def namespace(self, nsid: bytes) -> int | None:
        value = self.txn.get(NS + nsid)
        return None if value is None else int(U32.unpack_from(value)[0])

    def _next(self, name: str) -> int:
        self.add_meta(name, 1)
        return self.meta_int(name)

    def apply_namespace(self, entry: NamespaceEntry) -> None:
        if self.txn.get(NS + entry.nsid) is None:
            number = self._next("last_ns")
            self.txn.put(NS + entry.nsid, U32.pack(number) + entry.json.encode())
            self.count("namespaces")

    def class_id(self, name: str, seconds: int) -> int:
        """The number of a TTL class; made with these seconds if it is new."""
        value = self.txn.get(CLASSES + name.encode())
        if value is not None:
            return int(CLASS.unpack(value)[0])
        number = self._next("last_class")
        self.txn.put(CLASSES + name.encode(), CLASS.pack(number, seconds))
        return number

    def apply_class(self, entry: ClassEntry) -> None:
        number = self.class_id(entry.name, entry.seconds)
        self.txn.put(CLASSES + entry.name.encode(), CLASS.pack(number, entry.seconds))

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

    def apply_run(self, entry: RunEntry) -> None:
        number = self.segment_number(entry.segment)
        segment = None if number is None else self.segment(number)
        if segment is None or segment.state != LIVE:
            self.count("runs_without_segment")
            return
        kept = self._uncut(entry) if self._cuts else entry.count
        if kept:
            _Placer(self, segment, entry, kept).place()

    def _uncut(self, entry: RunEntry) -> int:
        """How many leading blocks of a run no earlier cut has taken."""
        kept = entry.count
        for key, value in scan(self.txn, CUTS + entry.segment):
            slot = int.from_bytes(key[-4:], "big")
            if slot < entry.slot + kept and slot + U32.unpack(value)[0] > entry.slot:
                kept = max(0, slot - entry.slot)
        return kept

    def insert(self, run: Run) -> None:
        key = run.key()
        self.txn.put(key, run.value())
        self.txn.put(place_key(run.seg, run.slot), key[1:])
        self.txn.put(child_key(run.ns, run.parent, run.head), b"")
        self.count("runs")
        self.count("blocks_added", run.count)

    def remove(self, run: Run) -> None:
        self.txn.delete(run.key())
        self.txn.delete(place_key(run.seg, run.slot))
        self.txn.delete(child_key(run.ns, run.parent, run.head))
        self.count("runs_removed")
        self.count("blocks_removed", run.count)

    def shorten(self, run: Run, keep: int) -> None:
        """Leaves the first `keep` blocks of a run in sight."""
        if keep <= 0:
            self.remove(run)
        elif keep < run.count:
            hashes = run.hashes[: keep * HASH_BYTES]
            self.txn.put(run.key(), dataclasses.replace(run, count=keep, hashes=hashes).value())
            self.count("blocks_removed", run.count - keep)

    # renewals and removals

    def apply_renew(self, entry: RenewEntry) -> None:
        ns = self.namespace(entry.nsid)
        run = None if ns is None else self.run(ns, entry.head)
        if run is None:
            self.count("renewed_nothing")
            return
        if not entry.force and (entry.expires_ms <= run.expires_ms or _expired(run, entry.when_ms)):
            return
        class_id = self.class_id(entry.ttl_class, 0) if entry.ttl_class else run.class_id
        renewed = dataclasses.replace(run, expires_ms=entry.expires_ms, class_id=class_id)
        self.txn.put(run.key(), renewed.value())
        self.count("renewed")

    def apply_cut(self, entry: CutEntry) -> None:
        key = CUTS + entry.segment + entry.slot.to_bytes(4, "big")
        if self.txn.put(key, U32.pack(entry.count), overwrite=False):
            self.add_meta("cuts", 1)
        self._cuts = True
        number = self.segment_number(entry.segment)
        if number is None:
            return
        for run in list(self.runs_of(number)):
            if run.slot < entry.slot + entry.count and run.slot + run.count > entry.slot:
                self.shorten(run, entry.slot - run.slot)

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
        if segment is None or segment.state != LIVE:
            return
        for run in list(self.runs_of(segment.number)):
            self.remove(run)
        dropped = dataclasses.replace(segment, state=DROPPED, dropped_ms=entry.when_ms)
        self.txn.put(SEGMENTS + PREFIX.pack(segment.number), dropped.value())
        self.count("segments_dropped")

    def apply_seal(self, entry: SealEntry) -> None:
        """The end of a journal is noted by whoever keeps its offset."""


def _expired(run: Run, now_ms: int) -> bool:
    return run.expires_ms <= now_ms


def common(a: bytes, b: bytes) -> int:
    """The number of leading 16-byte hashes that two strings of hashes share."""
    n = min(len(a), len(b)) // HASH_BYTES
    if a[: n * HASH_BYTES] == b[: n * HASH_BYTES]:
        return n
    for i in range(n):
        at = i * HASH_BYTES
        if a[at : at + HASH_BYTES] != b[at : at + HASH_BYTES]:
            return i
    return n


class _Placer:
    """Puts the blocks of one run that are not visible yet into the index."""

    def __init__(self, applier: Applier, segment: Segment, entry: RunEntry, kept: int) -> None:
        self.a = applier
        self.segment = segment
        self.entry = entry
        self.n = kept
        self.hashes = entry.hashes[: kept * HASH_BYTES]

    def place(self) -> None:
        at = self._skip_visible(0)
        if at == 0 and self.entry.block:
            at = self._skip_known_parent()
        while at < self.n:
            end = self._next_visible(at + 1) if self.a._orphans else self.n
            self._insert(at, end)
            at = self._skip_visible(end)
        self.a.count("blocks_trimmed", self.n - self.a.counts.pop("_placed", 0))

    def _hash(self, i: int) -> bytes:
        return self.hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]

    def _live(self, i: int) -> Run | None:
        """The run that begins with our block i. An expired one makes room for ours."""
        run = self.a.run(self.segment.ns, self._hash(i))
        if run is not None and _expired(run, self.entry.written_ms):
            self.a.remove(run)
            return None
        return run

    def _skip_visible(self, at: int) -> int:
        """The first block from `at` on that no run beginning on the way shows."""
        while at < self.n:
            run = self._live(at)
            if run is None:
                break
            at += common(run.hashes, self.hashes[at * HASH_BYTES :])
        return at

    def _next_visible(self, at: int) -> int:
        while at < self.n and self._live(at) is None:
            at += 1
        return at

    def _skip_known_parent(self) -> int:
        """Where to begin when our first block is no run's first: inside the parent's run?"""
        entry = self.entry
        run = self._parent_run()
        if run is None:
            self.a.count("orphans")
            self.a._orphans = True
            return 0
        inside = run.hashes[(entry.block - run.block) * HASH_BYTES :]
        return self._skip_visible(common(inside, self.hashes))

    def _parent_run(self) -> Run | None:
        """The visible run that holds our parent block: by path heads, then by a short search."""
        last: Run | None = None
        heads = self.entry.heads
        for at in range(len(heads) - HASH_BYTES, -1, -HASH_BYTES):
            last = self.a.run(self.segment.ns, heads[at : at + HASH_BYTES])
            if last is not None:
                break
        queue = [] if last is None else [last]
        for _ in range(_SEARCH_LIMIT):
            if not queue:
                return None
            run = queue.pop()
            at = self.entry.block - 1 - run.block
            if 0 <= at < run.count and run.hash(at) == self.entry.parent:
                return run
            if at >= run.count:
                queue += self._children(run)
        return None

    def _children(self, run: Run) -> list[Run]:
        last = child_key(run.ns, run.hash(run.count - 1))
        heads = [bytes(key[-HASH_BYTES:]) for key, _ in scan(self.a.txn, last)]
        runs = (self.a.run(run.ns, h) for h in heads[:_SEARCH_LIMIT])
        return [r for r in runs if r is not None]

    def _insert(self, at: int, end: int) -> None:
        e = self.entry
        self.a.insert(
            Run(
                self.segment.ns,
                self._hash(at),
                self.segment.number,
                e.slot + at,
                end - at,
                e.block + at,
                e.written_ms,
                e.expires_ms,
                self.segment.class_id,
                self._hash(at - 1) if at else e.parent,
                self.hashes[at * HASH_BYTES : end * HASH_BYTES],
            )  # fmt: skip
        )
        self.a.count("_placed", end - at)


_HANDLERS: dict[type[Any], Callable[[Applier, Any], None]] = {
    NamespaceEntry: Applier.apply_namespace,
    ClassEntry: Applier.apply_class,
    SegmentEntry: Applier.apply_segment,
    RunEntry: Applier.apply_run,
    RenewEntry: Applier.apply_renew,
    CutEntry: Applier.apply_cut,
    DropEntry: Applier.apply_drop,
    SealEntry: Applier.apply_seal,
}
