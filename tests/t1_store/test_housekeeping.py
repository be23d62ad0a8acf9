"""The housekeeper: passes by itself, one at a time, and journals that become checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.errors import BackendError
from kvfs.follow import checkpoint
from kvfs.follow.history import DEAD_MS
from kvfs.gc import folding
from kvfs.gc.collector import Collector, GcResult
from kvfs.gc.housekeeping import Housekeeper
from kvfs.gc.lease import Lease
from kvfs.testing.stock import Stock, tokens

A = tokens(1, 40)


@pytest.fixture
def stock(store_dir: Path) -> Iterator[Stock]:
    stock = Stock.make(store_dir, grace_seconds=0.0)
    yield stock
    stock.close()


def test_it_passes_by_itself(stock: Stock) -> None:
    stock.put(A, ttl_class="agent")
    stock.clock.now += 4 * 86400
    gone = threading.Event()

    def on_phase(phase: str) -> None:
        if phase == "dropped" and stock.store.index.segments()[0].state:
            gone.set()

    with Housekeeper(stock.store, 0.01, on_phase=on_phase) as keeper:
        assert gone.wait(20)
    assert keeper.passes > 0 and keeper.last is not None


def test_one_works_and_the_others_wait(stock: Stock) -> None:
    keeper = Housekeeper(stock.store)
    with Lease.acquire(stock.store.backend, stock.store.now_ms):
        assert keeper.turn() is None and keeper.busy == 1
    assert isinstance(keeper.turn(), GcResult)
    keeper.stop()


def test_a_pass_that_fails_is_logged_and_tried_again(
    stock: Stock, monkeypatch: pytest.MonkeyPatch, expect_logs: Callable[..., None]
) -> None:
    expect_logs("housekeeping in .*: broken")
    run, again = Collector.run, threading.Event()
    calls = []

    def fails_once(collector: Collector, **options: bool) -> GcResult:
        calls.append(1)
        if len(calls) == 1:
            raise BackendError("broken")
        result = run(collector, **options)
        again.set()
        return result

    monkeypatch.setattr(Collector, "run", fails_once)
    with Housekeeper(stock.store, 0.01):
        assert again.wait(20)


def test_journals_become_a_checkpoint(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "FOLD_BYTES", 300)
    stock.put(A)
    first = Collector(stock.store).run().folded
    assert first.checkpoint is not None and first.pruned == []
    assert Collector(stock.store).run().folded.checkpoint is None  # nothing new
    stock = stock.again()  # the first journal ends
    stock.put(tokens(2, 200))
    stock.clock.now += folding.KEEP_MS / 1000 + DEAD_MS / 1000
    assert Collector(stock.store).run().folded.checkpoint is not None
    stock.put(tokens(3, 200))
    stock.clock.now += folding.KEEP_MS / 1000 + DEAD_MS / 1000
    third = Collector(stock.store).run().folded
    assert any(path.startswith("log/") for path in third.pruned)
    assert checkpoint.newest(stock.store.backend, stock.store.uuid) is not None
    fresh = stock.another(index=stock.store.path + ".fresh")
    assert fresh.good(tokens(3, 200)) == 50
