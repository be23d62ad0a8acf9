"""What one host stores is found on the others: soon, exactly, and whatever comes in between."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.backend.select import open_backend
from kvfs.follow.following import ALL_SECONDS, Following
from kvfs.frames import RenewEntry
from kvfs.journal import journal_path
from kvfs.repair.rebuild import rebuild
from kvfs.serve import status
from kvfs.testing.blocks import small_identity
from kvfs.testing.command import command, environment, kvctl_json
from kvfs.testing.faults import Fail, FaultyBackend
from kvfs.testing.hosts import start
from kvfs.testing.indexcheck import index_faults
from kvfs.testing.journals import Fleet, MadeUp
from kvfs.testing.late import Late
from kvfs.testing.stock import Clock, Stock, tokens
from kvfs.testing.threefs.host import other_mount


@pytest.fixture
def stock(quick_store: Path) -> Iterator[Stock]:
    made = Stock.make(quick_store, clock=Clock(time.time()))
    yield made
    made.close()


def other(stock: Stock, name: str = "b", **options: Any) -> Stock:
    """Another host of the same store: an index of its own."""
    return stock.elsewhere(name, **options)


def counted(stock: Stock, name: str = "b") -> tuple[Stock, FaultyBackend]:
    backend = FaultyBackend(open_backend(other_mount(stock.store.path)))
    return other(stock, name, backend=backend, catch_up=False), backend


def settled(following: Following) -> None:
    """Turns until there is nothing more to apply."""
    while following.turn().entries:
        pass


# how soon


@pytest.mark.posix("how soon, is the stand-in's")
@pytest.mark.parametrize("hosts, puts", [(2, 50), (8, 13)])
def test_a_put_is_a_hit_on_every_other_host_within_a_second(
    stock: Stock, ram_dir: Path, hosts: int, puts: int
) -> None:
    stock.store.close()
    fleet = [start(stock.store.path, str(ram_dir / f"h{n}"), n, hosts, puts) for n in range(hosts)]
    for process in fleet:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in fleet:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    told = []
    for process in fleet:
        assert process.stdout is not None
        told.append(json.loads(process.stdout.readline()))
    for process in fleet:
        out, err = process.communicate("\n")
        assert process.returncode == 0, err
    put = {seed: at for host in told for seed, at in host["put"].items()}
    delays = [at - put[seed] for host in told for seed, at in host["whole"].items()]
    assert len(put) == hosts * puts
    assert len(delays) == (hosts - 1) * hosts * puts
    assert [host["reasons"] for host in told] == [{}] * hosts
    assert sorted(delays)[int(len(delays) * 0.99)] < 1.0


# what a look costs


@pytest.mark.posix("a stand-in holds every file open that the kernel has seen")
def test_thousands_of_writers_that_ended_cost_one_listing(stock: Stock) -> None:
    fleet, gone = Fleet(stock.store, stock.ns), 3000
    for _ in range(gone):
        writer = fleet.writer()
        writer.publish(*fleet.run(writer, 2))
        writer.end()
    host, backend = counted(stock)
    following = Following(host.store)
    settled(following)
    assert host.store.index.counters()["blocks"] == 2 * gone
    time.sleep(following.interval)  # what was read to its seal is looked at once more at most
    following.turn()
    backend.calls.clear()
    time.sleep(following.interval * 3)
    turns = [following.turn() for _ in range(10)]
    assert sum(turn.journals for turn in turns) <= 10  # of the one writer that lives
    assert sum(backend.calls.values()) <= 10 * 8, backend.calls


def test_idle_writers_are_asked_less_and_less(stock: Stock) -> None:
    fleet = Fleet(stock.store, stock.ns)
    writers = [fleet.writer() for _ in range(20)]
    for writer in writers:
        writer.publish(*fleet.run(writer, 2))
    host, backend = counted(stock)
    following = Following(host.store)
    settled(following)
    looks = []
    for _ in range(5):
        backend.calls.clear()
        following.turn()
        looks.append(backend.calls.get("open", 0))
    assert sum(looks) <= 2 * 21 + 4  # once more each, then they have a pause
    for writer in writers:
        writer.kill()


def test_a_turn_is_bounded_and_the_next_goes_on_at_once(stock: Stock) -> None:
    fleet = Fleet(stock.store, stock.ns)
    writer = fleet.writer()
    for _ in range(45):
        writer.publish(*(e for _ in range(1000) for e in fleet.run(writer, 1)))
    host, _ = counted(stock)
    following = Following(host.store)
    turns = [following.turn() for _ in range(3)]
    assert [t.cut_off for t in turns] == [True, True, False]
    assert 20_000 <= turns[0].entries <= 22_000
    assert host.store.index.counters()["blocks"] == 45_000
    writer.kill()


def test_many_unread_journals_are_read_in_bounded_memory(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tracemalloc

    from kvfs.follow import follower as follow

    monkeypatch.setattr(follow, "_READ_TOGETHER", 2 << 20)
    monkeypatch.setattr(follow, "BATCH_BYTES", 1 << 20)
    fleet = Fleet(stock.store, stock.ns)
    for _ in range(40):
        writer = fleet.writer()
        writer.publish(*(e for _ in range(60) for e in fleet.run(writer, 400)))
        writer.end()
    host, _ = counted(stock)
    tracemalloc.start()
    try:
        host.store.catch_up()
        assert tracemalloc.get_traced_memory()[1] < 12 << 20  # of 15 MiB
    finally:
        tracemalloc.stop()
    assert host.store.index.counters()["blocks"] == 40 * 60 * 400


# what a journal may look like


def test_a_torn_tail_is_taken_once_it_is_whole(stock: Stock) -> None:
    fleet = Fleet(stock.store, stock.ns)
    writer = fleet.writer()
    writer.publish(*fleet.run(writer, 3))
    path = stock.full(journal_path(writer.name, 0))
    before = os.path.getsize(path)
    writer.publish(*fleet.run(writer, 5))
    data = Path(path).read_bytes()
    host, _ = counted(stock)
    for end in [*range(before, len(data), 7), len(data)]:
        Path(path).write_bytes(data[:end])
        host.store.catch_up()
        assert host.store.index.counters()["blocks"] == (8 if end == len(data) else 3)
    writer.kill()


@pytest.mark.parametrize("shown", ["zeros", "nothing"])
def test_a_length_may_show_before_the_bytes(stock: Stock, shown: str) -> None:
    fleet = Fleet(stock.store, stock.ns)
    writer = fleet.writer()
    writer.publish(*fleet.run(writer, 3))
    writer.kill()
    path = Path(stock.full(journal_path(writer.name, 0)))
    data = path.read_bytes()
    host, _ = counted(stock)
    for hidden in (0, 64, 100):
        path.write_bytes(data[:hidden] + (bytes(len(data) - hidden) if shown == "zeros" else b""))
        assert host.store.catch_up().problems == []
        assert host.store.index.counters().get("blocks", 0) == 0
    path.write_bytes(data)
    host.store.catch_up()
    assert host.store.index.counters()["blocks"] == 3


def test_what_is_damaged_is_not_read_again_and_again(stock: Stock) -> None:
    """A megabyte behind a damaged frame is no reason to look for a larger frame."""
    fleet = Fleet(stock.store, stock.ns)
    writer = fleet.writer()
    at = writer.publish(*fleet.run(writer, 3))
    for _ in range(60):
        writer.publish(*fleet.run(writer, 2000))
    path = stock.full(journal_path(writer.name, 0))
    with open(path, "r+b") as f:
        f.seek(at + 40)
        f.write(b"?")
    host, backend = counted(stock)
    host.store.catch_up()
    read = 0

    def count(call: Any) -> Any:
        nonlocal read
        read += (got := call.proceed())
        return got

    backend.on("readv", "log/madeup*", do=count, times=None)
    host.store.catch_up()
    assert host.store.index.counters()["blocks"] == 3 and read < 2 << 20
    found = {w["writer"]: w["problem"] for w in status(host.store)["writers"]}
    assert "no whole entry" in found[writer.name]
    writer.kill()


def test_a_frame_larger_than_a_read_is_taken(stock: Stock) -> None:
    fleet = Fleet(stock.store, stock.ns)
    writer = fleet.writer()
    for blocks in (1, 200_000, 1, 90_000, 1):
        writer.publish(*fleet.run(writer, blocks))
    host, _ = counted(stock)
    host.store.catch_up()
    assert host.store.index.counters()["blocks"] == 290_003
    writer.kill()


@pytest.mark.parametrize("sealed", [True, False])
def test_the_next_journal_waits_for_the_last_bytes_of_the_one_before(
    stock: Stock, sealed: bool
) -> None:
    fleet = Fleet(stock.store, stock.ns)
    writer = fleet.writer()
    writer.publish(*fleet.run(writer, 2))
    path = Path(stock.full(journal_path(writer.name, 0)))
    short = path.stat().st_size
    writer.publish(*fleet.run(writer, 3))
    writer.roll(sealed=sealed)
    writer.publish(*fleet.run(writer, 4))
    whole = path.read_bytes()
    host, _ = counted(stock)
    for end, blocks in ((short, 2), (short + 9, 2), (len(whole), 9)):
        path.write_bytes(whole[:end])
        host.store.catch_up()
        assert host.store.index.counters()["blocks"] == blocks
    writer.kill()


@pytest.mark.parametrize("seed", range(6))
def test_a_file_system_that_shows_everything_late(stock: Stock, seed: int) -> None:
    """In the end nothing is missing and nothing is there twice, whatever came in first."""
    rng = random.Random(seed)
    backend = FaultyBackend(open_backend(stock.store.path))
    host = other(stock, backend=backend, catch_up=False)
    Late(backend, polls=4, seed=seed, paths="[ln][os]*")  # log and ns
    fleet = Fleet(stock.store, stock.ns)
    writers: list[MadeUp] = []
    following, blocks = Following(host.store, interval=0.0), 0
    for step in range(150):
        if not writers or rng.random() < 0.1:
            writers.append(fleet.writer())
        writer = rng.choice(writers)
        action = rng.random()
        if action < 0.7:
            n = rng.randint(1, 4)
            writer.publish(*fleet.run(writer, n))
            blocks += n
        elif action < 0.8 and writer.journal is not None:
            writer.roll(sealed=rng.random() < 0.5)
        elif action < 0.85 and writer.journal is not None:
            writer.end()
            writers.remove(writer)
        if step % 3 == 0:
            following.turn()
    backend.clear()
    for writer in writers:
        writer.kill()
    host.store.catch_up()
    assert host.store.index.counters()["blocks"] == blocks
    assert index_faults(host.store.index) == []


def test_a_directory_that_is_no_writer_and_a_strange_file_are_passed_over(stock: Stock) -> None:
    for name in ("lost+found", "x-zz", f"host-{'0' * 23}"):
        os.makedirs(stock.full(f"log/{name}"))
    strange = f"host-{'1' * 24}"
    os.makedirs(stock.full(f"log/{strange}"))
    Path(stock.full(journal_path(strange, 0))).write_bytes(b"not a journal" * 100)
    stock.put(tokens(1, 40))
    host, _ = counted(stock)
    following = Following(host.store)
    settled(following)
    assert host.stored(tokens(1, 40)) == 10
    assert len(following.problems) == 1 and "not a journal" in following.problems[0]


def test_storage_that_fails_is_tried_again(stock: Stock, expect_logs: Any) -> None:
    stock.put(tokens(1, 40))
    host, backend = counted(stock)
    with backend.during("open", "log/*", do=Fail(errno.EIO), times=None):
        followed = host.store.catch_up()
        assert not followed.complete and followed.problems
    expect_logs("following .*Input/output error")
    backend.on("names", "log", do=Fail(errno.EIO))
    with Following(host.store, interval=0.02) as following:
        until(lambda: host.stored(tokens(1, 40)) == 10)
    assert following.problems == []


def test_a_bug_in_one_turn_does_not_end_the_following(
    stock: Stock, monkeypatch: pytest.MonkeyPatch, expect_logs: Any
) -> None:
    expect_logs("following ")
    stock.put(tokens(1, 40))
    host = other(stock, catch_up=False)
    turn, turns = Following.turn, []

    def fails_once(following: Following) -> Any:
        turns.append(1)
        if len(turns) == 1:
            raise ZeroDivisionError("a bug")
        return turn(following)

    monkeypatch.setattr(Following, "turn", fails_once)
    with Following(host.store, interval=0.02):
        until(lambda: host.stored(tokens(1, 40)) == 10)


def until(true: Any, seconds: float = 60.0) -> None:
    """Waits for what other processes or threads do."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


