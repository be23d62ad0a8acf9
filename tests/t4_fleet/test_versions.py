"""What an earlier version wrote is read; what a later one wrote is left alone, or refused."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kvfs.errors import FormatError, IndexFault
from kvfs.follow import checkpoint
from kvfs.follow.history import prune
from kvfs.gc.collector import Collector
from kvfs.index.schema import META
from kvfs.record import PAGE
from kvfs.repair.fsck import fsck
from kvfs.repair.rebuild import rebuild
from kvfs.store import Store
from kvfs.testing.command import kvctl
from kvfs.testing.indexcheck import index_faults
from kvfs.testing.stock import Clock, Stock, overwrite, tokens

FIXTURES = sorted((Path(__file__).parents[1] / "fixtures").glob("store-v*.tar.gz"))
VERSION_AT = 8  # in journals, segments and checkpoints


@dataclass
class Kept:
    """A kept store, unpacked and open, and what it must hold."""

    stock: Stock
    expected: dict[str, Any]

    def told(self) -> list[int]:
        """Blocks of each prompt that are found, and read, and right."""
        return [self.stock.sound(p) for p in self.expected["prompts"]]

    def newer(self, path: str | Path, at: int = VERSION_AT) -> None:
        """States the next version in a file's header."""
        overwrite(self.stock.full(str(path)), at, (2).to_bytes(4, "little"))

    def files(self, pattern: str) -> list[str]:
        root = Path(self.stock.store.path)
        return sorted(str(p.relative_to(root)) for p in root.glob(pattern))


@pytest.fixture(params=FIXTURES, ids=lambda path: path.name.partition(".")[0])
def kept(request: pytest.FixtureRequest, ram_dir: Path) -> Iterator[Kept]:
    with tarfile.open(request.param) as tar:
        tar.extractall(ram_dir, filter="data")
    expected = json.loads((ram_dir / "store" / "expected.json").read_text())
    clock = Clock(expected["now"])
    store = Store.open(ram_dir / "store", index=str(ram_dir / "index"), clock=clock)
    stock = Stock(store, store.namespace(expected["namespace"]), clock, opened=[store])
    yield Kept(stock, expected)
    stock.close()


def other(kept: Kept, name: str = "other") -> Kept:
    place = Path(kept.stock.store.path).parent / name
    return Kept(kept.stock.another(index=str(place)), kept.expected)


def test_there_is_a_store_of_every_version() -> None:
    names = ["store-v1-keep.tar.gz", "store-v1.tar.gz"]
    assert [path.name for path in FIXTURES] == names
    assert sum(path.stat().st_size for path in FIXTURES) < 20_000


def test_what_it_held_is_found_and_read(kept: Kept) -> None:
    expected, store = kept.expected, kept.stock.store
    assert kept.told() == expected["stored"] and max(expected["stored"]) > 0
    assert len(kept.stock.runs()) == expected["runs"]
    assert store.classes() == expected["classes"]
    assert sorted(ns.name for ns in store.namespaces()) == expected["namespaces"]
    assert store.index.counters()["orphans"] == expected["waiting"]
    assert index_faults(store.index) == []


def test_fsck_finds_nothing(kept: Kept) -> None:
    report = fsck(kept.stock.store)
    assert not report.damaged and report.counts.keys() <= {"unsealed", "dropped"}, report.findings


@pytest.mark.parametrize("checkpoints", [True, False])
def test_it_is_rebuilt(kept: Kept, checkpoints: bool) -> None:
    if not checkpoints:
        shutil.rmtree(kept.stock.full("ckpt"))
    runs = kept.stock.runs()
    assert rebuild(kept.stock.store, source="journals").skipped == []
    assert kept.stock.runs() == runs and kept.told() == kept.expected["stored"]
    assert other(kept).told() == kept.expected["stored"]
    rebuild(kept.stock.store, source="segments")
    told = kept.told()
    assert all(a >= b for a, b in zip(told, kept.expected["stored"], strict=True))


def test_it_goes_on(kept: Kept) -> None:
    """Puts, a collection and a checkpoint of this version; a second host sees the same."""
    stock = kept.stock
    assert stock.put(tokens(50, 40), ttl_class="chatbot").complete
    assert stock.put(
        tokens(51, 20, after=kept.expected["prompts"][0]), ttl_class="chatbot"
    ).complete
    Collector(stock.store, force=True).run()
    checkpoint.write(stock.store.backend, stock.store.index, "now", stock.store.now_ms())
    second = other(kept)
    assert second.told() == kept.told() == kept.expected["stored"]
    assert second.stock.runs() == stock.runs()
    assert second.stock.sound(tokens(50, 40)) == 10


# what a later version wrote


def test_a_newer_marker_is_refused(kept: Kept) -> None:
    marker = Path(kept.stock.full("kvfs.json"))
    fields = json.loads(marker.read_text())
    marker.write_text(json.dumps({**fields, "kvfs": 2}))
    with pytest.raises(FormatError, match="store format 2; this kvfs reads 1"):
        other(kept)
    kvctl("ls", "--store", kept.stock.store.path, "--index", "unused", code=11)
    marker.write_text(json.dumps({**fields, "colour": "blue"}))
    with pytest.raises(FormatError, match="colour"):
        other(kept)


