"""Takes rows out of an index that nothing refers to any more, within the caller's transaction.

`wipe` empties it before it is filled anew. What other processes hold on to stays: the numbers of
namespaces and classes, the counters that `stats` prints, and how far numbering has come, so that a
number once given never comes to mean something else. The other functions are for segments whose
files are removed. Nothing here reads the store.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from kvfs.index.apply import Applier
from kvfs.index.schema import (
    ALIAS,
    ALIASES,
    CHILDREN,
    CUTS,
    GONE,
    JOURNALS,
    KEYS,
    META,
    MOVED,
    PLACED,
    POOLS,
    PREFIX,
    PURGE,
    RUNS,
    SEGIDS,
    SEGMENTS,
    SERVING,
    SLOTS,
    TOLD,
    UNLISTED,
    WAITING,
    Segment,
    scan,
)
from kvfs.segment import SEGMENT_ID_BYTES

_CONTENT = (
    SEGIDS, SEGMENTS, RUNS, KEYS, CHILDREN, PLACED, WAITING, CUTS, MOVED, ALIASES, TOLD,
)  # fmt: skip
_HINTS = (SLOTS, POOLS, SERVING, PURGE)
_SUMS = (b"blocks", b"orphans", b"cuts")


def wipe(applier: Applier, *, journals: bool) -> None:
    """Removes all segments, runs and cuts; with `journals` also how far each journal was applied,
    so that they count as unread."""
    for table in (*_CONTENT, *_HINTS, *((JOURNALS,) if journals else ())):
        _clear(applier, table)
    for name in _SUMS:
        applier.txn.delete(META + name)
    _clear(applier, META + UNLISTED.encode())
    applier.refresh()


def _clear(applier: Applier, table: bytes) -> None:
    with applier.txn.cursor() as cursor:
        more = cursor.set_range(table)
        while more and bytes(cursor.key()[: len(table)]) == table:
            more = cursor.delete()


def mark_gone(applier: Applier, segment: Segment) -> None:
    """Notes that the file of a dropped segment is removed."""
    gone = dataclasses.replace(segment, state=GONE)
    applier.txn.put(SEGMENTS + PREFIX.pack(segment.number), gone.value())


def forget(applier: Applier, segments: Iterable[Segment]) -> None:
    """Takes out segments that are gone, their cuts, where their blocks were moved to and what
    leads to them. What still comes in for them is left out."""
    gone = {s.segment: s for s in segments if s.state == GONE}
    for id_, segment in gone.items():
        applier.txn.delete(SEGMENTS + PREFIX.pack(segment.number))
        applier.txn.delete(SEGIDS + id_)
        _forget_cuts(applier, lambda cut, id_=id_: cut == id_, id_)  # type: ignore[misc]
        for key in [bytes(key) for key, _ in scan(applier.txn, MOVED + id_)]:
            applier.txn.delete(key)
    aliases = scan(applier.txn, ALIASES) if gone else ()  # all of them, once
    for key in [bytes(key) for key, value in aliases if ALIAS.unpack(value)[0] in gone]:
        applier.txn.delete(key)


def forget_cuts(applier: Applier, over: Callable[[bytes], bool]) -> None:
    """Takes out the cuts of unknown segments of which `over(id)` says that they never come in."""
    _forget_cuts(applier, lambda id_: applier.segment_number(id_) is None and over(id_))


def _forget_cuts(applier: Applier, over: Callable[[bytes], bool], prefix: bytes = b"") -> None:
    keys = [bytes(key) for key, _ in scan(applier.txn, CUTS + prefix)]
    done = [key for key in keys if over(key[1 : 1 + SEGMENT_ID_BYTES])]
    for key in done:
        applier.txn.delete(key)
    applier.add_meta("cuts", -len(done))
