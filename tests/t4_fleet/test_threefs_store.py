"""Stores on 3FS, by a stand-in: two hosts with caches of their own; daemons and clients die."""

from __future__ import annotations

import ast
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.arena import sweep
from kvfs.backend import read_into, write_all
from kvfs.backend.threefs import ThreefsBackend
from kvfs.backend.usrbio_layout import SHM
from kvfs.errors import ConfigError
from kvfs.gc.collector import Collector
from kvfs.index.place import require_local
from kvfs.limits import Limits
from kvfs.repair.fsck import fsck
from kvfs.repair.rebuild import rebuild
from kvfs.store import Store
from kvfs.testing.command import kvctl, kvctl_json
from kvfs.testing.stock import Stock, tokens
from kvfs.testing.threefs.host import Host, cluster, may_serve, shared_memory

CHUNK = 64 << 10
SECONDS = 20.0
pytestmark = pytest.mark.skipif(bool(may_serve()), reason=may_serve() or "-")
A, B, C = tokens(1, 40), tokens(2, 80), tokens(3, 400)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    with cluster(tmp_path, hosts=2, chunk=CHUNK) as made:
        yield made


@pytest.fixture
def stock(hosts: list[Host]) -> Iterator[Stock]:
    made = Stock.make(hosts[0].point / "kv", extent=None, durability="batch")
    yield made
    made.close()


def other_host(stock: Stock, host: Host, tmp_path: Path) -> Store:
    return Store.open(host.point / "kv", index=str(tmp_path / "index2"), clock=stock.clock)


def second(stock: Stock, host: Host, tmp_path: Path) -> Stock:
    store = other_host(stock, host, tmp_path)
    stock.opened.append(store)
    return Stock(store, store.namespace(stock.ns.nsid), stock.clock, [], stock.opened)


def test_the_mount_tells_the_backend_and_its_chunk(stock: Stock) -> None:
    assert isinstance(stock.store.backend, ThreefsBackend)
    assert stock.store.config.extent == CHUNK and stock.store.config.own_extents


def test_what_one_host_stores_the_other_finds_at_once(
    stock: Stock, hosts: list[Host], tmp_path: Path
) -> None:
    there = second(stock, hosts[1], tmp_path)
    for i in range(6):
        prompt = tokens(10 + i, 40 + 60 * i)
        stock.put(prompt)
        # Names and lengths that the second host has seen are old for 30 s; its ring reads on.
        there.store.catch_up()
        assert there.good(prompt) == len(prompt) // 4
    there.put(B)
    stock.store.catch_up()
    assert stock.good(B) == 20


