"""Collecting: what expired goes and nothing else, whoever puts, reads or collects meanwhile."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.backend.select import open_backend
from kvfs.errors import BackendError, BusyError, NoStoreError
from kvfs.gc.collector import Collector, GcResult
from kvfs.gc.lease import Holder, Lease
from kvfs.index.schema import CUTS, DROPPED, GONE, LIVE, scan_copies
from kvfs.limits import Limits
from kvfs.repair.fsck import fsck
from kvfs.repair.rebuild import rebuild
from kvfs.store import Store
from kvfs.testing.blocks import payloads, small_identity
from kvfs.testing.faults import Fail, FaultyBackend
from kvfs.testing.indexcheck import index_faults
from kvfs.testing.stock import START, Clock, Stock, tokens

DAY = 86400.0
A, B, C = tokens(1, 40), tokens(2, 40), tokens(3, 40)


@pytest.fixture
def stock(store_dir: Path) -> Iterator[Stock]:
    stock = Stock.make(store_dir)
    yield stock
    assert index_faults(stock.opened[-1].index) == []
    stock.close()


def collect(stock: Stock, *, wait: bool = False, **options: Any) -> GcResult:
    def sleep(seconds: float) -> None:
        stock.clock.now += seconds

    return Collector(stock.store, sleep=sleep, **options).run(wait=wait)


def files(stock: Stock) -> list[str]:
    return sorted(
        str(p.relative_to(stock.store.path)) for p in Path(stock.store.path).rglob("*.seg")
    )


def states(stock: Stock) -> list[int]:
    return [s.state for s in stock.store.index.segments()]


def kill_writer(stock: Stock) -> Stock:
    """Goes on as another process would after this one was killed: nothing is sealed."""
    other = stock.another()
    stock.opened.remove(stock.store)
    _abandoned.append(stock.store)
    return other


_abandoned: list[Store] = []


@pytest.fixture(autouse=True)
def _close_abandoned() -> Iterator[None]:
    yield
    while _abandoned:
        _abandoned.pop().close()


# the whole way


def test_expired_segments_go_whole(stock: Stock) -> None:
    stock.put(A, ttl_class="agent")
    stock.put(B, ttl_class="chatbot")
    stock.clock.now = START + 3 * DAY + 3600
    before = files(stock)
    assert len(before) == 2
    result = collect(stock)
    assert [(d.reason, d.ttl_class, d.runs, d.blocks) for d in result.dropped] == [
        ("expired", "agent", 1, 10)
    ]
    assert result.dropped_bytes == os.path.getsize(stock.full(result.dropped[0].path))
    assert (result.freed_bytes, result.in_grace, result.exit_code) == (0, 1, 0)
    assert files(stock) == before and states(stock) == [DROPPED, LIVE]

    assert collect(stock).removed == []  # within the grace
    stock.clock.now += 61
    result = collect(stock)
    assert [r.reason for r in result.removed] == ["dropped"] and result.dropped == []
    assert files(stock) == [p for p in before if "chatbot" in p] and states(stock) == [GONE, LIVE]
    assert not any(Path(stock.full("seg/agent")).iterdir())
    assert stock.sound(B) == 10 and stock.sound(A) == 0

    stock.clock.now += DAY
    collect(stock)
    assert states(stock) == [LIVE]
    assert collect(stock).to_json()["removed"] == []


def test_waiting_for_the_grace(stock: Stock) -> None:
    stock.put(A, ttl_class="agent")
    stock.clock.now = START + 4 * DAY
    result = collect(stock, wait=True)
    assert len(result.dropped) == len(result.removed) == 1 and result.in_grace == 0
    assert files(stock) == [] and states(stock) == [GONE]
    assert not os.path.exists(stock.full("gc.lease"))


def test_dry_run_says_the_same_and_changes_nothing(stock: Stock) -> None:
    stock.put(A, ttl_class="agent")
    stock.put(B, ttl_class="chatbot")
    stock.clock.now = START + 4 * DAY
    tree = {p: p.stat().st_mtime_ns for p in Path(stock.store.path).rglob("*")}
    rows = (stock.runs(), states(stock))
    planned = collect(stock, dry_run=True)
    assert {p: p.stat().st_mtime_ns for p in Path(stock.store.path).rglob("*")} == tree
    assert (stock.runs(), states(stock)) == rows
    done = collect(stock)
    assert planned.dry_run and planned.dropped == done.dropped
    stock.clock.now += 61
    planned, done = collect(stock, dry_run=True), collect(stock)
    assert planned.removed == done.removed != []
    json.dumps(done.to_json())


def test_nothing_that_is_of_use_goes(stock: Stock) -> None:
    stock.put(A, ttl_class="agent")
    stock.put(B, ttl_class="agent")  # the same segment
    stock.clock.now = START + 2 * DAY
    stock.store.touch(stock.ns, B)
    stock.clock.now = START + 4 * DAY
    assert collect(stock).dropped == []
    assert stock.sound(B) == 10
    stock.clock.now = START + 6 * DAY
    assert len(collect(stock).dropped) == 1


def test_removed_blocks_are_reclaimed_before_their_time(stock: Stock) -> None:
    stock.put(A)
    stock = stock.again()
    stock.put(B)
    stock.put(C)
    stock.store.remove(stock.ns, A)
    stock.store.remove(stock.ns, B)
    result = collect(stock)
    assert [(d.reason, d.blocks) for d in result.dropped] == [("removed", 0)]
    assert stock.sound(C) == 10
    stock.store.remove(stock.ns, C)
    assert [d.reason for d in collect(stock, wait=True).dropped] == ["removed"]
    assert files(stock) == []
    stock.clock.now += 2 * DAY
    collect(stock)
    with stock.store.index.env().read() as txn:
        assert list(scan_copies(txn, CUTS)) == []
    assert stock.store.index.query(lambda a: a.meta_int("cuts")) == 0


def test_what_only_this_host_hides_stays_for_the_others(stock: Stock) -> None:
    """A failed read takes a run out of this host's index; its segment is not dropped for that."""
    stock.put(A)
    other = stock.elsewhere()
    with open(stock.paths()[0], "r+b") as f:
        f.seek(4096)
        good = f.read(1)
        f.seek(4096)
        f.write(bytes([good[0] ^ 1]))
        f.flush()
        assert stock.fetch(A)[0] == stock.stored(A) == 0
        f.seek(4096)
        f.write(good)
    stock.store.writer().retire({s.segment for s in stock.store.index.segments()})
    assert collect(stock).dropped == []
    assert other.sound(A) == 10
    stock.clock.now += 7 * DAY + 3600
    assert [d.reason for d in collect(stock).dropped] == ["empty"]


