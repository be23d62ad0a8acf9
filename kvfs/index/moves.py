"""Where blocks have gone that were moved, for what comes in under their old places.

A cut or a renewal by a host that had not heard of a move names the old place, or the first block of
a run that is in the middle of another one by now. These rows lead to the new place, over several
moves if need be. What was moved goes with the old segment (kvfs.index.wipe), a day after its file;
an alias with the segment that it leads to.

Functions over one transaction; nothing is kept between calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from kvfs.chain import HASH_BYTES
from kvfs.frames import MovedEntry, MoveEntry, RunEntry
from kvfs.index.schema import (
    ALIAS,
    MOVE,
    MOVED,
    RUNS,
    Run,
    alias_key,
    moved_key,
    place_key,
    scan,
)

if TYPE_CHECKING:
    from kvfs.index.apply import Applier

# A chain of moves is followed so far; each is at least a grace time after the one before.
_MOST_MOVES = 64


class Stretch(NamedTuple):
    """Slots whose blocks were moved, and the place of the first now."""

    slot: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    segment: bytes
    at: int


def sources_of(entry: MoveEntry) -> Iterator[tuple[int, MovedEntry]]:
    """Yields (number of the first block, what became of it) for each source of a move."""
    run, block = entry.run, 0
    for source in entry.sources:
        head = run.hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES]
        yield (
            block,
            MovedEntry(run.nsid, source, run.segment, run.slot + block, head, entry.when_ms),
        )
        block += source.count


def note(applier: Applier, ns: int, e: MovedEntry) -> None:
    """Remembers a move."""
    if e.source.segment == e.segment:
        return  # told again where it is
    value = MOVE.pack(ns, e.source.count, e.segment, e.slot, e.head, e.when_ms)
    applier.txn.put(moved_key(e.source.segment, e.source.slot), value)
    applier.txn.put(alias_key(ns, e.head), ALIAS.pack(e.segment, e.slot))


def any_noted(applier: Applier) -> bool:
    return next(scan(applier.txn, MOVED), None) is not None


def away(applier: Applier, segment: bytes, first: int, count: int) -> Iterator[Stretch]:
    """What was moved from some slots, in slot order."""
    for key, value in scan(applier.txn, MOVED + segment):
        slot = int.from_bytes(key[-4:], "big")
        _, n, target, at, _, _ = MOVE.unpack(value)
        start, end = max(slot, first), min(slot + n, first + count)
        if start < end:
            yield Stretch(start, end - start, target, at + start - slot)


def settled(applier: Applier, entry: RunEntry, moves: int = _MOST_MOVES) -> Iterator[RunEntry]:
    """Yields the parts of a run where they are now, after later moves that were read before it."""
    at = 0
    for s in away(applier, entry.segment, entry.slot, entry.count) if moves else ():
        first = s.slot - entry.slot
        if first > at:
            yield entry.part(at, first)
        gone = entry.part(first, first + s.count)
        yield from settled(applier, replace(gone, segment=s.segment, slot=s.at), moves - 1)
        at = first + s.count
    if at < entry.count:
        yield entry.part(at, entry.count)


def run_of(applier: Applier, ns: int, head: bytes) -> Run | None:
    """The run that a run which began with this block was moved into."""
    value = applier.txn.get(alias_key(ns, head))
    return None if value is None else at_place(applier, *ALIAS.unpack(value))


def at_place(applier: Applier, segment: bytes, slot: int) -> Run | None:
    """The visible run that holds a slot, or what was moved from there."""
    for _ in range(_MOST_MOVES):
        number = applier.segment_number(segment)
        run = None if number is None else _holding(applier, number, slot)
        if run is not None:
            return run
        moved = next(away(applier, segment, slot, 1), None)
        if moved is None:
            return None
        segment, slot = moved.segment, moved.at
    return None


def _holding(applier: Applier, number: int, slot: int) -> Run | None:
    """The visible run of a segment that holds a slot."""
    prefix = place_key(number)
    with applier.txn.cursor() as cursor:
        after = cursor.set_range(place_key(number, slot + 1))
        if not (cursor.prev() if after else cursor.last()):
            return None
        if bytes(cursor.key()[: len(prefix)]) != prefix:
            return None
        key = RUNS + bytes(cursor.value())
    value = applier.txn.get(key)
    run = None if value is None else Run.decode(key, value)
    return run if run is not None and slot < run.slot + run.count else None
