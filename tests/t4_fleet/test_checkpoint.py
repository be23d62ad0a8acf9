"""A new host begins with a checkpoint, and old journals go: nobody ends up with anything else."""

from __future__ import annotations

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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs.backend.select import open_backend
from kvfs.errors import BackendError
from kvfs.follow import checkpoint
from kvfs.follow.checkpoint import DIRECTORY, all_whole, newest
from kvfs.follow.following import Following
from kvfs.follow.history import DEAD_MS, prune, tidy
from kvfs.index.schema import META, scan
from kvfs.journal import journal_path
from kvfs.repair.fsck import fsck
from kvfs.repair.rebuild import rebuild
from kvfs.store import Store
from kvfs.testing.command import environment
from kvfs.testing.faults import CutAt, Fail, FaultyBackend
from kvfs.testing.indexcheck import index_faults
from kvfs.testing.journals import Fleet, MadeUp
from kvfs.testing.stock import Clock, Stock, overwrite, tokens

DAY = 86_400.0
DAY_MS = 86_400_000


@pytest.fixture
def stock(quick_store: Path) -> Iterator[Stock]:
    made = Stock.make(quick_store)
    yield made
    made.close()


def other(stock: Stock, name: str, **options: Any) -> Stock:
    """Another host of the same store."""
    return stock.elsewhere(name, **options)


def write(stock: Stock) -> checkpoint.Checkpoint:
    """A checkpoint by this host, as it is now."""
    stock.store.catch_up()
    name = stock.store.writer().name
    return checkpoint.write(stock.store.backend, stock.store.index, name, stock.store.now_ms())


def cleaned(stock: Stock, *, keep: float = DAY, dead: float = DAY) -> list[str]:
    backend, now = stock.store.backend, stock.store.now_ms()
    return prune(
        backend, stock.store.uuid, now, int(keep * 1000), int(dead * 1000), index=stock.store.index
    )


def journals(stock: Stock) -> int:
    return sum(len(files) for _, _, files in os.walk(stock.full("log")))


def contents(stock: Stock) -> tuple[Any, ...]:
    """All that an index says, free of the numbers that it gives and of how far journals are."""
    index = stock.store.index
    segments = {
        (s.segment, s.state, s.created_ms, s.ttl_seconds, s.path, s.geometry)
        for s in index.segments()
    }
    numbers = {s.number: s.segment for s in index.segments()}
    waiting = set()
    with index.env().read() as txn:
        cuts = {(bytes(k), bytes(v)) for k, v in scan(txn, b"x")}
        for key, value in scan(txn, b"w"):
            segment = int.from_bytes(key[-8:-4], "big")
            waiting.add((bytes(key[5:-8]), numbers[segment], bytes(key[-4:]), bytes(value[56:])))
    return (
        stock.runs(), segments, cuts, waiting, index.classes(), set(index.namespaces()),
        index.counters().get("blocks", 0), index.counters().get("orphans", 0),
    )  # fmt: skip


def same(*hosts: Stock) -> None:
    """All of them say the same, and their rows are sound."""
    for host in hosts:
        host.store.catch_up()
    first, *rest = map(contents, hosts)
    for found in rest:
        assert found == first
    for host in hosts:
        assert index_faults(host.store.index) == []


# checkpoint and tail against having followed everything

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=6)
steps = st.one_of(
    st.tuples(st.just("put"), prompts, st.sampled_from(["agent", "chatbot"])),
    st.tuples(st.just("remove"), prompts, st.integers(0, 5)),
    st.tuples(st.just("touch"), prompts, st.sampled_from([None, "agent", "chatbot"])),
    st.tuples(st.just("class"), st.integers(100, 9000), st.sampled_from(["agent", "new"])),
    st.tuples(st.just("wait"), st.integers(0, 500), st.none()),
    st.tuples(st.just("orphan"), st.integers(1, 4), st.none()),
    st.tuples(st.just("checkpoint"), st.none(), st.none()),
    st.tuples(st.just("restart"), st.none(), st.none()),
)


