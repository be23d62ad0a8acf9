"""Room, where there is too little of it or where it is wasted: evict, then clean.

1. for the store, and for each namespace and tenant with a quota: where its segments take more than
   `high` of the limit, the longest unused runs go (kvfs.gc.eviction) until what is in use would fit
   below `low` with some slack; others' runs never go for it
2. segments that are little used are copied forward (kvfs.gc.cleaner), the least used first: those
   below a share always, and as many as it takes where a limit is exceeded

`dry_run` takes the same way and leaves out the writing. Blocking; belongs to one thread, which
holds the lease.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvfs.gc.cleaner import Cleaned, Cleaner
from kvfs.gc.eviction import Evicted, by_use, choose, evict
from kvfs.gc.expiry import Expiry
from kvfs.gc.occupancy import Occupied, occupied, worth_cleaning
from kvfs.gc.throttle import Bucket
from kvfs.index.schema import Run
from kvfs.limits import Limits
from kvfs.namespace import Namespace
from kvfs.store import Store
from kvfs.usage import tenant_of
from kvfs.writer import Writer

# Of what is in use so much less than fits, so that segments are worn when they are copied: with
# live data up to the brim every segment would have to be rewritten for each new one.
SLACK = 0.1
# Where a limit is exceeded, segments are cleaned up to this share.
PRESSED_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Scope:
    """Who has a limit."""

    what: str
    limit: int
    numbers: frozenset[int]
    """Of its namespaces."""


@dataclass(frozen=True, slots=True)
class Wear:
    """A segment that was cleaned, or would be."""

    path: str
    bytes: int
    live_bytes: int
    reason: str


@dataclass(slots=True)
class Reclaimed:
    """What was done, or would be."""

    used_bytes: int = 0
    """Of segments in use, before."""
    live_bytes: int = 0
    evicted: list[Evicted] = field(default_factory=list)
    cleaned: list[Wear] = field(default_factory=list)
    moved: Cleaned = field(default_factory=Cleaned)

    def to_json(self) -> dict[str, Any]:
        m = self.moved
        return {
            "used_bytes": self.used_bytes, "live_bytes": self.live_bytes,
            "evicted": [asdict(e) for e in self.evicted],
            "evicted_bytes": sum(e.bytes for e in self.evicted),
            "cleaned": [asdict(w) for w in self.cleaned],
            "cleaned_bytes": sum(w.bytes for w in self.cleaned),
            "moved_blocks": m.moved_blocks, "moved_runs": m.moved_runs, "new_runs": m.new_runs,
            "copied_bytes": m.copied_bytes, "bad_blocks": m.bad_blocks,
        }  # fmt: skip


class Reclaim:
    """Makes room in one store, once."""

    def __init__(
        self, store: Store, writer: Callable[[], Writer], expiry: Expiry, limits: Limits,
        bucket: Bucket, step: Callable[[], None], *, dry_run: bool,
    ) -> None:  # fmt: skip
        """writer: for the copies; bucket, step: as for Cleaner."""
        self.store = store
        self.writer = writer
        self.expiry = expiry
        self.limits = limits
        self.bucket = bucket
        self.step = step
        self.dry_run = dry_run
        self._namespaces = {ns.number: ns for ns in store.namespaces()}
        self._segments: list[Occupied] = []

    def run(self) -> Reclaimed:
        """Raises BusyError if the lease is lost, BackendError, SpaceError, IndexFault."""
        done = Reclaimed()
        self._segments = occupied(self.expiry)
        done.used_bytes = sum(s.bytes for s in self._segments)
        done.live_bytes = sum(s.live_bytes for s in self._segments)
        victims: dict[bytes, tuple[Occupied, str]] = {}
        scopes = self._scopes()
        for scope in scopes:
            for s in self._relieve(scope, done):
                victims.setdefault(s.segment.segment, (s, f"{scope.what} is too full"))
        whole = scopes[-1].limit * self.limits.low
        below = self.limits.clean_below(done.used_bytes / whole)
        # A namespace that only a newer version can read holds records of a shape unknown here.
        readable = [s for s in self._segments if s.segment.ns in self._namespaces]
        for s in worth_cleaning(readable, below, None):
            victims.setdefault(s.segment.segment, (s, "little of it is in use"))
        ready = [v for v in victims.values() if self.expiry.quiet(v[0].segment)]
        ready.sort(key=lambda v: v[0].share)
        self._clean(ready, done)
        return done

    def _scopes(self) -> list[Scope]:
        """Those with a limit, the narrowest first: what goes for one counts for the wider ones."""
        limits, found = self.limits, []
        for ns in self._namespaces.values():
            if ns.name in limits.namespaces:
                quota = limits.namespaces[ns.name]
                found.append(Scope(f"namespace {ns.name}", quota, frozenset({ns.number})))
        for tenant, quota in limits.tenants.items():
            numbers = frozenset(n for n, ns in self._namespaces.items() if self._of(ns, tenant))
            found.append(Scope(f"tenant {tenant}", quota, numbers))
        everyone = frozenset(self._namespaces)
        if limits.capacity_bytes is not None:
            found.append(Scope("the store", limits.capacity_bytes, everyone))
        else:
            found += self._file_system(everyone)
        return found

    @staticmethod
    def _of(ns: Namespace, tenant: str) -> bool:
        return tenant_of(ns.identity) == tenant

    def _file_system(self, everyone: frozenset[int]) -> list[Scope]:
        """Without a capacity of its own the store may have what the file system has left."""
        free, total = self.store.backend.free_bytes()
        room = free - self.limits.reserve(total)
        return [Scope("the file system", max(1, self._used(everyone) + room), everyone)]

    def _used(self, numbers: frozenset[int]) -> int:
        return sum(s.bytes for s in self._segments if s.segment.ns in numbers)

    def _relieve(self, scope: Scope, done: Reclaimed) -> list[Occupied]:
        """Evicts what a scope has too much; returns the segments to clean for it."""
        used = self._used(scope.numbers)
        if used <= scope.limit * self.limits.high:
            return []
        target = int(scope.limit * self.limits.low)
        mine = [s for s in self._segments if s.segment.ns in scope.numbers]
        need = sum(s.live_bytes for s in mine) - int(target * (1 - SLACK))
        if need > 0:
            self._evict(scope, need, done)
            mine = [s for s in self._segments if s.segment.ns in scope.numbers]
        return worth_cleaning(mine, PRESSED_SHARE, used - target)

    def _evict(self, scope: Scope, need: int, done: Reclaimed) -> None:
        now_ms = self.expiry.now_ms
        # A dry run before it may have chosen some already.
        places = {
            (r.ns, r.head): s.segment.geometry for s in self._segments for r in s.runs
        }  # fmt: skip

        def room(run: Run) -> int:
            return places[run.ns, run.head].room(run.count)

        ordered = by_use(self.store, scope.numbers, now_ms)
        here = [(used, run) for used, run in ordered if (run.ns, run.head) in places]
        chosen = list(choose(here, room, need))
        runs = [run for _, run in chosen]
        if not self.dry_run:
            self.step()
            runs = evict(self.store, runs, now_ms)
        latest = max((used for used, _ in chosen), default=now_ms)
        for number in scope.numbers:
            mine = [r for r in runs if r.ns == number]
            if mine:
                blocks = sum(r.count for r in mine)
                name, size = self._namespaces[number].name, sum(map(room, mine))
                done.evicted.append(Evicted(name, len(mine), blocks, size, now_ms - latest))
        self._segments = [_without(s, runs) for s in self._segments]

    def _clean(self, ready: list[tuple[Occupied, str]], done: Reclaimed) -> None:
        if self.dry_run or not ready:
            done.cleaned = [_wear(s, why) for s, why in ready]
            return
        reasons = {s.segment.segment: why for s, why in ready}
        cleaner = Cleaner(self.store, self.writer(), self.expiry, self.bucket, self.step)
        done.moved = cleaner.clean([s for s, _ in ready])
        done.cleaned = [_wear(s, reasons[s.segment.segment]) for s in done.moved.segments]


def _without(s: Occupied, runs: list[Run]) -> Occupied:
    gone = {r.head for r in runs if r.seg == s.segment.number}
    return replace(s, runs=tuple(r for r in s.runs if r.head not in gone)) if gone else s


def _wear(s: Occupied, reason: str) -> Wear:
    return Wear(s.segment.path, s.bytes, s.live_bytes, reason)
