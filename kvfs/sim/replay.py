"""Driving a store with a request trace: per request check, fetch what hits, put the rest.

That is what an engine does, with made-up contents (kvfs.sim.synth): every fetched byte can be, and
by default is, compared with what must have been put. Stored tokens are the longest stored prefix
that `check` finds, before any hit cap; hit tokens are what is left after it.

A replay counts what goes wrong in the store (a short fetch, a refused put) and goes on, as engines
do; only wrong bytes end it. One Replayer belongs to one thread. kvfs.sim.lockstep spreads a
replay over processes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from kvfs.chain import HASH_BYTES, PrefixHasher
from kvfs.errors import DamageError, InputError
from kvfs.namespace import Namespace
from kvfs.plan import Plan
from kvfs.sim.synth import PayloadSynth, TokenSynth
from kvfs.sim.trace import SESSION_GAP, Request, Trace
from kvfs.sim.windows import Sums, Windows
from kvfs.store import Store


@dataclass(frozen=True, slots=True)
class Options:
    """How to replay.

    limit: requests at most; max_bytes: bytes of records to write at most, the replay ends before
    the request that would exceed them; max_seconds: start no request after that time;
    fetch: fetch what hits, else only check; verify: compare fetched bytes; touch: renew what was
    hit, as an engine does; ttl_class: for what is put, None is the namespace's; session_gap:
    seconds between session starts; state_policy: policies of kvfs.state.policy to reckon besides.
    """

    limit: int | None = None
    max_bytes: int | None = None
    max_seconds: float | None = None
    fetch: bool = True
    verify: bool = True
    touch: bool = False
    ttl_class: str | None = None
    session_gap: float = SESSION_GAP
    state_policy: tuple[str, ...] = ()


@dataclass(slots=True)
class TraceClock:
    """A clock that shows trace time: give it to Store.open and to the replay, which sets t."""

    start: float
    t: float = 0.0

    def __call__(self) -> float:
        return self.start + self.t


@dataclass(slots=True)
class Step:
    """What one request did.

    failures: (reason, detail); times are seconds, None where the operation did not take place.
    """

    tokens: int
    stored_tokens: int
    hit_tokens: int
    blocks_put: int = 0
    bytes_put: int = 0
    bytes_fetched: int = 0
    written: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)
    check: float | None = None
    fetch: float | None = None
    put: float | None = None


@dataclass(slots=True)
class Result:
    """The sums of a replay, so far or at its end.

    failures: reason -> how often a fetch came short or a put was refused, details: reason -> what
    was said the first time; total: requests in all
    as far as the trace tells; stopped: the option that ended the replay early ("max_bytes" or
    "max_seconds"), else ""; seconds: wall time of it all; written: bytes of whole records put;
    windows: what the state policies came to.
    """

    total: int | None = None
    processes: int = 1
    requests: int = 0
    input_tokens: int = 0
    stored_tokens: int = 0
    hit_tokens: int = 0
    blocks_put: int = 0
    bytes_put: int = 0
    bytes_fetched: int = 0
    written: int = 0
    seconds: float = 0.0
    stopped: str = ""
    failures: Counter[str] = field(default_factory=Counter)
    details: dict[str, str] = field(default_factory=dict)
    latency: dict[str, list[float]] = field(
        default_factory=lambda: {"check": [], "fetch": [], "put": []}
    )
    windows: list[Sums] = field(default_factory=list)

    def add(self, step: Step) -> None:
        self.requests += 1
        self.input_tokens += step.tokens
        self.stored_tokens += step.stored_tokens
        self.hit_tokens += step.hit_tokens
        self.blocks_put += step.blocks_put
        self.bytes_put += step.bytes_put
        self.bytes_fetched += step.bytes_fetched
        self.written += step.written
        for reason, detail in step.failures:
            self.failures[reason] += 1
            self.details.setdefault(reason, detail)
        for name, seconds in self.latency.items():
            took = getattr(step, name)
            if took is not None:
                seconds.append(took)

    @property
    def hit_rate(self) -> float:
        """Hit tokens as a share of input tokens, 0 to 1."""
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0

    def percentile(self, operation: str, share: float) -> float | None:
        """Seconds within which that share of the operations ("check", "fetch", "put") ended."""
        times = sorted(self.latency[operation])
        return times[min(len(times) - 1, int(share * len(times)))] if times else None

    def rate(self, operation: str) -> float | None:
        """Payload bytes a second while fetching ("fetch") or putting ("put")."""
        spent = sum(self.latency[operation])
        moved = self.bytes_fetched if operation == "fetch" else self.bytes_put
        return moved / spent if spent else None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; latencies in seconds, rates in bytes a second."""
        out: dict[str, Any] = {name: getattr(self, name) for name in _SUMS}
        out["failures"] = dict(self.failures)
        out["failure_details"] = dict(self.details)
        out["latency"] = {
            name: {
                "count": len(times),
                "p50": self.percentile(name, 0.5),
                "p99": self.percentile(name, 0.99),
            }
            for name, times in self.latency.items()
        }
        out["bytes_per_second"] = {name: self.rate(name) for name in ("fetch", "put")}
        if self.windows:
            out["state_policies"] = [sums.to_json(self.input_tokens) for sums in self.windows]
        return out


_SUMS = (
    *("requests", "input_tokens", "stored_tokens", "hit_tokens", "hit_rate"),
    *("blocks_put", "bytes_put", "bytes_fetched", "seconds", "processes", "stopped"),
)

Progress = Callable[[Result], None]