# those who write


def test_a_segment_that_is_being_written_stays(stock: Stock) -> None:
    """Of a class shorter than a day: a run put into a dropped segment would be lost."""
    stock.store.define_class("brief", 10)
    other = stock.another()
    other.put(A, ttl_class="brief")
    stock.clock.now += 60
    result = collect(stock)
    assert result.dropped == [] and result.being_written == 1
    other.put(B, ttl_class="brief")
    assert stock.sound(B) == 10
    stock.clock.now += 60
    other.store.close()
    assert len(collect(stock).dropped) == 1


def test_a_segment_of_this_process_is_retired_first(stock: Stock) -> None:
    stock.store.define_class("brief", 10)
    stock.put(A, ttl_class="brief")
    stock.clock.now += 60
    assert len(collect(stock, dry_run=True).dropped) == 1
    assert len(collect(stock).dropped) == 1
    stock.put(A, ttl_class="brief")
    assert stock.sound(A) == 10 and states(stock) == [DROPPED, LIVE]


def test_a_run_under_way_keeps_its_segment(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process collects between the write of a run and its publishing."""
    stock.store.define_class("brief", 10)
    stock.put(A, ttl_class="brief")
    stock.clock.now += 60
    writer, seen = stock.store.writer(), []
    publish = writer.publish

    def late(*args: Any) -> None:
        monkeypatch.undo()
        seen.append(collect(stock))
        publish(*args)

    monkeypatch.setattr(writer, "publish", late)
    assert stock.put(B, ttl_class="brief").stored == 10
    assert seen[0].dropped == [] and seen[0].being_written == 1
    assert stock.sound(B) == 10


def test_segments_of_killed_writers(stock: Stock) -> None:
    stock.store.define_class("brief", 10)
    stock.put(A, ttl_class="brief")
    stock = kill_writer(stock)
    stock.clock.now += 3600
    assert collect(stock).being_written == 1  # it may be alive, as far as anyone can tell
    stock.clock.now += DAY
    assert len(collect(stock, wait=True).dropped) == 1 and files(stock) == []


def test_put_between_mark_and_sweep_keeps_its_blocks(stock: Stock) -> None:
    """The same prompt is put, and another is renewed, when both are already marked."""
    stock.put(A, ttl_class="agent")
    stock = stock.again()
    stock.put(B, ttl_class="agent")
    other = stock.another()
    stock.clock.now = START + 4 * DAY

    def meanwhile(phase: str) -> None:
        if phase == "marked":
            assert other.put(A, ttl_class="agent").complete
            heads = [other.ns.hasher(B).digest(1)]
            assert other.store.renew_runs(other.ns, heads, other.store.catalog.ttl("agent")) == 1

    result = collect(stock, on_phase=meanwhile)
    assert [d.reason for d in result.dropped] == ["expired"] and len(result.spared) == 1
    stock.clock.now += 120
    collect(stock)
    for s in (stock, other):
        assert (s.sound(A), s.sound(B)) == (10, 10)


def test_a_put_that_loses_the_race_stores_its_blocks(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It found them stored and was about to renew them; a collector dropped them just then."""
    stock.put(A, ttl_class="agent")
    other = stock.another()
    stock.clock.now = START + 3 * DAY - 1
    writer = other.store.writer()
    publish = writer.publish

    def late(*args: Any) -> None:
        monkeypatch.undo()
        stock.clock.now += 3600
        assert len(collect(stock).dropped) == 1
        publish(*args)

    monkeypatch.setattr(writer, "publish", late)
    result = other.put(A, ttl_class="agent")
    assert result.complete and result.stored == 10
    assert (stock.sound(A), other.sound(A)) == (10, 10)


def test_readers_go_on_through_the_grace(stock: Stock) -> None:
    stock.put(A, ttl_class="agent")
    hasher = stock.ns.hasher(A)
    plan = stock.store.check(stock.ns, hasher)
    stock.clock.now = START + 4 * DAY
    collect(stock)
    assert stock.store.fetch(stock.ns, plan, hasher, blocks=10).blocks == 10
    stock.clock.now += 61
    collect(stock)
    got = stock.store.fetch(stock.ns, plan, hasher, blocks=10)
    assert got.blocks == 0 and got.reason == "segment missing (ENOENT)"


def test_other_hosts_learn_of_it(stock: Stock) -> None:
    stock.put(A, ttl_class="agent")
    other = stock.elsewhere()
    stock.clock.now = START + 4 * DAY
    collect(stock, wait=True)
    other.store.catch_up()
    assert other.runs() == set() and states(other) == [DROPPED]
    result = collect(other)
    assert states(other) == [GONE] and result.problems == [] and result.removed == []


# files that are not as they should be


def test_a_segment_removed_by_hand(stock: Stock) -> None:
    """Now, when it has expired, and while its file waits for the grace to end."""
    stock.put(A, ttl_class="agent")
    path = stock.paths()[0]
    os.unlink(path)
    assert stock.fetch(A) == (0, "segment missing (ENOENT)")
    assert stock.stored(A) == 0
    assert collect(stock).exit_code == 0
    stock.put(A, ttl_class="agent")  # not into the file that nobody finds
    assert stock.sound(A) == 10
    stock = stock.again()
    shutil.rmtree(os.path.dirname(path))
    stock.clock.now = START + 4 * DAY
    result = collect(stock, wait=True)
    assert len(result.dropped) == 2 and result.problems == [] and result.removed == []
    assert states(stock) == [GONE, GONE]


def test_a_directory_in_place_of_a_segment(stock: Stock) -> None:
    stock.put(A, ttl_class="agent")
    path = stock.paths()[0]
    stock = stock.again()
    os.unlink(path)
    os.mkdir(path)
    stock.clock.now = START + 4 * DAY
    result = collect(stock, wait=True)
    assert result.exit_code == 0 and len(result.problems) >= 1
    os.rmdir(path)
    assert collect(stock).problems == [] and states(stock) == [GONE]


def test_a_file_that_cannot_be_removed_is_tried_again(store_dir: Path) -> None:
    stock = Stock.make(store_dir)
    faulty = FaultyBackend(open_backend(str(store_dir)))
    failing = stock.another(backend=faulty)
    stock.put(A, ttl_class="agent")
    stock.clock.now = START + 4 * DAY
    collect(stock)
    stock.clock.now += 61
    for operation in ("remove_tree", "unlink"):
        faulty.on(operation, "seg/*", do=Fail(errno.EACCES))
    result = collect(failing)
    assert len(result.problems) == 2 and states(failing) == [DROPPED] and len(files(stock)) == 1
    assert len(collect(failing).removed) == 1
    stock.close()


def operations(backend: FaultyBackend) -> dict[str, int]:
    return {op: backend.calls.get(op, 0) for op in ("remove_tree", "unlink")}


def test_a_day_goes_by_one_call(store_dir: Path) -> None:
    """However many files and namespaces are in it; on 3FS that is one removal for the servers."""
    stock = Stock.make(store_dir, segment_bytes=1 << 17)
    other = stock.store.create_namespace(small_identity(tokenizer="another"))
    for i in range(12):
        stock.put(tokens(i, 40), ttl_class="agent")
    stock.store.put(other, A, payloads(other.hasher(A), other.row_bytes), ttl_class="agent")
    stock = stock.again()
    faulty = FaultyBackend(open_backend(str(store_dir)))
    watched = stock.another(backend=faulty)
    stock.clock.now = START + 4 * DAY
    assert len(collect(watched).dropped) > 4
    stock.clock.now += 61
    before = operations(faulty)
    result = collect(watched)
    after = operations(faulty)
    assert len(result.removed) > 4 and result.freed_bytes > 0 and result.problems == []
    assert after["remove_tree"] - before["remove_tree"] == 1
    assert files(stock) == [] and os.listdir(stock.full("seg/agent")) == []
    assert set(states(watched)) == {GONE}
    stock.close()


def test_what_is_not_due_keeps_its_directory(stock: Stock) -> None:
    """Another namespace's, and one in which lies what this kvfs does not know."""
    other = stock.store.create_namespace(small_identity(tokenizer="another"))
    third = stock.store.create_namespace(small_identity(tokenizer="a third"))
    stock.put(A, ttl_class="agent")
    for ns in (other, third):
        stock.store.put(ns, A, payloads(ns.hasher(A), ns.row_bytes), ttl_class="agent")
    stock = stock.again()
    stock.clock.now = START + 2 * DAY
    stock.store.touch(other, A)
    strange = Path(stock.full(next(p for p in files(stock) if third.name in p))).parent / "x.new"
    strange.write_bytes(b"mine")
    stock.clock.now = START + 4 * DAY
    result = collect(stock, wait=True)
    assert len(result.removed) == 2 and result.problems == []
    (left,) = files(stock)
    assert other.name in left and strange.read_bytes() == b"mine"
    assert not any(stock.ns.name in str(p) for p in Path(stock.full("seg/agent")).rglob("*"))


def test_orphans_go_after_their_own_time(stock: Stock) -> None:
    """A writer died between writing and publishing: nobody knows of its segment but the disk."""
    stock.put(A, ttl_class="agent")
    path = stock.full(stock.paths()[0])
    stock = stock.again()
    orphan = path[: -len("000000.seg") - 25] + f"{'ab' * 12}-000000.seg"
    shutil.copy(path, orphan)
    with open(orphan, "r+b") as f:  # of a writer of its own
        header = bytearray(f.read(4096))
        header[16:28] = bytes.fromhex("ab" * 12)
        _resum(header)
        f.seek(0)
        f.write(header)
    unfinished = path[: -len("000000.seg") - 25] + f"{'cd' * 12}-000000.seg"
    Path(unfinished).write_bytes(b"")
    stock.clock.now = START + 2 * DAY + 3600
    assert [r.reason for r in collect(stock).removed] == ["unfinished"]
    stock.store.touch(stock.ns, A)
    stock.clock.now = START + 4 * DAY + 3600
    assert [r.reason for r in collect(stock).removed] == ["orphan"]
    assert files(stock) == [s.path for s in stock.store.index.segments()]


def test_files_that_never_got_their_name_go_after_a_day(stock: Stock) -> None:
    left = ["gc.lease.0123456789ab.new", "ns/nobody/namespace.json.0123456789ab.new"]
    os.mkdir(stock.full("ns/nobody"))
    for path in left:
        Path(stock.full(path)).write_bytes(b"{")
    assert collect(stock).removed == []
    stock.clock.now += DAY - 60
    under_way = Path(stock.full("limits.json.0123456789ab.new"))
    under_way.write_bytes(b"{")
    assert collect(stock).removed == []
    stock.clock.now += 60
    removed = collect(stock).removed
    assert [(r.path, r.reason) for r in removed] == [(path, "unfinished") for path in left]
    assert under_way.exists() and collect(stock).problems == []


def _resum(header: bytearray) -> None:
    import struct

    import xxhash

    header[-8:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(header[:-8])))


