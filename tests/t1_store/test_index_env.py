"""The index as a file of LMDB: opened twice, forked, killed in, outgrown and spoilt.

What may kill a process happens in a child.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs import catalog
from kvfs.errors import KvfsError
from kvfs.frames import NamespaceEntry, RunEntry, SegmentEntry
from kvfs.index import Index, guard
from kvfs.index import env as env_module
from kvfs.index.apply import Applier
from kvfs.index.schema import META
from kvfs.store import Store
from kvfs.testing import children
from kvfs.testing.blocks import small_identity
from kvfs.testing.indexcheck import index_faults
from kvfs.testing.stock import Stock, tokens

PROMPTS = [tokens(seed, 4 * (1 + seed % 7)) for seed in range(20)]


@pytest.fixture
def place(ram_dir: Path, tmp_path: Path) -> Path:
    path = ram_dir / tmp_path.name
    path.mkdir()
    return path


@pytest.fixture
def stock(place: Path) -> Iterator[Stock]:
    made = Stock.make(place / "store", index=str(place / "index"))
    yield made
    made.close()


# one environment per process


def test_one_directory_by_several_names(stock: Stock, place: Path) -> None:
    (place / "link").symlink_to(place / "store")
    (place / "index link").symlink_to(place / "index")
    names = [
        (place / "store", place / "index"),
        (f"{place}/store/", f"{place}/index/"),
        (place / "link", place / "index link"),
        (f"{place}/../{place.name}/store", f"{place}/./index"),
    ]
    others = [
        Stock(Store.open(s, index=str(i), clock=stock.clock), stock.ns, stock.clock)
        for s, i in names
    ]
    assert len({id(other.store.index.env()) for other in others}) == 1
    errors: list[BaseException] = []

    def use(mine: Stock, first: int) -> None:
        try:
            for prompt in PROMPTS[first::4] * 5:
                assert mine.put(prompt).complete
                assert mine.good(prompt) == len(prompt) // 4
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=use, args=(o, n)) for n, o in enumerate(others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for n, other in enumerate(others):
        other.store.close()
        for rest in others[n + 1 :]:
            assert rest.put(tokens(100 + n, 8)).complete and rest.good(PROMPTS[0]) == 1
    assert stock.good(tokens(102, 8)) == 2


def test_closing_twice_and_using_what_is_closed(stock: Stock) -> None:
    other = stock.another(index=os.path.dirname(stock.store.index.path))
    other.store.close()
    other.store.close()
    assert stock.put(PROMPTS[0]).complete


# namespaces: many of them, and in an index that others make anew


def test_a_namespace_is_found_without_a_look_at_the_others(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, unknown = small_identity(model="other"), small_identity(model="unknown")
    stock.store.create_namespace(other)
    stock.store.remove_all(stock.store.namespace(other.name), whole=True)

    def all_rows(*_: object) -> None:
        raise AssertionError("reads a whole table")

    monkeypatch.setattr(Index, "_scan", all_rows)
    known = stock.store.catalog.known
    assert [known(i) for i in (stock.ns.identity, other, unknown)] == [True, False, False]


def test_handles_are_kept_for_some_namespaces_and_work_for_all(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "HANDLES", 3)
    identities = [small_identity(model=f"m{n}") for n in range(10)]
    held = [stock.store.create_namespace(identity) for identity in identities]
    assert stock.store.create_namespace(identities[9]) is held[9]
    assert len(stock.store.catalog._recent) == 3
    for ns, seed in zip(held, range(10), strict=True):
        mine = Stock(stock.store, ns, stock.clock)
        assert mine.put(tokens(seed, 8)).complete and mine.good(tokens(seed, 8)) == 2


def test_segments_that_were_hit_are_kept_in_bounds(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.index.index.SEGMENTS_KEPT", 3)
    for prompt in PROMPTS[:8]:
        assert stock.put(prompt).complete
        stock.store.writer().retire({s.segment for s in stock.store.index.segments()})
    for prompt in PROMPTS[:8] * 2:
        assert stock.good(prompt) == len(prompt) // 4
    assert len(stock.store.index.segments()) == 8 and len(stock.store.index._segments) <= 3


def test_numbers_do_not_depend_on_the_order(stock: Stock, place: Path) -> None:
    ids = [b"\x01" * 16, b"\x02" * 16, b"\x81" + b"\x01" * 15, b"\x01" * 15 + b"\x03"]
    found = []
    for n, order in enumerate((ids, ids[::-1])):
        index = Index(str(place / f"own{n}"), bytes(16))
        for nsid in order:
            index.write(lambda a, nsid=nsid: a.apply(NamespaceEntry(nsid, "{}")))  # type: ignore[misc]
        found.append({nsid: known.number for nsid in ids if (known := index.namespace(nsid))})
        index.close()
    assert all(
        len(set(numbers.values())) == len(ids) and all(numbers.values()) for numbers in found
    )
    assert found[0][ids[1]] == found[1][ids[1]]  # the others have one beginning: first come


@pytest.mark.parametrize("counted", [False, True])
def test_an_index_that_another_process_made_anew(
    stock: Stock, monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    """It has met the namespaces in another order; counted: ids that are too much alike."""
    if counted:
        monkeypatch.setattr(Applier, "_number_for", lambda a, nsid: a._next("last_ns"))
    names = [stock.ns.name, *(f"m{n}" for n in range(9, 0, -1))]
    held = [stock.ns, *(stock.store.create_namespace(small_identity(model=m)) for m in names[1:])]
    hosts = [Stock(stock.store, ns, stock.clock) for ns in held]
    assert stock.put(PROMPTS[3]).complete
    assert stock.store.index.revive() is False
    shutil.rmtree(stock.store.index.path)

    def anew() -> None:
        Store.open(stock.store.path, index=os.path.dirname(stock.store.index.path)).close()

    for _ in range(2):  # the first one enters, leaves and is found by those that stay
        assert children.run(anew) == 0
    assert stock.store.index.revive() is True
    stock.store.catch_up()
    for host in hosts:
        assert host.put(PROMPTS[5]).complete and host.good(PROMPTS[5]) == 6
    assert stock.good(PROMPTS[3]) == 4
    assert index_faults(stock.store.index) == []


@pytest.mark.parametrize("why", ["deleted", "forked"])
def test_an_index_that_cannot_be_had_is_tried_again(
    stock: Stock, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """And nothing that others have opened meanwhile is closed."""
    assert stock.put(PROMPTS[3]).complete
    index = stock.store.index

    def refuse(*_: object) -> None:
        raise KvfsError("no descriptors left")

    def again() -> None:
        with monkeypatch.context() as m:
            m.setattr("kvfs.index.index.acquire", refuse)
            for _ in range(2):
                with pytest.raises(KvfsError, match="no descriptors"):
                    index.revive()
        fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
        assert index.revive() is (why == "deleted")
        for fd in fds:
            os.close(fd)  # EBADF if it was closed
        stock.store.catch_up()
        assert stock.good(PROMPTS[3]) == 4

    if why == "deleted":
        shutil.rmtree(index.path)
        again()
    else:
        assert children.run(again) == 0


def test_an_index_that_others_made_useless_is_not_closed(stock: Stock) -> None:
    """What this process has of it goes on until there is another one to be had."""
    assert stock.put(PROMPTS[3]).complete
    index = stock.store.index
    shutil.rmtree(index.path)
    newer = Index(index.path + ".new", index.store)
    newer.write(lambda a: a.txn.put(META + b"format", b"2"))
    newer.close()
    os.rename(newer.path, index.path)
    for _ in range(2):
        with pytest.raises(KvfsError, match="format"):
            index.revive()
    assert stock.good(PROMPTS[3]) == 4
    shutil.rmtree(index.path)
    assert index.revive() is True
    stock.store.catch_up()
    assert stock.good(PROMPTS[3]) == 4


# fork


def test_parent_and_child_use_the_same_store(stock: Stock) -> None:
    assert stock.put(PROMPTS[3]).complete

    def child() -> None:
        assert stock.good(PROMPTS[3]) == 4
        assert stock.put(PROMPTS[4]).complete
        assert stock.good(PROMPTS[4]) == 5
        stock.store.close()

    for _ in range(3):
        assert children.run(child) == 0
        assert stock.good(PROMPTS[4]) == 5
        assert stock.put(PROMPTS[5]).complete
    grandchild: list[int] = []
    assert children.run(lambda: grandchild.append(children.run(child))) == 0
    writers = {s.path.rpartition("/")[2].rpartition("-")[0] for s in stock.store.index.segments()}
    # The parent's one; each child that stored something new has its own.
    assert len(writers) == 2
    assert index_faults(stock.store.index) == []


def test_a_child_that_only_leaves_takes_nothing_along(stock: Stock) -> None:
    assert stock.put(PROMPTS[3]).complete
    before = stock.store.stats()
    assert children.run(stock.store.close) == 0
    assert stock.put(PROMPTS[3] + tokens(9, 4)).complete
    assert stock.good(PROMPTS[3]) == 4
    after = stock.store.stats()
    assert after["put_blocks"] == before["put_blocks"] + 1


def test_forking_while_others_are_in_the_middle(stock: Stock) -> None:
    """A lock that another thread holds at the fork is never released in the child."""
    done = threading.Event()
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        n = 0
        try:
            while not done.is_set():
                n += 1
                assert stock.put(tokens(seed * 10_000 + n, 12)).complete
                assert stock.good(tokens(seed * 10_000 + n, 12)) == 3
                stock.store.stats()
        except BaseException as e:
            errors.append(e)

    def child() -> None:
        assert stock.store.check(stock.ns, PROMPTS[3]).stored_blocks == 4
        assert stock.good(PROMPTS[3]) == 4
        assert stock.put(tokens(5_000_000 + os.getpid(), 8)).complete
        stock.store.stats()
        stock.store.close()

    assert stock.put(PROMPTS[3]).complete
    assert stock.good(PROMPTS[3]) == 4  # what is imported late is: its lock is Python's own
    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    try:
        assert [children.run(child, seconds=10) for _ in range(25)] == [0] * 25
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert index_faults(stock.store.index) == []


# readers that die or stay


DIE_READING = """
import os, signal, sys
from kvfs.index import Index
index = Index(sys.argv[1], bytes.fromhex(sys.argv[2]))
for _ in range(int(sys.argv[3])):
    if not os.fork():
        index.env().begin_read()
        os.kill(os.getpid(), signal.SIGKILL)