def test_a_newer_journal_is_passed_over_and_kept(kept: Kept) -> None:
    """What only it tells is not found; all else is, and it is not removed."""
    newest = kept.files("log/*/*.log")[-1]
    kept.newer(newest)
    shutil.rmtree(kept.stock.full("ckpt"))
    second = other(kept)
    followed = second.stock.store.catch_up()
    assert any("version 2" in p for p in followed.problems)
    assert all(a <= b for a, b in zip(second.told(), kept.expected["stored"], strict=True))
    report = fsck(second.stock.store)
    assert report.counts["newer"] == 1
    assert rebuild(second.stock.store).newer == 1
    kept.stock.clock.now += 30 * 86_400
    checkpoint.write(
        second.stock.store.backend, second.stock.store.index, "x", second.stock.store.now_ms()
    )
    kept.stock.clock.now += 3 * 86_400
    prune(second.stock.store.backend, second.stock.store.uuid, second.stock.store.now_ms(), 0, 0)
    Collector(second.stock.store, force=True).run()
    assert os.path.exists(kept.stock.full(newest))


def test_a_newer_segment_is_a_miss_and_kept(kept: Kept) -> None:
    path = kept.files("seg/**/*.seg")[0]
    data = bytearray(Path(kept.stock.full(path)).read_bytes())
    data[VERSION_AT] = 2
    data[PAGE - 8 : PAGE] = xxhash.xxh3_64_intdigest(data[: PAGE - 8]).to_bytes(8, "little")
    target = Path(kept.stock.full(path.replace("-000000.seg", "-000777.seg")))
    target.write_bytes(data)
    assert fsck(kept.stock.store).counts["newer"] == 1
    kept.stock.clock.now += 60 * 86_400
    assert Collector(kept.stock.store, force=True).run().newer == 1
    assert target.exists()
    assert rebuild(kept.stock.store, source="segments").newer == 1


def test_a_newer_record_is_a_miss(kept: Kept) -> None:
    run = next(r for r in kept.stock.store.index.all_runs(kept.stock.ns.number) if not r.block)
    segment = kept.stock.store.index.segment(run.seg)
    end = segment.geometry.offset(run.slot) + kept.stock.ns.stride
    overwrite(kept.stock.full(segment.path), end - 124, (2).to_bytes(2, "little"))
    second = other(kept)
    told = second.told()
    assert sum(a < b for a, b in zip(told, kept.expected["stored"], strict=True)) >= 1


def test_a_newer_checkpoint_is_passed_over_and_kept(kept: Kept) -> None:
    (path,) = kept.files("ckpt/*.ckpt")
    kept.newer(path)
    assert other(kept).told() == kept.expected["stored"]
    assert checkpoint.newer(kept.stock.store.backend, path)


def test_a_newer_index_is_refused_and_made_anew_elsewhere(kept: Kept) -> None:
    second = other(kept)
    second.stock.store.index.write(lambda a: a.txn.put(META + b"format", b"2"))
    second.stock.store.close()
    with pytest.raises(IndexFault, match="kvctl rebuild"):
        other(kept)
    assert other(kept, "new").told() == kept.expected["stored"]


def test_a_namespace_that_only_a_newer_version_can_read(kept: Kept) -> None:
    """It is not shown; the others are served as ever."""
    (first, *_) = kept.files("ns/*/namespace.json")
    fields = json.loads(Path(kept.stock.full(first)).read_text())
    place = Path(kept.stock.full("ns/of-a-newer-version/namespace.json"))
    place.parent.mkdir()
    place.write_text(json.dumps({**fields, "model": "newer", "colour": "blue"}))
    second = other(kept)
    assert second.told() == kept.expected["stored"]
    names = [ns.name for ns in second.stock.store.namespaces()]
    assert sorted(names) == kept.expected["namespaces"]
    second.stock.store.flush_counters()
    assert second.stock.store.index.counters()["namespaces_unreadable"] == 1


def test_a_namespace_file_in_the_place_of_another_is_not_believed(kept: Kept) -> None:
    """Neither at open nor by a rebuild."""
    (first, *_) = kept.files("ns/*/namespace.json")
    fields = json.loads(Path(kept.stock.full(first)).read_text())
    place = Path(kept.stock.full("ns/of-another-name/namespace.json"))
    place.parent.mkdir()
    place.write_text(json.dumps({**fields, "model": "elsewhere"}))
    second = other(kept)
    assert sorted(ns.name for ns in second.stock.store.namespaces()) == kept.expected["namespaces"]
    skipped = rebuild(second.stock.store).skipped
    assert skipped == ["ns/of-another-name/namespace.json: not the identity of that name"]
    assert sorted(ns.name for ns in second.stock.store.namespaces()) == kept.expected["namespaces"]