def test_newer_versions_are_not_touched(stock: Stock) -> None:
    """Neither a segment nor what the journal of a newer kvfs may tell of."""
    stock.put(A, ttl_class="agent")
    path = stock.paths()[0]
    stock = stock.again()
    newer = path.replace("000000.seg", "000001.seg")
    page = bytearray(Path(path).read_bytes()[:4096])
    page[8] = 2
    _resum(page)
    Path(newer).write_bytes(page)
    orphan = path.replace("000000.seg", "000002.seg")
    page[8], page[12] = 1, 2
    _resum(page)
    Path(orphan).write_bytes(page)
    os.makedirs(stock.full(f"log/newer-host-00000000-{'ef' * 12}"))
    Path(stock.full(f"log/newer-host-00000000-{'ef' * 12}/000000.log")).write_bytes(
        b"KVFSLOG1" + bytes([2]) + bytes(55)
    )
    stock.clock.now = START + 30 * DAY
    result = collect(stock)
    assert result.newer == 1 and any("journal version 2" in p for p in result.problems)
    assert Path(newer).exists() and Path(orphan).exists() and len(result.dropped) == 1
    shutil.rmtree(stock.full(f"log/newer-host-00000000-{'ef' * 12}"))
    collect(stock)
    assert Path(newer).exists() and not Path(orphan).exists()


