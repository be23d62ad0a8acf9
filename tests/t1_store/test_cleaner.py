"""The cleaner: what is of use is copied forward, verified, and found by every host throughout."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.errors import BusyError
from kvfs.follow import checkpoint
from kvfs.frames import DropEntry, MoveEntry, NamespaceEntry, RunEntry
from kvfs.gc.cleaner import Cleaned, Cleaner
from kvfs.gc.expiry import Expiry
from kvfs.gc.occupancy import occupied, worth_cleaning
from kvfs.gc.throttle import Bucket
from kvfs.geometry import Geometry
from kvfs.index import Index, wipe
from kvfs.index.apply import Applier
from kvfs.index.schema import (
    ALIAS,
    ALIASES,
    DROPPED,
    GONE,
    LIVE,
    MOVE,
    MOVED,
    Segment,
    alias_key,
    moved_key,
    scan,
)
from kvfs.repair.fsck import fsck
from kvfs.repair.rebuild import rebuild
from kvfs.scan.journals import JournalTail, journal_files, read_journal
from kvfs.testing.indexcheck import index_faults
from kvfs.testing.stock import START, Stock, flip, tokens
from kvfs.writer import Writer

DAY = 86400.0
A, B, C = tokens(1, 40), tokens(2, 40), tokens(3, 40)
LONG = tokens(9, 120)


@pytest.fixture
def stock(store_dir: Path) -> Iterator[Stock]:
    stock = Stock.make(store_dir)
    yield stock
    for store in stock.opened:
        if not store._closed:
            assert index_faults(store.index) == []
    stock.close()


def clean(stock: Stock, below: float = 1.1, step: Callable[[], None] = lambda: None) -> Cleaned:
    """Cleans every segment of which less than a share is in use."""
    store = stock.store
    store.writer().retire({s.segment for s in store.index.segments()})
    expiry = Expiry(store)
    writer = Writer(store.backend, store.index, store.config, store.clock)
    try:
        cleaner = Cleaner(store, writer, expiry, Bucket(), step)
        return cleaner.clean(worth_cleaning(occupied(expiry), below, None))
    finally:
        writer.close()


def states(stock: Stock) -> list[int]:
    return [s.state for s in stock.store.index.segments()]


def extents(stock: Stock, prompt: list[int]) -> list[tuple[int, int]]:
    return [(e.block, e.count) for e in stock.store.check(stock.ns, prompt).extents]


def sound(stock: Stock) -> None:
    report = fsck(stock.store)
    assert not report.damaged and report.level_count("warning") == 0, report.findings


def test_live_blocks_are_copied_and_the_rest_goes(stock: Stock) -> None:
    stock.put(A, ttl_class="agent")
    stock.put(B, ttl_class="agent")
    before = stock.store.check(stock.ns, A).extents[0]
    stock.clock.now = START + 2 * DAY
    stock.store.touch(stock.ns, A)
    stock.clock.now = START + 3 * DAY + 3600
    result = clean(stock)
    assert (result.moved_blocks, result.moved_runs, result.new_runs) == (10, 1, 1)
    assert [s.segment.segment for s in result.segments] == [before.segment_id]
    assert states(stock) == [DROPPED, LIVE]
    (after,) = stock.store.check(stock.ns, A).extents
    assert after.segment_id != before.segment_id and after.expires_ms == (START + 5 * DAY) * 1000
    assert stock.good(A) == 10 and stock.good(B) == 0
    sound(stock)
    again = stock.again()
    assert again.good(A) == 10


def test_the_runs_of_a_chain_become_one(stock: Stock) -> None:
    prompt: list[int] = []
    for turn in range(6):
        prompt = tokens(turn + 1, 40, after=prompt)
        stock.put(prompt)
        stock.put(tokens(100 + turn, 40))  # others in between
    fork = tokens(77, 40, after=prompt[:120])
    stock.put(fork)
    assert len(extents(stock, prompt)) == 6
    result = clean(stock)
    assert extents(stock, prompt) == [(0, 60)]
    assert extents(stock, fork) == [(0, 30), (30, 10)]
    assert stock.good(prompt) == 60 and stock.good(fork) == 40
    assert result.moved_runs == 13 and result.new_runs == 8
    (extent,) = stock.store.check(stock.ns, prompt).extents
    assert extent.expires_ms == (START + 7 * DAY) * 1000
    sound(stock)


def test_what_was_used_at_other_times_is_not_merged(stock: Stock) -> None:
    stock.put(A)
    long = tokens(9, 40, after=A)
    stock.put(long)
    stock.clock.now += 3 * DAY
    stock.store.touch(stock.ns, A)
    clean(stock)
    assert extents(stock, long) == [(0, 10), (10, 10)]
    assert [e.expires_ms for e in stock.store.check(stock.ns, long).extents] == [
        (START + 10 * DAY) * 1000, (START + 7 * DAY) * 1000,
    ]  # fmt: skip


def test_what_was_stored_again_after_a_removal_is_not_merged_too_soon(
    stock: Stock, tmp_path: Path
) -> None:
    """A host that hears of the removal behind the move must not take it for a removal of both."""
    other = stock.another(index=str(tmp_path / "other"))
    stock.put(A)
    stock.store.remove(stock.ns, A, from_block=4)
    stock.clock.now += 1
    stock.put(A)
    for part in ([(0, 4), (4, 6)], [(0, 10)]):
        stock.put(B)
        stock.store.remove(stock.ns, B)
        clean(stock)
        other.store.catch_up()
        for host in (stock, other):
            assert extents(host, A) == part and host.good(A) == 10
        stock.clock.now += 7200
    sound(other)


def test_a_class_change_moves_to_its_directory(stock: Stock) -> None:
    stock.put(A, ttl_class="agent")
    stock.store.touch(stock.ns, A, ttl_class="chatbot")
    clean(stock)
    (extent,) = stock.store.check(stock.ns, A).extents
    assert extent.segment.startswith("seg/chatbot/")
    assert stock.good(A) == 10


def test_bad_records_are_not_carried_on(stock: Stock) -> None:
    stock.put(A)
    stock.put(B)
    (extent,) = stock.store.check(stock.ns, A).extents
    flip(stock.full(extent.segment), extent.geometry.offset(extent.slot + 4) + 5)
    result = clean(stock)
    assert result.bad_blocks == 6 and result.moved_blocks == 14
    assert stock.good(A) == 4 and stock.good(B) == 10
    assert states(stock) == [DROPPED, LIVE]
    sound(stock)
    stock.put(A)
    assert stock.good(A) == 10


def test_an_unreadable_segment_stays(stock: Stock) -> None:
    stock.put(A)
    (path,) = stock.paths()
    os.rename(path, path + ".away")
    stock.store.writer().retire({s.segment for s in stock.store.index.segments()})
    result = clean(stock)
    os.rename(path + ".away", path)
    assert result.segments == [] and stock.good(A) == 10


def test_the_lease_is_looked_at_within_a_chain(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And before the copies are told of: whoever has it by now may have dropped the originals."""
    monkeypatch.setattr("kvfs.gc.cleaner.STEP_SECONDS", 0.0)
    for _ in range(3):  # one chain of three runs
        stock.put(LONG[: len(stock.prompts) * 40 + 40])
    steps = []

    def lost_after(most: int) -> Callable[[], None]:
        def step() -> None:
            steps.append(most)
            if steps.count(most) > most:
                raise BusyError("the lease was taken over")

        return step

    for most in (2, 3, 4, 5):
        with pytest.raises(BusyError):
            clean(stock, step=lost_after(most))
        assert states(stock) == [LIVE] and stock.good(LONG) == 30
    assert clean(stock, step=lost_after(100)).moved_blocks == 30
    assert states(stock) == [DROPPED, LIVE] and stock.good(LONG) == 30


