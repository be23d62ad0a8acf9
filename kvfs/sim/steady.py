"""A store in its steady state: days of requests on a clock that is driven, at a fixed capacity.

Per request check, renew what hit, put the rest, as an engine does; a housekeeper passes at fixed
intervals of the trace's time. What comes of it is held against the rule of kvfs.sim.reference.
Blocks are small stand-ins of one page, told by four tokens each, so that days fit into minutes;
all that decides (the index, segments, times to live, the cleaner, the limits) is the store itself.

Belongs to one thread. Needs numpy, and room for the capacity and a tenth.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from kvfs.chain import PrefixHasher
from kvfs.gc.collector import GcResult
from kvfs.gc.housekeeping import Housekeeper
from kvfs.layout import Identity, Span
from kvfs.limits import Limits
from kvfs.namespace import Namespace
from kvfs.sim.reference import ids_of
from kvfs.sim.replay import TraceClock
from kvfs.sim.trace import Request
from kvfs.store import Store

BLOCK_TOKENS = 4
ROW_BYTES = 64
START = 1_800_000_000.0
FLUSH_SECONDS = 5.0


@dataclass(slots=True)
class Steady:
    """The sums of a run. Bytes are those of whole records."""

    requests: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    written_bytes: int = 0
    copied_bytes: int = 0
    evicted_bytes: int = 0
    freed_bytes: int = 0
    removals: int = 0
    """Calls that removed a file."""
    refused_puts: int = 0
    passes: int = 0
    most_bytes: int = 0
    """The most that segment files took behind a pass."""
    fragments: float = 0.0
    """Extents a hit consisted of, on average."""

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    @property
    def copied_per_written(self) -> float:
        return self.copied_bytes / self.written_bytes if self.written_bytes else 0.0

    def removals_per_tb(self, record_bytes: int) -> tuple[float, float]:
        """(removal calls a TB given back, the same if each record of a size had its own file).

        record_bytes: of the records that the small ones here stand for.
        """
        blocks = self.freed_bytes / 4096
        if not blocks:
            return 0.0, 1e12 / record_bytes
        return self.removals * 1e12 / (blocks * record_bytes), 1e12 / record_bytes

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self), "hit_rate": self.hit_rate,
            "copied_per_written": self.copied_per_written,
        }  # fmt: skip


def identity() -> Identity:
    """The layout of the small blocks."""
    return Identity(
        model="steady", weights="w", tokenizer="t", spans=(Span(0, "kv", 0, ROW_BYTES),),
        row_bytes=ROW_BYTES, record_format="opaque", block_tokens=BLOCK_TOKENS,
    )  # fmt: skip


def make_store(path: str, ttl: int, segment_bytes: int, **options: Any) -> tuple[Store, TraceClock]:
    """A store with one TTL class, and the clock it goes by."""
    clock = TraceClock(START)
    store = Store.init(
        path, extent=min(segment_bytes, 64 << 20), segment_bytes=segment_bytes, durability="none",
        classes={"chatbot": ttl}, clock=clock, **options,
    )  # fmt: skip
    return store, clock


class SteadyRun:
    """Drives one store with one trace."""

    def __init__(
        self, store: Store, clock: TraceClock, capacity_bytes: int | None, every: float
    ) -> None:
        """every: seconds of the trace from one pass of the housekeeper to the next."""
        self.store = store
        self.clock = clock
        self.every = every
        self.ns: Namespace = store.create_namespace(identity())
        self.result = Steady()
        self._keeper = Housekeeper(store, force=True)
        self._extents = self._hits = 0
        # Rates are of the true clock's seconds, of which days of the trace take few.
        Limits(capacity_bytes, reserve_bytes=0, copy_rate=None, remove_rate=None).save(
            store.backend
        )

    def run(self, requests: Iterable[Request]) -> Steady:
        due = flush = 0.0
        try:
            for request in requests:
                if request.t >= due:
                    self._pass()
                    due = request.t + self.every
                self.clock.t = request.t
                self._request(request)
                if request.t >= flush:
                    self.store.flush_renewals()
                    flush = request.t + FLUSH_SECONDS
        finally:
            self._keeper.stop()
        self.result.fragments = self._extents / self._hits if self._hits else 0.0
        return self.result

    def _request(self, request: Request) -> None:
        hasher = self._hasher(request)
        plan = self.store.check(self.ns, hasher)
        r, stored = self.result, plan.stored_blocks
        r.requests += 1
        r.tokens += request.tokens
        r.hit_tokens += min(stored * request.block_tokens, request.tokens)
        if stored:
            self._hits += 1
            self._extents += len(plan.extents)
            self.store.note_hit(self.ns, plan, hasher)
        rest = hasher.n_blocks - stored
        if rest:
            rows = bytes(rest * ROW_BYTES)
            put = self.store.put(self.ns, hasher, rows, first_block=stored)
            r.written_bytes += put.stored * self.ns.stride
            r.refused_puts += put.error is not None

    def _hasher(self, request: Request) -> PrefixHasher:
        import numpy as np

        ids = ids_of(request)
        tokens = (ids[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).astype(np.uint32)
        return self.ns.hasher(tokens.reshape(-1))

    def _pass(self) -> None:
        space = self.store.writer().space
        done = self._keeper.turn()
        if done is not None:
            self._add(done)
        if space is not None:
            space.forget()  # it goes by the true clock

    def _add(self, done: GcResult) -> None:
        r = self.result
        r.passes += 1
        r.copied_bytes += done.reclaimed.moved.copied_bytes
        r.evicted_bytes += sum(e.bytes for e in done.reclaimed.evicted)
        r.freed_bytes += done.freed_bytes
        r.removals += len(done.removed)
        r.most_bytes = max(r.most_bytes, done.reclaimed.used_bytes)