# guards


def test_an_absent_mount_is_not_an_empty_store(stock: Stock) -> None:
    stock.put(A, ttl_class="agent")
    stock.put(B)
    runs, state = stock.runs(), states(stock)
    stock.clock.now = START + 4 * DAY
    away = stock.store.path + ".away"
    os.rename(stock.store.path, away)
    os.mkdir(stock.store.path)
    for wait in (False, True):
        with pytest.raises(NoStoreError):
            collect(stock, wait=wait)
    assert os.listdir(stock.store.path) == []
    assert (stock.runs(), states(stock)) == (runs, state)
    os.rmdir(stock.store.path)
    os.rename(away, stock.store.path)
    assert stock.sound(B) == 10
    assert len(collect(stock).dropped) == 1


def test_the_mount_goes_away_in_the_middle(stock: Stock) -> None:
    stock.put(A, ttl_class="agent")
    stock.clock.now = START + 4 * DAY
    away = stock.store.path + ".away"

    def unmount(phase: str) -> None:
        os.rename(stock.store.path, away)
        os.mkdir(stock.store.path)

    with pytest.raises(NoStoreError):
        collect(stock, on_phase=unmount)
    assert os.listdir(stock.store.path) == [] and states(stock) == [LIVE]
    os.rmdir(stock.store.path)
    os.rename(away, stock.store.path)
    stock.clock.now += 700  # the lease that could not be given back
    assert len(collect(stock).dropped) == 1


