"""What journals tell of blocks by their hashes: KEEP and REMOVE (kvfs.chain_entries).

They hold for every copy of the blocks, also for one whose run comes in later: a journal may be read
before the one that tells of what it renews or removes. So each REMOVE, and of a KEEP what it named
in vain, stands in `told` for a while, and what comes in is held against those that are not older
than itself. A copy that was written after a REMOVE is another one, and stays.

  told      key: ns, ms u64 (big-endian), kind, hashes of the first and the last block
            value: TOLD_VALUE, the hash of every block

Rows go when every journal has been read as it was long after them (kvfs.follow.history). That a
namespace is not listed any more is kept in `meta`, under "removed:" and its number: twice the time,
and 1 while it is so.

Functions over one write transaction, whose Applier keeps what was read of these rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfs.chain import HASH_BYTES
from kvfs.chain_entries import BLOCKS, LISTING, NOTHING, KeepEntry, RemoveEntry
from kvfs.frames import RunEntry
from kvfs.index import waiting
from kvfs.index.finder import holder
from kvfs.index.schema import (
    META,
    NS,
    PREFIX,
    REMOVALS,
    RUN,
    TOLD,
    TOLD_KEY,
    TOLD_VALUE,
    U32,
    U64,
    UNLISTED,
    Run,
    common,
    run_key,
    scan,
    scan_copies,
    waiting_hashes,
    waiting_key,
)
from kvfs.index.slots import removed_anchors

if TYPE_CHECKING:
    from kvfs.index.apply import Applier

REMOVED, KEPT = 0, 1
REMEMBER_MS = 3_600_000
"""A run comes in no later than so long after it was written, once all journals have been read: the
time of the longest put, of a file system that shows bytes late, and of clocks that differ."""
_MORE_MS = 60_000


class Shown(NamedTuple):
    """Blocks first.. of a visible run, which are those from `at` on of what was named."""

    run: Run
    first: int
    at: int
    count: int  # type: ignore[assignment]  # hides tuple.count


def shown(
    applier: Applier, ns: int, block: int, heads: bytes, hashes: bytes, *, thorough: bool
) -> Iterator[Shown]:
    """Yields where consecutive blocks of a chain are visible, each run once.

    block: number of the first; heads: its path heads; thorough: see kvfs.index.finder.
    """
    n, at = len(hashes) // HASH_BYTES, 0
    run, first = applier.holding(ns, _hash(hashes, 0))
    if run is None and block and not applier.keyed(ns):
        run = holder(applier, ns, block, _hash(hashes, 0), heads, thorough=thorough)
        first = 0 if run is None else block - run.block
    while at < n:
        count = 0 if run is None else common(run.hashes[first * HASH_BYTES :],
                                             hashes[at * HASH_BYTES :])  # fmt: skip
        if run is not None and count:
            yield Shown(run, first, at, count)
        at += max(1, count)
        # A block is in the run of the one before, or the first of its own.
        if at < n:
            run, first = applier.holding(ns, _hash(hashes, at))


def _hash(hashes: bytes, i: int) -> bytes:
    return hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]


def _each(hashes: bytes) -> Iterator[bytes]:
    return (hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES))


# news come in


def apply_keep(applier: Applier, entry: KeepEntry) -> None:
    """Blocks expire later, or as they are told to."""
    ns = applier.namespace(entry.nsid)
    if ns is None:
        applier.count("renewed_nothing")
        return
    class_id = applier.class_id(entry.ttl_class, 0) if entry.ttl_class else None
    thorough = entry.block > 0 and not entry.heads  # whoever renews all runs knows no paths
    found = list(shown(applier, ns, entry.block, entry.heads, entry.hashes, thorough=thorough))
    for s in found:
        _keep(applier, s, entry.expires_ms, class_id, entry.force)
    missing, at = b"", 0
    for s in found:
        missing += entry.hashes[at * HASH_BYTES : s.at * HASH_BYTES]
        at = s.at + s.count
    missing += entry.hashes[at * HASH_BYTES :]
    if missing:
        applier.count("renewed_nothing")
        _keep_waiting(applier, ns, missing, entry.expires_ms)
        _note(applier, ns, entry.when_ms, KEPT, missing, entry.expires_ms, class_id or 0)


def _keep(
    applier: Applier, s: Shown, expires_ms: int, class_id: int | None, force: bool = False
) -> None:
    run = s.run
    if not force and expires_ms <= run.expires_ms:
        return
    class_id = run.class_id if class_id is None else class_id
    if expires_ms < run.expires_ms and s.count < run.count:
        run = applier.split(run, s.first, s.count)  # the others keep their time
    renewed = dataclasses.replace(run, expires_ms=expires_ms, class_id=class_id)
    applier.txn.put(renewed.key(), renewed.value())
    applier.count("renewed")


def apply_remove(applier: Applier, entry: RemoveEntry) -> None:
    """Blocks go out of sight, every copy that was written by then; also those that come later."""
    ns = applier.namespace(entry.nsid)
    if ns is None:
        applier.count("unknown_namespace")
        return
    _note_removed(applier, ns, entry)
    if not entry.hashes:
        if entry.block != NOTHING:
            _remove_all(applier, ns, entry.when_ms)
        return
    found = shown(applier, ns, entry.block, entry.heads, entry.hashes, thorough=True)
    for s in list(found):
        if s.run.written_ms <= entry.when_ms:
            _hide(applier, s)
    _remove_waiting(applier, ns, entry)
    removed_anchors(applier, ns, _each(entry.hashes))


def _hide(applier: Applier, s: Shown) -> None:
    """Takes blocks out of a run; those in front and behind stay, each as a run of their own."""
    run = s.run
    if s.first + s.count < run.count:
        applier.remove(applier.split(run, s.first, s.count))
        return
    applier.shorten(run, s.first)
    segment = applier.segment(run.seg)
    if segment is not None:  # the cleaner asks of what it does not see whether it was removed
        applier.note_cut(segment.segment, run.slot + s.first, s.count)


def _remove_all(applier: Applier, ns: int, when_ms: int) -> None:
    for key, value in list(scan_copies(applier.txn, run_key(ns, b""))):
        run = Run.decode(key, value)
        if run.written_ms <= when_ms:
            _hide(applier, Shown(run, 0, 0, run.count))
    for key, value in list(scan_copies(applier.txn, waiting_key(ns, b""))):
        if RUN.unpack_from(value)[4] <= when_ms:
            waiting.stop(applier, key)
    removed_anchors(applier, ns, None)


def _waiting_with(applier: Applier, ns: int, hashes: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Rows of runs that wait for their parent and hold one of these blocks."""
    if applier.meta_int("orphans"):
        named = set(_each(hashes))
        for key, value in list(scan_copies(applier.txn, waiting_key(ns, b""))):
            if not named.isdisjoint(_each(waiting_hashes(value)[0])):
                yield key, value


