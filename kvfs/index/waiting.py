"""Runs whose parent block is not visible: they wait, out of sight, until it is.

A row in `waiting` is a run as in `runs`, by the hash of the parent it waits for; the counter
"orphans" says how many there are. Functions over one write transaction; nothing is kept between
calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfs.chain import HASH_BYTES
from kvfs.frames import RunEntry
from kvfs.index.schema import (
    PLACE,
    RUN,
    WAITING,
    Run,
    Segment,
    scan_copies,
    waiting_hashes,
    waiting_key,
)

if TYPE_CHECKING:
    from kvfs.index.apply import Applier


def wait(applier: Applier, segment: Segment, entry: RunEntry, count: int, moved: bool) -> None:
    """Lets the first `count` blocks of a run wait; moved: it is to be placed as a moved one."""
    run = Run(
        segment.ns, entry.hashes[:HASH_BYTES], segment.number, entry.slot, count,
        entry.block, entry.written_ms, entry.expires_ms, segment.class_id, entry.parent,
        entry.hashes[: count * HASH_BYTES],
    )  # fmt: skip
    key = waiting_key(run.ns, run.parent, run.seg, run.slot)
    value = run.value() + (b"\1" if moved else b"")
    if applier.txn.put(key, value, overwrite=False):
        applier.add_meta("orphans", 1)


def wake(applier: Applier, placed: Run) -> list[tuple[RunEntry, bool]]:
    """The runs that have waited for a block of one that was placed just now, and which of them are
    moved ones."""
    rows = []
    for i in range(placed.count):
        rows += list(scan_copies(applier.txn, waiting_key(placed.ns, placed.hash(i))))
    woken = []
    for key, value in rows:
        stop(applier, key)
        if (entry := entry_of(applier, key, value, placed.head)) is not None:
            woken.append(entry)
    return woken


def entry_of(
    applier: Applier, key: bytes, value: bytes, head: bytes = b""
) -> tuple[RunEntry, bool] | None:
    """The entry of a run that waits, and whether it is a moved one; None if its segment is gone.

    head: begins the run that holds its parent block.
    """
    segment = applier.segment(segment_of(key))
    if segment is None:
        return None
    _, slot, _, block, written, expires, _, parent = RUN.unpack_from(value)
    hashes, moved = waiting_hashes(value)
    entry = RunEntry(b"", segment.segment, slot, block, written, expires, parent, head, hashes)
    return entry, moved


def segment_of(key: bytes) -> int:
    """The number of the segment of a run that waits."""
    return int(PLACE.unpack_from(key, len(key) - PLACE.size)[0])


def stop(applier: Applier, key: bytes) -> None:
    """It does not wait any longer."""
    applier.txn.delete(key)
    applier.add_meta("orphans", -1)


def drop(applier: Applier, segment: Segment) -> None:
    """Nothing of a segment waits any longer."""
    for key, _ in list(scan_copies(applier.txn, WAITING)):
        if segment_of(key) == segment.number:
            stop(applier, key)
