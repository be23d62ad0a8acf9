"""What of a store's blocks is of no use though it is sound: holes in chains, and second copies.

For fsck. Reads the index, a namespace at a time: memory for a hash of each run, not of each block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvfs.chain import HASH_BYTES
from kvfs.frames import RunEntry
from kvfs.index import Index
from kvfs.index.apply import Applier
from kvfs.index.schema import Run, Segment
from kvfs.index.told import shown
from kvfs.namespace import Namespace


def holes(index: Index, ns: Namespace, now_ms: int) -> Iterator[Run]:
    """Yields the live runs that no check reaches, since the block before them is in no live run:
    it has expired, or was found to be bad. Where an engine keys the blocks there are none."""
    if ns.keyed:
        return
    parents = {r.parent for r in index.all_runs(ns.number) if r.block and r.expires_ms > now_ms}
    for run in index.all_runs(ns.number):
        if run.expires_ms > now_ms and parents:
            data = run.hashes
            parents.difference_update(
                data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES)
            )
    for run in index.all_runs(ns.number) if parents else ():
        if run.block and run.parent in parents and run.expires_ms > now_ms:
            yield run


def second_copies(index: Index, segment: Segment, told: Iterable[RunEntry], now_ms: int) -> int:
    """How many blocks of the runs that a segment was written with are shown from another one: two
    writers have stored them at once."""

    def count(applier: Applier) -> int:
        return sum(
            s.count
            for e in told
            if e.expires_ms > now_ms
            for s in shown(applier, segment.ns, e.block, e.heads, e.hashes, thorough=False)
            if s.run.seg != segment.number and s.run.expires_ms > now_ms
        )

    return index.query(count)