def test_only_what_is_little_used(stock: Stock) -> None:
    stock.put(A)
    assert clean(stock, below=0.5).segments == []
    stock.store.remove(stock.ns, A, from_block=2)
    assert clean(stock, below=0.5).moved_blocks == 2
    assert stock.good(A) == 2


def test_more_than_a_segment_holds(stock: Stock) -> None:
    prompt: list[int] = []
    for turn in range(20):  # 20 runs of 20 records of 4 KiB: more than one segment of 1 MiB
        prompt = tokens(turn + 1, 80, after=prompt)
        stock.put(prompt)
    clean(stock)
    assert len(extents(stock, prompt)) == 2 and stock.good(prompt) == 400
    clean(stock)
    assert len(extents(stock, prompt)) == 2 and stock.good(prompt) == 400
    sound(stock)
    rebuild(stock.store, source="journals")
    assert len(extents(stock, prompt)) == 2 and stock.good(prompt) == 400


def test_rebuilt_from_the_segments_it_is_all_there(stock: Stock) -> None:
    prompt = tokens(5, 40, after=A)
    stock.put(A)
    stock.put(prompt)
    clean(stock)
    for path, state in zip(stock.paths(), states(stock), strict=True):
        if state == DROPPED:
            os.unlink(path)
    rebuild(stock.store, source="segments")
    assert stock.good(prompt) == 20


