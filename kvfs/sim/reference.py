"""What a cache with a time to live and a capacity would hit: the rule that the store is held to.

A block lives until `ttl` seconds have gone by since it was last used: written or part of a hit.
Where more than `capacity` blocks live, the one that was used longest ago goes, of one request the
last one first, so that a block never goes before those that follow it. What a request uses itself
never goes for it. A hit is the longest run of living blocks from a request's first one on.

Works on a trace's chain ids alone and imports nothing of the store. Needs numpy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvfs.sim.trace import Request


@dataclass(slots=True)
class Ideal:
    """The sums of a replay by rule."""

    tokens: int = 0
    hit_tokens: int = 0
    most_live: int = 0
    """The most blocks that lived at a time."""
    written: int = 0
    """Blocks that were written, again included."""

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.tokens if self.tokens else 0.0


def ids_of(request: Request) -> Any:
    """The chain ids of a request, as an array of int64."""
    import numpy as np

    parts = [np.arange(first, first + count, dtype=np.int64) for first, count in request.runs]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def sliding(requests: Iterable[Request], ttl: float, capacity: float = math.inf) -> Ideal:
    """Replays requests, in the order of time. ttl: seconds; capacity: blocks."""
    return _Sliding(ttl, capacity).replay(requests)


class _Sliding:
    def __init__(self, ttl: float, capacity: float) -> None:
        import numpy as np

        self.np = np
        self.ttl = ttl
        self.capacity = capacity
        self.used: Any = np.full(1 << 16, -math.inf)  # block -> when it was last used; -inf: gone
        self.queue: deque[tuple[float, Any]] = deque()  # uses, the longest ago first
        self.live = 0
        self.result = Ideal()

    def replay(self, requests: Iterable[Request]) -> Ideal:
        for request in requests:
            ids = ids_of(request)
            self._grow(ids)
            self._expire(request.t)
            self._use(request, ids)
        return self.result

    def _grow(self, ids: Any) -> None:
        np = self.np
        need = int(ids.max()) + 1 if len(ids) else 0
        if need > len(self.used):
            more = np.full(max(need, 2 * len(self.used)) - len(self.used), -math.inf)
            self.used = np.concatenate([self.used, more])

    def _expire(self, now: float) -> None:
        """A block that was last used exactly `ttl` ago still lives."""
        while self.queue and self.queue[0][0] + self.ttl < now:
            at, ids = self.queue.popleft()
            gone = ids[self.used[ids] == at]
            self.used[gone] = -math.inf
            self.live -= len(gone)

    def _use(self, request: Request, ids: Any) -> None:
        alive = self.used[ids] > -math.inf
        n = len(ids)
        hit = n if alive.all() else int(alive.argmin())
        result = self.result
        result.tokens += request.tokens
        result.hit_tokens += min(hit * request.block_tokens, request.tokens)
        new = int(n - alive.sum())
        result.written += new
        self.live += new
        self.used[ids] = request.t
        self.queue.append((request.t, ids))
        self._fit(len(self.queue) - 1)
        result.most_live = max(result.most_live, self.live)

    def _fit(self, others: int) -> None:
        """Lets go of blocks of earlier uses until the rest fits."""
        while self.live > self.capacity and others:
            at, ids = self.queue.popleft()
            last = ids[self.used[ids] == at]
            excess = int(self.live - self.capacity)
            gone = last[max(0, len(last) - excess) :]
            self.used[gone] = -math.inf
            self.live -= len(gone)
            if len(gone) < len(last):
                self.queue.appendleft((at, last[: len(last) - len(gone)]))
            else:
                others -= 1
