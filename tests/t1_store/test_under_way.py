"""Puts of one process at the same time: what one is storing the others do not store again."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from kvfs import put, under_way
from kvfs.backend.select import open_backend
from kvfs.errors import BackendError, BusyError
from kvfs.put import PutResult
from kvfs.testing.faults import Fail, FaultyBackend, Hold
from kvfs.testing.stock import Stock, tokens
from kvfs.under_way import UnderWay

SHARED = tokens(1, 40)  # ten blocks
KEY = b"namespace", b"hash"


@pytest.fixture
def faults(store_dir: Path) -> FaultyBackend:
    return FaultyBackend(open_backend(str(store_dir)))


@pytest.fixture
def stock(store_dir: Path, faults: FaultyBackend) -> Iterator[Stock]:
    made = Stock.make(store_dir, backend=faults)
    yield made
    made.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as made:
        yield made


def first_and_others(
    stock: Stock, faults: FaultyBackend, pool: ThreadPoolExecutor, others: list[list[int]],
    hold: Hold,
) -> list[Future[PutResult]]:  # fmt: skip
    """A put of SHARED that is held while it writes, and others that wait for it."""
    faults.on("writev", "seg/*", nth=2, do=hold)  # behind the header
    futures = [pool.submit(stock.put, SHARED)]
    assert hold.reached.wait(10)
    writer = stock.store.writer()
    futures += [pool.submit(stock.put, prompt) for prompt in others]
    waiting = sum(prompt[: len(SHARED)] == SHARED for prompt in others)
    until = time.monotonic() + 30
    while writer.under_way._puts < 1 + waiting and time.monotonic() < until:
        time.sleep(0.001)
    assert writer.under_way._puts >= 1 + waiting, "they did not come"
    return futures


def test_what_another_is_storing_is_waited_for_and_not_stored_again(
    stock: Stock, faults: FaultyBackend, pool: ThreadPoolExecutor
) -> None:
    longer, other = tokens(2, 20, SHARED), tokens(3, 40)
    hold = Hold(0)
    _, same, more, apart = futures = first_and_others(
        stock, faults, pool, [SHARED, longer, other], hold
    )
    assert apart.result(10).stored == 10, "one that shares nothing waits too"
    assert not same.done() and not more.done()
    hold.release()
    results = [future.result(10) for future in futures]
    assert [(r.stored, r.existing) for r in results] == [(10, 0), (0, 10), (5, 10), (10, 0)]
    assert all(r.complete and r.error is None for r in results)
    assert stock.store.stats()["put_blocks"] == 25
    assert stock.sound(longer) == 15


def test_the_next_stores_what_the_first_could_not(
    stock: Stock, faults: FaultyBackend, pool: ThreadPoolExecutor
) -> None:
    hold = Hold(0)
    futures = first_and_others(stock, faults, pool, [SHARED] * 5, hold)
    faults.on("sync", "seg/*", do=Fail(errno.EIO))
    faults.on("writev", "log/*", do=Fail(errno.EIO), times=2)
    hold.release()
    first, *others = [future.result(10) for future in futures]
    assert isinstance(first.error, BackendError) and not first.stored
    assert all(r.complete and r.error is None for r in others)
    assert sorted(r.stored for r in others) == [0, 0, 0, 0, 10]
    assert stock.sound(SHARED) == 10


def test_nobody_waits_for_ever(
    stock: Stock, faults: FaultyBackend, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(put, "WAIT_SECONDS", 0.05)
    hold = Hold(0)
    first, second = first_and_others(stock, faults, pool, [SHARED], hold)
    assert second.result(10).stored == 10
    hold.release()
    assert first.result(10).error is None
    assert stock.sound(SHARED) == 10


def test_one_too_many_is_dropped_and_counted(
    stock: Stock, faults: FaultyBackend, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_way, "MOST", 2)
    hold = Hold(0)
    futures = first_and_others(stock, faults, pool, [SHARED], hold)
    dropped = stock.put(tokens(4, 20))
    assert isinstance(dropped.error, BusyError)
    assert (dropped.stored, dropped.existing, dropped.blocks) == (0, 0, 5)
    assert stock.store.check(stock.ns, SHARED).stored_blocks == 0, "loads go on"
    hold.release()
    for future in futures:
        assert future.result(10).complete
    assert stock.put(tokens(4, 20)).stored == 5
    assert stock.store.stats()["puts_dropped"] == 1


def test_what_came_between_the_look_and_the_claim_is_noticed() -> None:
    puts = UnderWay()
    until = time.monotonic() + 60
    turn = puts.turn
    assert puts.claim(KEY, turn, until)
    puts.release(KEY)
    assert not puts.claim(KEY, turn, until), "it was stored since"
    assert puts.claim((b"namespace", b"other"), turn, until)
    assert puts.claim(KEY, puts.turn, until)


def test_a_claim_that_is_waited_for_is_looked_at_again() -> None:
    puts = UnderWay()
    until = time.monotonic() + 60
    assert puts.claim(KEY, puts.turn, until)
    claimed: list[bool] = []
    waiting = threading.Thread(target=lambda: claimed.append(puts.claim(KEY, 0, until)))
    waiting.start()
    puts.release(KEY)
    waiting.join(10)
    assert claimed == [False]
    assert puts.claim(KEY, puts.turn, 0.0) and puts.claim(KEY, puts.turn, 0.0), "out of patience"