# what refers to what others did


def test_namespaces_and_classes_of_another_host_appear(stock: Stock) -> None:
    host, _ = counted(stock)
    following = Following(host.store)
    settled(following)
    made = stock.store.create_namespace(small_identity(model="later"))
    stock.store.define_class("late", 1234)
    time.sleep(0.5)  # the longest pause between two looks
    settled(following)
    assert host.store.namespace(made.nsid).name == made.name
    assert host.store.classes()["late"] == 1234


def test_a_segment_of_a_namespace_that_does_not_show_yet_waits(stock: Stock) -> None:
    """Its journal is read on only once the namespace is known: nothing of it is left out."""
    host, backend = counted(stock)
    Late(backend, polls=10**6, paths="ns*").now()
    host.store.catch_up()
    backend.names("ns")
    made = stock.store.create_namespace(small_identity(model="later"))
    third = other(stock, "c")
    fleet = Fleet(third.store, third.store.namespace(made.nsid))
    writer = fleet.writer()
    writer.publish(*fleet.run(writer, 5))
    following = Following(host.store)
    hidden = f"log/{stock.store.writer().name}/*"
    with backend.during("open", hidden, do=Fail(errno.ENOENT), times=None):
        following.turn()
        assert any("unknown here" in p for p in following.problems), following.problems
        assert host.store.index.counters().get("blocks", 0) == 0
    for _ in range(2):
        host.store.catch_up()
    assert host.store.index.counters()["blocks"] == 5
    writer.kill()


