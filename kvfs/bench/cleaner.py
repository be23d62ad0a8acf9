"""CLEANER: what checks and fetches cost while a housekeeper copies and removes, beside idle times.

`kvctl serve` keeps house in a store whose segments are half in use, at the rate that a store has by
default (kvfs.limits). It works and is stopped in turns, each some seconds long, so that both
figures are of the same moments; meanwhile this process checks and fetches as a router and an engine
would, from the same index and the same file system.
"""

from __future__ import annotations

import gc
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np

from kvfs.bench import check
from kvfs.bench.payload import Prompts, hit_blocks, touched
from kvfs.bench.place import drop_cache, new_store, segments
from kvfs.bench.synthetic import fill, plant
from kvfs.bench.timing import Options, Row, percentile, timed
from kvfs.limits import Limits
from kvfs.namespace import Namespace
from kvfs.store import Store

RUNS = 8
BLOCKS = 1_000_000
SEGMENT_BYTES = 64 << 20
PHASE_SECONDS = 2.0
CHECK_LIMIT = 1.5
FETCH_LIMIT = 1.25
"""0.8 of the idle throughput."""
IDLE = "the same while the housekeeper is stopped"
CLEAN_SHARE = 0.9
_CHECKS = 20
_WORN_BLOCKS = 64
# More than is copied in all busy phases: they end with the request at hand.
_MARGIN = 1.5
_BEGIN_SECONDS = 120.0
_SOME_BYTES = 1 << 20


@dataclass(slots=True)
class Phase:
    """Samples, in seconds, of one phase or of several."""

    check: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)

    def add(self, other: Phase) -> None:
        self.check += other.check
        self.warm += other.warm
        self.cold += other.cold


def run(options: Options) -> Iterator[Row]:
    """Yields the rows `cleaner.*`. Raises ConfigError, BackendError, SpaceError, IndexFault."""
    runs, rate = options.runs or RUNS, Limits().copy_rate
    assert rate is not None
    place = new_store(
        options.directory, options.index, segment_bytes=SEGMENT_BYTES, grace_seconds=0.0
    )
    with place as (store, ns):
        fill(store, ns, min(options.blocks, BLOCKS), options.progress)
        requests = _Requests(store, ns)
        options.progress("cleaner: wearing segments")
        _wear(store, ns, int(rate * (PHASE_SECONDS * runs * _MARGIN + 1)))
        with _Keeper(store).started() as keeper:
            options.progress("cleaner")
            pairs, copied = _phases(requests, keeper, runs)
    yield from _rows(pairs, requests, copied, rate)


class _Requests:
    """Checks a prompt that is stored in several runs, and fetches one that lies in full segments,
    which no cleaner touches."""

    def __init__(self, store: Store, ns: Namespace) -> None:
        self.store, self.ns = store, ns
        tokens, stored_runs = check.SIZES[1][1:3]
        prompt = np.random.default_rng(tokens).integers(0, check.VOCABULARY, tokens, np.int32)
        plant(store, ns, prompt, stored_runs)
        self._prompts = cycle([prompt.copy() for _ in range(_CHECKS)])
        self.blocks = hit_blocks(ns)
        prompts = Prompts(ns, self.blocks)
        self._tokens = prompts.next()
        put = store.put(ns, self._tokens, prompts.payload)
        if put.error is not None:
            raise put.error
        store.writer().retire({s.segment for s in store.index.segments()})
        self._files = segments(store)
        self._into = touched(len(prompts.payload))
        self.bytes = len(prompts.payload)

    def during(self, seconds: float) -> Phase:
        """All kinds of requests, one after the other, for so long."""
        done, end = Phase(), time.perf_counter() + seconds
        while time.perf_counter() < end:
            for fetches, cold in ((done.warm, False), (done.cold, True)):
                for _ in range(_CHECKS):
                    prompt = next(self._prompts)
                    done.check.append(timed(lambda p=prompt: self.store.check(self.ns, p)))  # type: ignore[misc]
                fetches.append(self._fetch(cold))
        return done

    def _fetch(self, cold: bool) -> float:
        for path in self._files if cold else ():
            drop_cache(path)
        hasher = self.ns.hasher(self._tokens)
        plan = self.store.check(self.ns, hasher)
        start = time.perf_counter()
        got = self.store.fetch(self.ns, plan, hasher, self._into, blocks=self.blocks)
        seconds = time.perf_counter() - start
        if got.reason is not None:
            raise AssertionError(f"a fetch ended early: {got.reason}")
        return seconds