for _ in range(int(sys.argv[3])):
    os.wait()
"""


def test_readers_that_are_killed_leave_room_for_others(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three hundred of them, in a table of 126."""
    monkeypatch.setattr(env_module, "MAX_READERS", 126)
    stock = stock.again(index=os.path.dirname(stock.store.index.path))
    assert stock.put(PROMPTS[3]).complete
    index = stock.store.index
    script = DIE_READING.replace("import Index", "import Index, env; env.MAX_READERS = 126")
    for _ in range(3):
        command = [sys.executable, "-c", script, index.path, index.store.hex(), "100"]
        assert subprocess.run(command, check=False).returncode == 0
        assert stock.good(PROMPTS[3]) == 4
        with Store.open(stock.store.path, index=os.path.dirname(index.path)) as other:
            assert other.check(other.namespace(stock.ns.nsid), PROMPTS[3]).stored_blocks == 4
    assert stock.store.stats()["index_readers"] <= 126


def test_a_table_full_of_living_readers_is_a_clear_error(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env_module, "MAX_READERS", 4)
    index = Stock.make(place / "store", index=str(place / "index")).store.index
    env = index.env()
    held = []
    with pytest.raises(KvfsError, match="4 live readers"):
        for _ in range(6):
            held.append(env.begin_read())
    while held:
        env.end_read(held.pop())
    assert index.namespaces()
    index.close()