def _remove_waiting(applier: Applier, ns: int, entry: RemoveEntry) -> None:
    """What is left of runs that wait goes on waiting."""
    for key, value in _waiting_with(applier, ns, entry.hashes):
        found = waiting.entry_of(applier, key, value)
        if found is not None and found[0].written_ms <= entry.when_ms:
            waiting.stop(applier, key)
            for left in _without(found[0], set(_each(entry.hashes))):
                applier.place(left, moved=found[1])


def _keep_waiting(applier: Applier, ns: int, hashes: bytes, expires_ms: int) -> None:
    for key, value in _waiting_with(applier, ns, hashes):
        fields = list(RUN.unpack_from(value))
        fields[5] = max(fields[5], expires_ms)
        applier.txn.put(key, RUN.pack(*fields) + value[RUN.size :])


# what was told, for those that come in later


def _note(
    applier: Applier, ns: int, when_ms: int, kind: int, hashes: bytes, expires_ms: int = 0,
    class_id: int = 0,
) -> None:  # fmt: skip
    ends = hashes[:HASH_BYTES] + hashes[-HASH_BYTES:]
    key = TOLD + TOLD_KEY.pack(ns, when_ms, kind) + ends
    known = applier.txn.get(key)
    if known is not None:
        expires_ms = max(expires_ms, TOLD_VALUE.unpack_from(known)[0])
    applier.txn.put(key, TOLD_VALUE.pack(expires_ms, class_id) + hashes)
    memory = applier.told.get(ns)
    if memory is not None and when_ms >= memory.from_ms:
        memory.add(when_ms, kind, expires_ms, class_id, hashes)
    applier.latest_told[ns] = max(latest(applier, ns), when_ms)