def test_a_clock_that_is_behind_stops_it(stock: Stock) -> None:
    stock.store.define_class("brief", 10)
    stock.put(A, ttl_class="brief")
    stock.clock.now += 400 * DAY
    stock.put(B)
    stock.clock.now = START + 3600
    result = collect(stock)
    assert result.refused is not None and "400.0 days behind" in result.refused
    assert result.exit_code == 7 and result.dropped == []
    assert len(collect(stock, force=True).dropped) == 1


def test_a_removal_by_a_clock_that_is_ahead_stops_nothing(stock: Stock) -> None:
    """What is put behind it expires by the clock of its writer, and the cleaner sees that."""
    stock.put(A, ttl_class="agent")
    elsewhere = stock.elsewhere()
    stock.clock.now = START + 365 * DAY
    elsewhere.store.remove_all(elsewhere.ns, whole=True)
    stock.clock.now = START + DAY
    stock.store.catch_up()
    assert stock.store.listed_namespaces() == []
    assert stock.store.create_namespace(stock.ns.identity) in stock.store.listed_namespaces()
    long = tokens(1, 2000)  # more than a segment takes
    assert stock.put(long, ttl_class="agent").complete and stock.good(long) == 500
    (expires,) = {e.expires_ms for e in stock.store.check(stock.ns, long).extents}
    assert expires == (START + 4 * DAY) * 1000
    assert collect(stock).refused is None and stock.good(long) == 500
    stock.clock.now = START + 5 * DAY
    assert stock.stored(long) == 0
    assert collect(stock).refused is None
    stock.clock.now += 61
    assert collect(stock).refused is None
    assert not any(map(os.path.exists, stock.paths()))


