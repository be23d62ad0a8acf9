"""Whatever the storage does, a fetch is the good prefix and a reason, in time; the
fetcher lives and serves the next one; the index forgets what is bad for good."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from kvfs.backend.select import open_backend
from kvfs.fetcher import workers
from kvfs.fetcher.client import FetchClient
from kvfs.fetcher.ticket import Ticket
from kvfs.record import TRAILER_BYTES
from kvfs.testing.faults import CutAt, Fail, FaultyBackend, Flip, Hold, Short
from kvfs.testing.stock import Stock, flip, overwrite
from tests.t2_fetch.conftest import Start
from tests.t2_fetch.test_fetcher import ask, eventually, stored, unused, wrong

LASTING = ["EIO", "EACCES", "ESTALE", "EISDIR", "EUCLEAN"]
PASSING = ["ENODEV", "ETIMEDOUT", "ENOTCONN", "EAGAIN", "EHOSTDOWN", "EMFILE", "ENOMEM"]


def fetch(client: FetchClient, stock: Stock, prompt: list[int], **options: Any) -> Ticket:
    """A ticket that ended. Fails if a good block is wrong, or it took too long."""
    began = time.monotonic()
    ticket = ask(client, stock, prompt, **{"deadline": 5, **options})
    ticket.wait()
    assert ticket.done and time.monotonic() - began < 2
    assert wrong(ticket, stock, prompt) is None
    return ticket


def settle(ticket: Ticket, stock: Stock, prompt: list[int]) -> int:
    """What an engine does with a ticket; returns the blocks that a check finds after that."""
    plan = stock.store.check(stock.ns, prompt)
    if ticket.lasting:
        stock.store.report_bad(stock.ns, plan, prompt, ticket.first + ticket.good)
    ticket.release()
    return stock.store.check(stock.ns, prompt).stored_blocks


# errors of the storage


@pytest.mark.parametrize("name", LASTING + PASSING)
@pytest.mark.parametrize("op", ["open", "readv"])
def test_each_error_is_a_prefix_and_a_reason(
    op: str, name: str, stock: Stock, faults: FaultyBackend, start: Start
) -> None:
    prompt, other = stored(stock, 1, 60), stored(stock, 2, 60)
    nth = 3 if op == "readv" else 1
    faults.on(op, "seg/*", nth=nth, do=Fail(getattr(errno, name)), times=1)
    fetcher = start(faults, threads=1)
    client = fetcher.client()
    ticket = fetch(client, stock, prompt)
    good = 31 if op == "readv" else 0
    assert ticket.good == good
    assert ticket.reason == f"I/O error ({name})"
    assert ticket.lasting == (name in LASTING)
    assert fetcher.core.stats()[f"miss.I/O_error_({name})"] == 1
    left = settle(ticket, stock, prompt)
    assert left == (good if name in LASTING else 60)
    fetch(client, stock, other).release()
    if name in PASSING:
        again = fetch(client, stock, prompt)
        assert again.good == 59
        again.release()
    eventually(lambda: unused(fetcher))


def test_an_error_in_the_middle_of_a_read_keeps_what_came_before(
    stock: Stock, faults: FaultyBackend, start: Start
) -> None:
    prompt = stored(stock, 1, 60)
    faults.on("readv", "seg/*", do=CutAt((1 << 20) + 3 * (64 << 10) + 5000, errno.EIO), times=None)
    ticket = fetch(start(faults).client(), stock, prompt)
    assert (ticket.good, ticket.reason, ticket.lasting) == (18, "I/O error (EIO)", True)
    assert settle(ticket, stock, prompt) == 18


def test_short_reads_are_read_on_and_the_end_of_the_file_is_a_miss(
    stock: Stock, faults: FaultyBackend, start: Start
) -> None:
    prompt = stored(stock, 1, 60)
    with faults.during("readv", "seg/*", do=Short(10_000), times=None):
        ticket = fetch(start(faults).client(), stock, prompt)
        assert ticket.good == 59 and not ticket.reason
        ticket.release()
    faults.on("readv", "seg/*", nth=3, do=Short(0), times=1)
    ticket = fetch(start(faults, threads=1).client(), stock, prompt)
    assert (ticket.good, ticket.reason, ticket.lasting) == (31, "short read", True)
    ticket.release()


def test_bits_that_turn_over_on_the_way_never_reach_a_client(
    stock: Stock, faults: FaultyBackend, start: Start
) -> None:
    prompt = stored(stock, 1, 200)
    faults.on("readv", "seg/*", do=Flip(), times=None, chance=0.3)
    fetcher = start(faults)
    client, reasons = fetcher.client(), set()
    for _ in range(30):
        with fetch(client, stock, prompt) as ticket:
            reasons.add(ticket.reason)
        client.evict()
    assert len(reasons) > 1
    known = ("", "checksum of part", "bad trailer", "no record", "record version")
    assert all(reason.startswith(known) for reason in reasons)
    faults.clear()
    with fetch(client, stock, prompt) as ticket:
        assert ticket.good == 199
    eventually(lambda: unused(fetcher))


def _inject(what: str, path: str, faults: FaultyBackend) -> None:
    """Does something to block 20 of a prompt of 60 that stands alone in a file: the third read."""
    third = {"EIO": Fail(errno.EIO), "short read": Short(0), "hang": Hold(0)}
    if what in third:
        faults.on("readv", "seg/*", nth=3, do=third[what], times=None)
    elif what == "truncation":
        os.truncate(path, at(20))
    else:
        flip(path, at(20) + PLACES[what][0])


@pytest.mark.parametrize(
    ("what", "good", "reason", "counter"),
    [
        ("EIO", 31, "I/O error (EIO)", "miss.I/O_error_(EIO)"),
        ("short read", 31, "short read", "miss.short_read"),
        ("hang", 31, "deadline", "expired"),
        ("truncation", 20, "short read", "miss.short_read"),
        ("payload", 20, "checksum of part index", "miss.checksum_of_part_index"),
        ("tokens", 20, "bad trailer", "miss.bad_trailer"),
        ("trailer's checksum", 20, "bad trailer", "miss.bad_trailer"),
    ],
)
def test_every_fault_is_the_good_prefix_and_a_counted_reason_within_the_deadline(
    what: str, good: int, reason: str, counter: str, stock: Stock, faults: FaultyBackend,
    start: Start,
) -> None:  # fmt: skip
    prompt = stored(stock, 1, 60)
    _inject(what, stock.paths()[0], faults)
    fetcher = start(faults, threads=1)
    deadline = 1.0 if what == "hang" else 60.0
    began = time.monotonic()
    with ask(fetcher.client(), stock, prompt, deadline=deadline) as ticket:
        assert ticket.wait() == good
        assert (ticket.reason, wrong(ticket, stock, prompt)) == (reason, None)
        assert what != "hang" or time.monotonic() - began < 30 - deadline
        eventually(lambda: fetcher.core.stats().get(counter, 0) >= 1)


# what lies in the storage is not what was put


def at(block: int) -> int:
    """The offset of a block of the first prompt in its segment: 15 in the first extent, then 16."""
    record = 64 << 10
    return 4096 + block * record if block < 15 else (1 << 20) + (block - 15) * record


PLACES = {
    "payload": (100, "checksum of part index"),
    "payload, the larger part": (40_000, "checksum of part kv"),
    "tokens": ((64 << 10) - TRAILER_BYTES - 64 + 5, "bad trailer"),
    "magic": ((64 << 10) - TRAILER_BYTES, "bad trailer"),
    "version": ((64 << 10) - TRAILER_BYTES + 4, "record version 0"),
    "hash": ((64 << 10) - TRAILER_BYTES + 30, "bad trailer"),
    "payload's checksum": ((64 << 10) - 64, "bad trailer"),
    "lineage": ((64 << 10) - 40, "bad trailer"),
    "trailer's checksum": ((64 << 10) - 1, "bad trailer"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_bit_that_turned_over_ends_the_prefix(place: str, stock: Stock, start: Start) -> None:
    prompt = stored(stock, 1, 60)
    offset, reason = PLACES[place]
    (path,) = stock.paths()
    flip(path, at(20) + offset)
    fetcher = start()
    ticket = fetch(fetcher.client(), stock, prompt)
    assert (ticket.good, ticket.reason, ticket.lasting) == (20, reason, True)
    # The store's own reader says the same.
    plan = stock.store.check(stock.ns, prompt)
    direct = stock.store.reader().fetch(stock.ns, plan, stock.ns.hasher(prompt))
    assert (direct.blocks, direct.reason, direct.lasting) == (20, reason, True)
    assert settle(ticket, stock, prompt) == 20
    again = fetch(fetcher.client(), stock, prompt, blocks=20)
    assert again.good == 20 and not again.reason
    assert stock.put(prompt).stored == 40, "what was forgotten can be stored again"
    whole = fetch(fetcher.client(), stock, prompt)
    assert whole.good == 59
    for each in (again, whole):
        each.release()


@pytest.mark.parametrize("block", [0, 15, 58])
def test_a_bad_block_anywhere_is_found_by_both_readers(
    block: int, stock: Stock, start: Start
) -> None:
    prompt = stored(stock, 1, 60)
    flip(stock.paths()[0], at(block) + 5)
    with fetch(start().client(), stock, prompt) as ticket:
        assert ticket.good == block
    result = stock.store.fetch(stock.ns, stock.store.check(stock.ns, prompt), prompt)
    assert result.blocks == block
    assert stock.stored(prompt) == block


def test_the_record_of_another_block_is_not_delivered(stock: Stock, start: Start) -> None:
    prompt = stored(stock, 1, 60)
    (path,) = stock.paths()
    with open(path, "rb") as f:
        f.seek(at(30))
        record = f.read(64 << 10)
    overwrite(path, at(20), record)
    ticket = fetch(start().client(), stock, prompt)
    assert (ticket.good, ticket.reason) == (20, "identity mismatch: tokens")
    assert settle(ticket, stock, prompt) == 20


@pytest.mark.parametrize("how", ["removed", "directory", "empty", "cut", "zeros", "chmod"])
def test_a_segment_that_is_not_there_as_it_was(how: str, stock: Stock, start: Start) -> None:
    """Somebody did something to a file of the store."""
    prompt, other = stored(stock, 1, 60), stored(stock, 2, 30)
    stock.another().put([*prompt[: 16 * 50], *range(16 * 40)])  # by another writer, another file
    plan_paths = {e.segment for e in stock.store.check(stock.ns, prompt).extents}
    (path,) = (stock.full(p) for p in plan_paths)
    good = 0
    if how == "cut":
        os.truncate(path, at(40) + 100)
        good = 40
    elif how == "zeros":
        overwrite(path, at(10), bytes(20 * (64 << 10)))
        good = 10
    elif how == "chmod":
        if os.geteuid() == 0:
            pytest.skip("root may read anything")
        os.chmod(path, 0)
    else:
        os.unlink(path)
        if how == "directory":
            os.mkdir(path)
        elif how == "empty":
            Path(path).touch()
    fetcher = start()
    client = fetcher.client()
    ticket = fetch(client, stock, prompt)
    assert ticket.good == good and ticket.reason and ticket.lasting
    assert settle(ticket, stock, prompt) == good, "the second check is as wrong as the first"
    with fetch(client, stock, other) as ticket:
        assert ticket.done
    eventually(lambda: unused(fetcher))


def test_a_store_whose_mount_is_away_is_down_and_nothing_is_forgotten(
    stock: Stock, start: Start
) -> None:
    """It looks like all its segments removed."""
    prompt, cached = stored(stock, 1, 60), stored(stock, 2, 60)
    fetcher = start()
    client = fetcher.client()
    fetch(client, stock, cached).release()
    fetcher.workers.files.close()
    away = stock.store.path + ".away"
    os.rename(stock.store.path, away)
    os.mkdir(stock.store.path)
    ticket = fetch(client, stock, prompt)
    assert (ticket.good, ticket.reason, ticket.lasting) == (0, "backend down", False)
    plan = stock.store.check(stock.ns, prompt)
    assert not stock.store.report_bad(stock.ns, plan, prompt, 0), "the store was taken for empty"
    with fetch(client, stock, cached) as here:
        assert here.good == 59, "what is in memory needs no storage"
    os.rmdir(stock.store.path)
    os.rename(away, stock.store.path)
    with fetch(client, stock, prompt) as again:
        assert again.good == 59, "it did not recover by itself"
    ticket.release()


def test_a_file_that_gave_an_error_is_opened_anew(
    stock: Stock, faults: FaultyBackend, start: Start
) -> None:
    """A descriptor from before a remount gives ENOTCONN or ESTALE for ever."""
    prompt = stored(stock, 1, 60)
    faults.on("readv", "seg/*", do=Fail(errno.ENOTCONN), times=1)
    client = start(faults, threads=1).client()
    opened = faults.calls.get("open", 0)
    fetch(client, stock, prompt).release()
    with fetch(client, stock, prompt) as ticket:
        assert ticket.good == 59
    assert faults.calls["open"] == opened + 2


def test_report_bad_forgets_no_more_than_it_must(stock: Stock) -> None:
    shared = stored(stock, 1, 40)
    fork = stored(stock, 2, 20, shared[: 16 * 30])
    plan = stock.store.check(stock.ns, fork)
    assert stock.store.report_bad(stock.ns, plan, fork, 35)
    assert stock.stored(fork) == 35 and stock.stored(shared) == 40
    assert stock.store.report_bad(stock.ns, plan, fork, 35), "twice is once"
    assert stock.stored(fork) == 35
    assert stock.store.report_bad(stock.ns, plan, fork, 10)
    assert stock.stored(fork) == 10 == stock.stored(shared)


# storage that hangs


def test_hanging_storage_costs_nobody_more_than_the_deadline(
    stock: Stock, faults: FaultyBackend, start: Start
) -> None:
    """200 requests: no more threads or descriptors than for one; then it recovers."""
    prompts = [stored(stock, seed, 20) for seed in range(20)]
    hold = Hold(0)
    faults.on("readv", "seg/*", do=hold, times=None)
    fetcher = start(faults, threads=3, stall_seconds=0.5)
    client = fetcher.client()
    fetch(client, stock, prompts[0], deadline=0.1).release()
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    reasons: dict[str, int] = {}
    for i in range(200):
        began = time.monotonic()
        try:
            with ask(client, stock, prompts[i % 20], deadline=0.05) as ticket:
                assert ticket.wait() == 0
                reason = ticket.reason
        except Exception as e:
            reason = str(e).split(":")[0]
        assert time.monotonic() - began < 0.5
        reasons[reason] = reasons.get(reason, 0) + 1
    assert set(reasons) == {"deadline", "backend down"}
    assert reasons["backend down"] > 100, "storage that gives no answer is asked again and again"
    after = threading.active_count(), len(os.listdir("/proc/self/fd"))
    assert after[0] <= before[0] and after[1] <= before[1]
    hold.release()
    eventually(lambda: fetcher.workers.stalled_seconds() == 0)
    for prompt in prompts:
        with fetch(client, stock, prompt) as ticket:
            assert ticket.good == 19
    eventually(lambda: unused(fetcher))


@pytest.mark.expect_logs("a read has not ended")
def test_reads_that_never_end_cost_a_thread_and_its_memory_but_never_the_pool(
    stock: Stock, faults: FaultyBackend, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a client daemon that lives has lost them."""
    monkeypatch.setattr(workers, "MOST_LOST", 2)
    monkeypatch.setattr(workers, "_LOOK_SECONDS", 0.05)
    prompts = [stored(stock, seed, 20) for seed in range(4)]
    fetcher = start(faults, threads=1, stall_seconds=0.5)
    client = fetcher.client()
    holds = [Hold(0) for _ in range(3)]
    for n, hold in enumerate(holds[:2], 1):
        faults.on("readv", "seg/*", do=hold, times=1)
        monkeypatch.setattr(fetcher.workers, "lost_seconds", 0.1)
        with ask(client, stock, prompts[n], deadline=60) as ticket:
            assert ticket.wait() == 0, "it waits for what never ends"
            assert (ticket.reason, ticket.lasting) == ("no answer", False)
        # Others may take their time.
        monkeypatch.setattr(fetcher.workers, "lost_seconds", workers.LOST_SECONDS)
        with fetch(client, stock, prompts[n]) as ticket:
            assert ticket.good == 19, "the next one waits for the same read"
        stats = fetcher.core.stats()
        assert stats["reads_lost"] == n
        assert fetcher.workers.stalled_seconds() == 0
    faults.on("readv", "seg/*", do=holds[2], times=1)
    monkeypatch.setattr(fetcher.workers, "lost_seconds", 0.1)
    with ask(client, stock, prompts[3], deadline=0.5) as ticket:
        assert ticket.wait() == 0 and ticket.reason == "deadline", "threads without end"
    monkeypatch.setattr(fetcher.workers, "lost_seconds", workers.LOST_SECONDS)
    assert len(fetcher.workers._readers) == 3
    for hold in holds:
        hold.release()
    eventually(lambda: len(fetcher.workers._readers) == 1)
    eventually(lambda: not fetcher.workers.stalled_seconds())  # else the storage counts as down
    with fetch(client, stock, prompts[3]) as ticket:
        assert ticket.good == 19
    eventually(lambda: unused(fetcher))
    client.evict()
    assert fetcher.core.ranges.free_bytes == fetcher.core.ranges.total