def note_entry(applier: Applier, entry: KeepEntry | RemoveEntry) -> None:
    """Notes what was told without applying it."""
    ns = applier.namespace(entry.nsid)
    if ns is None:
        return
    if isinstance(entry, RemoveEntry):
        _note_removed(applier, ns, entry)
    else:
        class_id = applier.class_id(entry.ttl_class, 0) if entry.ttl_class else 0
        _note(applier, ns, entry.when_ms, KEPT, entry.hashes, entry.expires_ms, class_id)


def _note_removed(applier: Applier, ns: int, entry: RemoveEntry) -> None:
    if not entry.hashes and entry.block != BLOCKS:
        mark = 2 * entry.when_ms + (entry.block == LISTING)  # what was told last counts
        name = f"{UNLISTED}{ns}"
        applier.add_meta(name, max(0, mark - applier.meta_int(name)))
    if entry.hashes or entry.block != NOTHING:
        _note(applier, ns, entry.when_ms, REMOVED, entry.hashes)
        applier.add_meta(f"{REMOVALS}{ns}", 1)


def removals(applier: Applier, ns: int) -> int:
    """Another number than before: a removal was heard of, or the index is another one."""
    return applier.meta_int(f"{REMOVALS}{ns}")


def latest(applier: Applier, ns: int) -> int:
    """When the last of what is remembered of a namespace was told, 0: nothing is."""
    known = applier.latest_told.get(ns)
    if known is None:
        prefix = TOLD + PREFIX.pack(ns)
        known = 0
        with applier.txn.cursor() as cursor:
            beyond = cursor.set_range(TOLD + PREFIX.pack(ns + 1))
            if (cursor.prev() if beyond else cursor.last()) and cursor.key()[:5] == prefix:
                known = int(TOLD_KEY.unpack_from(cursor.key(), 1)[1])
        applier.latest_told[ns] = known
    return known


def after_all_told(applier: Applier, ns: int) -> int:
    """A time that is later than all that was told of a namespace, by whatever clocks."""
    unlisted_ms = applier.meta_int(f"{UNLISTED}{ns}") // 2
    return max(latest(applier, ns), unlisted_ms) + 1


class Kept(NamedTuple):
    """A row of `told`: blocks that were renewed."""

    when_ms: int
    expires_ms: int
    class_id: int
    hashes: bytes


class Memory:
    """What was told of one namespace since some time, by block: one transaction looks at it for
    each run that comes in, and reads the rows once."""

    def __init__(self, from_ms: int) -> None:
        self.from_ms = from_ms
        self.all_removed_ms = -1
        """When all of it was removed last."""
        self._removed_ms: dict[bytes, int] = {}
        self._kept: dict[bytes, list[Kept]] = {}

    def add(self, when_ms: int, kind: int, expires_ms: int, class_id: int, hashes: bytes) -> None:
        if kind == KEPT:
            kept = Kept(when_ms, expires_ms, class_id, hashes)
            for hash_ in _each(hashes):
                self._kept.setdefault(hash_, []).append(kept)
            return
        if not hashes:
            self.all_removed_ms = max(self.all_removed_ms, when_ms)
        for hash_ in _each(hashes):
            self._removed_ms[hash_] = max(self._removed_ms.get(hash_, -1), when_ms)

    def removed_ms(self, hash_: bytes) -> int:
        """When a block was removed last; -1: not since."""
        return max(self.all_removed_ms, self._removed_ms.get(hash_, -1))

    def kept(self, hashes: bytes, ms: int) -> list[Kept]:
        """What was told of any of these blocks no earlier than `ms`, in order."""
        if not self._kept:
            return []
        found = {k for h in _each(hashes) for k in self._kept.get(h, ()) if k.when_ms >= ms}
        return sorted(found)


def since(applier: Applier, ns: int, ms: int) -> Memory:
    """What was told since `ms`, or since longer."""
    memory = applier.told.get(ns)
    if memory is None or memory.from_ms > ms:
        # Some more: what comes in is in order of its time, but for some seconds.
        memory = Memory(max(0, ms - _MORE_MS))
        prefix = TOLD + PREFIX.pack(ns)
        start = TOLD + TOLD_KEY.pack(ns, memory.from_ms, 0)
        for key, value in scan(applier.txn, prefix, start):
            _, when_ms, kind = TOLD_KEY.unpack_from(key, 1)
            expires_ms, class_id = TOLD_VALUE.unpack_from(value)
            memory.add(when_ms, kind, expires_ms, class_id, bytes(value[TOLD_VALUE.size :]))
        applier.told[ns] = memory
    return memory