def test_a_reader_that_stays_costs_room_only_while_it_stays(stock: Stock) -> None:
    def renew(times: int) -> int:
        for _ in range(times):
            stock.clock.now += 1
            stock.store.touch(stock.ns, PROMPTS[6], ttl_class="agent")
        return os.path.getsize(os.path.join(stock.store.index.path, "data.mdb"))

    for prompt in PROMPTS:
        assert stock.put(prompt).complete
    steady = renew(300)
    env = stock.store.index.env()
    reader = env.begin_read()
    grown = renew(300)
    env.end_read(reader)
    assert grown > steady
    assert renew(300) <= grown and renew(1000) <= grown
    assert stock.store.stats()["index_bytes"] <= grown


# a map that is too small


GROW = """
import json, sys
from kvfs.store import Store
from kvfs.testing.blocks import first_wrong, payloads
from kvfs.testing.stock import tokens
path, index, seed, count, write = json.loads(sys.argv[1])
store = Store.open(path, index=index, map_bytes=1 << 20)
(ns,) = store.namespaces()
print("ready", flush=True)
sys.stdin.readline()
if write:
    for n in range(count):
        hasher = ns.hasher(tokens(seed * 50_000 + n, 4))
        assert store.put(ns, hasher, payloads(hasher, ns.row_bytes)).complete
else:
    found = looked = 0
    while found < count:
        looked += 1
        for writer in (0, 1):
            plan = store.check(ns, tokens(writer * 50_000 + looked % count, 4))
            found += plan.stored_blocks
print("done", flush=True)
store.close()
"""


