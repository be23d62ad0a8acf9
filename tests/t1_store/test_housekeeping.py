"""The housekeeper: passes by itself, one at a time, and journals that become checkpoints."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvfs.backend.select import open_backend
from kvfs.errors import BackendError
from kvfs.follow import checkpoint
from kvfs.follow.history import DEAD_MS
from kvfs.gc import folding
from kvfs.gc.collector import Collector, GcResult
from kvfs.gc.housekeeping import Housekeeper
from kvfs.gc.lease import Lease
from kvfs.gc.pace import Ended
from kvfs.gc.passes import PATH, Passed
from kvfs.limits import Limits
from kvfs.repair.fsck import fsck
from kvfs.repair.rebuild import rebuild
from kvfs.serve import housekeeping
from kvfs.testing.faults import Fail, FaultyBackend
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
        if phase == "marked" and stock.store.index.segments()[0].state:
            gone.set()  # by a pass before this one

    with Housekeeper(stock.store, 0.01, on_phase=on_phase) as keeper:
        assert gone.wait(20)
    assert keeper.passes > 0 and keeper.last is not None


def test_one_works_and_the_others_wait(stock: Stock) -> None:
    keeper = Housekeeper(stock.store)
    with Lease.acquire(stock.store.backend, stock.store.now_ms):
        assert keeper.turn() is None and keeper.busy == 1
    assert isinstance(keeper.turn(), GcResult)
    keeper.stop()


@pytest.mark.parametrize("error", [BackendError("broken"), ZeroDivisionError("broken")])
def test_a_pass_that_fails_is_logged_and_tried_again(
    stock: Stock, error: Exception, monkeypatch: pytest.MonkeyPatch,
    expect_logs: Callable[..., None],
) -> None:  # fmt: skip
    expect_logs("housekeeping in ")
    run, again = Collector.run, threading.Event()
    calls = []

    def fails_once(collector: Collector, **options: bool) -> GcResult:
        calls.append(1)
        if len(calls) == 1:
            raise error
        result = run(collector, **options)
        again.set()
        return result

    monkeypatch.setattr(Collector, "run", fails_once)
    with Housekeeper(stock.store, 0.01):
        assert again.wait(20)


def worn(stock: Stock, prompts: int = 6) -> list[list[int]]:
    """Prompts of which each lies in a segment with as much again that was removed."""
    kept = [tokens(i, 40) for i in range(prompts)]
    for i, prompt in enumerate(kept):
        waste = tokens(1000 + i, 40)
        stock.put(prompt)
        stock.put(waste)
        stock.store.remove(stock.ns, waste)
    stock.store.writer().retire({s.segment for s in stock.store.index.segments()})
    Limits(clean_share=0.9).save(stock.store.backend)
    return kept


def test_what_passes_did_is_on_record(stock: Stock) -> None:
    assert housekeeping(stock.store) == {"working": None, "passed": None}
    worn(stock)
    first = Collector(stock.store).run()
    stock.clock.now += 1
    second = Collector(stock.store).run()
    assert first.reclaimed.moved.copied_bytes and second.freed_bytes
    told = stock.elsewhere()
    passed = Passed.load(told.store.backend)
    assert passed is not None and passed.total.passes == 2 and passed.last.passes == 1
    assert passed.last.freed_bytes == second.freed_bytes == passed.total.freed_bytes
    assert passed.total.removed_files == len(second.removed)
    assert passed.total.copied_bytes == first.reclaimed.moved.copied_bytes
    with Lease.acquire(stock.store.backend, stock.store.now_ms):
        shown = housekeeping(told.store)
    assert shown["working"]["pid"] == shown["passed"]["pid"] == passed.pid


def test_a_record_that_is_lost_or_refused_is_no_harm(store_dir: Path) -> None:
    faults = FaultyBackend(open_backend(str(store_dir)))
    stock = Stock.make(store_dir, backend=faults)
    Path(stock.full(PATH)).write_text('{"host": 3}')
    assert Collector(stock.store).run().problems == []
    passed = Passed.load(stock.store.backend)
    assert passed is not None and passed.total.passes == 1
    faults.on("replace", PATH, do=Fail(errno.ENOSPC))
    assert Collector(stock.store).run().problems == []
    assert Passed.load(stock.store.backend) == passed
    stock.close()


def test_who_passed_goes_on_and_the_others_take_over(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, pid = [0.0], [1]
    monkeypatch.setattr(
        "kvfs.gc.housekeeping.time", SimpleNamespace(monotonic=lambda: now[0])
    )  # fmt: skip
    for module in ("housekeeping", "passes"):
        monkeypatch.setattr(f"kvfs.gc.{module}.os.getpid", lambda: pid[0])
    mine, other = Housekeeper(stock.store, 10), Housekeeper(stock.store, 10)

    def due(keeper: Housekeeper, as_pid: int) -> float:
        pid[0] = as_pid
        return keeper.due_in()

    assert due(mine, 1) == due(other, 2) == 10  # nobody ever passed
    now[0] = 10
    pid[0] = 1
    assert mine.turn() is not None
    assert due(mine, 1) == 10 and 15 <= due(other, 2) <= 30
    now[0] = 20
    assert due(mine, 1) == 0 and due(other, 2) >= 5
    now[0] = 40  # silent for too long
    assert due(other, 2) <= 0
    pid[0] = 2
    assert other.turn() is not None
    assert due(other, 2) == 10 and due(mine, 1) >= 15
    monkeypatch.undo()
    for keeper in (mine, other):
        keeper.stop()


def test_it_ends_in_the_middle_of_a_slow_pass(stock: Stock) -> None:
    kept, begun = worn(stock), threading.Event()
    keeper = Housekeeper(
        stock.store, 0.01, copy_rate=1.0, on_phase=lambda phase: begun.set()
    )  # fmt: skip
    with keeper:
        assert begun.wait(20)
    assert keeper.passes == keeper.busy == 0  # at this rate it takes days
    assert [stock.good(prompt) for prompt in kept] == [10] * len(kept)
    stock.clock.now += 1
    assert Collector(stock.store).run().problems == []
    assert [stock.good(prompt) for prompt in kept] == [10] * len(kept)


def test_a_pass_that_is_told_to_end_keeps_what_it_has_copied(stock: Stock) -> None:
    kept, asked = worn(stock), []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > 3

    with pytest.raises(Ended):
        Collector(stock.store, copy_rate=1.0, stop=stop).run()
    passed = Passed.load(stock.store.backend)
    assert passed is not None and passed.last.copied_bytes > 0
    assert [stock.good(prompt) for prompt in kept] == [10] * len(kept)


def test_a_large_index_is_written_less_often(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "FOLD_BYTES", 300)
    stock.put(tokens(1, 4000))
    assert Collector(stock.store).run().folded.checkpoint is not None
    made = 0
    for seed in range(20):  # each a twentieth of what there is
        stock.clock.now += 1
        stock.put(tokens(2 + seed, 200))
        made += Collector(stock.store).run().folded.checkpoint is not None
    assert 2 <= made <= 4


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
    fresh = stock.elsewhere("fresh")
    assert fresh.good(tokens(3, 200)) == 50
    # A checkpoint does not tell of journals that were gone before it was written.
    stock.put(tokens(4, 200))
    stock.clock.now += 1
    assert Collector(stock.store).run().folded.checkpoint is not None
    for host in (stock, fresh):
        rebuild(host.store)
        assert [host.good(tokens(seed, 200)) for seed in (2, 3, 4)] == [50] * 3
        assert not fsck(host.store).findings
