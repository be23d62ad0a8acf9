"""Looks whether an index keeps the invariants that kvfs.index.schema states.

Reads one snapshot, within one process; for tests of what changes an index.
"""

from __future__ import annotations

from collections import Counter

from kvfs.chain import HASH_BYTES
from kvfs.index import Index
from kvfs.index.schema import (
    CHILDREN,
    META,
    PLACED,
    RUNS,
    SEGMENTS,
    U64,
    WAITING,
    Run,
    child_key,
    place_key,
    scan_copies,
)


def index_faults(index: Index) -> list[str]:
    """What is wrong with the rows of an index, a sentence each; empty if it is sound."""
    with index.env().read() as txn:
        tables = {
            name: dict(scan_copies(txn, name))
            for name in (RUNS, CHILDREN, PLACED, SEGMENTS, WAITING)
        }
        sums = {name: txn.get(META + name) for name in (b"blocks", b"orphans")}
        counted = {n: 0 if v is None else U64.unpack(v)[0] for n, v in sums.items()}
    runs = [Run.decode(key, value) for key, value in tables[RUNS].items()]
    faults = [fault for run in runs for fault in _of_run(run, tables)]
    for name, table in (("children", CHILDREN), ("placed", PLACED)):
        if len(tables[table]) != len(runs):
            faults.append(f"{len(tables[table])} rows in {name} for {len(runs)} runs")
    seen = Counter((run.ns, run.hash(i)) for run in runs for i in range(run.count))
    faults += [f"block {h.hex()} in {n} runs" for (_, h), n in seen.items() if n > 1]
    blocks = sum(run.count for run in runs)
    if counted[b"blocks"] != blocks:
        faults.append(f"{counted[b'blocks']} blocks counted, {blocks} in runs")
    if counted[b"orphans"] != len(tables[WAITING]):
        faults.append(f"{counted[b'orphans']} orphans counted, {len(tables[WAITING])} wait")
    return faults


def _of_run(run: Run, tables: dict[bytes, dict[bytes, bytes]]) -> list[str]:
    name = f"run {run.head.hex()}"
    faults = []
    if len(run.hashes) != run.count * HASH_BYTES or not run.count:
        faults.append(f"{name}: {len(run.hashes)} bytes of hashes for {run.count} blocks")
    if run.hashes[:HASH_BYTES] != run.head:
        faults.append(f"{name}: begins with {run.hashes[:HASH_BYTES].hex()}")
    if child_key(run.ns, run.parent, run.head) not in tables[CHILDREN]:
        faults.append(f"{name}: not among the children of {run.parent.hex()}")
    if tables[PLACED].get(place_key(run.seg, run.slot)) != run.key()[1:]:
        faults.append(f"{name}: not in its place, segment {run.seg} slot {run.slot}")
    if SEGMENTS + run.seg.to_bytes(4, "big") not in tables[SEGMENTS]:
        faults.append(f"{name}: in unknown segment {run.seg}")
    return faults
