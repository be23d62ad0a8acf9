"""Looks whether an index keeps the invariants that kvfs.index.schema states, the costly one too.

Holds all hashes in memory; for tests of what changes an index.
"""

from __future__ import annotations

from collections import Counter

from kvfs.index import Index, soundness
from kvfs.index.schema import RUNS, Run, scan


def index_faults(index: Index) -> list[str]:
    """What is wrong with the rows, a sentence each; empty if they are sound."""
    faults = soundness.index_faults(index)
    with index.env().read() as txn:
        runs = [Run.decode(key, value) for key, value in scan(txn, RUNS)]
    seen = Counter((run.ns, run.hash(i)) for run in runs for i in range(run.count))
    return faults + [f"block {h.hex()} in {n} runs" for (_, h), n in seen.items() if n > 1]