def test_a_map_that_is_too_small_grows_under_all_its_users(place: Path) -> None:
    """Two processes write 50,000 rows into an index of 1 MiB, four read from it."""
    runs = 25_000 // 3  # a run is three rows
    stock = Stock.make(place / "store", index=str(place / "index"), map_bytes=1 << 20)
    stock.store.clock = time.time  # that of the processes
    jobs = [(seed, runs, True) for seed in (0, 1)] + [(seed, 3000, False) for seed in range(4)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", GROW,
             json.dumps([str(place / "store"), str(place / "index"), *job])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for job in jobs
    ]  # fmt: skip
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    outputs = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        outputs.append((process.communicate()[0], process.returncode))
    assert outputs == [("done\n", 0)] * 6
    found = [
        sum(stock.stored(tokens(seed * 50_000 + n, 4)) for n in range(runs)) for seed in (0, 1)
    ]
    assert found == [runs, runs]
    stats = stock.store.stats()
    assert stats["blocks"] == 2 * runs and stats["index_map_bytes"] > 4 << 20
    assert index_faults(stock.store.index) == []
    stock.close()


# an index that is spoilt


class Spoilt:
    """An index with long and short runs and pages that are free again, and what checks found."""

    def __init__(self, place: Path) -> None:
        self.place = place
        stock = Stock.make(place / "store", index=str(place / "index"))
        rng = random.Random(1)
        self.prompts = [
            tokens(rng.randrange(20), 4 * rng.randrange(1, 40))
            + tokens(n, 4 * rng.choice([1, 2, 300]))
            for n in range(60)
        ]
        for n, prompt in enumerate(self.prompts):
            assert stock.put(prompt).complete
            if n % 7 == 0:
                stock.store.remove(stock.ns, rng.choice(self.prompts), from_block=n % 3)
        self.nsid = stock.ns.nsid
        self.want = [stock.stored(prompt) for prompt in self.prompts]
        self.index = Path(stock.store.index.path)
        self.clock = stock.clock
        stock.close()
        shutil.copytree(place / "index", place / "sound")

    def restore(self) -> None:
        shutil.rmtree(self.place / "index")
        shutil.copytree(self.place / "sound", self.place / "index")

    def open(self) -> Store:
        return Store.open(self.place / "store", index=str(self.place / "index"), clock=self.clock)

    def answers(self, store: Store) -> list[int]:
        ns = store.namespace(self.nsid)
        return [store.check(ns, prompt).stored_blocks for prompt in self.prompts]


