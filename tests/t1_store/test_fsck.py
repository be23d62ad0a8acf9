"""Checking a store: every damage is found where it is, and a repair takes nothing else."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.backend.select import open_backend
from kvfs.errors import NoStoreError
from kvfs.follow import checkpoint
from kvfs.gc.collector import Collector
from kvfs.index.schema import CHILDREN, scan_copies
from kvfs.index.soundness import index_faults
from kvfs.layout import Span
from kvfs.record import PAGE
from kvfs.repair.fsck import fsck
from kvfs.repair.rebuild import rebuild
from kvfs.scan.findings import Finding, Report
from kvfs.scan.segments import read_head
from kvfs.testing.faults import Fail, FaultyBackend
from kvfs.testing.stock import Stock, flip, overwrite, tokens

DAY = 86400.0
A, B = tokens(1, 40), tokens(2, 40)


@pytest.fixture
def stock(store_dir: Path) -> Iterator[Stock]:
    stock = Stock.make(store_dir)
    yield stock
    assert index_faults(stock.opened[-1].index) == []
    stock.close()


def kinds(report: Report) -> dict[str, int]:
    return dict(report.counts)


def only(report: Report) -> Finding:
    (finding,) = report.findings
    return finding


def repaired(stock: Stock, **options: Any) -> Report:
    """Repairs, and sees that nothing is left to repair."""
    report = fsck(stock.store, repair=True, **options)
    again = fsck(stock.store, repair=True)
    assert not again.damaged and again.cut_blocks == again.dropped_segments == 0
    return report


# sound stores


def test_a_sound_store_is_clean(stock: Stock) -> None:
    stock.put(A)
    stock.put(tokens(3, 60, A[:20]), ttl_class="agent")
    assert kinds(fsck(stock.store)) == {}  # open segments, journals that go on
    stock = stock.again()
    stock.put(B)
    stock.store.remove(stock.ns, B, from_block=5)
    seen: list[tuple[int, int]] = []
    report = fsck(stock.store, progress=lambda done, total: seen.append((done, total)))
    assert kinds(report) == {} and report.exit_code == 0
    assert (report.segments, report.records) == (3, 10 + 15 + 5)
    assert report.bytes == 30 * stock.ns.stride == seen[-1][0] == seen[-1][1]
    assert all(done <= total for done, total in seen)
    assert json.dumps(report.to_json())


def test_what_expired_is_not_read(stock: Stock) -> None:
    stock.put(A, ttl_class="agent")
    flip(stock.paths()[0], PAGE)
    stock.clock.now += 4 * DAY
    report = fsck(stock.store)
    assert (report.records, report.expired_runs, report.damaged) == (0, 1, False)


def test_after_collecting_it_is_clean(stock: Stock) -> None:
    stock.put(A, ttl_class="agent")
    stock.put(B)
    stock.clock.now += 4 * DAY
    Collector(stock.store).run()
    report = fsck(stock.store)
    assert [f.kind for f in report.findings] == ["dropped", "unsealed"]  # B's is days old
    stock.clock.now += 61
    Collector(stock.store).run()
    assert kinds(fsck(stock.store)) == {"unsealed": 1}


# one flipped bit (a layout of the large model's shape: index and main part of several layers)

LAYERS, INDEX, MAIN = 3, 400, 1600
ROW = LAYERS * (INDEX + MAIN)
SPANS = tuple(
    span
    for i in range(LAYERS)
    for span in (
        Span(i, "index", i * (INDEX + MAIN), INDEX),
        Span(i, "kv", i * (INDEX + MAIN) + INDEX, MAIN),
    )
)


class Place:
    """A byte of a segment file, and what damage there must look like."""

    def __init__(self, stock: Stock, size: int, footer_at: int, offset: int) -> None:
        g, shape = stock.store.index.segments()[0].geometry, stock.ns.shape
        self.slot: int | None = None
        self.detail = ""
        if offset < PAGE:
            self.kind = "header"
        elif offset >= footer_at:
            self.kind = "footer"
        else:
            slots = range(g.slots_within(footer_at))
            starts = {slot: offset - g.offset(slot) for slot in slots}
            inside = [s for s, at in starts.items() if 0 <= at < g.stride]
            self.kind = "record" if inside else "gap"
            if inside:
                self.slot = inside[0]
                self._in_record(shape.payload, shape.meta_at, starts[inside[0]])

    def _in_record(self, payload: int, meta_at: int, at: int) -> None:
        if at < payload:
            part = "index" if at % (INDEX + MAIN) < INDEX else "kv"
            self.detail = f"checksum of part {part}"
        elif at < meta_at:
            self.kind = "padding"

    def fits(self, finding: Finding, offset: int) -> bool:
        return (
            (finding.kind, finding.slot) == (self.kind, self.slot)
            and self.detail in finding.detail
            and (self.kind not in ("padding", "gap") or finding.offset == offset)
        )


def random_places(stock: Stock, footer_at: int, size: int, rng: random.Random) -> list[int]:
    """Two hundred offsets, of every kind alike whatever their share of the file."""
    g, shape = stock.store.index.segments()[0].geometry, stock.ns.shape
    slots = g.slots_within(footer_at)
    ranges = [(0, PAGE), (footer_at, size), (g.offset(g.in_first - 1) + g.stride, g.extent)]
    for _ in range(60):
        start = g.offset(rng.randrange(slots))
        index = start + rng.randrange(LAYERS) * (INDEX + MAIN)
        ranges += [
            (index, index + INDEX),
            (index + INDEX, index + INDEX + MAIN),
            (start + shape.payload, start + shape.meta_at),
            (start + shape.meta_at, start + shape.stride),
            *ranges[:3],
        ]
    return [rng.randrange(*rng.choice(ranges)) for _ in range(200)]


def test_a_flipped_bit_anywhere(store_dir: Path) -> None:
    """Never a wrong byte, and the check names the place."""
    identity = {"spans": SPANS, "row_bytes": ROW, "block_tokens": 64}
    # An extent that no whole number of records fills, so that there are gaps.
    stock = Stock.make(store_dir, identity=identity, extent=8 * PAGE, own_extents=False)
    prompt = tokens(1, 64 * 24)
    stock.put(prompt)
    stock = stock.again()
    (path,) = stock.paths()
    size = os.path.getsize(path)
    (segment,) = stock.store.index.segments()
    footer_at = read_head(stock.store.backend, segment.path, stock.store.uuid).footer_at
    assert footer_at is not None and segment.geometry.in_first == 3
    rng = random.Random(os.environ.get("KVFS_SEED", "5"))
    met: dict[str, int] = {}
    for offset in random_places(stock, footer_at, size, rng):
        place, bit = Place(stock, size, footer_at, offset), rng.randrange(8)
        flip(path, offset, bit)
        report = fsck(stock.store)
        assert len(report.findings) == 1 and place.fits(report.findings[0], offset), (
            offset, bit, place.kind, place.slot, place.detail, report.findings)  # fmt: skip
        assert report.exit_code == (12 if place.kind == "record" else 0)
        blocks, reason = stock.fetch(prompt)  # fails for a wrong byte
        if place.kind == "record":
            assert blocks == place.slot and reason is not None
            rebuild(stock.store, source="journals")  # forget that it was forgotten
        else:
            assert (blocks, reason) == (24, None)
        flip(path, offset, bit)
        met[place.kind] = met.get(place.kind, 0) + 1
    assert met.keys() == {"header", "record", "padding", "gap", "footer"}
    assert kinds(fsck(stock.store)) == {}
    stock.close()


# bad records and their repair


def test_bad_records_and_what_follows_are_dropped_everywhere(stock: Stock) -> None:
    other = stock.elsewhere()
    stock.put(A)
    inside, behind = tokens(3, 20, A[:24]), tokens(4, 20, A)
    stock.put(inside)
    stock.put(behind)
    stock.put(B)
    (path,) = stock.paths()
    place = stock.store.index.segments()[0].geometry.offset
    flip(path, place(7))
    flip(path, place(8) + stock.ns.shape.meta_at + 20)
    report = fsck(stock.store)
    assert [(f.kind, f.slot, f.block, f.offset) for f in report.findings] == [
        ("record", 7, 7, place(7)), ("record", 8, 8, place(8)),
    ]  # fmt: skip
    assert "part index" in report.findings[0].detail
    assert stock.stored(behind) == 15 and not report.repaired

    report = repaired(stock)
    assert report.exit_code == 12 and report.repaired
    assert report.cut_blocks == 3 + 5
    other.store.catch_up()
    for s in (stock, other):
        assert [s.sound(p) for p in (A, inside, behind, B)] == [7, 11, 7, 10]
    stock.put(behind)
    assert [stock.sound(p) for p in (A, inside, behind, B)] == [10, 11, 15, 10]
    assert kinds(fsck(stock.store)) == {}
    rebuild(stock.store, source="journals")
    assert [stock.sound(p) for p in (A, inside, behind, B)] == [10, 11, 15, 10]


def test_a_segment_that_is_gone(stock: Stock) -> None:
    stock.put(A)
    lost = stock.paths()[0]
    stock = stock.again()
    longer = tokens(3, 20, A)
    stock.put(longer)
    stock.put(B)
    os.unlink(lost)
    report = repaired(stock)
    finding = report.findings[0]
    assert (finding.kind, finding.blocks) == ("missing", 10) and lost.endswith(finding.path)
    assert report.dropped_segments == 1 and report.cut_blocks == 15
    assert [stock.stored(p) for p in (A, longer, B)] == [0, 0, 10]


def test_a_segment_cut_short(stock: Stock) -> None:
    stock.put(A)
    stock.put(B)
    (path,) = stock.paths()
    os.truncate(path, stock.store.index.segments()[0].geometry.offset(15) + 10)
    report = repaired(stock)
    assert [f.slot for f in report.findings if f.kind == "short"] == [15, 16, 17, 18, 19]
    assert (stock.sound(A), stock.sound(B)) == (10, 5)


def test_the_whole_store_missing_is_not_believed(stock: Stock) -> None:
    stock.put(A)
    stock = stock.again()
    stock.put(B)
    away = stock.full("away")
    os.rename(stock.full("seg"), away)
    report = fsck(stock.store, repair=True)
    assert report.damaged and not report.repaired and "--force" in report.unrepaired[0]
    os.rename(away, stock.full("seg"))
    assert kinds(fsck(stock.store)) == {} and (stock.sound(A), stock.sound(B)) == (10, 10)
    shutil.rmtree(stock.full("seg"))
    assert repaired(stock, force=True).dropped_segments == 2
    os.rename(stock.full("kvfs.json"), away)
    with pytest.raises(NoStoreError):
        fsck(stock.store, repair=True)
    os.rename(away, stock.full("kvfs.json"))


def test_what_cannot_be_opened_is_left_alone(store_dir: Path) -> None:
    stock = Stock.make(store_dir)
    stock.put(A)
    faulty = FaultyBackend(open_backend(str(store_dir)))
    failing = stock.another(backend=faulty)
    faulty.on("open", "seg/*", do=Fail(errno.EACCES), times=None)
    report = fsck(failing.store, repair=True)
    assert kinds(report) == {"unreadable": 1} and only(report).blocks == 10
    assert report.exit_code == 12 and report.unrepaired
    faulty.clear()
    assert kinds(fsck(failing.store)) == {} and failing.sound(A) == 10
    stock.close()


def test_a_bad_sector(store_dir: Path) -> None:
    """One record cannot be read: it, and what follows, goes; the others of its piece stay."""
    stock = Stock.make(store_dir)
    stock.put(A)
    stock.put(B)
    faulty = FaultyBackend(open_backend(str(store_dir)))
    failing = stock.another(backend=faulty)
    bad = stock.store.index.segments()[0].geometry.offset(6)

    def sector(call: Any) -> Any:
        if call.offset <= bad < call.offset + call.size:
            raise call.error(errno.EIO)
        return call.proceed()

    faulty.on("readv", "seg/*", do=sector, times=None)
    report = repaired(failing)
    assert (only(report).slot, only(report).detail) == (6, "I/O error (EIO)")
    assert (failing.sound(A), failing.sound(B)) == (6, 10)
    stock.close()


# header, footer, journals, index


def test_a_damaged_header_or_footer_is_told(stock: Stock) -> None:
    stock.put(A)
    (path,) = stock.paths()
    stock = stock.again()
    flip(path, 9)  # in the version: damage, not another version
    flip(path, os.path.getsize(path) - 50)
    report = repaired(stock)
    assert kinds(report) == {"header": 1} and "no sound footer" in only(report).detail
    flip(path, 9)
    assert kinds(fsck(stock.store)) == {"footer": 1}
    assert stock.sound(A) == 10


def test_journals_that_cannot_be_read(stock: Stock) -> None:
    stock.put(A)
    stock = stock.again()
    stock.put(B)
    stock = stock.again()
    stock.put(tokens(3, 40))
    first, second, _ = sorted(Path(stock.full("log")).glob("*/*.log"),
                              key=lambda p: p.stat().st_ctime_ns)  # fmt: skip
    with open(second, "ab") as f:
        f.write(b"torn")
    assert kinds(fsck(stock.store)) == {"journal": 1}
    flip(str(first), first.stat().st_size - 200)  # the entry of its run
    report = repaired(stock)
    assert kinds(report) == {"journal": 2, "untold": 1} and report.exit_code == 0
    assert any("though this host has applied them" in f.detail for f in report.findings)
    flip(str(first), 30)
    report = fsck(stock.store)
    assert any("damaged journal header" in f.detail for f in report.findings)
    assert [stock.sound(p) for p in (A, B)] == [10, 10]


def test_an_index_that_is_behind(stock: Stock) -> None:
    other = stock.elsewhere()
    stock.put(A)
    report = fsck(other.store)
    assert kinds(report) == {"behind": 1} and report.exit_code == 0
    assert kinds(fsck(other.store, repair=True)) == {"behind": 1}
    assert kinds(fsck(other.store)) == {} and other.sound(A) == 10


def test_an_index_that_contradicts_itself_is_rebuilt(stock: Stock) -> None:
    stock.put(A)
    stock.put(tokens(3, 40, A[:20]))
    runs = stock.runs()

    def spoil(applier: Any) -> None:
        key, _ = next(scan_copies(applier.txn, CHILDREN))
        applier.txn.delete(key)
        applier.add_meta("blocks", 7)

    stock.store.index.write(spoil)
    report = fsck(stock.store)
    assert kinds(report) == {"index": 3} and report.exit_code == 12
    assert repaired(stock).rebuilt
    assert stock.runs() == runs and kinds(fsck(stock.store)) == {}


def test_bad_records_are_cut_after_a_rebuild_too(stock: Stock) -> None:
    """Both at once: the rebuilt index has other numbers for the segments."""
    stock.put(B)
    stock = stock.again()
    stock.put(A)
    flip(stock.full(next(s.path for s in stock.store.index.segments() if s.number == 2)), PAGE)
    stock.store.index.write(lambda a: a.add_meta("blocks", 7))
    report = repaired(stock)
    assert report.rebuilt and report.cut_blocks == 10
    assert (stock.stored(A), stock.stored(B)) == (0, 10)


# files nobody needs


@pytest.mark.expect_logs("the journals are gone")
def test_orphans_copies_and_strangers(stock: Stock) -> None:
    stock.put(A)
    (segment,) = stock.store.index.segments()
    stock = stock.again()
    directory = os.path.dirname(stock.full(segment.path))
    shutil.copy(stock.full(segment.path), os.path.join(directory, "copy-" + segment.path[-35:]))
    Path(directory, "notes.seg").write_text("not ours")
    Path(directory, f"h-0-{'11' * 12}-000000.seg").write_bytes(b"nor this")
    newer = Path(directory, f"h-0-{'22' * 12}-000000.seg")
    shutil.copy(stock.full(segment.path), newer)
    overwrite(str(newer), 8, b"\x02")
    overwrite(str(newer), PAGE - 8, b"whatever")
    report = fsck(stock.store)
    assert kinds(report) == {"duplicate": 1, "strange": 2, "newer": 1} and report.exit_code == 0

    log = next(Path(stock.full("log")).glob(f"*{segment.segment[:12].hex()}"))
    shutil.rmtree(log)
    stock.store.close()
    shutil.rmtree(os.environ["KVFS_INDEX"])
    stock = stock.another()
    report = fsck(stock.store, repair=True)
    orphan = next(f for f in report.findings if (f.kind, f.path) == ("orphan", segment.path))
    assert "10 sound records" in orphan.detail
    rebuild(stock.store, source="segments")
    assert stock.sound(A) == 10
    assert kinds(fsck(stock.store))["journal"] == 1  # none is left


def test_what_was_stored_twice(stock: Stock, tmp_path: Path) -> None:
    """Two writers at once: each host shows one copy, and the other takes room."""
    other = stock.another(index=str(tmp_path / "other"))
    stock.put(A)
    other.put(A[:24])
    other.put(B)
    other.store.close()
    stock = stock.again()
    report = fsck(stock.store)
    assert kinds(report) == {"copy": 1} and report.exit_code == 0
    assert "6 blocks are in another segment" in only(report).detail
    stock.store.remove(stock.ns, A)
    assert kinds(fsck(stock.store)) == {}


def test_a_hole_in_a_chain(stock: Stock, tmp_path: Path) -> None:
    """What follows is sound, but nobody can find it before its beginning is stored again."""
    long = tokens(5, 40, after=A)
    stock.put(A, ttl_class="agent")
    stock.clock.now += DAY
    stock.put(long, ttl_class="agent")
    (first, _) = stock.store.check(stock.ns, long).extents
    assert kinds(fsck(stock.store)) == {}
    plan = stock.store.check(stock.ns, A)
    assert stock.store.report_bad(stock.ns, plan, A, 4)
    report = fsck(stock.store)
    assert kinds(report) == {"hole": 1} and not report.damaged
    assert "10 blocks that no check reaches" in only(report).detail
    stock.put(A)
    assert kinds(fsck(stock.store)) == {"copy": 1} or stock.sound(long) == 20


def test_every_checkpoint_is_read(stock: Stock) -> None:
    stock.put(A)
    paths = []
    for _ in range(2):
        made = checkpoint.write(
            stock.store.backend, stock.store.index, "host", stock.store.now_ms()
        )
        paths.append(made.path)
        stock.clock.now += 60
    assert kinds(fsck(stock.store)) == {}
    flip(stock.full(paths[0]), 200)
    finding = only(fsck(stock.store))
    assert (finding.kind, finding.path) == ("checkpoint", paths[0])
    flip(stock.full(paths[1]), os.path.getsize(stock.full(paths[1])) - 3)
    assert kinds(fsck(stock.store)) == {"checkpoint": 2}


def test_a_writer_that_was_killed(stock: Stock) -> None:
    """Its segment has no footer and its journal no end; nothing is lost by that."""
    stock.put(A)
    other = stock.another()
    report = fsck(other.store)
    assert kinds(report) == {}
    stock.clock.now += 2 * DAY
    report = fsck(other.store)
    assert kinds(report) == {"unsealed": 1} and report.exit_code == 0


def test_many_findings_are_counted_not_kept(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfs.scan.findings.MAX_FINDINGS", 4)
    stock.put(A)
    (path,) = stock.paths()
    overwrite(path, PAGE, bytes(10 * stock.ns.stride))
    report = fsck(stock.store)
    assert len(report.findings) == 4 and report.to_json()["left_out"] == 6
    assert {f.detail for f in report.findings} == {"no record"}
    assert str(report.findings[0]).startswith("damage: record: seg/chatbot/")
    assert repaired(stock).cut_blocks == 10


# in use


def test_what_goes_while_it_is_checked_is_no_damage(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector takes a segment between the look at the index and the look at its file."""
    stock.put(A, ttl_class="agent")
    stock.put(B)
    index = stock.store.index
    runs_of = index.runs_of

    def late(number: int) -> Any:
        runs = runs_of(number)
        monkeypatch.undo()
        stock.clock.now += 4 * DAY
        Collector(stock.store, sleep=lambda s: None).run()
        os.unlink(stock.full(index.segment(number).path))
        return runs

    monkeypatch.setattr(index, "runs_of", late)
    report = fsck(stock.store)
    assert not report.damaged and stock.sound(B) == 10


