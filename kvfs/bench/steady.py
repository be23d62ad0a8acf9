"""STEADY: five days of coding agents at a fixed capacity, with times to live of 1 h, 1 d and 3 d.

Nothing here is a matter of this machine's speed, but for the seconds that a run takes: the hit rate
beside that of the rule (kvfs.sim.reference) for the same trace, time to live and capacity, the
bytes that cleaning copies for each byte that is written, and the removal calls for each TB that is
given back beside those of a store with a file for each block.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from kvfs.bench.place import scratch
from kvfs.bench.timing import Options, Row
from kvfs.sim.reference import sliding
from kvfs.sim.steady import SteadyRun, make_store
from kvfs.sim.trace import find

TRACE = "weka_claude_code_full"
TTLS = {"1h": 3600, "1d": 86400, "3d": 3 * 86400}
CAPACITY_BLOCKS = 215_000
"""Half of what a time to live of a day would need at most."""
SEGMENT_BYTES = 8 << 20
PASS_SECONDS = 120.0
RECORD_BYTES = 114_688
"""Of the records that the small ones stand for: DeepSeek-V4.1-Flash."""
PAGE = 4096
# Most that the hit rate may be below the rule's, in percentage points.
MOST_BELOW = 0.5
MOST_COPIED = 0.3


def run(options: Options) -> Iterator[Row]:
    """Yields the rows `steady.*`. Raises BackendError, SpaceError, IndexFault."""
    for name, ttl in TTLS.items():
        options.progress(f"steady.{name}")
        yield _row(f"steady.{name}", ttl, options)


def _row(name: str, ttl: int, options: Options) -> Row:
    trace = find(TRACE)
    ideal = sliding(trace.requests(), ttl, CAPACITY_BLOCKS)
    began = time.perf_counter()
    with scratch(options.directory) as place, scratch(options.index) as index:
        store, clock = make_store(str(place / "store"), ttl, SEGMENT_BYTES, index=str(index))
        with store:
            capacity = CAPACITY_BLOCKS * PAGE
            done = SteadyRun(store, clock, capacity, PASS_SECONDS).run(trace.requests())
    calls, single = done.removals_per_tb(RECORD_BYTES)
    below = (ideal.hit_rate - done.hit_rate) * 100
    figures = {
        "hit_percent": done.hit_rate * 100, "rule_percent": ideal.hit_rate * 100,
        "points_below": below, "copied_per_written": done.copied_per_written,
        "removals_per_tb": calls, "single_file_removals_per_tb": single,
        "refused_puts": float(done.refused_puts), "extents_per_hit": done.fragments,
    }  # fmt: skip
    limits = {
        "points_below": MOST_BELOW, "copied_per_written": MOST_COPIED,
        "removals_per_tb": single / 1000,
    }  # fmt: skip
    what = f"{done.requests:,} requests of {TRACE}, {CAPACITY_BLOCKS:,} blocks"
    return Row(name, time.perf_counter() - began, 1, what, figures=figures, limits=limits)
