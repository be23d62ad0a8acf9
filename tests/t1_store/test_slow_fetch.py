"""A fetch that is slower than everything around it: what it reads goes meanwhile.

Segments are dropped, or copied forward, by another host while the fetch is under way, and their
files are removed when the grace is over. The grace is counted from there, not from when they were
written, and must be longer than the longest fetch: then the fetch is whole. One that takes longer
still ends with a shorter prefix, a reason, and never a wrong byte; what a removed file looks like
to who has it open differs between file systems.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.backend.select import open_backend
from kvfs.fetch import FetchResult
from kvfs.gc.collector import Collector
from kvfs.limits import Limits
from kvfs.testing.blocks import first_wrong
from kvfs.testing.faults import FaultyBackend
from kvfs.testing.stock import Stock, tokens

BLOCKS, DAY = 36, 86_400
PROMPT = tokens(1, 4 * BLOCKS)
STEP_SECONDS = 5.0


@pytest.fixture
def stock(store_dir: Path) -> Iterator[Stock]:
    """The grace is 10 min; the prompt lies in many runs and segments, with room that is wasted."""
    made = Stock.make(
        store_dir, backend=FaultyBackend(open_backend(str(store_dir))), grace_seconds=600.0,
        segment_bytes=64 << 10,
    )  # fmt: skip
    for end in range(24, len(PROMPT) + 1, 24):
        waste = tokens(100 + end, 16)
        made.put(PROMPT[:end], ttl_class="agent")
        made.put(waste, ttl_class="agent")
        made.store.remove(made.ns, waste)
    made.store.writer().retire({s.segment for s in made.store.index.segments()})
    Limits(clean_share=0.95).save(made.store.backend)
    yield made
    made.close()


class Slow:
    """Each read moves two records and takes its time, behind which another host makes a pass."""

    def __init__(self, stock: Stock, removed_is: str) -> None:
        """removed_is: what a removed file is to who has it open: "there", "stale", "short" or
        "zeros"."""
        self.stock = stock
        self.host = stock.another(index=f"{stock.store.path}.host", backend=None)
        self.removed_is = removed_is
        self.dropped = self.moved = 0

    def __call__(self, call: Any) -> Any:
        self.stock.clock.now += STEP_SECONDS
        result = Collector(self.host.store, force=True).run()
        self.dropped += len(result.dropped)
        self.moved += result.reclaimed.moved.moved_blocks
        gone = not os.path.exists(self.stock.full(call.path))
        if gone and self.removed_is == "stale":
            raise call.error(errno.ESTALE)
        if gone and self.removed_is == "short":
            return 0
        got = call.proceed(min(2 * self.stock.ns.stride, call.size))
        if gone and self.removed_is == "zeros":
            left = got
            for buffer in call.buffers:
                n = min(left, buffer.nbytes)
                buffer[:n] = bytes(n)
                left -= n
        return got


def fetch(stock: Stock, slow: Slow) -> FetchResult:
    hasher = stock.ns.hasher(PROMPT)
    plan = stock.store.check(stock.ns, hasher)
    assert plan.stored_blocks == BLOCKS
    backend = stock.store.backend
    assert isinstance(backend, FaultyBackend)
    with backend.during("readv", "seg/*", do=slow, times=None):
        got = stock.store.fetch(stock.ns, plan, hasher, blocks=BLOCKS)
    assert first_wrong(got.data, hasher, stock.ns.row_bytes) is None
    return got


def test_what_expires_while_it_is_fetched_is_whole_within_the_grace(stock: Stock) -> None:
    stock.clock.now += 3 * DAY - 2  # written days ago
    slow = Slow(stock, "stale")
    got = fetch(stock, slow)
    assert slow.dropped > 1, "it was not fetched while it expired"
    assert (got.blocks, got.reason) == (BLOCKS, None)


def test_what_is_copied_forward_while_it_is_fetched_is_whole_within_the_grace(
    stock: Stock,
) -> None:
    slow = Slow(stock, "stale")
    got = fetch(stock, slow)
    assert slow.moved >= BLOCKS
    assert (got.blocks, got.reason) == (BLOCKS, None)
    stock.store.catch_up()
    assert stock.good(PROMPT) == BLOCKS


@pytest.mark.posix("what is removed elsewhere is there for seconds by name, for minutes if open")
@pytest.mark.parametrize("removed_is", ["there", "stale", "short", "zeros"])
def test_a_fetch_that_outlasts_the_grace_is_a_shorter_prefix(
    stock: Stock, removed_is: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.STEP_SECONDS", 100.0)
    stock.clock.now += 3 * DAY - 2
    slow = Slow(stock, removed_is)
    got = fetch(stock, slow)
    assert slow.dropped > 1
    assert 0 < got.blocks < BLOCKS and got.reason is not None
    assert stock.store.check(stock.ns, PROMPT).hit_blocks == 0  # it has expired


@pytest.mark.posix("what is removed elsewhere is there for seconds by name, for minutes if open")
def test_what_is_lost_to_a_slow_fetch_is_found_where_it_was_copied_to(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index forgets a block that a fetch has not found; where it is now, it learns again."""
    monkeypatch.setattr(f"{__name__}.STEP_SECONDS", 100.0)
    got = fetch(stock, Slow(stock, "stale"))
    assert got.blocks < BLOCKS
    stock.store.catch_up()
    assert stock.good(PROMPT) == BLOCKS
