"""Blocks that an engine keys itself: found from the middle on, whoever wrote, moved or removed."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs.backend import PosixBackend
from kvfs.errors import InputError
from kvfs.follow import checkpoint
from kvfs.gc.cleaner import Cleaner
from kvfs.gc.collector import Collector
from kvfs.gc.expiry import Expiry
from kvfs.gc.occupancy import occupied, worth_cleaning
from kvfs.gc.purge import Purge
from kvfs.gc.throttle import Bucket
from kvfs.index.schema import KEYS, WAITING, scan, scan_copies
from kvfs.repair.fsck import fsck
from kvfs.repair.rebuild import rebuild
from kvfs.testing import children
from kvfs.testing.faults import Fail, FaultyBackend
from kvfs.testing.fetchers import FetcherThread
from kvfs.testing.indexcheck import index_faults
from kvfs.testing.keyed import KeyedStock, keys, payload
from kvfs.testing.stock import flip
from kvfs.writer import Writer

DAY = 86_400.0
A = keys(1, 0, 12)


@pytest.fixture
def stock(ram_dir: Path, tmp_path: Path) -> Iterator[KeyedStock]:
    stock = KeyedStock.make(ram_dir / tmp_path.name, index=str(tmp_path / "here"))
    yield stock
    for store in stock.opened:
        if not store._closed:
            assert index_faults(store.index) == []
    stock.close()


def other_host(stock: KeyedStock, tmp_path: Path, name: str = "there", **more: Any) -> KeyedStock:
    return stock.another(index=str(tmp_path / name), **more)


def runs(stock: KeyedStock) -> list[tuple[int, int]]:
    """(number of the first block, blocks) of every run."""
    return sorted((r.block, r.count) for r in stock.store.index.all_runs(stock.ns.number))


# put, check, fetch


def test_what_was_put_is_found_from_any_block_on(stock: KeyedStock) -> None:
    result = stock.put(A)
    assert (result.blocks, result.stored, result.existing, result.complete) == (12, 12, 0, True)
    for first in range(12):
        assert stock.store.check_keys(stock.ns, A[first:]).stored_blocks == 12 - first
        assert stock.good(A[first:]) == 12 - first
    assert len(stock.store.check_keys(stock.ns, A).extents) == 1
    assert stock.store.check_keys(stock.ns, A[3:5]).reason == "hit"


def test_a_hit_is_not_capped_the_engine_decides(stock: KeyedStock) -> None:
    stock.put(A)
    plan = stock.store.check_keys(stock.ns, A)
    assert plan.hit_blocks == plan.stored_blocks == 12


def test_blocks_one_at_a_time_and_from_the_middle(stock: KeyedStock) -> None:
    stock.put(A[4:6], A[3])
    stock.put([A[9]], A[8])
    assert stock.have(A) == [i in (4, 5, 9) for i in range(12)]
    assert stock.good(A) == 0 and stock.good(A[4:]) == 2 and stock.good([A[9]]) == 1
    plan = stock.store.check_keys(stock.ns, A)
    assert (plan.stored_blocks, plan.reason) == (0, "root unknown")
    assert stock.store.check_keys(stock.ns, A[4:]).reason == "diverged at block 2"
    got = stock.store.fetch_keys(stock.ns, A[4:])
    assert (got.blocks, got.wanted, got.reason) == (2, 8, "diverged at block 2")


def test_only_what_is_missing_is_written(stock: KeyedStock) -> None:
    stock.put(A[2:4])
    stock.put(A[7:8])
    result = stock.put(A)
    assert (result.stored, result.existing, result.complete) == (9, 3, True)
    assert stock.have(A) == [True] * 12 and stock.good(A) == 12
    assert sum(n for _, n in runs(stock)) == 12
    assert stock.put(A).stored == 0


def test_numbers_follow_the_parent_where_it_is_known(stock: KeyedStock) -> None:
    stock.put(A[:5])
    stock.put(A[5:7], A[4])
    stock.put(keys(2, 0, 1), A[2])
    stock.put(keys(3, 9, 10), "never seen")
    stock.put(keys(4, 6, 7), "never seen either", first_block=6)
    assert runs(stock) == [(0, 1), (0, 5), (3, 1), (5, 2), (6, 1)]


def test_no_keys_and_keys_that_are_none(stock: KeyedStock) -> None:
    assert stock.store.check_keys(stock.ns, []).stored_blocks == 0
    assert stock.have([]) == [] and stock.good([]) == 0
    with pytest.raises(InputError):
        stock.store.check_keys(stock.ns, [""])
    with pytest.raises(InputError, match="keyed by its engine"):
        stock.store.check(stock.ns, [1, 2, 3, 4])


def test_the_same_keys_in_another_namespace_are_other_blocks(stock: KeyedStock) -> None:
    from kvfs.testing.blocks import small_identity

    stock.put(A)
    other = stock.store.create_namespace(small_identity(hash="external", weights="w1"))
    assert stock.store.have_keys(other, A) == [False] * 12


def test_into_a_buffer_of_the_caller(stock: KeyedStock) -> None:
    stock.put(A)
    size = stock.ns.row_bytes
    into = bytearray(3 * size)
    got = stock.store.fetch_keys(stock.ns, A[5:8], into)
    assert got.blocks == 3 and got.reason is None
    assert bytes(into) == b"".join(payload(k, size) for k in A[5:8])


# the failure rule


def test_a_damaged_block_is_a_miss_and_can_be_stored_again(stock: KeyedStock) -> None:
    stock.put(A)
    extent = stock.store.check_keys(stock.ns, A[6:]).extents[0]
    flip(f"{stock.store.path}/{extent.segment}", extent.offset + 3)
    got = stock.store.fetch_keys(stock.ns, A[4:])
    assert got.blocks == 2 and got.reason is not None and got.lasting
    assert stock.have(A) == [True] * 6 + [False] * 6
    assert stock.put(A).stored == 6 and stock.good(A) == 12


def test_a_block_in_the_place_of_another_is_not_served(stock: KeyedStock) -> None:
    stock.put(A)
    e = stock.store.check_keys(stock.ns, A).extents[0]
    path, stride = Path(stock.store.path) / e.segment, e.geometry.stride
    with open(path, "r+b") as f:
        f.seek(e.offset)
        record = f.read(stride)
        f.seek(e.offset + 5 * stride)
        f.write(record)
    assert stock.good(A) == 5


def test_storage_that_fails_is_a_miss(ram_dir: Path, tmp_path: Path) -> None:
    backend = FaultyBackend(PosixBackend(str(ram_dir / tmp_path.name)))
    stock = KeyedStock.make(ram_dir / tmp_path.name, index=str(tmp_path / "i"), backend=backend)
    stock.put(A)
    with backend.during("readv", do=Fail(errno.EIO)):
        assert stock.good(A) == 0
    with backend.during("writev", do=Fail(errno.ENOSPC)):
        result = stock.put(keys(2, 0, 4))
    assert result.error is not None and result.stored == 0
    assert stock.have(keys(2, 0, 4)) == [False] * 4
    stock.close()


def test_through_the_fetch_process(stock: KeyedStock) -> None:
    stock.put(A[:5])
    stock.put(A[5:], A[4])
    ns, part = stock.ns, A[3:9]
    chain = ns.keys(part)
    plan = stock.store.check(ns, chain)
    with FetcherThread(stock.store.backend, stock.store.uuid) as thread:
        fetcher = thread.client()
        with fetcher.fetch(ns, plan, chain, deadline=30.0, blocks=6) as ticket:
            assert ticket.wait() == 6
            rows = [bytes(ticket.payload(i)) for i in range(6)]
        assert rows == [payload(k, ns.row_bytes) for k in part]
        wrong = ns.keys([*part[:2], "another", *part[3:]])
        with fetcher.fetch(ns, plan, wrong, deadline=30.0, blocks=6) as ticket:
            assert ticket.wait() == 2 and "identity" in ticket.reason


# other hosts, and an index that is made anew


def test_another_host_finds_them_at_once_and_in_any_order(
    stock: KeyedStock, tmp_path: Path
) -> None:
    there = other_host(stock, tmp_path)
    stock.put(A[6:], A[5])
    there.store.catch_up()
    there.put(A[3:8], A[2])  # some of which are there already
    stock.store.catch_up()
    for host in (stock, there):
        assert host.have(A) == [False] * 3 + [True] * 9
        assert host.good(A[3:]) == 9
        with host.store.index.env().read() as txn:
            assert not list(scan(txn, WAITING))  # nothing waits for a parent


def test_both_wrote_the_same_and_neither_knew(stock: KeyedStock, tmp_path: Path) -> None:
    there = other_host(stock, tmp_path)
    stock.put(A[0:7])
    there.put(A[5:12])
    for host in (stock, there):
        host.store.catch_up()
        assert host.good(A) == 12


@pytest.mark.parametrize("source", ["journals", "segments"])
def test_rebuilt_it_finds_the_same(stock: KeyedStock, source: str) -> None:
    stock.put(A[4:8], A[3])
    stock.put(A[10:], A[9])
    stock.put(keys(2, 0, 3))
    before = stock.have([*A, *keys(2, 0, 3)])
    rebuild(stock.store, source=source)
    assert stock.have([*A, *keys(2, 0, 3)]) == before
    assert stock.good(A[4:]) == 4 and stock.good(A[10:]) == 2


def test_a_new_host_begins_with_a_checkpoint(stock: KeyedStock, tmp_path: Path) -> None:
    stock.put(A[4:8], A[3])
    checkpoint.write(
        stock.store.backend, stock.store.index, stock.store.writer().name, stock.store.now_ms()
    )
    shutil.rmtree(f"{stock.store.path}/log")
    there = other_host(stock, tmp_path)
    assert there.have(A) == stock.have(A) and there.good(A[4:]) == 4


def test_an_index_whose_files_are_deleted_keeps_to_keys(ram_dir: Path, tmp_path: Path) -> None:
    def child() -> None:  # what has lost its files stays open for as long as its process lives
        stock = KeyedStock.make(ram_dir / tmp_path.name, index=str(tmp_path / "here"))
        stock.put(A)
        shutil.rmtree(tmp_path / "here")
        assert stock.store.index.revive()
        assert stock.have(A) == [False] * 12
        stock.store.catch_up()
        assert stock.have(A[3:]) == [True] * 9 and stock.good(A[3:]) == 9

    assert children.run(child) == 0


def test_rows_of_keys_that_are_wrong_are_seen_and_do_no_harm(stock: KeyedStock) -> None:
    stock.put(A)
    with stock.store.index.env().read() as txn:
        rows = list(scan_copies(txn, KEYS))
    (first, value), (second, _) = rows[0], rows[1]
    stock.store.index.write(lambda a: a.txn.put(second, value))
    stock.store.index.write(lambda a: a.txn.delete(first))
    faults = index_faults(stock.store.index)
    assert any("among the keys" in f for f in faults) and any("rows in keys" in f for f in faults)
    assert [stock.have([key])[0] for key in A].count(False) == 2
    rebuild(stock.store)
    assert stock.have(A) == [True] * 12


# renewal, expiry, removal, cleaning, erasing


def expires(stock: KeyedStock) -> list[int]:
    return sorted(r.expires_ms for r in stock.store.index.all_runs(stock.ns.number))


def test_a_hit_in_the_middle_renews_the_run_everywhere(stock: KeyedStock, tmp_path: Path) -> None:
    stock.put(A)
    there = other_host(stock, tmp_path)
    (before,) = expires(stock)
    stock.clock.now += 3 * DAY
    assert stock.good(A[5:7]) == 2
    assert stock.store.flush_renewals() == 1
    there.store.catch_up()
    for host in (stock, there):
        assert expires(host) == [before + 3 * 86_400_000]


def test_storing_again_renews_what_is_there(stock: KeyedStock) -> None:
    stock.put(A)
    (before,) = expires(stock)
    stock.clock.now += 3 * DAY
    stock.put(A[6:8])
    assert expires(stock) == [before + 3 * 86_400_000]


def test_what_expired_is_gone_and_collected(stock: KeyedStock) -> None:
    stock.put(A[:6], ttl_class="agent")
    stock.put(A[6:], A[5], ttl_class="chatbot")
    stock.clock.now += 4 * DAY
    assert stock.have(A) == [False] * 6 + [True] * 6
    assert stock.good(A[6:]) == 6  # its prefix is gone, and it is asked for all the same
    stock.store.writer().retire({s.segment for s in stock.store.index.segments()})
    result = Collector(stock.store, sleep=lambda s: None).run(wait=False)
    assert len(result.dropped) == 1
    assert stock.have(A) == [False] * 6 + [True] * 6 and stock.good(A[6:]) == 6
    assert stock.put(A[:6]).stored == 6 and stock.good(A) == 12


def test_removing_takes_what_follows(stock: KeyedStock, tmp_path: Path) -> None:
    stock.put(A[:8])
    stock.put(A[8:], A[7])
    there = other_host(stock, tmp_path)
    ns = stock.ns
    assert stock.store.remove(ns, ns.keys(A[3:]), from_block=2) == 7
    there.store.catch_up()
    for host in (stock, there):
        assert host.have(A) == [True] * 5 + [False] * 7


def clean(stock: KeyedStock) -> None:
    """Cleans every segment; no host goes on in one that it had begun."""
    store = stock.store
    for opened in stock.opened:
        opened.writer().retire({s.segment for s in opened.index.segments()})
    expiry = Expiry(store)
    writer = Writer(store.backend, store.index, store.config, store.clock)
    try:
        cleaner = Cleaner(store, writer, expiry, Bucket())
        victims = worth_cleaning(occupied(expiry), 1.1, None)
        done = cleaner.clean(v for v in victims if expiry.quiet(v.segment))
    finally:
        writer.close()
    assert done.problems == [] and done.bad_blocks == 0


def test_cleaned_they_are_found_where_they_went(stock: KeyedStock, tmp_path: Path) -> None:
    there = other_host(stock, tmp_path)
    stock.put(A[:4])
    stock.put(A[4:8], A[3])
    there.put(A[2:6], A[1])  # this host shows some of them from elsewhere
    stock.put(keys(2, 5, 9), "never seen", first_block=3)
    stock.put(keys(2, 9, 11), keys(2, 8, 9)[0], first_block=40)  # told a number that cannot be
    stock.store.catch_up()
    clean(stock)
    there.store.catch_up()
    for host in (stock, there):
        assert host.good(A) == 8 and host.good(A[5:]) == 3 and host.good(keys(2, 5, 11)) == 6
    report = fsck(stock.store)
    assert not report.damaged, report.findings
    rebuild(stock.store)
    assert stock.good(A) == 8 and stock.good(keys(2, 5, 11)) == 6


def test_renewed_by_a_host_that_has_not_heard_of_the_move(
    stock: KeyedStock, tmp_path: Path
) -> None:
    stock.put(A)
    there = other_host(stock, tmp_path)
    stock.clock.now += 2 * DAY
    clean(stock)
    assert there.good(A[7:9]) == 2
    assert there.store.flush_renewals() == 1
    stock.store.catch_up()
    there.store.catch_up()
    assert len(set(expires(stock) + expires(there))) == 1


def test_erasing_leaves_no_byte(stock: KeyedStock) -> None:
    stock.put(A[:6])
    stock.put(keys(2, 0, 3))
    head = stock.ns.keys(A).digest(1)
    receipt = Purge(stock.store, stock.ns, sleep=lambda s: None).run([(head, 2)])
    assert receipt.complete and receipt.blocks == 4
    assert stock.have(A[:6]) == [True] * 2 + [False] * 4 and stock.good(keys(2, 0, 3)) == 3
    gone = payload(A[4], stock.ns.row_bytes)
    assert not any(gone in p.read_bytes() for p in Path(stock.store.path).rglob("*.seg"))


def test_fsck_cuts_what_is_damaged_for_every_host(stock: KeyedStock, tmp_path: Path) -> None:
    stock.put(A)
    there = other_host(stock, tmp_path)
    extent = stock.store.check_keys(stock.ns, A[6:]).extents[0]
    flip(f"{stock.store.path}/{extent.segment}", extent.offset + 3)
    report = fsck(stock.store, repair=True)
    assert report.damaged and report.repaired
    there.store.catch_up()
    for host in (stock, there):
        assert host.have(A) == [True] * 6 + [False] * 6


# hosts that know different things, against a plain set


_stretch = st.tuples(st.integers(0, 1), st.integers(0, 7), st.integers(1, 6))
_step = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 1), _stretch, st.booleans()),
    st.tuples(st.just("follow"), st.integers(0, 1), st.none(), st.none()),
    st.tuples(st.just("clean"), st.integers(0, 1), st.none(), st.none()),
    st.tuples(st.just("rebuild"), st.integers(0, 1), st.none(), st.none()),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(_step, max_size=9))
def test_whatever_hosts_do_every_key_that_was_put_is_found(ram_dir: Path, steps: list[Any]) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(dir=ram_dir) as name:
        place = Path(name)
        first = KeyedStock.make(place / "store", index=str(place / "0"))
        hosts = [first, first.another(index=str(place / "1"))]
        put: set[str] = set()
        known: list[set[str]] = [set(), set()]
        for what, who, stretch, told in steps:
            host = hosts[who]
            first.clock.now += 1  # blocks are not moved again within the same moment
            if what == "put":
                chain, start, n = stretch
                some = keys(chain, start, start + n)
                parent = keys(chain, start - 1, start)[0] if start and told else None
                result = host.put(some, parent, first_block=start if told else None)
                assert result.complete
                put |= set(some)
                known[who] |= set(some)
            elif what == "clean":
                host.store.catch_up()
                clean(host)
                known[who] = set(put)
            else:
                host.store.catch_up() if what == "follow" else rebuild(host.store)
                known[who] = set(put)
            found = host.have(sorted(put))
            assert found == [key in known[who] for key in sorted(put)]
        for host in hosts:
            host.store.catch_up()
            assert host.have(sorted(put)) == [True] * len(put)
            for key in sorted(put):
                assert host.good([key]) == 1
            assert index_faults(host.store.index) == []
        first.close()
