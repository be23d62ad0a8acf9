"""What this host's index forgets of itself: a block that a fetch found to be bad or gone.

Only this host's: whether the block is bad for others too is theirs to find out, or fsck's. One
index transaction, no I/O on the shared storage. Thread-safe; no state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from kvfs.errors import KvfsError
from kvfs.index import Index
from kvfs.index.apply import Applier
from kvfs.index.schema import Run, Segment
from kvfs.plan import Extent
from kvfs.writer import of_this_host

LATE_MS = 60_000
"""What another host wrote shows after this time, whatever the shared file system (3FS: 30 s)."""


def forget(
    index: Index, ns: int, extent: Extent, head: bytes, block: int, now_ms: Callable[[], int]
) -> bool:
    """Takes a block of an extent and what follows it in its run out of the index; says whether.

    head: hash of the extent's first block. Left alone is what is elsewhere by now, and what another
    host wrote so short a time ago that it may only not show here yet.
    """

    def shorten(applier: Applier) -> bool:
        run, place = applier.holding(ns, head)
        segment = None if run is None else applier.segment(run.seg)
        if run is None or segment is None or _may_be_late(run, segment, now_ms()):
            return False
        if (segment.segment, run.slot + place) == (extent.segment_id, extent.slot):
            applier.shorten(run, place + block - extent.block)
        return True

    with contextlib.suppress(KvfsError):
        return index.write(shorten)
    return False


def _may_be_late(run: Run, segment: Segment, now_ms: int) -> bool:
    """Shared file systems show lengths, bytes and names that other hosts made with a delay."""
    age = now_ms - max(run.written_ms, segment.created_ms)
    # What is from further ahead tells nothing of its age: see kvfs.put.
    return abs(age) < LATE_MS and not of_this_host(segment.path)