class History:
    """Two hosts that do things in turn, and one that only follows."""

    def __init__(self, place: Path) -> None:
        self.place = place
        clock = Clock()
        classes = {"agent": 800, "chatbot": 8000}
        self.hosts = [Stock.make(place / "s", clock=clock, index=str(place / "a"), classes=classes)]
        self.hosts.append(self.hosts[0].another(index=str(place / "b")))
        self.follower = self.hosts[0].another(index=str(place / "f"))
        self.fleet = Fleet(self.hosts[0].store, self.hosts[0].ns)
        self.writers: list[MadeUp] = []
        self.n = 0

    def do(self, step: tuple[Any, ...]) -> None:
        what, a, b = step
        self.n += 1
        host = self.hosts[self.n % 2]
        host.clock.now += 0.005  # what two hosts do in one millisecond has no order
        host.store.catch_up()
        getattr(self, f"_{what}")(host, a, b)
        self.follower.store.catch_up()

    def _put(self, host: Stock, blocks: list[int], ttl: str) -> None:
        assert host.put([t for b in blocks for t in [b] * 4], ttl_class=ttl).error is None

    def _remove(self, host: Stock, blocks: list[int], at: int) -> None:
        host.store.remove(host.ns, [t for b in blocks for t in [b] * 4], from_block=at)

    def _touch(self, host: Stock, blocks: list[int], ttl: str | None) -> None:
        host.store.touch(host.ns, [t for b in blocks for t in [b] * 4], ttl_class=ttl)

    def _class(self, host: Stock, seconds: int, name: str) -> None:
        host.store.define_class(name, seconds)

    def _wait(self, host: Stock, seconds: int, _: None) -> None:
        host.clock.now += seconds

    def _orphan(self, host: Stock, blocks: int, _: None) -> None:
        """A run whose parent is nowhere yet, by a writer that is killed then."""
        writer = self.fleet.writer()
        writer.publish(*self.fleet.run(writer, blocks, parent=os.urandom(16), block=3))
        writer.kill()

    def _checkpoint(self, host: Stock, *_: None) -> None:
        write(host)

    def _restart(self, host: Stock, *_: None) -> None:
        i = self.hosts.index(host)
        host.store.close()
        self.hosts[i] = self.hosts[0 if i else 1].another(index=str(self.place / "ab"[i]))


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = Path("/dev/shm") if Path("/dev/shm").is_dir() else tmp_path_factory.mktemp("ground")
    path = place / f"ckpt-{os.getpid()}"
    path.mkdir()
    yield path
    shutil.rmtree(path)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(before=st.lists(steps, max_size=14), after=st.lists(steps, max_size=6))
def test_checkpoint_and_tail_tell_what_the_journals_told(
    ground: Path, before: list[Any], after: list[Any]
) -> None:
    place = ground / str(time.monotonic_ns())
    place.mkdir()
    history = History(place)
    try:
        for step in before:
            history.do(step)
        history.do(("checkpoint", None, None))
        for step in after:
            history.do(step)
        late = history.hosts[0].another(index=str(place / "late"), catch_up=False)
        late.store.catch_up()
        same(history.follower, late, *history.hosts)
        rebuild(late.store)
        same(history.follower, late)
    finally:
        history.hosts[0].close()
        history.follower.close()
        shutil.rmtree(place)


def test_a_new_host_reads_no_journal_that_is_covered(stock: Stock) -> None:
    for seed in range(1, 20):
        stock.put(tokens(seed, 40))
    stock = stock.again()
    write(stock)
    stock.put(tokens(50, 40))
    backend = FaultyBackend(open_backend(stock.store.path))
    gone = sorted(os.listdir(stock.full("log")))
    gone.remove(stock.store.writer().name)
    rules = [backend.on("open", f"log/{name}/*", do=Fail(5), times=None) for name in gone]
    host = other(stock, "b", backend=backend)
    assert [rule.hits for rule in rules] == [0] * len(rules)
    same(stock, host)
    host.store.close()


