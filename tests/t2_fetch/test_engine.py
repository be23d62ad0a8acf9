"""What engines hold: a fetcher that is found, started, lost and found again, and never raises."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.errors import InputError
from kvfs.fetcher import launch
from kvfs.fetcher.engine import Fetcher
from kvfs.fetcher.launch import Options
from kvfs.testing.stock import Stock, flip, overwrite
from tests.t2_fetch.conftest import end
from tests.t2_fetch.test_fetcher import eventually, stored, wrong
from tests.t2_fetch.test_fetcher_faults import at

MIB = 1 << 20


@pytest.fixture
def engine(stock: Stock) -> Iterator[Fetcher]:
    options = Options(16 * MIB, parent=os.getpid())
    with Fetcher(stock.store.path, stock.store.uuid, options, report=stock.store.report_bad) as f:
        yield f
        client = launch.find(stock.store.uuid)
    if client is not None:
        client.close()
        end(client.fetcher_pid)


def test_a_fetch_before_there_is_a_fetcher_is_a_miss_and_soon_there_is_one(
    stock: Stock, engine: Fetcher
) -> None:
    prompt = stored(stock, 1, 60)
    plan = stock.store.check(stock.ns, prompt)
    began = time.monotonic()
    with engine.fetch(stock.ns, plan, prompt, deadline=5) as ticket:
        assert (ticket.wait(), ticket.reason, ticket.done) == (0, "fetcher gone", True)
        assert not ticket.held
    assert time.monotonic() - began < 0.1
    assert engine.ready(10) and not engine.problem
    with engine.fetch(stock.ns, plan, prompt, deadline=5) as ticket:
        assert ticket.wait() == 59 and wrong(ticket, stock, prompt) is None
    with pytest.raises(InputError):
        engine.fetch(stock.ns, plan, prompt, deadline=5, blocks=61)


def test_a_killed_fetcher_is_replaced_and_tickets_keep_what_they_have(
    stock: Stock, engine: Fetcher
) -> None:
    prompt = stored(stock, 1, 60)
    plan = stock.store.check(stock.ns, prompt)
    assert engine.ready(10)
    with engine.fetch(stock.ns, plan, prompt, deadline=5) as ticket:
        assert ticket.wait() == 59
        for _ in range(3):
            assert engine._client is not None
            end(engine._client.fetcher_pid)
            eventually(lambda: engine.fetch(stock.ns, plan, prompt, deadline=5).wait() == 59)
        assert ticket.held and wrong(ticket, stock, prompt) is None


def test_bad_blocks_are_reported_to_the_store(stock: Stock, engine: Fetcher) -> None:
    prompt = stored(stock, 1, 60)
    flip(stock.paths()[0], at(20))
    assert engine.ready(10)
    plan = stock.store.check(stock.ns, prompt)
    with engine.fetch(stock.ns, plan, prompt, deadline=5) as ticket:
        assert ticket.wait() == 20 and ticket.lasting
        assert stock.stored(prompt) == 60
    eventually(lambda: stock.stored(prompt) == 20)


def test_why_fetches_miss_is_counted_in_the_store(stock: Stock) -> None:
    """Also what only the client sees: a sound record that is not the one asked for."""
    prompts = [stored(stock, seed, 30) for seed in (1, 2)]
    path = stock.paths()[0]
    with open(path, "rb") as f:
        f.seek(at(5))
        record = f.read(64 << 10)
    overwrite(path, at(10), record)
    with Fetcher.of(stock.store, Options(16 * MIB, parent=os.getpid())) as engine:
        plans = [stock.store.check(stock.ns, prompt) for prompt in prompts]
        assert engine.fetch(stock.ns, plans[1], prompts[1], deadline=5).wait() == 0
        assert engine.ready(10) and engine._client is not None
        for plan, prompt in zip(plans, prompts, strict=True):
            with engine.fetch(stock.ns, plan, prompt, deadline=5) as ticket:
                ticket.wait()
        engine.fetch(stock.ns, plans[1], prompts[1], deadline=5).cancel()
        pid = engine._client.fetcher_pid
    end(pid)
    counted = {k: n for k, n in stock.store.stats().items() if k.startswith("fetch_miss.")}
    assert counted == {"fetch_miss.fetcher_gone": 1, "fetch_miss.identity_mismatch": 1}


def test_what_is_used_of_a_prefix_is_renewed(stock: Stock, runtime_dir: Path) -> None:
    """As by Store.fetch: a cache whose hits went through the fetcher would expire in use."""
    first, rest = stored(stock, 1, 40), stored(stock, 2, 20)
    longer = stored(stock, 3, 30, first)
    options = Options(16 * MIB, parent=os.getpid())

    def left(prompt: list[int]) -> list[int]:
        plan = stock.store.check(stock.ns, prompt)
        return [(extent.expires_ms - stock.store.now_ms()) // 1000 for extent in plan.extents]

    with Fetcher.of(stock.store, options) as engine:
        assert engine.ready(10)
        whole = left(longer)
        stock.clock.now += whole[0] // 2
        plan = stock.store.check(stock.ns, longer)
        with engine.fetch(stock.ns, plan, longer, deadline=5, blocks=30) as ticket:
            assert ticket.wait() == 30
        stock.store.flush_renewals()
        assert left(longer) == [whole[0], whole[1] - whole[0] // 2], "more than was used, or less"
        with engine.fetch(stock.ns, plan, longer, deadline=5, first=40) as ticket:
            assert ticket.wait() == 29
        engine.fetch(stock.ns, plan, longer, deadline=5).release()
        stock.store.flush_renewals()
        assert left(longer) == whole
        assert left(rest) == [whole[0] - whole[0] // 2], "nobody has used it"
        assert engine._client is not None
        pid = engine._client.fetcher_pid
    end(pid)


@pytest.mark.expect_logs("telling what came of a fetch")
def test_a_report_that_fails_stops_nothing(stock: Stock) -> None:
    def report(*args: object) -> None:
        raise RuntimeError("a bug of the engine")

    prompt = stored(stock, 1, 60)
    flip(stock.paths()[0], at(20))
    options = Options(16 * MIB, parent=os.getpid())
    plan = stock.store.check(stock.ns, prompt)
    with Fetcher(stock.store.path, stock.store.uuid, options, report=report) as engine:
        assert engine.ready(10)
        for _ in range(2):
            with engine.fetch(stock.ns, plan, prompt, deadline=5) as ticket:
                assert ticket.wait() == 20
        eventually(lambda: not engine._reports)
        assert engine._client is not None
        pid = engine._client.fetcher_pid
    end(pid)


@pytest.mark.expect_logs("no fetcher: .*arena needs")
def test_why_there_is_no_fetcher_is_said_once_and_costs_no_request_anything(stock: Stock) -> None:
    prompt = stored(stock, 1, 60)
    plan = stock.store.check(stock.ns, prompt)
    with Fetcher(stock.store.path, stock.store.uuid, Options(1 << 50)) as engine:
        assert not engine.ready(0.01)
        eventually(lambda: "arena needs" in engine.problem)
        for _ in range(100):
            began = time.monotonic()
            assert engine.fetch(stock.ns, plan, prompt, deadline=5).wait() == 0
            assert time.monotonic() - began < 0.1


def test_busy_is_a_miss(stock: Stock, engine: Fetcher) -> None:
    prompt, other = stored(stock, 1, 300), stored(stock, 2, 20)
    plan = stock.store.check(stock.ns, prompt)
    assert engine.ready(10)
    with engine.fetch(stock.ns, plan, prompt, deadline=5) as ticket:
        assert ticket.wait() == 256 and ticket.reason == "arena full"
        plan = stock.store.check(stock.ns, other)
        with engine.fetch(stock.ns, plan, other, deadline=5) as refused:
            assert refused.wait() == 0 and refused.reason.startswith("busy: the arena is full")


def test_a_closed_one_misses(stock: Stock, engine: Fetcher) -> None:
    prompt = stored(stock, 1, 20)
    plan = stock.store.check(stock.ns, prompt)
    assert engine.ready(10)
    ticket = engine.fetch(stock.ns, plan, prompt, deadline=5)
    assert ticket.wait() == 19
    engine.close()
    assert not engine.ready() and not ticket.held
    assert engine.fetch(stock.ns, plan, prompt, deadline=5).reason == "fetcher gone"


def test_many_that_miss_a_fetcher_start_one(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of a host, when the fetcher they share was killed."""
    options = Options(4 * MIB, parent=os.getpid())
    started: list[int] = []

    def connect() -> None:
        with launch.connect(stock.store.path, stock.store.uuid, options) as client:
            started.append(client.fetcher_pid)

    starts, real = [], launch.start

    def start(path: str, options: Options) -> None:
        starts.append(path)
        real(path, options)

    monkeypatch.setattr(launch, "start", start)
    threads = [threading.Thread(target=connect) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(started) == 16 and len(set(started)) == 1
    assert len(starts) == 1, "each of them starts a process"
    end(started[0])
