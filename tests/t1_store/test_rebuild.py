"""The index is derived: thrown away, it comes back the same, from journals or from segments."""

from __future__ import annotations

import errno
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from kvfs.backend.select import open_backend
from kvfs.errors import BackendError, FormatError, InputError, NoStoreError
from kvfs.follow import checkpoint
from kvfs.follow.history import prune
from kvfs.frames import SegmentEntry
from kvfs.record import PAGE
from kvfs.repair.fsck import fsck
from kvfs.repair.rebuild import rebuild, shapes
from kvfs.scan.segments import id_of, read_head, scan_segment, segment_paths, version_of
from kvfs.store import Store
from kvfs.testing.blocks import small_identity
from kvfs.testing.faults import Fail, FaultyBackend
from kvfs.testing.stock import START, Stock, flip, overwrite, tokens

A, B = tokens(1, 40), tokens(2, 40)


@pytest.fixture
def stock(store_dir: Path) -> Iterator[Stock]:
    stock = Stock.make(store_dir)
    yield stock
    stock.close()


def fill(stock: Stock, seed: int = 1, prompts: int = 12) -> None:
    """Prompts that share prefixes with earlier ones, at block and other boundaries."""
    rng = random.Random(seed)
    for i in range(prompts):
        base = rng.choice(stock.prompts)[: rng.randrange(90)] if stock.prompts and i % 4 else []
        stock.put(tokens(seed * 1000 + i, rng.randrange(20, 120), base))
        stock.clock.now += rng.random()


def lose_index(stock: Stock) -> Stock:
    """A new process, after the index's directory was removed."""
    stock.store.close()
    shutil.rmtree(os.environ["KVFS_INDEX"])
    return stock.another(catch_up=False)


def lose_journals(stock: Stock) -> None:
    shutil.rmtree(stock.full("log"))


# from the journals


