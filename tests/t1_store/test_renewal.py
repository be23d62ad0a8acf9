"""What a hit renews, how often, and up to which time. The clock is moved by hand."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs import removal
from kvfs.backend.select import open_backend
from kvfs.chain_entries import KeepEntry
from kvfs.errors import BackendError, InputError
from kvfs.frames import Entry
from kvfs.segment import END_BYTES, decode_end
from kvfs.store import Store
from kvfs.testing.faults import Fail, FaultyBackend
from kvfs.testing.stock import START, Stock, tokens

DAY = 86400.0
A, B = tokens(1, 40), tokens(2, 40)


@pytest.fixture
def stock(store_dir: Path) -> Iterator[Stock]:
    stock = Stock.make(store_dir, classes={"agent": 3 * 86400, "chatbot": 7 * 86400})
    yield stock
    stock.close()


def expires(stock: Stock, prompt: list[int]) -> list[float]:
    """Days from the start at which each run of a prompt expires."""
    plan = stock.store.check(stock.ns, prompt)
    return [(e.expires_ms / 1000 - START) / DAY for e in plan.extents]


def hit(stock: Stock, prompt: list[int], at: float) -> int:
    """Fetches a prompt `at` days from the start; returns the runs that this renewed."""
    stock.clock.now = START + at * DAY
    stock.good(prompt)
    return stock.store.flush_renewals()


def test_a_hit_renews_and_a_check_does_not(stock: Stock) -> None:
    stock.put(A, ttl_class="agent")
    stock.put(B, ttl_class="agent")
    for hour in range(48):
        stock.clock.now = START + hour * 3600
        stock.stored(B)
    assert hit(stock, A, 2) == 1
    assert expires(stock, A) == [5] and expires(stock, B) == [3]
    stock.clock.now = START + 3 * DAY + 1
    assert stock.stored(B) == 0 and stock.stored(A) == 10
    assert stock.store.check(stock.ns, B).reason == "expired at block 0"


def test_a_hit_that_delivers_nothing_renews_nothing(stock: Stock) -> None:
    stock.put(A, ttl_class="agent")
    plan = stock.store.check(stock.ns, A)
    stock.clock.now = START + DAY
    os.truncate(stock.full(plan.extents[0].segment), 4096)
    assert stock.store.fetch(stock.ns, plan, A).blocks == 0
    assert stock.store.flush_renewals() == 0


def test_once_in_an_eighth_of_the_time_to_live(stock: Stock) -> None:
    stock.put(A, ttl_class="agent")
    assert hit(stock, A, 0.37) == 0  # less than 3/8 of a day
    assert hit(stock, A, 0.38) == 1
    for i in range(1000):
        assert hit(stock, A, 0.38 + i * 0.37 / 1000) == 0
    assert expires(stock, A) == [pytest.approx(3.38)]


def test_many_hits_are_one_entry(stock: Stock) -> None:
    stock.put(A, ttl_class="agent")
    stock.clock.now = START + DAY
    plan = stock.store.check(stock.ns, A)
    for _ in range(1000):
        stock.store.note_hit(stock.ns, plan, A)
    assert stock.store.flush_renewals() == 1
    assert stock.store.flush_renewals() == 0


def test_hits_alone_never_pass_the_cap(store_dir: Path) -> None:
    stock = Stock.make(store_dir, renew_cap_seconds=10 * DAY)
    stock.put(A, ttl_class="agent")
    for hour in range(6, 240, 6):
        hit(stock, A, hour / 24)
        assert all(e <= 10 for e in expires(stock, A))
    # What is left below the cap may be less than an eighth of the time to live.
    (last,) = expires(stock, A)
    assert last > 10 - 3 / 8
    # Put and touch are not capped, and hits behind them take nothing away.
    stock.clock.now = START + 9.5 * DAY
    stock.store.touch(stock.ns, A)
    assert expires(stock, A) == [12.5]
    assert hit(stock, A, 12) == 0 and expires(stock, A) == [12.5]
    stock.put(A, ttl_class="agent")
    assert expires(stock, A) == [15]
    stock.close()


def test_what_has_expired_is_not_revived(stock: Stock) -> None:
    stock.put(A, ttl_class="agent")
    plan = stock.store.check(stock.ns, A)
    stock.clock.now = START + 3 * DAY
    stock.store.note_hit(stock.ns, plan, A)  # a plan kept for too long
    assert stock.store.flush_renewals() == 0
    assert stock.stored(A) == 0


def test_a_hit_before_the_end_counts_behind_it(stock: Stock) -> None:
    stock.put(A, ttl_class="agent")
    stock.clock.now = START + 3 * DAY - 1
    stock.good(A)
    stock.clock.now += 4
    assert stock.store.flush_renewals() == 1
    assert stock.stored(A) == 10


def test_a_shared_block_takes_the_longer_class(stock: Stock) -> None:
    stock.put(A, ttl_class="agent")
    stock.clock.now = START + 2 * DAY + 23 * 3600
    stock.put(A, ttl_class="chatbot")
    assert expires(stock, A) == [pytest.approx(2 + 23 / 24 + 7)]
    assert hit(stock, A, 5) == 1  # by its new class
    assert expires(stock, A) == [12]


def test_only_the_runs_that_were_hit(stock: Stock) -> None:
    long = tokens(9, 40, after=A)
    stock.put(A, ttl_class="agent")
    stock.put(long, ttl_class="agent")
    assert len(expires(stock, long)) == 2
    assert hit(stock, A, 2) == 1
    assert expires(stock, long) == [5, 3]


def test_other_hosts_agree(stock: Stock, tmp_path: Path) -> None:
    stock.put(A, ttl_class="agent")
    other = stock.another(index=str(tmp_path / "other"))
    other.clock.now = START + 2 * DAY
    assert other.good(A) == 10 and other.store.flush_renewals() == 1
    stock.store.catch_up()
    assert expires(stock, A) == expires(other, A) == [5]


def test_closing_publishes_what_is_left(stock: Stock) -> None:
    stock.put(A, ttl_class="agent")
    stock.clock.now = START + DAY
    assert stock.good(A) == 10
    assert expires(stock.again(), A) == [4]


def test_the_thread_publishes_by_itself(stock: Stock) -> None:
    stock.put(A, ttl_class="agent")
    stock.clock.now = START + DAY
    published = threading.Event()
    writer = stock.store.writer()
    publish = writer.publish

    def told(runs: Any, others: Any = (), counters: Any = None) -> None:
        publish(runs, others, counters)
        if any(isinstance(e, KeepEntry) for e in others):
            published.set()

    writer.publish = told  # type: ignore[method-assign]
    stock.store._renewer.flush_seconds = 0.01
    stock.good(A)
    assert published.wait(20)
    assert expires(stock, A) == [4]


def test_a_bug_in_one_turn_neither_ends_the_thread_nor_loses_hits(
    stock: Stock, monkeypatch: pytest.MonkeyPatch, expect_logs: Any
) -> None:
    expect_logs("renewing what was hit")
    monkeypatch.setattr("kvfs.periodic.FAULT_SECONDS", 0.0)
    stock.put(A, ttl_class="agent")
    stock.clock.now = START + DAY
    renewer = stock.store._renewer
    due, failed, published = renewer._due, threading.Event(), threading.Event()

    def first_fails(hits: Any) -> list[Entry]:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("a bug")
        published.set()
        return due(hits)

    monkeypatch.setattr(renewer, "_due", first_fails)
    renewer.flush_seconds = 0.01
    stock.good(A)
    assert published.wait(20)
    stock.store.close()
    assert expires(stock.another(), A) == [4]


def test_a_namespace_that_the_index_does_not_know_yet(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a moment an index that is begun anew knows none."""
    stock.put(A, ttl_class="agent")
    stock.clock.now = START + DAY
    stock.good(A)
    with monkeypatch.context() as patched:
        patched.setattr(stock.store.index, "namespaces", dict)
        assert stock.store.flush_renewals() == 0


