"""From which prefix length on loading a prefix beats computing it again, by what was measured here.

A fetch costs a fixed time and then so much for each token; so two fetches of different lengths give
both, and a rate of prefill gives the length where they meet. What is compared is check and fetch,
to the client, with the prefill of as many tokens: not the copy to the GPU, which overlaps with the
forward pass, nor that other requests get the GPU's time.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvfs.bench.timing import Row

SMALL, LARGE = "fetch.fetcher.4k.", "fetch.fetcher.128k."
FROM = {"warm": "from the page cache", "cold": "from the disk"}
ADVISING = frozenset(f"{size}{how}" for size in (SMALL, LARGE) for how in FROM)
"""The rows it is made from; they have the figures `tokens` and `check_seconds`."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What loading costs: seconds however little is loaded, and then for each token."""

    fixed_seconds: float
    token_seconds: float

    @classmethod
    def through(cls, small: tuple[float, float], large: tuple[float, float]) -> Cost:
        """The line through two measured points (tokens, seconds).

        Neither part is below zero: where noise would have it so, all of the larger fetch counts as
        the rate.
        """
        (n, short), (m, long) = small, large
        rate = max(0.0, (long - short) / (m - n)) if m > n else 0.0
        fixed = short - n * rate
        if fixed < 0:
            return cls(0.0, long / m)
        return cls(fixed, rate)

    def seconds(self, tokens: float) -> float:
        return self.fixed_seconds + tokens * self.token_seconds

    def worth_from(self, prefill: float, block: int) -> int | None:
        """The smallest number of tokens, a multiple of `block`, that load faster than they are
        computed at `prefill` tokens a second; None: no number does."""
        gain = 1 / prefill - self.token_seconds
        if gain <= 0:
            return None
        blocks = math.floor(self.fixed_seconds / gain / block) + 1
        return blocks * block


def advise(rows: Iterable[Row], prefill: float, block: int = 128) -> dict[str, dict[str, Any]]:
    """What the rows of `fetch` say, by where blocks come from; what was not measured is missing.

    prefill: tokens a second; block: tokens. Keys of each: fixed_seconds, tokens_per_second (null:
    too fast to tell), from_tokens (null: never), and for the longer of the measured fetches tokens,
    load_seconds and compute_seconds.
    """
    named = {row.name: row for row in rows}
    out: dict[str, dict[str, Any]] = {}
    for how in FROM:
        small, large = named.get(f"{SMALL}{how}"), named.get(f"{LARGE}{how}")
        if small is None or large is None:
            continue
        cost = Cost.through(_point(small), _point(large))
        tokens = large.figures["tokens"]
        out[how] = {
            "fixed_seconds": cost.fixed_seconds,
            "tokens_per_second": 1 / cost.token_seconds if cost.token_seconds else None,
            "from_tokens": cost.worth_from(prefill, block),
            "tokens": int(tokens), "load_seconds": cost.seconds(tokens),
            "compute_seconds": tokens / prefill,
        }  # fmt: skip
    return out


def _point(row: Row) -> tuple[float, float]:
    """(tokens, seconds) of a fetch, with the check before it."""
    return row.figures["tokens"], row.seconds + row.figures["check_seconds"]