def _wear(store: Store, ns: Namespace, live_bytes: int) -> None:
    """Fills segments with prompts of which every other one is removed again."""
    prompts = Prompts(ns, _WORN_BLOCKS)
    for _ in range(live_bytes // (_WORN_BLOCKS * ns.stride) + 1):
        for waste in (False, True):
            tokens = prompts.next()
            put = store.put(ns, tokens, prompts.payload)
            if put.error is not None:
                raise put.error
            if waste:
                store.remove(ns, tokens)
    store.writer().retire({s.segment for s in store.index.segments()})
    Limits(clean_share=CLEAN_SHARE).save(store.backend)


class _Keeper:
    """`kvctl serve`, which keeps house only while it is let go."""

    def __init__(self, store: Store) -> None:
        words = ["serve", "--store", store.path, "--index", os.path.dirname(store.index.path)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvfs.cli", *words, "--gc-interval", "0.1"]
        )  # fmt: skip

    @contextmanager
    def started(self) -> Iterator[_Keeper]:
        """It has begun to copy, and is stopped. It is killed in the end."""
        try:
            self._copying(0)
            self.stop()
            yield self
        finally:
            self._process.kill()
            self._process.wait()

    def _copying(self, before: int) -> None:
        """Waits until it has copied some more."""
        end = time.monotonic() + _BEGIN_SECONDS
        while self.written() < before + _SOME_BYTES:
            if time.monotonic() > end or self._process.poll() is not None:
                raise AssertionError("the housekeeper does not copy")
            time.sleep(0.001)

    def go(self) -> None:
        """It goes on, and has begun to copy."""
        before = self.written()
        self._process.send_signal(signal.SIGCONT)
        self._copying(before)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def written(self) -> int:
        """Bytes that it has handed to the kernel so far."""
        with open(f"/proc/{self._process.pid}/io", encoding="ascii") as f:
            return int(next(line for line in f if line.startswith("wchar")).split()[1])


Pair = tuple[Phase, Phase]


def _phases(requests: _Requests, keeper: _Keeper, runs: int) -> tuple[list[Pair], float]:
    """(pairs of a busy phase and an idle one, bytes a second that were written in the former)."""
    pairs, written, seconds = [], 0, 0.0
    requests.during(PHASE_SECONDS / 4)
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for turn in range(runs):
            phases = {}
            for busy in (True, False) if turn % 2 else (False, True):
                if busy:
                    keeper.go()
                before, start = keeper.written(), time.perf_counter()
                phases[busy] = requests.during(PHASE_SECONDS)
                if busy:
                    keeper.stop()
                    seconds += time.perf_counter() - start
                    written += keeper.written() - before
            pairs.append((phases[True], phases[False]))
    finally:
        if was_on:
            gc.enable()
    return pairs, written / seconds


def _rows(pairs: list[Pair], requests: _Requests, copied: float, rate: float) -> Iterator[Row]:
    busy, idle = Phase(), Phase()
    for one, other in pairs:
        busy.add(one)
        idle.add(other)
    p99, idle_p99 = percentile(busy.check, 99), percentile(idle.check, 99)
    yield Row(
        "cleaner.check", p99, len(busy.check),
        "99 % of the checks of 131,072 tokens, stored in 5 runs, take at most this while a "
        "housekeeper copies at the default rate",
        ratio=p99 / idle_p99, ratio_limit=CHECK_LIMIT, reference=IDLE, reference_seconds=idle_p99,
        figures={
            "p50_microseconds": statistics.median(busy.check) * 1e6,
            "idle_p50_microseconds": statistics.median(idle.check) * 1e6,
            "copied_bytes_per_second": copied, "rate_bytes_per_second": rate,
        },
    )  # fmt: skip
    for name in ("warm", "cold"):
        with_it, without = getattr(busy, name), getattr(idle, name)
        seconds, base = statistics.median(with_it), statistics.median(without)
        yield Row(
            f"cleaner.fetch.{name}", seconds, len(with_it),
            f"{requests.blocks:,} blocks, {requests.bytes:,} bytes, verified, "
            f"{'from the page cache' if name == 'warm' else 'page cache dropped'}, meanwhile",
            ratio=seconds / base, ratio_limit=FETCH_LIMIT, reference=IDLE,
            reference_seconds=base,
            figures={
                "bytes_per_second": requests.bytes / seconds,
                "idle_bytes_per_second": requests.bytes / base,
            },
        )  # fmt: skip