def test_too_large_a_share_stops_it(stock: Stock) -> None:
    """The clock jumped ahead by a year; a small store is not worth the guard."""
    for i in range(9):
        stock.put(tokens(i, 8), ttl_class="agent")
        stock = stock.again()
    stock.clock.now += 365 * DAY
    result = collect(stock, min_segments=8)
    assert result.refused is not None and "9 of 9" in result.refused and states(stock) == [LIVE] * 9
    assert collect(stock, min_segments=8, dry_run=True).refused is not None
    assert len(collect(stock, min_segments=8, force=True).dropped) == 9


# one at a time


def test_one_collector_works_the_others_say_so(stock: Stock) -> None:
    stock.put(A, ttl_class="agent")
    stock.clock.now = START + 4 * DAY
    refused: list[str] = []

    def others(phase: str) -> None:
        for _ in range(2):
            with pytest.raises(BusyError, match=f"already running: process {os.getpid()}") as e:
                collect(stock)
            refused.append(str(e.value))
            assert e.value.exit_code == 5
        assert collect(stock, dry_run=True).live >= 0  # changes nothing, so it needs no lease

    assert len(collect(stock, on_phase=others).dropped) == 1
    assert len(refused) == 4
    assert collect(stock).dropped == []


def test_three_processes_at_once(stock: Stock) -> None:
    """One holds the lease until the two others have been turned away."""
    stock.put(A)
    code = (
        "import sys\n"
        "from kvfs.errors import KvfsError\n"
        "from kvfs.gc.collector import Collector\n"
        "from kvfs.store import Store\n"
        "def hold(phase):\n"
        "    print(phase, flush=True); sys.stdin.readline()\n"
        "with Store.open(sys.argv[1]) as store:\n"
        "    try: Collector(store, on_phase=hold, force=True).run()\n"
        "    except KvfsError as e: print(e, file=sys.stderr); sys.exit(e.exit_code)\n"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, stock.store.path], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    waiting = {p.pid: p for p in started}
    turned_away = []
    while len(turned_away) < 2:
        pid, status = os.waitpid(-1, 0)
        process = waiting.pop(pid)
        process.returncode = os.waitstatus_to_exitcode(status)
        turned_away.append(process)
    (worker,) = waiting.values()
    worker.communicate("\n\n")
    for process in turned_away:
        assert process.returncode == 5
        assert "already running" in process.communicate()[1]
    assert worker.returncode == 0