def replay(
    store: Store,
    ns: Namespace,
    trace: Trace,
    options: Options | None = None,
    *,
    clock: TraceClock | None = None,
    progress: Progress | None = None,
) -> Result:
    """Replays the trace in this process and returns the sums.

    clock: the one the store was opened with, to be driven by trace time; progress is called behind
    every request. Raises InputError for a bad trace, DamageError if the store served wrong bytes.
    """
    chosen = options or Options()
    replayer = Replayer(store, ns, trace, chosen, clock)
    result = Result(windows=[] if replayer.windows is None else replayer.windows.sums)
    return run(
        trace, chosen, result, lambda _, request, left: replayer.step(request, left), progress
    )


def run(
    trace: Trace,
    options: Options,
    result: Result,
    turn: Callable[[int, Request, int | None], Step | None],
    progress: Progress | None,
) -> Result:
    """Gives every request its turn, in order, adds up what comes of it and heeds the limits.

    turn(i, request, bytes left to write or None) returns None if those would not do.
    """
    result.total = _expected(trace, options)
    began = time.perf_counter()
    for i, request in enumerate(requests(trace, options)):
        if options.max_seconds is not None and result.seconds > options.max_seconds:
            result.stopped = "max_seconds"
            break
        left = None if options.max_bytes is None else options.max_bytes - result.written
        step = turn(i, request, left)
        if step is None:
            result.stopped = "max_bytes"
            break
        result.add(step)
        result.seconds = time.perf_counter() - began
        if progress is not None:
            progress(result)
    return result


def requests(trace: Trace, options: Options) -> Iterator[Request]:
    """The requests of the trace that the options let through, in the order of time."""
    return islice(trace.requests(options.session_gap), options.limit)


def _expected(trace: Trace, options: Options) -> int | None:
    """How many requests there will be, if the header tells."""
    known = [n for n in (options.limit, trace.header.requests) if n is not None]
    return min(known, default=None)


def touched(size: int) -> bytearray:
    """A buffer whose pages are there, as an engine's are: the first touch costs ten reads."""
    return bytearray(1) * size


class Replayer:
    """Takes the requests of one trace through one store, one at a time."""

    def __init__(
        self,
        store: Store,
        ns: Namespace,
        trace: Trace,
        options: Options,
        clock: TraceClock | None = None,
    ) -> None:
        """Raises InputError for a trace whose ids are too short to be told apart."""
        if options.limit is not None and options.limit < 0:
            raise InputError(f"a replay of {options.limit} requests is not possible")
        self._store, self._ns, self._options, self._clock = store, ns, options, clock
        self._tokens = TokenSynth(trace.header.block_tokens, trace.header.name)
        self._payload = PayloadSynth(ns.row_bytes)
        self._buffer = bytearray()
        self.windows: Windows | None = None
        if options.state_policy:
            self.windows = Windows(ns.identity, options.state_policy)

    def step(self, request: Request, budget: int | None = None) -> Step | None:
        """Check, fetch, touch, put. None, and nothing done, if that would write beyond budget."""
        if self._clock is not None:
            self._clock.t = request.t
        tokens = self._tokens.tokens(request)
        began = time.perf_counter()
        hasher = self._ns.hasher(tokens)
        plan = self._store.check(self._ns, hasher)
        took = time.perf_counter() - began
        first = plan.stored_blocks
        rest = hasher.n_blocks - first
        if budget is not None and rest * self._ns.stride > budget:
            return None
        step = Step(len(tokens), plan.stored_tokens, plan.hit_tokens, check=took)
        # A hasher of its own: the one above is as an engine would hand it to fetch and put.
        keys = self._ns.hasher(tokens).hashes()
        if self.windows is not None:
            self.windows.step(len(tokens), plan.stored_tokens, keys)
        if self._options.fetch and plan.hit_tokens:
            self._fetch(request, step, plan, hasher, keys)
        if self._options.touch and plan.stored_tokens:
            self._store.touch(self._ns, tokens[: plan.stored_tokens])
        if rest:
            self._put(step, hasher, keys, first)
        return step

    def _fetch(
        self, request: Request, step: Step, plan: Plan, hasher: PrefixHasher, keys: bytes
    ) -> None:
        size = plan.hit_blocks * self._ns.row_bytes
        if len(self._buffer) < size:
            # Twice as much, so that a growing session does not touch fresh memory each turn.
            self._buffer = touched(2 * size)
        began = time.perf_counter()
        found = self._store.fetch(self._ns, plan, hasher, memoryview(self._buffer)[:size])
        step.fetch = time.perf_counter() - began
        step.bytes_fetched = found.blocks * self._ns.row_bytes
        if found.reason is not None and found.blocks < found.wanted:
            at = f"block {found.blocks} of the request in line {request.line}"
            step.failures.append((f"fetch: {found.reason}", at))
        if not self._options.verify:
            return
        bad = self._payload.first_difference(keys[: found.blocks * HASH_BYTES], found.data)
        if bad is not None:
            raise DamageError(
                f"block {bad} of the request in line {request.line} came back with other bytes "
                f"than were put; its chain hash is {keys[bad * 16 : bad * 16 + 16].hex()}"
            )

    def _put(self, step: Step, hasher: PrefixHasher, keys: bytes, first: int) -> None:
        blocks = self._payload.make(keys[first * HASH_BYTES :])
        began = time.perf_counter()
        put = self._store.put(
            self._ns, hasher, blocks, first_block=first, ttl_class=self._options.ttl_class
        )
        step.put = time.perf_counter() - began
        step.blocks_put = put.stored
        step.bytes_put = put.stored * self._ns.row_bytes
        step.written = put.stored * self._ns.stride
        if put.error is not None:
            step.failures.append((f"put: {type(put.error).__name__}", str(put.error)))