def test_runs_begin_in_extents_of_their_own(stock: Stock) -> None:
    for prompt in (A, B, C):
        stock.put(prompt)
    runs = list(stock.store.index.all_runs(stock.ns.number))
    segments = {s.number: s for s in stock.store.index.segments()}
    starts = [segments[r.seg].geometry.offset(r.slot) for r in runs]
    assert all(at % CHUNK == 0 and at >= CHUNK for at in starts)
    assert len({(r.seg, at // CHUNK) for r, at in zip(runs, starts, strict=True)}) == len(runs)
    assert all(s.geometry.first == CHUNK for s in segments.values())


def test_rebuilt_and_checked_from_the_files_alone(
    stock: Stock, hosts: list[Host], tmp_path: Path
) -> None:
    for prompt in (A, B, C):
        stock.put(prompt)
    there = second(stock, hosts[1], tmp_path)  # with a segment that is still open
    rebuild(there.store)
    assert [there.good(p) for p in (A, B, C)] == [10, 20, 100]
    assert fsck(there.store).findings == []
    again = stock.again()
    assert [again.good(p) for p in (A, B, C)] == [10, 20, 100]


def test_collected_on_one_host_and_gone_on_the_other(
    stock: Stock, hosts: list[Host], tmp_path: Path
) -> None:
    there = second(stock, hosts[1], tmp_path)
    stock.put(A)
    there.store.catch_up()
    assert there.good(A) == 10
    hosts[1].set(gc_delay_s=0)
    hosts[0].set(gc_delay_s=0)
    stock.clock.now += 40 * 86400
    stock.put(B)

    def sleep(seconds: float) -> None:
        stock.clock.now += seconds

    Collector(stock.store, sleep=sleep).run(wait=True)
    there.store.catch_up()
    assert there.stored(A) == 0 and there.good(B) == 20


def test_room_that_runs_leave_unused_is_not_cleaned_for(hosts: list[Host]) -> None:
    """Each run has whole chunks, so that copies of short ones would take as much again."""
    stock = Stock.make(hosts[0].point / "kv", extent=None, segment_bytes=16 * CHUNK)
    for i in range(30):
        stock.clock.now += 1
        stock.put(tokens(100 + i, 20))  # 5 of the 16 blocks that a chunk holds
    stock = stock.again()
    result = Collector(stock.store).run().reclaimed
    assert result.live_bytes == 30 * CHUNK and result.cleaned == []
    Limits(capacity_bytes=int(result.used_bytes / 1.5)).save(stock.store.backend)
    for _ in range(3):
        stock.clock.now += 100
        result = Collector(stock.store).run().reclaimed
    assert result.used_bytes < Limits.load(stock.store.backend).capacity_bytes  # type: ignore[operator]
    found = [stock.stored(tokens(100 + i, 20)) for i in range(30)]
    gone = found.count(0)
    assert 10 <= gone <= 25 and found == [0] * gone + [5] * (30 - gone)
    assert result.cleaned == [], "the pass before has made the room"
    stock.close()


@pytest.mark.parametrize("old", [0, 1], ids=["by ioctl", "by a link, as older daemons want it"])
def test_a_day_of_segments_is_one_removal(hosts: list[Host], tmp_path: Path, old: int) -> None:
    stock = Stock.make(hosts[0].point / "kv", extent=None, segment_bytes=4 * CHUNK)
    there = second(stock, hosts[1], tmp_path)
    hosts[0].set(old=old)
    for i in range(24):
        stock.put(tokens(100 + i, 80), ttl_class="agent")
    stock.clock.now += 4 * 86400
    stock.put(B)
    there.store.catch_up()
    begun = there.store.backend.open(there.store.index.segments()[0].path)

    def sleep(seconds: float) -> None:
        stock.clock.now += seconds

    result = Collector(stock.store, sleep=sleep).run(wait=True)
    assert result.problems == [] and len(result.removed) >= 12
    assert stock.store.backend.names("seg/agent") == []
    assert not any((hosts[1].backing / "kv/seg/agent").iterdir())
    # Whoever has a file open there reads on until the servers have removed its chunks.
    page = bytearray(4096)
    assert read_into(there.store.backend, begun, [memoryview(page)], 0) == 4096
    there.store.backend.close(begun)
    stock.close()
    hosts[0].end(signal.SIGTERM)
    totals = ast.literal_eval(hosts[0].said.removeprefix("totals "))
    # Beside it there are the lease and a few small files that were replaced.
    assert totals["removals"] < len(result.removed), totals


@pytest.mark.parametrize("knobs", [
    {"fail_every": 3, "fail_errno": 121}, {"fail_every": 2, "fail_errno": 5},
    {"short_every": 3}, {"delay_ms": 5},
], ids=str)  # fmt: skip
def test_faults_give_a_good_prefix_or_a_miss(
    stock: Stock, hosts: list[Host], knobs: dict[str, float]
) -> None:
    stock.put(C)
    hosts[0].set(**knobs)
    for _ in range(10):
        stock.good(C)  # fails if a byte is wrong
    stock.put(B)
    hosts[0].set(fail_every=0, short_every=0, delay_ms=0)
    stock.put(C)
    stock.put(B)
    assert stock.good(C) == 100 and stock.good(B) == 20


def test_the_daemon_dies_and_comes_back(stock: Stock, hosts: list[Host]) -> None:
    stock.put(C)
    assert stock.good(C) == 100
    hosts[0].kill()
    began = time.monotonic()
    assert stock.fetch(C)[0] == 0
    assert stock.put(B).error is not None
    assert time.monotonic() - began < 3
    hosts[0].start()
    began = time.monotonic()
    while stock.good(C) < 100:
        assert time.monotonic() - began < 5
    while stock.put(B).error is not None:
        assert time.monotonic() - began < 5
    assert stock.good(B) == 20


def test_the_daemon_dies_while_blocks_are_written(stock: Stock, hosts: list[Host]) -> None:
    """What was acknowledged is there when it comes back, and nothing is half there."""
    acknowledged: list[int] = []

    def put() -> None:
        for seed in range(200, 10_000):
            if stock.put(tokens(seed, 80)).error is not None:
                return
            acknowledged.append(seed)

    hosts[0].set(delay_ms=20)
    writer = threading.Thread(target=put)
    writer.start()
    while len(acknowledged) < 3:
        time.sleep(0.001)
    hosts[0].kill()
    writer.join()
    hosts[0].start()
    while stock.put(B).error is not None:
        time.sleep(0.01)
    for _ in range(2):
        assert [stock.good(tokens(seed, 80)) for seed in acknowledged] == [20] * len(acknowledged)
        assert stock.good(B) == 20
        stock = stock.again()
    assert not fsck(stock.store).damaged


_CLIENT = """
import os, sys
from kvfs.index.place import require_local
from kvfs.store import Store
from kvfs.testing.command import kvctl, kvctl_json
from kvfs.testing.stock import Stock, tokens
store = Store.open(sys.argv[1])
stock = Stock(store, store.namespaces()[0], None)
print("ready", flush=True)
for i in range(10**9):
    stock.put(tokens(100 + i % 50, 400))
    stock.good(tokens(3, 400))
"""


def test_a_killed_client_leaves_nothing(stock: Stock, hosts: list[Host]) -> None:
    stock.put(C)
    stock.store.backend.release()
    before = shared_memory()
    for _ in range(3):
        client = subprocess.Popen(
            [sys.executable, "-c", _CLIENT, str(stock.store.path)], text=True,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        assert client.stdout is not None and client.stdout.readline() == "ready\n"
        until = time.monotonic() + SECONDS
        while len(hosts[0].links()) < 3:
            assert client.poll() is None and time.monotonic() < until
        client.kill()
        client.wait()
        client.stdout.close()
        while hosts[0].links():
            assert time.monotonic() < until, hosts[0].links()
    assert stock.good(C) == 100
    stock.store.backend.release()
    while shared_memory() - before:  # a ring that was being made has a name: who comes next sees it
        sweep(SHM)


def test_the_command_line(hosts: list[Host], tmp_path: Path) -> None:
    place = hosts[0].point / "kv"
    kvctl("init", "--store", f"3fs:{place}")
    facts = {fact["name"]: fact for fact in kvctl_json("doctor", "--store", place, code=None)}
    assert facts["rings"]["state"] == "ok"
    kvctl("ns", "create", "--preset", "tiny", "--weights", "w", "--tokenizer", "t",
          "--store", f"3fs:{place}")  # fmt: skip
    for words in (str(place), f"3fs:{place}"):
        assert "tiny" in kvctl_json("ns", "list", "--store", words)["namespace"]
    with Store.open(place, catch_up=False) as store:
        config = store.config
    assert config.own_extents and config.extent == CHUNK


def test_no_index_on_3fs(hosts: list[Host]) -> None:
    with pytest.raises(ConfigError, match="on 3FS"):
        require_local(str(hosts[0].point / "index"), force=True)


def test_a_forked_child_reads_by_rings_of_its_own(stock: Stock, hosts: list[Host]) -> None:
    stock.put(C)
    assert stock.good(C) == 100
    backend = stock.store.backend
    file = backend.open(stock.store.index.segments()[0].path)
    want = bytearray(4096)
    assert backend.readv(file, [memoryview(want)], CHUNK) == 4096
    child = os.fork()
    if not child:
        status = 1
        try:
            got = bytearray(4096)
            backend.readv(file, [memoryview(got)], CHUNK)
            backend.release()
            status = int(got != want)
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert stock.good(C) == 100
    backend.close(file)


def test_completions_that_never_come_take_no_memory_that_is_used_again(hosts: list[Host]) -> None:
    backend = ThreefsBackend(str(hosts[0].point), seconds=0.2, bounce_bytes=1 << 20)
    file = backend.create("x")
    data = os.urandom(200_000)
    write_all(backend, file, [data], 0)
    first = backend.session()
    hosts[0].set(drop_every=1)
    for _ in range(4):
        with pytest.raises(OSError) as e:
            backend.readv(file, [memoryview(bytearray(200_000))], 0)
        assert e.value.errno == errno.ETIMEDOUT
    assert first.worn and first.bounce.kept >= 2
    hosts[0].set(drop_every=0)
    got = bytearray(200_000)
    assert read_into(backend, file, [memoryview(got)], 0) == len(data)
    assert got == data and backend.session() is not first
    backend.close(file)
    backend.release()