def test_a_renewal_comes_in_before_the_run_it_renews(stock: Stock) -> None:
    """Another host has seen the run and renewed it: whoever reads that journal first must not
    lose the renewal."""
    host, _ = counted(stock)
    third = other(stock, "c")
    following = Following(host.store)
    settled(following)
    stock.put(tokens(1, 40))
    third.store.catch_up()
    stock.clock.now += 86_400
    assert third.store.touch(third.ns, tokens(1, 40)) == 1
    # Only the journal of the third host is due.
    following._list(time.monotonic())
    for writer, pace in following._paces.items():
        due = writer == third.store.writer().name
        pace.due = 0.0 if due else time.monotonic() + 100
    following._all_due = time.monotonic() + 100
    following.turn()
    assert host.runs() == set()
    following._all_due = 0.0
    settled(following)
    assert host.runs() == third.runs() != set()


def test_a_block_that_does_not_show_here_yet_is_not_forgotten(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host wrote it a moment ago: a length, the bytes or the file itself may come later."""
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    assert other(stock, "elsewhere").put(tokens(1, 40)).complete
    monkeypatch.undo()
    host, _ = counted(stock)
    host.store.catch_up()
    path = next(iter(host.paths()))
    data = Path(path).read_bytes()
    for shown in (data[:9000], data[:9000] + bytes(len(data) - 9000), None):
        if shown is None:
            os.unlink(path)
        else:
            Path(path).write_bytes(shown)
        blocks, reason = host.fetch(tokens(1, 40))
        assert blocks < 10 and reason
        assert host.stored(tokens(1, 40)) == 10
    Path(path).write_bytes(data)
    host.store.reader().forget(os.path.relpath(path, host.store.path))
    assert host.good(tokens(1, 40)) == 10
    os.truncate(path, 9000)
    stock.clock.now += 61
    assert host.good(tokens(1, 40)) == 1
    assert host.stored(tokens(1, 40)) == 1  # now it is gone for good


# killed, deleted, rebuilt


FOLLOWER = """
import sys
from kvfs.follow.following import Following
from kvfs.store import Store
with Store.open(sys.argv[1], index=sys.argv[2], catch_up=False) as store:
    print("open", flush=True)
    following = Following(store, interval=0.01)
    while True:
        following.turn()
"""


@pytest.mark.crash
def test_a_follower_killed_at_random_instants_goes_on_exactly(stock: Stock, ram_dir: Path) -> None:
    rng, fleet = random.Random(5), Fleet(stock.store, stock.ns)
    writers = [fleet.writer() for _ in range(3)]
    index = str(ram_dir / "killed")
    blocks = 0
    for _ in range(8):
        for _ in range(10):
            writer = rng.choice(writers)
            writer.publish(*(e for _ in range(200) for e in fleet.run(writer, 3)))
            blocks += 600
        process = subprocess.Popen(
            [sys.executable, "-c", FOLLOWER, stock.store.path, index],
            env=environment(), stdout=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None and process.stdout.readline()
        time.sleep(rng.random() * 0.3)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    host = stock.another(index=index)
    straight = other(stock, "straight")
    assert host.store.index.counters()["blocks"] == blocks
    assert host.runs() == straight.runs()
    assert index_faults(host.store.index) == []
    for writer in writers:
        writer.kill()


@pytest.mark.posix("how long it takes, is the stand-in's")
def test_an_index_deleted_under_load_comes_back_while_the_others_serve(
    stock: Stock, ram_dir: Path
) -> None:
    """kvctl serve fills it again; a router that has it open finds more and more of it."""
    fleet = Fleet(stock.store, stock.ns)
    for _ in range(4):
        writer = fleet.writer()
        for _ in range(10):
            writer.publish(*(e for _ in range(1000) for e in fleet.run(writer, 2)))
        writer.kill()
    prompts = [tokens(seed, 40) for seed in range(1, 30)]
    for prompt in prompts:
        stock.put(prompt)
    index = ram_dir / "b"
    environ = {**environment(), "KVFS_INDEX": str(index), "KVFS_STORE": stock.store.path}
    serve = subprocess.Popen(command("serve", "--interval", "0.05"), env=environ)
    router = stock.another(index=str(index), catch_up=False)
    until(lambda: all(router.stored(p) == 10 for p in prompts))
    shutil.rmtree(index)
    shares: list[float] = []
    counts: list[int] = []

    def back() -> bool:
        assert stock.stored(prompts[0]) == 10  # this host has nothing to do with it
        stock.put(tokens(1000 + len(counts), 40))
        counts.append(sum(router.stored(p) == 10 for p in prompts))
        if len(counts) % 5 == 1:
            told = kvctl_json("status", "--store", stock.store.path, "--index", str(index))
            shares.append(told["followed"])
        return shares[-1] == 1.0 and counts[-1] == len(prompts)

    until(back)
    assert min(shares) < 1.0
    serve.send_signal(signal.SIGTERM)
    assert serve.wait(10) == 0
    router.store.catch_up()
    assert router.runs() == stock_runs_after_catching_up(stock)


def stock_runs_after_catching_up(stock: Stock) -> set[tuple[Any, ...]]:
    stock.store.catch_up()
    return stock.runs()


def test_a_rebuild_on_one_host_under_load(stock: Stock) -> None:
    """Others put and find; the host itself goes on following and putting meanwhile."""
    host = other(stock, "b")
    prompts = [tokens(seed, 40) for seed in range(1, 60)]
    with Following(host.store, interval=0.01):
        for i, prompt in enumerate(prompts):
            (stock if i % 2 else host).put(prompt)
            if i % 10 == 5:
                rebuild(host.store)
    for side in (stock, host):
        side.store.catch_up()
        assert [side.sound(p) for p in prompts] == [10] * len(prompts)
    assert stock.runs() == host.runs()
    assert index_faults(host.store.index) == []


def test_the_index_notes_when_it_had_read_everything(stock: Stock) -> None:
    from kvfs.follow.history import followed_ms

    stock.put(tokens(1, 40))
    host, _ = counted(stock)
    assert followed_ms(host.store.index) == 0
    following = Following(host.store)
    following.turn()
    assert followed_ms(host.store.index) == stock.store.now_ms()
    stock.clock.now += 1000
    following.turn()
    assert followed_ms(host.store.index) < stock.store.now_ms()
    following._all_due -= ALL_SECONDS
    following.turn()
    assert followed_ms(host.store.index) == stock.store.now_ms()


def test_status_tells_how_far_a_new_host_is(stock: Stock) -> None:
    """A share that grows to all, over several journals of a writer, at the cost of a few reads."""
    fleet = Fleet(stock.store, stock.ns)
    writer = fleet.writer()
    for _ in range(6):
        for _ in range(15):
            writer.publish(*(e for _ in range(1000) for e in fleet.run(writer, 4)))
        writer.roll()
    host, backend = counted(stock)
    following, shares, records = Following(host.store), [], []
    while not shares or shares[-1] < 1.0:
        backend.calls.clear()
        told = status(host.store)
        shares.append(told["followed"])
        records.append(told["behind_records"])
        assert told["problems"] == [] and backend.calls.get("readv", 0) < 30
        following.turn()
    assert shares == sorted(shares) and shares[0] == 0.0 and len(shares) >= 5
    assert 80_000 < records[0] < 100_000 and records == sorted(records, reverse=True)
    assert (told["behind_records"], told["behind_seconds"]) == (0, 0.0)


def test_entries_of_unknown_things_do_not_stop_a_follower(stock: Stock) -> None:
    fleet = Fleet(stock.store, stock.ns)
    writer = fleet.writer()
    now = writer.now_ms
    writer.publish(
        RenewEntry(stock.ns.nsid, b"h" * 16, now + 1, now, "nobody", False),
        RenewEntry(b"n" * 16, b"h" * 16, now + 1, now, "nobody", True),
        *fleet.run(writer, 2),
    )
    host, _ = counted(stock)
    following = Following(host.store)
    settled(following)
    assert following.problems == [] and host.store.index.counters()["blocks"] == 2
    writer.kill()