def test_leases_of_the_dead_and_the_late_are_taken_over(stock: Stock) -> None:
    backend, now = stock.store.backend, stock.store.now_ms
    me = Holder.me(now() + 600_000)
    path = stock.full("gc.lease")
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    dead = {"pid": child.pid, "started": 1}
    later = {"pid": me.pid, "started": me.started + 1}
    elsewhere = {"host": "elsewhere", "boot_id": "another", **dead}
    for fields, taken in ((dead, True), (later, True), (elsewhere, False), ({}, False)):
        content = json.loads(me.encode()) | fields
        Path(path).write_text(json.dumps(content))
        if taken:
            with Lease.acquire(backend, now):
                pass
            assert not os.path.exists(path)
        else:
            with pytest.raises(BusyError):
                Lease.acquire(backend, now)
    stock.clock.now += 601
    with Lease.acquire(backend, now) as lease:
        lease.check()
    Path(path).write_text("not a lease")
    with Lease.acquire(backend, now) as lease:
        stock.clock.now += 400
        lease.check()  # prolongs it
        assert json.loads(Path(path).read_text())["expires_ms"] == now() + 600_000
        stock.clock.now += 700
        with Lease.acquire(backend, now) as newer:
            with pytest.raises(BusyError, match="taken over"):
                lease.check()
            lease.release()
            newer.check()


def test_a_lease_that_cannot_be_written(store_dir: Path) -> None:
    stock = Stock.make(store_dir)
    faulty = FaultyBackend(open_backend(str(store_dir)))
    faulty.on("put_new", "gc.lease", do=Fail(errno.EROFS))
    with pytest.raises(BackendError, match=r"gc\.lease"):
        Lease.acquire(faulty, stock.store.now_ms)
    stock.close()


# after a crash, a rebuild, many times


def test_every_step_can_be_cut_off_and_finished(store_dir: Path) -> None:
    """Each call on the storage fails once; whatever pass comes next ends in the same state."""
    stock = Stock.make(store_dir)
    faulty = FaultyBackend(open_backend(str(store_dir)))
    failing = stock.another(backend=faulty)
    for i, operation in enumerate(("put_new", "writev", "unlink", "load", "size", "remove_tree")):
        for nth in (1, 2):
            prompt = tokens(100 * i + nth, 40)
            stock.put(prompt, ttl_class="agent")
            stock.clock.now += 4 * DAY
            rule = faulty.on(operation, do=Fail(errno.EIO), nth=nth)
            with contextlib.suppress(BackendError):
                collect(failing, wait=True)
            rule.times = 0
            stock.clock.now += 700  # the lease, if it could not be given back
            collect(failing, wait=True)
            collect(failing)
            assert files(stock) == [], (operation, nth)
            assert stock.stored(prompt) == 0
    stock.close()


def test_a_rebuild_knows_what_was_dropped(stock: Stock) -> None:
    stock.put(A, ttl_class="agent")
    stock.put(B)
    stock.clock.now = START + 4 * DAY
    collect(stock, wait=True)
    runs = stock.runs()
    rebuild(stock.store, source="journals")
    assert stock.runs() == runs and states(stock) == [DROPPED, LIVE]
    assert collect(stock).problems == [] and sorted(states(stock)) == [LIVE, GONE]
    rebuild(stock.store, source="segments")
    assert stock.runs() == runs


def test_a_failed_journal_drops_nothing(store_dir: Path) -> None:
    stock = Stock.make(store_dir)
    stock.put(A, ttl_class="agent")
    faulty = FaultyBackend(open_backend(str(store_dir)))
    failing = stock.another(backend=faulty)
    stock.clock.now = START + 4 * DAY
    failing_writes = faulty.during("writev", "log/*", do=Fail(errno.EIO), times=None)
    with failing_writes, pytest.raises(BackendError):
        collect(failing)
    assert states(failing) == [LIVE]
    assert len(collect(failing).dropped) == 1 and states(stock) == [DROPPED]
    stock.close()