def test_what_is_in_memory_is_served_while_the_storage_hangs(
    stock: Stock, faults: FaultyBackend, start: Start
) -> None:
    cached, missing = stored(stock, 1, 60), stored(stock, 2, 30)
    longer = stored(stock, 3, 20, cached[: 16 * 50])
    fetcher = start(faults, threads=1, stall_seconds=0.05)
    client = fetcher.client()
    fetch(client, stock, cached).release()
    hold = Hold(0)
    faults.on("readv", "seg/*", do=hold, times=None)
    fetch(client, stock, missing, deadline=0.2).release()
    with fetch(client, stock, cached) as ticket:
        assert ticket.good == 59
    with fetch(client, stock, longer) as ticket:
        assert ticket.good == 50 and ticket.reason.startswith("backend down")
        assert not ticket.lasting
    hold.release()


def test_one_file_that_hangs_does_not_stop_the_others(
    stock: Stock, faults: FaultyBackend, start: Start
) -> None:
    prompt = stored(stock, 1, 30)
    beside = stock.another()
    other = stored(beside, 2, 30)
    (path,) = {e.segment for e in stock.store.check(stock.ns, prompt).extents}
    stock.store.catch_up()
    hold = Hold(0)
    faults.on("readv", path, do=hold, times=None)
    fetcher = start(faults, threads=2)
    client = fetcher.client()
    with ask(client, stock, prompt, blocks=10) as ticket:
        assert hold.reached.wait(5)
        with fetch(client, stock, other) as ticket:
            assert ticket.good == 29
        hold.release()