def place(applier: Applier, entry: RunEntry, since_ms: int, *, moved: bool) -> None:
    """Places what of a run was not removed since, and renews what was renewed.

    since_ms: whatever was told before this time the run has not been affected by.
    """
    ns = applier.namespace(entry.nsid)
    if ns is None or latest(applier, ns) < since_ms:
        applier.place(entry, moved=moved)
        return
    memory = since(applier, ns, since_ms)
    if memory.all_removed_ms >= since_ms:
        applier.count("runs_removed_before")
        return
    removed = {h for h in _each(entry.hashes) if memory.removed_ms(h) >= since_ms}
    for left in _without(entry, removed):
        applier.place(left, moved=moved)
    for kept in memory.kept(entry.hashes, since_ms):
        _keep_late(applier, ns, entry, kept.hashes, kept.expires_ms, kept.class_id or None)


def _keep_late(
    applier: Applier, ns: int, entry: RunEntry, hashes: bytes, expires_ms: int, class_id: int | None
) -> None:
    named = set(_each(hashes))
    _keep_waiting(applier, ns, hashes, expires_ms)
    for s in list(shown(applier, ns, entry.block, entry.heads, entry.hashes, thorough=False)):
        stretch = entry.hashes[s.at * HASH_BYTES : (s.at + s.count) * HASH_BYTES]
        if not named.isdisjoint(_each(stretch)):
            _keep(applier, s, expires_ms, class_id)


def _without(entry: RunEntry, removed: set[bytes]) -> Iterator[RunEntry]:
    """The parts of a run whose blocks are not among those that were removed."""
    at = 0
    while at < entry.count:
        end = at
        while end < entry.count and _hash(entry.hashes, end) not in removed:
            end += 1
        if end > at:
            yield entry.part(at, end)
        at = end + 1


def was_removed(applier: Applier, entry: RunEntry, i: int) -> bool:
    """Says whether the i-th block of a run was removed since it was written, as far as that is
    remembered."""
    ns = applier.namespace(entry.nsid)
    if ns is None or latest(applier, ns) < entry.written_ms:
        return False
    memory = since(applier, ns, entry.written_ms)
    return memory.removed_ms(_hash(entry.hashes, i)) >= entry.written_ms


def forget_before(applier: Applier, ms: int) -> None:
    """Takes out what was told before some time."""
    numbers = [U32.unpack_from(value)[0] for _, value in scan(applier.txn, NS)]
    for ns in numbers:
        old = (bytes(key) for key, _ in scan(applier.txn, TOLD + PREFIX.pack(ns)))
        for key in list(takewhile(lambda k: TOLD_KEY.unpack_from(k, 1)[1] < ms, old)):
            applier.txn.delete(key)
    applier.latest_told.clear()
    applier.told.clear()


def all_entries(txn: Any, nsids: dict[int, bytes], classes: dict[int, str]) -> Iterator[
    KeepEntry | RemoveEntry
]:  # fmt: skip
    """What is remembered, as entries that are to be noted, not applied."""
    prefix = META + UNLISTED.encode()
    for key, value in scan(txn, prefix):
        ns = int(bytes(key[len(prefix) :]))
        when_ms, removed = divmod(U64.unpack(value)[0], 2)
        yield RemoveEntry(nsids[ns], when_ms, LISTING if removed else NOTHING, b"", b"")
    for key, value in scan(txn, TOLD):
        ns, when_ms, kind = TOLD_KEY.unpack_from(key, 1)
        expires_ms, class_id = TOLD_VALUE.unpack_from(value)
        hashes = bytes(value[TOLD_VALUE.size :])
        if kind == REMOVED:
            yield RemoveEntry(nsids[ns], when_ms, 0, b"", hashes)
        else:
            name = classes.get(class_id, "")
            yield KeepEntry(nsids[ns], expires_ms, when_ms, 0, name, False, b"", hashes)