def test_journals_give_the_same_index(stock: Stock) -> None:
    fill(stock)
    stock = stock.again()
    fill(stock, 2)
    stock.clock.now += 2 * 86400
    stock.store.touch(stock.ns, stock.prompts[0], ttl_class="agent")
    stock.store.touch(stock.ns, stock.prompts[3])
    assert stock.store.remove(stock.ns, stock.prompts[5], from_block=2)
    stock.store.define_class("short", 60)
    runs, lookups, classes = stock.runs(), stock.lookups(), stock.store.classes()
    counters = stock.store.index.counters()
    assert stock.lookups() != [len(p) // 4 for p in stock.prompts]

    result = rebuild(stock.store, source="journals")
    assert (result.source, result.skipped, result.unmentioned) == ("journals", [], [])
    assert result.blocks == counters["blocks"] and result.runs == len(runs)
    assert (stock.runs(), stock.lookups(), stock.store.classes()) == (runs, lookups, classes)
    assert stock.store.index.counters() == counters
    stock.put(tokens(77, 40))
    assert stock.sound(tokens(77, 40)) == 10


def test_a_lost_index_comes_back_at_open(stock: Stock) -> None:
    fill(stock)
    runs = stock.runs()
    stock.store.close()
    shutil.rmtree(os.environ["KVFS_INDEX"])
    with stock.another().store as store:
        again = Stock(store, store.namespace(stock.ns.nsid), stock.clock, stock.prompts)
        assert again.runs() == runs


def test_handles_of_others_live_on(stock: Stock) -> None:
    """Another handle reads, and writes into its open segment and journal, across a rebuild."""
    other = stock.another()
    fill(stock)
    fill(other, 2)
    plan = other.store.check(other.ns, stock.prompts[0])
    for source in ("journals", "segments", "auto"):
        rebuild(stock.store, source=source)
        mine, theirs = tokens(len(source), 40), tokens(100 + len(source), 44)
        stock.put(mine)
        other.put(theirs)
        assert (stock.sound(theirs), other.sound(mine)) == (11, 10)
    assert other.store.fetch(other.ns, plan, stock.prompts[0], blocks=plan.stored_blocks).complete
    assert stock.lookups() == [len(p) // 4 for p in stock.prompts]


def test_a_rebuild_that_fails_changes_nothing(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(stock)
    runs = stock.runs()

    def broken(n: int) -> None:
        raise RuntimeError("in the middle")

    for source in ("journals", "segments"):
        with pytest.raises(RuntimeError):
            rebuild(stock.store, source=source, progress=broken)
        assert stock.runs() == runs
    os.rename(stock.full("kvfs.json"), stock.full("away"))
    with pytest.raises(NoStoreError):
        rebuild(stock.store)
    with pytest.raises(InputError):
        rebuild(stock.store, source="tea leaves")
    assert stock.runs() == runs


def test_a_torn_or_damaged_journal_is_told(stock: Stock) -> None:
    stock.put(tokens(1, 40))
    stock.put(tokens(2, 40))
    stock.store.close()
    (journal,) = Path(stock.full("log")).glob("*/*.log")
    data = journal.read_bytes()
    flip(str(journal), len(data) - 200)  # in the entry of the second put
    stock = lose_index(stock)
    result = rebuild(stock.store)
    assert result.source == "journals"
    assert len(result.skipped) == 1 and "are no whole entry" in result.skipped[0]
    assert (stock.stored(tokens(1, 40)), stock.stored(tokens(2, 40))) == (10, 0)
    rebuild(stock.store, source="segments")
    assert (stock.sound(tokens(1, 40)), stock.sound(tokens(2, 40))) == (10, 10)


def test_removed_journals_are_made_up_for_by_a_checkpoint(stock: Stock) -> None:
    """Also what was removed and renewed before it, and all that came after it."""
    fill(stock)
    stock.store.remove(stock.ns, stock.prompts[2], from_block=1)
    stock.store.touch(stock.ns, stock.prompts[3], ttl_class="agent")
    stock = stock.again()
    made = checkpoint.write(stock.store.backend, stock.store.index, "w", stock.store.now_ms())
    fill(stock, 2)
    stock.clock.now += 3 * 3600
    pruned = prune(stock.store.backend, stock.store.uuid, stock.store.now_ms(), 1000, 10**9)
    assert pruned and rebuild(stock.store).source == "journals"
    stock.store.remove(stock.ns, stock.prompts[0], from_block=1)
    runs, lookups = stock.runs(), stock.lookups()
    report = fsck(stock.store)
    assert dict(report.counts) == {}
    for lose in (False, True):
        stock = lose_index(stock) if lose else stock
        result = rebuild(stock.store)
        assert (result.source, result.skipped) == ("journals", [])
        assert (stock.runs(), stock.lookups()) == (runs, lookups)
    flip(stock.full(made.path), 1000)
    assert dict(fsck(stock.store).counts)["checkpoint"] == 1
    with pytest.raises(BackendError, match="damaged"):
        rebuild(stock.store)
    assert stock.runs() == runs
    flip(stock.full(made.path), 20)
    result = rebuild(stock.store)
    assert stock.lookups() != lookups and result.unmentioned and result.waiting
    assert result.skipped == [f"{made.path}: not whole"]
    rebuild(stock.store, source="segments")
    assert all(a >= b for a, b in zip(stock.lookups(), lookups, strict=True))


def test_a_journal_that_could_not_be_begun_is_no_gap(store_dir: Path) -> None:
    """The first file of a writer's journal failed; all that it publishes later is found."""
    stock = Stock.make(store_dir)
    faulty = FaultyBackend(open_backend(str(store_dir)))
    failing = stock.another(backend=faulty)
    faulty.on("writev", "log/*", do=Fail(errno.EIO))
    assert failing.put(A).stored == 0
    assert failing.put(B).stored == 10
    stock.store.catch_up()
    elsewhere = stock.elsewhere()
    assert (stock.sound(B), elsewhere.sound(B)) == (10, 10)
    rebuild(stock.store, source="journals")
    assert stock.sound(B) == 10
    stock.close()


def test_segments_no_journal_tells_of_are_reported(stock: Stock) -> None:
    stock.put(tokens(1, 40))
    stock = stock.again()
    stock.put(tokens(2, 40))
    stock.store.close()
    first, second = sorted(Path(stock.full("log")).iterdir(), key=lambda p: p.stat().st_ctime_ns)
    shutil.rmtree(second)
    stock = lose_index(stock)
    result = rebuild(stock.store)
    (lost,) = result.unmentioned
    assert second.name in lost
    assert (stock.stored(tokens(1, 40)), stock.stored(tokens(2, 40))) == (10, 0)


# from the segments


@pytest.mark.parametrize("sealed", [True, False])
def test_segments_give_the_same_index(stock: Stock, sealed: bool) -> None:
    fill(stock)
    other = stock.another()
    fill(other, 2, prompts=20)
    stock.prompts = other.prompts
    runs, lookups = other.runs(), other.lookups()
    if sealed:
        other.store.close()
        stock = stock.again()
    else:
        heads = [read_head(stock.store.backend, s.path, stock.store.uuid)
                 for s in stock.store.index.segments()]  # fmt: skip
        assert sum(head.footer is None for head in heads) == 2  # as if both had been killed
    lose_journals(stock)
    result = rebuild(stock.store)
    assert (result.source, result.skipped) == ("segments", [])
    assert (stock.runs(), stock.lookups()) == (runs, lookups)


def test_branches_inside_a_run_of_an_unsealed_segment(stock: Stock) -> None:
    """Trailers have no path heads: the place of a run that leaves another in its middle, and of
    what two writers stored twice, is found all the same."""
    trunk = tokens(1, 80)
    other = stock.another()
    stock.put(trunk)
    branch = tokens(2, 40, trunk[:40])
    other.put(branch)
    stock.put(tokens(3, 40, branch[:60]))
    other.put(tokens(4, 20, trunk[:8]))
    stock.prompts = [trunk, branch, tokens(3, 40, branch[:60]), tokens(4, 20, trunk[:8])]
    runs = stock.runs()
    lose_journals(stock)
    rebuild(stock.store)
    assert stock.runs() == runs and stock.lookups() == [20, 20, 25, 7]
    assert stock.store.index.counters().get("orphans", 0) == 0


def test_index_and_journals_lost(stock: Stock, expect_logs: Callable[[str], None]) -> None:
    fill(stock)
    runs = stock.runs()
    stock.store.close()
    lose_journals(stock)
    stock = lose_index(stock)
    stock.another()
    expect_logs("the journals are gone; `kvctl rebuild` finds the blocks")
    seen: list[int] = []
    result = rebuild(stock.store, progress=seen.append)
    assert sum(seen) == result.entries == len(runs) + result.segments
    assert stock.runs() == runs
    stock.another()  # has nothing to say any more


def test_what_was_removed_comes_back_from_segments_only(stock: Stock) -> None:
    stock.put(tokens(1, 40))
    stock.store.remove(stock.ns, tokens(1, 40), from_block=4)
    rebuild(stock.store, source="journals")
    assert stock.stored(tokens(1, 40)) == 4
    rebuild(stock.store, source="segments")
    assert stock.sound(tokens(1, 40)) == 10


def test_torn_zero_and_foreign_records_are_left_out(stock: Stock) -> None:
    """Of a segment without a footer the leading sound records of each run count."""
    for i in range(4):
        stock.put(tokens(i, 40))
    (path,) = stock.paths()
    (segment,) = stock.store.index.segments()
    place = segment.geometry.offset
    meta = stock.ns.shape.meta_at
    flip(path, place(3) + 5)  # run 0: a payload
    overwrite(path, place(10), bytes(stock.ns.stride))  # run 1: its first record
    flip(path, place(25) + meta + 3)  # run 2: a token
    with open(path, "rb") as f:
        f.seek(place(35))
        record = bytearray(f.read(stock.ns.stride))
    record[-120:-104] = b"another-namespce"
    record[-8:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(record[meta:-8]))
    overwrite(path, place(35), bytes(record))  # run 3: sound, but not of here
    scan = scan_segment(stock.store.backend, segment.path, stock.store.uuid,
                        shapes(stock.store).get)  # fmt: skip
    assert [(r.slot, r.count) for r in scan.runs] == [(0, 3), (20, 5), (30, 5)]
    assert dict(scan.unsound)[3] == "checksum of part index"
    assert dict(scan.unsound)[25] == "bad trailer"
    assert dict(scan.unsound)[35] == "foreign namespace"
    assert 10 not in dict(scan.unsound)  # empty is not unsound
    assert scan.records == 13
    rebuild(stock.store, source="segments")
    stock.prompts = [tokens(i, 40) for i in range(4)]
    assert stock.lookups() == [3, 0, 5, 5]
    assert [stock.sound(p) for p in stock.prompts] == [3, 0, 5, 5]


def test_a_segment_cut_short(stock: Stock) -> None:
    stock.put(tokens(1, 40))
    (path,) = stock.paths()
    os.truncate(path, stock.store.index.segments()[0].geometry.offset(6) + 100)
    rebuild(stock.store, source="segments")
    assert stock.sound(tokens(1, 40)) == 6


def test_a_footer_stands_in_for_a_damaged_header(stock: Stock) -> None:
    stock.put(tokens(1, 40))
    (path,) = stock.paths()
    stock = stock.again()
    for offset in (3, 9, 20, 90, 113, 2000, 4090):
        flip(path, offset)
        head = read_head(stock.store.backend, os.path.relpath(path, stock.store.path),
                         stock.store.uuid)  # fmt: skip
        assert len(head.damage) == 1 and head.footer is not None, offset
        rebuild(stock.store, source="segments")
        assert stock.sound(tokens(1, 40)) == 10
        flip(path, offset)


def test_a_damaged_footer_leaves_the_trailers(stock: Stock) -> None:
    stock.put(tokens(1, 40))
    (path,) = stock.paths()
    stock = stock.again()
    for back in (1, 33, 41, 200):
        flip(path, os.path.getsize(path) - back)
        result = rebuild(stock.store, source="segments")
        assert stock.sound(tokens(1, 40)) == 10 and result.skipped == []
        flip(path, os.path.getsize(path) - back)


# other versions, other stores


def with_version(path: str, version: int) -> None:
    """Makes a segment, or a journal, of another format version, with checksums that fit."""
    size, at = (64, 56) if path.endswith(".log") else (PAGE, PAGE - 8)
    with open(path, "r+b") as f:
        page = bytearray(f.read(size))
        page[8:12] = struct.pack("<I", version)
        page[at:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(page[:at]))
        f.seek(0)
        f.write(page)


def test_newer_and_older_versions_are_left_alone(stock: Stock) -> None:
    for i in range(3):
        stock.put(tokens(i, 40))
        stock = stock.again()
    newer, older, ours = (s.path for s in stock.store.index.segments())
    with_version(stock.full(newer), 2)
    with_version(stock.full(older), 0)
    for path, word in ((newer, "newer"), (older, "older")):
        with pytest.raises(FormatError, match=word) as e:
            read_head(stock.store.backend, path, stock.store.uuid)
        assert path in str(e.value)
    before = {p: Path(stock.full(p)).read_bytes() for p in (newer, older, ours)}
    result = rebuild(stock.store, source="segments")
    assert result.newer == 1 and len(result.skipped) == 2
    assert [stock.sound(tokens(i, 40)) for i in range(3)] == [0, 0, 10]

    journals = sorted(Path(stock.full("log")).glob("*/*.log"))
    with_version(str(journals[0]), 2)
    result = rebuild(stock.store)
    assert result.source == "journals" and result.newer >= 1
    assert any("journal version 2" in s for s in result.skipped)
    assert {p: Path(stock.full(p)).read_bytes() for p in before} == before


def test_a_flipped_version_is_damage_not_a_version(stock: Stock) -> None:
    stock.put(tokens(1, 40))
    page = bytearray(Path(stock.paths()[0]).read_bytes()[:PAGE])
    assert version_of(bytes(page)) == 1
    page[8] ^= 2
    assert version_of(bytes(page)) == 1
    assert version_of(bytes(PAGE)) is None


def test_what_is_no_segment_of_this_store(stock: Stock, tmp_path: Path) -> None:
    stock.put(tokens(1, 40))
    stock = stock.again()
    (segment,) = stock.store.index.segments()
    directory = os.path.dirname(stock.full(segment.path))
    Path(directory, "notes.txt").write_text("not ours")
    Path(directory, "host-00000000-zz-000000.seg").write_bytes(b"")
    Path(stock.full("seg"), "a-file").write_text("in the way")
    os.mkdir(os.path.join(directory, f"h-0-{'11' * 12}-000000.seg"))
    shutil.copy(stock.full(segment.path), os.path.join(directory, "copy-" + segment.path[-35:]))
    with Stock.make(tmp_path / "other").store as other:
        ns = other.create_namespace(small_identity())
        theirs = Stock(other, ns, stock.clock)
        theirs.put(tokens(5, 40))
        shutil.copy(theirs.paths()[0], directory)
        foreign = os.path.join(os.path.dirname(segment.path), os.path.basename(theirs.paths()[0]))
    assert len(list(segment_paths(stock.store.backend))) == 5
    with pytest.raises(FormatError, match="another store"):
        read_head(stock.store.backend, foreign, stock.store.uuid)
    result = rebuild(stock.store, source="segments")
    assert result.segments == 1 and len(result.skipped) == 4
    assert stock.sound(tokens(1, 40)) == 10


def test_names_tell_ids() -> None:
    entry = SegmentEntry(bytes(range(12)) + b"\x07\0\0\0", b"", 0, 0, 0, 0, 0, "", "")
    path = f"seg/agent/20300101/ns/some-host-1234abcd-{bytes(range(12)).hex()}-000007.seg"
    assert id_of(path) == entry.segment
    for bad in (
        "x.seg",
        "a-b.seg",
        f"h-{'zz' * 12}-000001.seg",
        f"h-{'11' * 12}-9999999999999.seg",
    ):
        assert id_of(bad) is None


def test_a_store_of_several_namespaces_and_classes(stock: Stock) -> None:
    stock.store.define_class("long", 90 * 86400)
    second = stock.store.create_namespace(small_identity(weights="w1", row_bytes=4000))
    both = [stock, Stock(stock.store, second, stock.clock)]
    for i, s in enumerate(both):
        s.put(tokens(1, 60), ttl_class="long")
        s.put(tokens(2 + i, 60), ttl_class="agent")
    before = [(s.runs(), s.lookups()) for s in both]
    lose_journals(stock)
    rebuild(stock.store)
    assert [(s.runs(), s.lookups()) for s in both] == before
    assert stock.store.classes()["long"] == 90 * 86400
    with Store.open(stock.store.path, clock=stock.clock) as again:
        assert len(again.namespaces()) == 2
    assert stock.clock.now == START