# damaged ones


def spoil(path: str, how: str) -> None:
    size = os.path.getsize(path)
    if how == "header":
        overwrite(path, 20, b"?")
    elif how == "end":
        overwrite(path, size - 10, b"?")
    elif how == "marks":
        overwrite(path, size - 60, b"?")
    elif how == "empty":
        os.truncate(path, 0)
    else:
        os.truncate(path, size // 2)


@pytest.mark.parametrize("how", ["header", "end", "marks", "empty", "half"])
def test_a_checkpoint_that_is_not_whole_is_passed_over(stock: Stock, how: str) -> None:
    stock.put(tokens(1, 40))
    first = write(stock)
    stock.clock.now += 60
    stock.put(tokens(2, 40))
    second = write(stock)
    stock.put(tokens(3, 40))
    spoil(stock.full(second.path), how)
    found = newest(stock.store.backend, stock.store.uuid)
    assert found is not None and found.path == first.path
    same(stock, other(stock, "b"))
    spoil(stock.full(first.path), how)
    same(stock, other(stock, "c"))


def test_a_damaged_body_is_passed_over_for_the_one_before(stock: Stock, expect_logs: Any) -> None:
    """A host that is new, a rebuild, and one whose journals are gone; not if there is no other."""
    for day in range(5):
        stock.put(tokens(day + 1, 40))
        stock.clock.now += DAY
        stock = lives(stock)
        last = write(stock)
        cleaned(stock)
    behind = other(stock, "behind")
    whole = list(all_whole(stock.store.backend, stock.store.uuid))
    assert len(whole) >= 2 and journals(stock) < 5
    runs = stock.runs()
    overwrite(stock.full(last.path), 200, b"????")
    expect_logs(rf"{last.path}: damaged .*: passed over")
    same(stock, behind, other(stock, "b"))
    assert any(f"{last.path}: damaged" in skipped for skipped in rebuild(stock.store).skipped)
    assert stock.runs() == runs
    assert dict(fsck(stock.store).counts) == {"checkpoint": 1}
    for made in whole[:-1]:
        overwrite(stock.full(made.path), 200, b"????")
    for begin in (lambda: other(stock, "c"), lambda: rebuild(stock.store)):
        with pytest.raises(BackendError, match=f"{last.path}: damaged"):
            begin()
    assert stock.runs() == runs


def test_journals_do_where_none_was_removed(stock: Stock, expect_logs: Any) -> None:
    stock.put(tokens(1, 40))
    made = write(stock)
    overwrite(stock.full(made.path), 200, b"????")
    expect_logs(rf"{made.path}: damaged .*: passed over")
    same(stock, other(stock, "b"))
    rebuild(stock.store)
    same(stock, other(stock, "c"))
    stock.clock.now += DEAD_MS / 1000
    with pytest.raises(BackendError, match="damaged"):
        other(stock, "d")
    os.unlink(stock.full(made.path))
    same(stock, other(stock, "e"))


def test_nothing_waits_for_the_storage_within_a_transaction(stock: Stock) -> None:
    """What hangs there would keep the map from growing, and every check waits for that."""
    stock.put(tokens(1, 40))
    backend = FaultyBackend(open_backend(stock.store.path))
    host = other(stock, "b", backend=backend)
    host.store.catch_up()
    env, active = host.store.index.env(), set()

    def look(call: Any) -> Any:
        active.add(env._active)
        return call.proceed()

    backend.on("*", do=look, times=None)
    name = host.store.writer().name
    made = checkpoint.write(backend, host.store.index, name, host.store.now_ms())
    backend.clear()
    assert active == {0}
    same(host, other(stock, "c"))
    assert newest(backend, stock.store.uuid) == made
    assert not any("tmp" in name for name in os.listdir(host.store.index.path))


@pytest.mark.parametrize("at", [0, 64, 300])
def test_a_full_disk_leaves_no_half_checkpoint(stock: Stock, at: int) -> None:
    stock.put(tokens(1, 40))
    backend = FaultyBackend(open_backend(stock.store.path))
    host = other(stock, "b", backend=backend)
    backend.on("writev", f"{DIRECTORY}/*", do=CutAt(at), times=None)
    with pytest.raises(OSError):
        write(host)
    assert os.listdir(stock.full(DIRECTORY)) == []
    host.store.close()


def test_a_checkpoint_of_another_store_or_a_newer_version(stock: Stock, ram_dir: Path) -> None:
    stock.put(tokens(1, 40))
    made = write(stock)
    with Store.init(ram_dir / "another", index=str(ram_dir / "x")) as store:
        os.makedirs(os.path.join(store.path, DIRECTORY))
        shutil.copy(stock.full(made.path), os.path.join(store.path, DIRECTORY))
        assert newest(store.backend, store.uuid) is None
    data = bytearray(Path(stock.full(made.path)).read_bytes())
    data[8] = 2
    later = f"{DIRECTORY}/{stock.store.now_ms() - 30 * DAY_MS:013d}-x.ckpt"
    Path(stock.full(later)).write_bytes(data)
    assert checkpoint.newer(stock.store.backend, later)
    stock.clock.now += 3 * DAY
    write(stock)
    write_again = write_later(stock)
    cleaned(stock)
    assert os.path.exists(stock.full(later)), "a newer version's file was removed"
    assert write_again


def write_later(stock: Stock) -> str:
    stock.clock.now += 60
    return write(stock).path


# what goes


def lives(stock: Stock) -> Stock:
    """The host begins a new process, and thereby a new writer."""
    place = os.path.dirname(stock.store.index.path)
    return stock.again(index=place)


def test_prune_removes_only_what_nobody_needs(stock: Stock) -> None:
    b = other(stock, "b")
    b.put(tokens(90, 40))
    for day in range(8):
        stock.put(tokens(day + 1, 40))
        stock.clock.now += DAY
        stock = lives(stock)
        write(stock)
        cleaned(stock, keep=2 * DAY)
        same(stock, b)
        new = other(stock, f"new{day}")
        same(stock, new)
        new.store.close()
    assert journals(stock) <= 6  # of ten that there were
    assert len(os.listdir(stock.full(DIRECTORY))) <= 4
    assert rebuild(stock.store).skipped == []
    same(stock, b)
    assert dict(fsck(stock.store).counts).keys() <= {"unsealed"}


def test_nothing_goes_before_its_time(stock: Stock) -> None:
    stock.put(tokens(1, 40))
    stock = lives(stock)
    write(stock)
    for _ in range(5):  # two hours at least
        assert not any(path.startswith("log/") for path in cleaned(stock, keep=0.0, dead=0.0))
        stock.clock.now += DEAD_MS / 1000 / 5 - 1
        write(stock)
    stock.clock.now += 10
    assert any(path.startswith("log/") for path in cleaned(stock, keep=0.0, dead=0.0))


def test_checkpoints_do_not_pile_up(stock: Stock) -> None:
    """Where one is written every ten minutes, one an hour stays: in the first day, and later."""
    made: list[float] = []
    for n in range(30 * 6):
        stock.clock.now += 600
        if n % 60 == 0:
            stock.put(tokens(n + 1, 40))
        made.append(stock.clock.now)
        write(stock)
        cleaned(stock)
        if n % 60 == 59:
            there = [c.created_ms / 1000 for c in all_whole(stock.store.backend, stock.store.uuid)]
            assert there[-2:] == made[-2:] and len(there) <= 28
            assert all(b - a >= 3600 for a, b in zip(there[:-3], there[1:-2], strict=True))
            assert stock.clock.now - there[0] <= DAY + 3600
    same(stock, other(stock, "b"))


def test_a_host_that_was_away_for_longer_than_journals_are_kept(stock: Stock) -> None:
    """It had read some of a journal, all of another, and a third came and went unseen."""
    b = other(stock, "b")
    stock.put(tokens(1, 40))
    b.store.catch_up()
    b.store.close()
    stock.put(tokens(2, 40))
    for day in range(5):
        stock = lives(stock)
        stock.put(tokens(10 + day, 40))
        stock.store.remove(stock.ns, tokens(1, 40), from_block=5)
        stock.clock.now += DAY
        write(stock)
        cleaned(stock)
    b = other(stock, "b", catch_up=False)
    with Following(b.store, interval=0.01) as following:
        while not following.turns:
            time.sleep(0.01)
    same(stock, b)
    assert b.lookups()[0] == 5


def test_a_host_that_was_away_for_a_while_goes_on_where_it_was(stock: Stock) -> None:
    b = other(stock, "b")
    stock.put(tokens(1, 40))
    for hour in range(60):
        stock.clock.now += 3600
        stock = lives(stock)
        stock.put(tokens(2 + hour, 40))
        if hour % 3 == 0:
            write(stock)
            cleaned(stock)
        if hour < 40:
            b.store.catch_up()
        elif hour == 40:
            b.store.close()
    b = other(stock, "b")
    assert b.store.index.query(lambda a: a.txn.get(META + b"adopted")) is None
    same(stock, b)
    assert journals(stock) < 40


def test_the_first_checkpoint_does_not_make_hosts_begin_anew(stock: Stock) -> None:
    b = other(stock, "b")
    stock.put(tokens(1, 40))
    stock.clock.now += 600
    write(stock)
    b.store.catch_up()
    assert b.store.index.query(lambda a: a.txn.get(META + b"adopted")) is None
    same(stock, b)


def test_journals_of_killed_writers_go_when_they_have_not_grown(stock: Stock) -> None:
    fleet = Fleet(stock.store, stock.ns)
    killed, alive = fleet.writer(), fleet.writer()
    for writer in (killed, alive):
        writer.publish(*fleet.run(writer, 3))
    killed.kill()
    b = other(stock, "b")
    for _ in range(8):
        stock.clock.now += DAY / 2
        alive.publish(*fleet.run(alive, 1))
        write(stock)
        cleaned(stock)
        b.store.catch_up()
    assert not os.path.exists(stock.full(f"log/{killed.name}"))
    assert os.path.exists(stock.full(f"log/{alive.name}"))
    alive.kill()
    same(stock, b, other(stock, "c"))


def test_a_damaged_journal_stays_for_as_long_as_it_grows(stock: Stock) -> None:
    """What a living writer tells behind a damaged frame is lost to others, but not to its host."""
    fleet = Fleet(stock.store, stock.ns)
    killed, alive = fleet.writer(), fleet.writer()
    for writer in (killed, alive):
        at = writer.publish(*fleet.run(writer, 3))
        end = writer.publish(*fleet.run(writer, 3))
        if writer is alive:
            overwrite(stock.full(journal_path(writer.name, 0)), at + 40, b"????")
        else:
            os.truncate(stock.full(journal_path(writer.name, 0)), end - 8)
    killed.kill()
    told = []
    for _ in range(8):
        stock.clock.now += DAY / 2
        alive.publish(*fleet.run(alive, 1))
        told += [stock.store.catch_up().problems]
        write(stock)
        cleaned(stock)
    assert not os.path.exists(stock.full(f"log/{killed.name}"))
    assert told[0] == [] and all(alive.name in problem for (problem,) in told[1:])
    alive.kill()
    for _ in range(8):  # nobody goes on behind it any more
        assert os.path.exists(stock.full(f"log/{alive.name}"))
        stock.clock.now += DAY / 4
        write(stock)
        cleaned(stock)
        if not os.path.exists(stock.full(f"log/{alive.name}")):
            break
    assert journals(stock) == 0
    assert stock.store.catch_up().problems == []


@pytest.mark.posix("other hosts remember for seconds that its directory was removed")
def test_a_writer_that_was_idle_for_days_is_followed_when_it_goes_on(stock: Stock) -> None:
    """Its journal is gone by then; it goes on in the next. Known to hosts that had read it, that
    had not, and that begin with a checkpoint."""
    fleet = Fleet(stock.store, stock.ns)
    idle = fleet.writer()
    b, c = other(stock, "b"), other(stock, "c")
    idle.publish(*fleet.run(idle, 3))
    b.store.catch_up()
    for _ in range(8):
        stock.clock.now += DAY / 2
        write(stock)
        cleaned(stock)
        b.store.catch_up()
    assert not os.path.exists(stock.full(f"log/{idle.name}"))
    d = other(stock, "d")
    same(stock, b, c, d)
    idle.roll(sealed=True)
    idle.now_ms = stock.store.now_ms()
    idle.publish(*fleet.run(idle, 4))
    same(stock, b, c, d, other(stock, "e"))
    assert b.store.index.counters()["blocks"] == 7
    idle.kill()


def test_a_writer_that_rolls_is_found_by_a_new_host_after_its_first_journals_went(
    stock: Stock,
) -> None:
    fleet = Fleet(stock.store, stock.ns)
    writer = fleet.writer()
    for _ in range(6):
        writer.publish(*fleet.run(writer, 3))
        writer.roll()
        stock.clock.now += DAY
        write(stock)
        cleaned(stock)
    writer.publish(*fleet.run(writer, 3))
    assert not os.path.exists(stock.full(journal_path(writer.name, 0)))
    b = other(stock, "b", catch_up=False)
    b.put(tokens(1, 40))  # it has a journal of its own before it has read any other
    same(stock, b)
    assert b.store.index.counters()["blocks"] == 6 * 3 + 3 + 10
    writer.kill()


def tidied(host: Stock) -> int:
    store = host.store
    return tidy(store.backend, store.index, store.uuid, store.now_ms())


@pytest.mark.posix("other hosts remember for seconds that a directory was removed")
def test_writers_that_were_killed_are_forgotten_after_a_month(stock: Stock) -> None:
    """Nothing is read twice for it, nothing is lost; one that was only idle is found again."""
    fleet = Fleet(stock.store, stock.ns)
    killed = [fleet.writer() for _ in range(20)]
    for writer in killed:
        writer.publish(*fleet.run(writer, 2))
    idle = killed[0]
    b = other(stock, "b")
    for days in (1, 1, 1, 1, 10, 15, 5):
        stock.clock.now += days * DAY
        write(stock)
        cleaned(stock)
        for host in (stock, b):
            host.store.catch_up()
            assert days == 5 or tidied(host) == 0
            assert len(host.store.index.journals()) >= 20
    assert {w.name for w in killed}.isdisjoint(os.listdir(stock.full("log")))
    for host in (stock, b):
        assert tidied(host) >= 20 and tidied(host) == 0
        assert len(host.store.index.journals()) <= 3
        assert host.store.index.counters()["blocks"] == 40
    stock.clock.now += 60
    write(stock)
    c = other(stock, "c")
    same(stock, b, c)
    idle.roll(sealed=True)
    idle.now_ms = stock.store.now_ms()
    idle.publish(*fleet.run(idle, 4))
    for host in (stock, b, c):
        host.store.catch_up()
        assert host.store.index.counters()["blocks"] == 40  # its first journal may come yet
    stock.clock.now += 700
    for host in (stock, b, c):
        host.store.catch_up()
        host.store.catch_up()
        assert host.store.index.counters()["blocks"] == 44
    same(stock, b, c)
    for writer in killed:
        writer.kill()


def test_a_journal_that_shows_before_the_one_in_front_waits_for_it(stock: Stock) -> None:
    fleet = Fleet(stock.store, stock.ns)
    writer = fleet.writer()
    writer.publish(*fleet.run(writer, 2))
    writer.roll()
    writer.publish(*fleet.run(writer, 3))
    first = stock.full(journal_path(writer.name, 0))
    os.rename(first, f"{first}.late")
    b = other(stock, "b")
    b.store.catch_up()
    stock.clock.now += 60
    b.store.catch_up()
    assert b.store.index.counters().get("blocks", 0) == 0
    os.rename(f"{first}.late", first)
    b.store.catch_up()
    assert b.store.index.counters()["blocks"] == 5
    writer.kill()


def test_writers_that_are_gone_for_good_are_forgotten(stock: Stock) -> None:
    fleet = Fleet(stock.store, stock.ns)
    for _ in range(50):
        writer = fleet.writer()
        writer.publish(*fleet.run(writer, 1))
        writer.end()
    b = other(stock, "b")
    for _ in range(8):
        stock.clock.now += DAY
        write(stock)
        cleaned(stock)
        for host in (stock, b):
            host.store.catch_up()
            tidied(host)
    for host in (stock, b):
        assert len(host.store.index.journals()) <= 3
    assert len(newest(stock.store.backend, stock.store.uuid).marks) <= 3  # type: ignore[union-attr]
    same(stock, b, other(stock, "c"))
    assert b.store.index.counters()["blocks"] == 50


def test_an_absent_mount_makes_no_host_forget(stock: Stock) -> None:
    stock.put(tokens(1, 40))
    write(stock)
    os.rename(stock.store.path, f"{stock.store.path}.away")
    os.makedirs(stock.store.path)
    before = contents(stock)
    stock.store.catch_up()
    tidied(stock)
    assert contents(stock) == before and stock.store.index.journals()
    os.rmdir(stock.store.path)
    os.rename(f"{stock.store.path}.away", stock.store.path)
    same(stock, other(stock, "b"))


# killed

WORK = """
import sys, time
from kvfs.follow import checkpoint
from kvfs.follow.history import prune
from kvfs.store import Store
what, path, index, start = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])
now = [start]
store = Store.open(path, index=index, clock=lambda: now[0], catch_up=what != "load")
print("ready", flush=True)
for i in range(10_000):
    now[0] = start + 3600 * i
    if what == "load":
        from kvfs.follow.history import adopt
        from kvfs.index.schema import META
        store.index.write(lambda a: (a.txn.delete(META + b"followed_ms"),
                                     a.txn.delete(META + b"adopted")))
        store.catch_up()
        continue
    checkpoint.write(store.backend, store.index, "w", store.now_ms())
    if what == "prune":
        prune(store.backend, store.uuid, store.now_ms(), 7_200_000, 7_200_000)
"""


@pytest.mark.crash
@pytest.mark.parametrize("what", ["write", "load", "prune"])
def test_killed_while_it_writes_loads_or_prunes(stock: Stock, ram_dir: Path, what: str) -> None:
    rng, fleet = random.Random(what), Fleet(stock.store, stock.ns)
    blocks = 0
    for _ in range(100):
        writer = fleet.writer()
        writer.publish(*(e for _ in range(30) for e in fleet.run(writer, 3)))
        writer.end() if rng.random() < 0.5 else writer.kill()
        blocks += 90
    stock.store.catch_up()
    write(stock)
    index, now = str(ram_dir / "worker"), stock.clock.now
    for _ in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", WORK, what, stock.store.path, index, str(now)],
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(rng.random() * 0.15)
        process.send_signal(signal.SIGKILL)
        assert process.communicate()[1] == b""
        newest_ = newest(stock.store.backend, stock.store.uuid)
        assert newest_ is not None
        last = max(checkpoint.written_ms(name) for name in os.listdir(stock.full(DIRECTORY)))
        now = stock.clock.now = last / 1000 + 7200
    worker = stock.another(index=index)
    assert worker.store.index.counters()["blocks"] == blocks
    same(stock, worker, other(stock, "new"))
    if what == "prune":
        assert journals(stock) < 100
        write(stock)
        stock.clock.now += 7201
        write(stock)
        cleaned(stock, keep=7200)
        whole = {c.path for c in all_whole(stock.store.backend, stock.store.uuid)}
        assert whole == {f"{DIRECTORY}/{n}" for n in os.listdir(stock.full(DIRECTORY))}
        assert journals(stock) <= 3
        same(stock, other(stock, "newer"))