def test_what_another_host_takes_while_it_is_checked_is_no_damage(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is published there, removed after the grace, and not followed here yet."""
    host = stock.elsewhere("host")
    stock.put(A, ttl_class="agent")
    stock.put(B)
    index = stock.store.index
    runs_of = index.runs_of

    def late(number: int) -> Any:
        monkeypatch.undo()
        host.store.remove(host.ns, A)
        stock.store.writer().retire({s.segment for s in index.segments()})
        Collector(host.store).run()
        stock.clock.now += DAY
        assert Collector(host.store).run().removed
        return runs_of(number)

    host.store.catch_up()
    monkeypatch.setattr(index, "runs_of", late)
    report = fsck(stock.store)
    assert not report.damaged, report.findings
    assert stock.sound(B) == 10


def test_while_others_write(stock: Stock) -> None:
    """Runs that are published while it reads are no finding, whatever it sees first."""
    other = stock.another()
    stock.put(A)
    n = itertools.count()

    def more(done: int, total: int) -> None:
        i = next(n)
        if i > 100:
            return
        other.put(tokens(100 + i, 40))
        if i % 3 == 0:
            other.store.remove(other.ns, tokens(100 + i, 40), from_block=3)

    for _ in range(8):
        report = fsck(stock.store, progress=more)
        assert kinds(report).keys() <= {"behind"}, report.findings