def test_disk_use_and_index_agree_over_many_days(stock: Stock) -> None:
    """Puts, touches, removals, restarts and passes in random order: nothing is left behind."""
    rng = random.Random(7)
    for step in range(60):
        stock.clock.now += rng.random() * DAY
        ttl = rng.choice(("agent", "chatbot"))
        stock.put(tokens(step, rng.randrange(4, 60)), ttl_class=ttl)
        if rng.random() < 0.3:
            stock.store.remove(stock.ns, rng.choice(stock.prompts), from_block=rng.randrange(4))
        if rng.random() < 0.3:
            stock.store.touch(stock.ns, rng.choice(stock.prompts))
        if rng.random() < 0.3:
            stock = stock.again()
        if rng.random() < 0.5:
            known = {s.path for s in stock.store.index.segments() if s.state != GONE}
            collect(stock, wait=rng.random() < 0.5)
            known |= {s.path for s in stock.store.index.segments()}  # what was copied forward
            assert set(files(stock)) <= known
    for prompt in stock.prompts:
        assert stock.sound(prompt) == stock.stored(prompt)
    stock = stock.again()
    stock.clock.now += 15 * DAY
    collect(stock, wait=True)
    stock.clock.now += 2 * DAY
    collect(stock)
    assert files(stock) == [] and states(stock) == []
    assert stock.store.index.counters()["blocks"] == 0


# everybody at once

PROCESS = """
import random, select, sys
from kvfs.errors import KvfsError
from kvfs.gc.collector import Collector
from kvfs.store import Store
from kvfs.testing.stock import Clock, Stock, tokens

role, path, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = Store.open(path)
stock = Stock(store, store.namespaces()[0], Clock())
rng = random.Random(number)

def told_to_stop():
    return bool(select.select([sys.stdin], [], [], 0)[0])

def write(i):
    seed = number * 10_000 + i
    result = stock.put(tokens(seed, 40), ttl_class="brief" if i % 2 else "chatbot")
    assert result.complete, result
    if i % 2 == 0:
        print(seed, flush=True)

def read(i):
    store.catch_up()
    stock.good(tokens(rng.randrange(1, 3) * 10_000 + rng.randrange(200), 40))

def collect(i):
    print(i, flush=True)
    try:
        Collector(store, force=True).run()
    except KvfsError as e:
        assert e.exit_code == 5, e

work, i = {"write": write, "read": read, "collect": collect}[role], 0
while not told_to_stop():
    work(i)
    i += 1
store.close()
"""


Start = Callable[[str, int], subprocess.Popen[str]]
"""Starts PROCESS in a role; it ends with the test."""


@pytest.fixture
def start(store_dir: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start(role: str, number: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, role, str(store_dir), str(number)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.crash
def test_writers_readers_and_collectors_that_are_killed(store_dir: Path, start: Start) -> None:
    """No reader meets a wrong byte, no stored block is lost before its time, nothing is left."""
    # Large enough for any clock: these processes live in real time.
    stock = Stock.make(
        store_dir, clock=Clock(time.time()), grace_seconds=0.2, segment_bytes=1 << 16
    )
    stock.store.define_class("brief", 1)
    Limits(copy_rate=None, remove_rate=None).save(stock.store.backend)
    others = [start(role, n) for role in ("write", "read") for n in (1, 2)]
    rng = random.Random(3)
    for n in range(9):
        collector = start("collect", n)
        out = collector.stdout
        assert out is not None and out.readline()
        if n == 8:  # the last one gets far enough to remove what it dropped
            assert [out.readline() for _ in range(9)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            collector.wait(rng.random())
        collector.kill()
        assert "Error" not in collector.communicate()[1]
    kept: list[int] = []
    for process in others:
        out, err = process.communicate("stop\n")
        assert process.returncode == 0, err
        kept += map(int, out.split())
    stock.clock.now = time.time()
    stock.store.catch_up()
    assert all(stock.sound(tokens(seed, 40)) == 10 for seed in kept) and len(kept) > 20
    assert GONE in states(stock)
    report = fsck(stock.store)
    left = {"unsealed", "dropped", "orphan", "copy", "hole"}
    assert not report.damaged and report.counts.keys() <= left, report.findings
    stock.clock.now += DAY + 10  # copies of a collector that was killed are told by no journal
    collect(stock, force=True, wait=True)
    assert all("/chatbot/" in path for path in files(stock))
    stock.clock.now += 8 * DAY
    collect(stock, force=True, wait=True)
    collect(stock)
    assert files(stock) == []
    stock.close()