def test_what_is_renewed_or_removed_while_copying(stock: Stock) -> None:
    """Looked at again in the transaction that publishes."""
    for prompt in (A, B, C):
        stock.put(prompt)
    copy = Cleaner._publish

    def meanwhile(cleaner: Cleaner, *args: object) -> None:
        stock.clock.now = START + DAY
        stock.store.touch(stock.ns, A)
        stock.store.remove(stock.ns, B, from_block=3)
        stock.put(tokens(50, 40, after=C))
        copy(cleaner, *args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cleaner, "_publish", meanwhile)
        clean(stock)
    assert [e.expires_ms for e in stock.store.check(stock.ns, A).extents] == [
        (START + 8 * DAY) * 1000
    ]
    assert (stock.good(A), stock.good(B), stock.good(C)) == (10, 3, 10)
    assert stock.good(tokens(50, 40, after=C)) == 20


def test_other_hosts_follow(stock: Stock, tmp_path: Path) -> None:
    prompt = tokens(5, 40, after=A)
    stock.put(A)
    stock.put(prompt)
    other = stock.another(index=str(tmp_path / "other"))
    plan = other.store.check(other.ns, prompt)
    clean(stock)
    # Before it hears of the move the other host still reads the old place, in its grace.
    assert other.good(prompt) == 20
    other.store.catch_up()
    assert extents(other, prompt) == [(0, 20)] and other.good(prompt) == 20
    assert other.store.fetch(other.ns, plan, prompt, blocks=20).blocks == 20
    sound(other)


def test_moves_that_are_heard_of_in_any_order(stock: Stock, tmp_path: Path) -> None:
    """Moves of one moment, or by clocks that differ, come in by another order than they went."""
    stock.put(A)
    for _ in range(3):
        clean(stock)
    (last,) = stock.store.check(stock.ns, A).extents
    backend, store = stock.store.backend, stock.store.uuid
    entries = [
        entry
        for writer, number in journal_files(backend)
        for entry in read_journal(backend, writer, number, store, JournalTail(""))
        if entry is not None and not isinstance(entry, DropEntry)
    ]
    moves = [e for e in entries if isinstance(e, MoveEntry)]
    others = [e for e in entries if not isinstance(e, MoveEntry | RunEntry)]
    others.sort(key=lambda e: not isinstance(e, NamespaceEntry))
    runs = [e for e in entries if isinstance(e, RunEntry)]
    assert len(moves) == 3 and len(runs) == 1
    for number, order in enumerate(itertools.permutations(moves)):
        index = Index(str(tmp_path / f"index{number}"), store)
        for entry in (*others, *runs, *order):
            index.write(lambda applier, entry=entry: applier.apply(entry))
        (run,) = index.all_runs(index.namespaces()[stock.ns.nsid][0])
        shown = index.segment(run.seg)
        assert (shown.segment, run.slot, run.count) == (last.segment_id, last.slot, 10)
        index.close()