@pytest.mark.expect_logs("reading seg/")
def test_a_bug_in_a_backend_is_a_miss_and_costs_no_thread(
    stock: Stock, faults: FaultyBackend, start: Start
) -> None:
    def bug(call: Any) -> Any:
        raise RuntimeError("a bug")

    prompt = stored(stock, 1, 30)
    faults.on("readv", "seg/*", do=bug, times=1)
    client = start(faults, threads=1).client()
    with fetch(client, stock, prompt) as ticket:
        assert (ticket.good, ticket.reason, ticket.lasting) == (0, "internal error", False)
    with fetch(client, stock, prompt) as ticket:
        assert ticket.good == 29


@pytest.mark.expect_logs("a checker goes on")
def test_a_thread_that_cannot_be_replaced_costs_no_other(
    stock: Stock, faults: FaultyBackend, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may be out of threads just when a reader is to go on for one that hangs."""
    looks: Queue[str] = Queue()

    def look(_: workers.Workers) -> None:
        looks.put(threading.current_thread().name)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(workers.Workers, "_look_after_readers", look)
    prompt = stored(stock, 1, 30)
    client = start(faults, threads=1).client()
    assert looks.get(timeout=30) == looks.get(timeout=30)
    with fetch(client, stock, prompt) as ticket:
        assert ticket.good == 29


def test_a_fetcher_whose_storage_hangs_ends_when_it_is_told_to(
    stock: Stock, tmp_path: Path
) -> None:
    """Its threads cannot be joined; the process ends all the same, and its arena's name with it."""
    import signal
    import subprocess
    import sys

    from kvfs.fetcher import launch
    from tests.t2_fetch.conftest import end

    prompt = stored(stock, 1, 30)
    shm = tmp_path / "shm"
    shm.mkdir()
    code = f"""if True:
        import errno, time
        from kvfs.backend.select import open_backend
        from kvfs.testing.faults import FaultyBackend
        from kvfs.fetcher.launch import Options
        from kvfs.fetcher.process import run
        faults = FaultyBackend(open_backend({stock.store.path!r}))
        faults.on("readv", "seg/*", do=lambda call: time.sleep(600), times=None)
        options = Options(8 << 20, threads=2, shm={str(shm)!r})
        run({stock.store.path!r}, options, backend=faults, ready=lambda name: print(flush=True))
    """
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.read(1)
    with launch.connect(stock.store.path, stock.store.uuid) as client:
        assert client.fetcher_pid == process.pid
        with fetch(client, stock, prompt, deadline=0.2) as ticket:
            assert ticket.reason == "deadline"
        began = time.monotonic()
        end(process.pid, signal.SIGTERM)
        assert process.wait() == 0 and time.monotonic() - began < 5
        assert not list(shm.iterdir())
    process.stdout.close()
    shutil.rmtree(shm)


def test_the_good_prefix_survives_whatever_follows(stock: Stock, start: Start) -> None:
    """The blocks of a ticket do not change while others come, go and evict."""
    prompt = stored(stock, 1, 40)
    others = [stored(stock, seed, 60) for seed in range(2, 8)]
    fetcher = start(open_backend(stock.store.path), arena_bytes=8 << 20)
    client = fetcher.client()
    with fetch(client, stock, prompt) as ticket:
        for other in others * 2:
            with fetch(client, stock, other) as busy:
                assert busy.good == 59
            assert wrong(ticket, stock, prompt) is None
    assert fetcher.core.stats()["blocks_evicted"] > 0
