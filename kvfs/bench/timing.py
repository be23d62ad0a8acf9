"""Measuring: rows, and cases that take turns.

One thread. The garbage collector is off while something is measured: what it would add belongs to
the program's whole state, not to the case.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Case = Callable[[], float]
"""Does the work once and returns the seconds it took, without what had to be prepared."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What the user chose. runs: samples of each figure, None for the benchmark's own number."""

    blocks: int = 10_000_000
    """Blocks in the index that `check` is measured on."""
    runs: int | None = None
    directory: str | None = None
    """Where stores are made: the file system to measure; None: the temporary directory."""
    index: str | None = None
    """Where their indexes are made: a local disk; None: the temporary directory."""
    progress: Progress = field(default=lambda text: None)
    clients: int = 4
    """Client processes that fetch at once, at most."""
    prefill: float | None = None
    """Tokens a second that the advice compares loading with."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: seconds are the median of `samples`.

    ratio: the median of the ratios to the reference, each taken within one turn. figures: further
    numbers by name; a limit on one of them stands in `limits`.
    """

    name: str
    seconds: float
    samples: int
    what: str
    limit_seconds: float | None = None
    ratio: float | None = None
    ratio_limit: float | None = None
    reference: str | None = None
    reference_seconds: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)

    @property
    def within(self) -> bool:
        """Nothing is above its limit."""
        pairs = [(self.seconds, self.limit_seconds), (self.ratio, self.ratio_limit)]
        pairs += [(self.figures[name], limit) for name, limit in self.limits.items()]
        return all(v is None or limit is None or v <= limit for v, limit in pairs)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "seconds": self.seconds, "limit_seconds": self.limit_seconds,
            "ratio": self.ratio, "ratio_limit": self.ratio_limit, "reference": self.reference,
            "reference_seconds": self.reference_seconds, "samples": self.samples,
            "within_limits": self.within, "what": self.what,
            "figures": dict(self.figures), "limits": dict(self.limits),
        }  # fmt: skip


def timed(work: Callable[[], Any]) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turns(cases: Mapping[str, Case], runs: int) -> dict[str, list[float]]:
    """Runs all cases `runs` times in turns; every other turn in reverse order, so that none always
    follows the same one. Returns the seconds of each, turn by turn."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for turn in range(runs):
            names = list(cases)
            for name in reversed(names) if turn % 2 else names:
                found[name].append(cases[name]())
    finally:
        if was_on:
            gc.enable()
    return found


def compared(samples: list[float], reference: list[float]) -> tuple[float, float, float]:
    """(median seconds, median seconds of the reference, median of the ratios of each turn)."""
    ratios = [a / b for a, b in zip(samples, reference, strict=True)]
    return statistics.median(samples), statistics.median(reference), statistics.median(ratios)


def percentile(samples: Sequence[float], percent: int) -> float:
    """The sample that so many per cent of all are at most."""
    return sorted(samples)[min(len(samples) - 1, len(samples) * percent // 100)]