@pytest.fixture(scope="module")
def spoilt(ram_dir: Path) -> Iterator[Spoilt]:
    place = ram_dir / "spoilt"
    place.mkdir()
    yield Spoilt(place)


def garble(path: Path, rng: random.Random) -> str:
    """Changes some bytes of a file; returns how."""
    data = bytearray(path.read_bytes())
    kind = rng.choice(["bit", "byte", "page", "zeros", "cut", "head", "swap"])
    for _ in range(rng.choice([1, 1, 3, 20])):
        at, page = rng.randrange(len(data)), rng.randrange(len(data) // 4096) * 4096
        other = rng.randrange(len(data) // 4096) * 4096
        if kind == "bit":
            data[at] ^= 1 << rng.randrange(8)
        elif kind == "byte":
            data[at] = rng.randrange(256)
        elif kind == "head":
            data[page + rng.randrange(40)] = rng.randrange(256)
        elif kind in ("page", "zeros"):
            data[page : page + 4096] = rng.randbytes(4096) if kind == "page" else bytes(4096)
        elif kind == "swap":
            a, b = slice(page, page + 4096), slice(other, other + 4096)
            data[a], data[b] = data[b], data[a]
    path.write_bytes(data[: rng.randrange(len(data))] if kind == "cut" else data)
    later = path.stat().st_mtime_ns + 10**9  # whatever the grain of the file system's times
    os.utime(path, ns=(later, later))
    return kind


@pytest.mark.parametrize("seed", range(24))
def test_a_garbled_index_is_made_anew(spoilt: Spoilt, seed: int) -> None:
    spoilt.restore()
    garble(spoilt.index / "data.mdb", random.Random(seed))

    def child() -> None:
        with spoilt.open() as store:
            assert store.index.discarded == "its file was changed by something else"
            assert spoilt.answers(store) == spoilt.want

    assert children.run(child) == 0, f"seed {seed}"


@pytest.mark.parametrize("seed", range(24))
def test_an_index_garbled_after_a_kill_kills_nobody(spoilt: Spoilt, seed: int) -> None:
    """Without a stamp only what is inside can tell: what is not noticed may find less, and never
    anything else."""
    spoilt.restore()
    (spoilt.index / "clean.stamp").unlink()
    garble(spoilt.index / "data.mdb", random.Random(seed))

    def child() -> None:
        with spoilt.open() as store:
            found = spoilt.answers(store)
            if store.index.discarded:
                assert found == spoilt.want
            assert all(n <= len(p) // 4 for n, p in zip(found, spoilt.prompts, strict=True))
            stock = Stock(store, store.namespace(spoilt.nsid), spoilt.clock)
            for n, prompt in enumerate(spoilt.prompts):
                stock.good(prompt)
                assert stock.put(tokens(1000 + n, 4 * (1 + n % 100))).error is None

    assert children.run(child) == 0, f"seed {seed}"


@pytest.mark.parametrize(
    "gone", [["data.mdb"], ["lock.mdb"], ["clean.stamp"], ["data.mdb", "lock.mdb"],
             ["users.lock"], ["data.mdb", "clean.stamp", "users.lock", "lock.mdb"]],
)  # fmt: skip
def test_files_of_an_index_that_are_gone(spoilt: Spoilt, gone: list[str]) -> None:
    spoilt.restore()
    for name in gone:
        (spoilt.index / name).unlink()
    with spoilt.open() as store:
        assert spoilt.answers(store) == spoilt.want


@pytest.mark.parametrize("name", ["lock.mdb", "users.lock", "clean.stamp", "counters.json"])
@pytest.mark.parametrize("content", [b"", b"\0" * 8192, os.urandom(5000)])
def test_files_beside_an_index_that_are_garbled(spoilt: Spoilt, name: str, content: bytes) -> None:
    spoilt.restore()
    (spoilt.index / name).write_bytes(content)
    assert children.run(lambda: _answers(spoilt)) == 0


def _answers(spoilt: Spoilt) -> None:
    with spoilt.open() as store:
        assert spoilt.answers(store) == spoilt.want
        store.stats()


def test_an_index_of_an_earlier_boot_that_was_in_use_is_not_believed(spoilt: Spoilt) -> None:
    """Its commits were not synced: the machine may have gone down in the middle of one."""
    spoilt.restore()
    (spoilt.index / "clean.stamp").unlink()
    (spoilt.index / "users.lock").write_text("another boot")
    with spoilt.open() as store:
        assert store.index.discarded == "the machine went down while it was in use"
        assert spoilt.answers(store) == spoilt.want


def test_an_index_that_was_closed_in_order_is_taken_as_it_is(
    spoilt: Spoilt, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt.restore()
    (spoilt.index / "clean.stamp").unlink()  # a copy is another file: look at it once
    spoilt.open().close()
    monkeypatch.setattr(guard.Guard, "_walk", lambda self: pytest.fail("walked"))
    with spoilt.open() as store:
        assert store.index.discarded is None
        assert spoilt.answers(store) == spoilt.want
    (spoilt.index / "users.lock").write_text("another boot")
    with spoilt.open() as store:
        assert store.index.discarded is None


def test_a_process_that_only_reads_leaves_the_stamp(spoilt: Spoilt) -> None:
    spoilt.restore()
    (spoilt.index / "clean.stamp").unlink()
    spoilt.open().close()
    before = (spoilt.index / "clean.stamp").stat().st_mtime_ns

    def killed() -> None:
        store = spoilt.open()
        spoilt.answers(store)
        os.kill(os.getpid(), signal.SIGKILL)

    assert children.run(killed) == -signal.SIGKILL
    assert (spoilt.index / "clean.stamp").stat().st_mtime_ns == before
    with spoilt.open() as store:
        assert store.index.discarded is None and spoilt.answers(store) == spoilt.want


# a large one


@pytest.mark.slow
def test_a_million_rows_are_ready_in_time(place: Path) -> None:
    """At once after an orderly stop, in ten seconds after a kill."""
    stock = Stock.make(place / "store", index=str(place / "index"))
    segment, runs = b"0" * 16, 340_000

    def add(first: int) -> None:
        entries = [
            RunEntry(stock.ns.nsid, segment, 2 * n, 0, 1, 1 << 60, b"r" * 16, b"", os.urandom(32))
            for n in range(first, first + 20_000)
        ]
        stock.store.index.write(lambda a: [a.apply(entry) for entry in entries])

    begin = SegmentEntry(segment, stock.ns.nsid, 4096, 1 << 20, 4096, 0, 1000, "agent", "seg/x")
    stock.store.index.write(lambda a: a.apply(begin))
    for first in range(0, runs, 20_000):
        add(first)
    assert stock.store.stats()["blocks"] == 2 * runs
    stock.close()

    def seconds_to_open() -> float:
        start = time.monotonic()
        store = Store.open(place / "store", index=str(place / "index"))
        taken = time.monotonic() - start
        assert store.index.discarded is None and store.stats()["blocks"] == 2 * runs
        store.close()
        return taken

    def killed() -> None:
        store = Store.open(place / "store", index=str(place / "index"))
        store.define_class("new", 60)
        os.kill(os.getpid(), signal.SIGKILL)

    assert seconds_to_open() < 3
    assert children.run(killed) == -signal.SIGKILL
    assert seconds_to_open() < 10