def test_a_cut_and_a_renewal_by_a_host_that_has_not_heard(stock: Stock, tmp_path: Path) -> None:
    prompt = tokens(5, 40, after=A)
    stock.put(A)
    stock.put(prompt)
    stock.put(B)
    other = stock.another(index=str(tmp_path / "other"))
    third = stock.another(index=str(tmp_path / "third"))
    clean(stock)
    other.clock.now += DAY
    other.store.touch(other.ns, prompt)
    other.store.remove(other.ns, B, from_block=4)
    for host in (other, stock, third):
        host.store.catch_up()
        assert host.good(B) == 4 and host.good(prompt) == 20
        assert [e.expires_ms for e in host.store.check(host.ns, prompt).extents] == [
            (START + 8 * DAY) * 1000
        ]
    rebuild(stock.store, source="journals")
    assert stock.good(B) == 4 and stock.good(prompt) == 20


def test_twice_stored_blocks_survive_whichever_copy_goes(stock: Stock, tmp_path: Path) -> None:
    other = stock.another(index=str(tmp_path / "other"))
    stock.put(A)
    other.put(A)  # has not heard of it
    other.store.close()
    other = stock.another(index=str(tmp_path / "other"))
    stock.store.catch_up()
    assert stock.good(A) == other.good(A) == 10
    clean(stock, below=0.5)  # the second place goes: nothing in it shows here
    other.store.catch_up()
    for path, state in zip(stock.paths(), states(stock), strict=True):
        if state == DROPPED:
            os.unlink(path)
    assert states(stock).count(DROPPED) == 1
    assert stock.good(A) == other.good(A) == 10


def test_segments_are_forgotten_together(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that leads to them, by one look at that; other aliases stay."""
    ids = [bytes([n]) * 16 for n in range(1, 6)]
    rows = [
        Segment(
            1000 + n, id_, stock.ns.number, 1, state, Geometry(4096, 1 << 16, 4096), 1, 1, 1, "x"
        )
        for n, (id_, state) in enumerate(zip(ids, [GONE, GONE, GONE, DROPPED, LIVE], strict=True))
    ]
    looks = []

    def counted(txn: Any, prefix: bytes, start: bytes = b"") -> Any:
        looks.append(prefix)
        return scan(txn, prefix, start)

    def work(applier: Applier) -> list[bytes]:
        for n, id_ in enumerate(ids):
            applier.txn.put(alias_key(stock.ns.number, bytes([50 + n]) * 16), ALIAS.pack(id_, 1))
            applier.txn.put(moved_key(id_, 0), bytes(MOVE.size))
        monkeypatch.setattr(wipe, "scan", counted)
        wipe.forget(applier, rows)
        moved = [bytes(key[1:17]) for key, _ in scan(applier.txn, MOVED)]
        assert moved == ids[3:]
        return [ALIAS.unpack(value)[0] for _, value in scan(applier.txn, ALIASES)]

    assert stock.store.index.write(work) == ids[3:]
    assert looks.count(ALIASES) == 1


def test_a_checkpoint_tells_what_was_moved(stock: Stock, tmp_path: Path) -> None:
    prompt = tokens(5, 40, after=A)
    stock.put(A)
    stock.put(prompt)
    late = stock.another(index=str(tmp_path / "late"))
    clean(stock)
    checkpoint.write(stock.store.backend, stock.store.index, "w", stock.store.now_ms())
    newest = checkpoint.newest(stock.store.backend, stock.store.uuid)
    assert newest is not None
    fresh = stock.another(index=str(tmp_path / "fresh"), catch_up=False)
    fresh.store.index.write(
        lambda a: checkpoint.load(stock.store.backend, a, newest, stock.store.uuid)
    )
    assert fresh.good(prompt) == 20
    for table in (MOVED, ALIASES):
        told, kept = (
            host.store.index.query(lambda a: [(bytes(k), bytes(v)) for k, v in scan(a.txn, table)])  # noqa: B023
            for host in (stock, fresh)
        )
        if table == MOVED:
            numbers = slice(4, None)  # behind the index's own number of the namespace
            told, kept = ([(k, v[numbers]) for k, v in rows] for rows in (told, kept))
        assert told == kept != []
    # A host that has not heard of the move renews a run that is no more: it is found all the same.
    late.clock.now += DAY
    late.store.touch(late.ns, prompt)
    fresh.store.catch_up()
    assert [e.expires_ms for e in fresh.store.check(fresh.ns, prompt).extents] == [
        (START + 8 * DAY) * 1000
    ]