def test_hits_beyond_the_most_are_counted(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfs.renewal.MOST_WAITING", 1)
    for prompt in (A, B):
        stock.put(prompt, ttl_class="agent")
    stock.clock.now = START + DAY
    for prompt in (A, A, B, B, A):
        stock.good(prompt)
    assert stock.store.stats()["renewals_left_out"] == 2
    assert stock.store.flush_renewals() == 1


def test_closing_waits_for_a_turn_that_makes_the_writer(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making it takes the lock that guards the closing."""
    stock.put(A, ttl_class="agent")
    stock = stock.again()  # which has no writer yet
    stock.clock.now = START + DAY
    holding, reached, go_on = stock.store.index.holding, threading.Event(), threading.Event()

    def held(*args: Any) -> Any:
        reached.set()
        go_on.wait()
        return holding(*args)

    monkeypatch.setattr(stock.store.index, "holding", held)
    renewer = stock.store._renewer
    renewer.flush_seconds = 0.01
    stock.good(A)
    assert reached.wait(20)
    closing = threading.Thread(target=stock.store.close, daemon=True)
    closing.start()
    assert renewer._stopped.wait(20)
    go_on.set()
    closing.join(20)
    assert not closing.is_alive()
    assert expires(stock.another(), A) == [4]


def test_closing_goes_on_whatever_fails(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    stock.put(A, ttl_class="agent")
    stock.store._count("puts_dropped")

    def fail() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(stock.store._renewer, "flush", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        stock.store.close()
    assert stock.store.index._closed
    again = stock.another()
    assert again.store.stats()["puts_dropped"] == 1
    (segment,) = again.store.index.segments()
    with open(again.full(segment.path), "rb") as f:
        assert decode_end(f.read()[-END_BYTES:]) is not None


def test_a_storage_that_fails_delays_it(store_dir: Path) -> None:
    first = Stock.make(store_dir)
    first.put(A, ttl_class="agent")
    first.store.close()
    faults = FaultyBackend(open_backend(str(store_dir)))
    stock = first.another(backend=faults)
    stock.clock.now = START + DAY
    stock.good(A)
    with faults.during("create", "log/*", do=Fail(5)), pytest.raises(BackendError):
        stock.store.flush_renewals()
    assert stock.store.flush_renewals() == 1
    assert expires(stock, A) == [4]
    stock.close()


def test_the_cap_is_checked_and_kept(store_dir: Path) -> None:
    with pytest.raises(InputError, match="renew_cap_seconds"):
        Stock.make(store_dir, renew_cap_seconds=-1)
    with Store.init(store_dir) as store:
        assert store.config.renew_cap_seconds == 30 * DAY


def test_paths_of_a_long_chain_are_found_in_steps(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A KEEP names a few of the runs before its own; to find them takes one step a run."""
    runs = 30
    for n in range(1, runs + 1):
        stock.put(tokens(1, 4 * n), ttl_class="agent")
    prompt = tokens(1, 4 * runs)
    heads = [stock.ns.hasher(prompt).digest(n) for n in range(1, runs + 1)]
    paths = [b"".join(heads[:n] if n <= 4 else [heads[0], *heads[n - 3 : n]]) for n in range(runs)]
    joined: list[int] = []
    published: list[Any] = []

    def few(path: bytes, true: Callable[[bytes], bytes] = removal.few) -> bytes:
        joined.append(len(path) // 16)
        return true(path)

    def publish(runs: Any, others: list[Any], *_: Any) -> None:
        published[:] = others

    monkeypatch.setattr("kvfs.put.few", few)
    monkeypatch.setattr("kvfs.removal.few", few)
    monkeypatch.setattr(stock.store.writer(), "publish", publish)
    stock.clock.now += DAY
    for renew in (stock.put, lambda p: stock.store.touch(stock.ns, p)):
        joined.clear()
        renew(prompt)
        assert [e.heads for e in published] == paths
        assert max(joined) <= 5
