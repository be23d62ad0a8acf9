"""Limits: what goes where there is too much, whose it is, and what a put is told meanwhile."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.errors import BackendError, FormatError, InputError, SpaceError
from kvfs.gc.collector import Collector, GcResult
from kvfs.gc.throttle import Bucket
from kvfs.index.schema import NS, U32
from kvfs.limits import PATH, Limits
from kvfs.namespace import Namespace
from kvfs.repair.fsck import fsck
from kvfs.store import Store
from kvfs.testing.blocks import payloads, small_identity
from kvfs.testing.indexcheck import index_faults
from kvfs.testing.stock import Stock, tokens
from kvfs.usage import measure, tenant_of

MIB = 1 << 20


@pytest.fixture
def stock(store_dir: Path) -> Iterator[Stock]:
    stock = Stock.make(store_dir, segment_bytes=128 << 10, grace_seconds=10)
    yield stock
    assert index_faults(stock.opened[-1].index) == []
    stock.close()


def limit(stock: Stock, **changes: Any) -> None:
    Limits(**changes).save(stock.store.backend)
    stock.store.writer().space.forget()  # type: ignore[union-attr]


def collect(stock: Stock, **options: Any) -> GcResult:
    result = Collector(stock.store, **options).run()
    stock.clock.now += 11
    Collector(stock.store).run()  # removes the files
    if stock.store.writer().space is not None:
        stock.store.writer().space.forget()  # type: ignore[union-attr]
    return result


def used(stock: Stock) -> int:
    return sum(p.stat().st_size for p in Path(stock.store.path).rglob("*.seg"))


def put(stock: Stock, ns: Namespace, prompt: list[int]) -> SpaceError | None:
    hasher = ns.hasher(prompt)
    error = stock.store.put(ns, hasher, payloads(hasher, ns.row_bytes)).error
    assert error is None or isinstance(error, SpaceError)
    return error


def fill(stock: Stock, n: int, first: int = 0) -> list[list[int]]:
    """Puts prompts of 10 blocks, a second apart."""
    prompts = [tokens(i, 40) for i in range(first, first + n)]
    for prompt in prompts:
        stock.clock.now += 1
        stock.put(prompt)
    return prompts


def test_the_longest_unused_go_first(stock: Stock) -> None:
    prompts = fill(stock, 50)
    for prompt in prompts[:5]:
        stock.clock.now += 86400
        stock.store.touch(stock.ns, prompt)
    before = used(stock)
    limit(stock, capacity_bytes=int(before / 1.2))
    result = collect(stock)
    lookups = [stock.stored(p) for p in prompts]
    gone = lookups.count(0)
    assert 5 < gone < 25 and lookups[5 : 5 + gone] == [0] * gone
    assert all(n == 10 for n in lookups[:5] + lookups[5 + gone :])
    assert used(stock) <= before / 1.2 * 0.92
    (evicted,) = result.reclaimed.evicted
    assert (evicted.blocks, evicted.namespace) == (gone * 10, stock.ns.name)
    assert stock.store.stats()[f"evicted_blocks.{stock.ns.name}"] == gone * 10
    assert all(stock.good(p) == n for p, n in zip(prompts, lookups, strict=True))
    assert not fsck(stock.store).damaged


def test_a_prefix_stays_with_its_suffix(stock: Stock) -> None:
    chains = []
    for seed in range(8):
        chain: list[int] = []
        for turn in range(6):
            stock.clock.now += 1
            chain = tokens(100 * seed + turn, 24, after=chain)
            stock.put(chain)
        chains.append(chain)
    for limit_ in (1.1, 1.5, 2.5):
        limit(stock, capacity_bytes=int(used(stock) / limit_))
        collect(stock)
        left = [r for r in stock.store.index.all_runs(stock.ns.number)]
        reachable = sum(stock.stored(chain) for chain in chains)
        assert sum(r.count for r in left) == reachable  # no orphan
        assert stock.stored(chains[-1]) > 0
    assert stock.stored(chains[0]) == 0


def test_what_is_used_meanwhile_is_spared(stock: Stock) -> None:
    prompts = fill(stock, 40)
    limit(stock, capacity_bytes=int(used(stock) / 1.2))

    def meanwhile(phase: str) -> None:
        if phase == "dropped":
            stock.clock.now += 86400
            stock.store.touch(stock.ns, prompts[0])

    collect(stock, on_phase=meanwhile)
    assert stock.good(prompts[0]) == 10 and stock.stored(prompts[1]) == 0


def test_dry_run_says_what_would_go(stock: Stock) -> None:
    fill(stock, 40)
    limit(stock, capacity_bytes=int(used(stock) / 1.2))
    stock.store.writer().retire({s.segment for s in stock.store.index.segments()})
    tree = {p: p.stat().st_mtime_ns for p in Path(stock.store.path).rglob("*")}
    planned = Collector(stock.store, dry_run=True).run()
    assert {p: p.stat().st_mtime_ns for p in Path(stock.store.path).rglob("*")} == tree
    done = Collector(stock.store).run()
    assert planned.reclaimed.evicted == done.reclaimed.evicted != []
    assert sorted(w.path for w in planned.reclaimed.cleaned) == sorted(
        w.path for w in done.reclaimed.cleaned
    )
    json.dumps(done.to_json())


def test_a_full_store_refuses_puts_and_serves(stock: Stock) -> None:
    limit(stock, capacity_bytes=MIB)
    kept = fill(stock, 10)
    refused = None
    for i in range(100, 200):
        refused = put(stock, stock.ns, tokens(i, 40))
        if refused is not None:
            break
    assert refused is not None and "capacity is 1048576 bytes" in str(refused)
    assert used(stock) <= MIB + (128 << 10)
    assert stock.good(kept[0]) == 10
    collect(stock)
    # Room comes back without a restart.
    assert put(stock, stock.ns, tokens(300, 40)) is None
    assert stock.good(tokens(300, 40)) == 10


def test_what_is_written_counts_once(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over however many segments, and nothing for what could not be written."""
    limit(stock, capacity_bytes=3_000_000)
    segments = stock.store.writer()._segments

    def fail(*_: object) -> None:
        raise BackendError("away")

    with monkeypatch.context() as patched:
        patched.setattr(segments, "write_run", fail)
        for seed in range(3):
            assert isinstance(stock.put(tokens(seed, 1600)).error, BackendError)
    assert stock.put(tokens(1, 1600)).complete  # 1.64 MB in 13 segments
    assert stock.put(tokens(2, 800)).complete
    assert isinstance(stock.put(tokens(3, 1600)).error, SpaceError)


def test_the_reserve_of_the_file_system(stock: Stock) -> None:
    free, _ = stock.store.backend.free_bytes()
    prompts = fill(stock, 3)
    limit(stock, reserve_bytes=free * 2)
    assert "reserve" in str(put(stock, stock.ns, tokens(9, 40)))
    assert stock.good(prompts[0]) == 10
    limit(stock)
    assert put(stock, stock.ns, tokens(9, 40)) is None


def test_a_loud_namespace_loses_its_own(stock: Stock) -> None:
    """Ten times its quota, while another one keeps all it has."""
    other = stock.store.create_namespace(small_identity(salt="b"))
    quiet = tokens(7, 400)
    assert put(stock, other, quiet) is None
    limit(stock, capacity_bytes=64 * MIB, namespaces={stock.ns.name: 2 * MIB})
    refused = 0
    for i in range(512):  # 20 MiB
        stock.clock.now += 1
        refused += put(stock, stock.ns, tokens(i + 1000, 40)) is not None
        if i % 3 == 2:
            collect(stock)
        assert measure(stock.store.backend).namespaces[stock.ns.name] <= 2 * MIB + (128 << 10)
    assert refused < 26  # evicts its own oldest instead
    assert stock.store.check(other, quiet).stored_blocks == 100
    stats = stock.store.stats()
    assert stats[f"evicted_blocks.{stock.ns.name}"] > 4000
    assert f"evicted_blocks.{other.name}" not in stats


def test_a_tenant_is_all_its_namespaces(stock: Stock) -> None:
    both = [
        stock.store.create_namespace(small_identity(salt="x", model=model)) for model in ("a", "b")
    ]
    stranger = stock.store.create_namespace(small_identity(salt="y"))
    tenant = tenant_of(both[0].identity)
    assert tenant == tenant_of(both[1].identity) != tenant_of(stranger.identity)
    assert put(stock, stranger, tokens(5, 400)) is None
    limit(stock, tenants={tenant: MIB})
    for i in range(120):
        stock.clock.now += 1
        put(stock, both[i % 2], tokens(i + 1000, 40))
        if i % 8 == 7:
            collect(stock)
    usage = measure(stock.store.backend).namespaces
    assert usage[both[0].name] + usage[both[1].name] <= MIB + (256 << 10)
    assert stock.store.check(stranger, tokens(5, 400)).stored_blocks == 100


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"namespaces": {"a": 0}}, "above 0"),
        ({"capacity_bytes": 100, "tenants": {"t": 200}}, "more than the whole capacity"),
        ({"high": 0.8, "low": 0.8}, "low < high"),
        ({"high": 1.0}, "low < high"),
        ({"capacity_bytes": 0}, "above 0"),
        ({"copy_rate": -1}, "above 0"),
        ({"clean_share": 1.0}, "clean_share"),
        ({"reserve_bytes": -1}, "negative"),
        ({"capacity_bytes": math.inf}, "above 0"),
        ({"copy_rate": math.nan}, "above 0"),
        ({"remove_rate": math.inf}, "above 0"),
        ({"reserve_bytes": math.nan}, "negative"),
    ],
)
def test_limits_that_cannot_work_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        Limits(**changes)


@pytest.mark.parametrize("text", ['{"high": 2}', '{"copy_rate": NaN}', '{"remove_rate": Infinity}'])
def test_a_bad_file_of_limits_is_told(stock: Stock, text: str) -> None:
    Path(stock.store.path, PATH).write_text(text)
    with pytest.raises(FormatError, match="limits.json"):
        Limits.load(stock.store.backend)


@pytest.mark.parametrize("steps", [300, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_usage_is_what_is_on_the_disk(store_dir: Path, steps: int) -> None:
    """Puts, passes, files removed behind our back and restarts; never a limit exceeded."""
    stock = Stock.make(
        store_dir, segment_bytes=128 << 10, grace_seconds=10, durability="none"
    )  # fmt: skip
    rng = random.Random(5)
    limit(stock, capacity_bytes=2 * MIB)
    for step in range(steps):
        stock.clock.now += rng.random() * 3600
        put(stock, stock.ns, tokens(rng.randrange(10_000), rng.randrange(4, 120)))
        if step % 23 == 0:
            collect(stock)
        if step % 40 == 7 and (files := sorted(Path(stock.store.path).rglob("*.seg"))):
            os.unlink(rng.choice(files))
        if step % 50 == 9:
            stock = stock.again()
        seen = measure(stock.store.backend).bytes
        sizes = [p.stat().st_blocks * 512 for p in Path(stock.store.path).rglob("*.seg")]
        disk = sum(sizes)
        assert abs(seen - disk) <= disk * 0.01 + 4096 * len(sizes)  # du counts whole pages
        assert disk <= 2 * MIB + (128 << 10)
    assert index_faults(stock.store.index) == []
    stock.close()


def test_a_bucket_keeps_its_rate_and_takes_a_new_one() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    bucket = Bucket(1000, clock=lambda: now[0], sleep=sleep)
    for _ in range(100):
        bucket.take(100)
    assert 9.0 <= now[0] <= 10.5 and bucket.taken == 10_000
    bucket.rate = 10_000
    before = now[0]
    for _ in range(100):
        bucket.take(100)
    assert 0.5 <= now[0] - before <= 1.5
    bucket.rate = None
    before = now[0]
    bucket.take(1 << 40)
    assert now[0] == before


def test_a_collector_keeps_to_the_rates(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    prompts = fill(stock, 20)
    for prompt in prompts[::2]:
        stock.store.remove(stock.ns, prompt)
    stock.store.remove(stock.ns, prompts[1], from_block=2)
    stock.store.writer().retire({s.segment for s in stock.store.index.segments()})
    limit(stock, copy_rate=1e9, clean_share=0.95)
    collector = Collector(stock.store)
    monkeypatch.setattr(collector._pace.copies, "_sleep", naps.append)
    result = collector.run()
    assert collector._pace.copies.rate == 1e9
    assert collector._pace.copies.taken >= result.reclaimed.moved.copied_bytes > 0


def test_without_limits_nothing_goes(store_dir: Path) -> None:
    with Store.init(store_dir) as store:
        assert Limits.load(store.backend) == Limits()
        assert Collector(store).run().reclaimed.evicted == []


def test_what_only_a_newer_version_can_read_is_no_hindrance(stock: Stock) -> None:
    """Its segments stay as they are, the others are cleaned."""
    limit(stock, clean_share=0.9)
    newer = stock.store.create_namespace(small_identity(model="newer"))
    worn = [Stock(stock.store, ns, stock.clock) for ns in (stock.ns, newer)]
    for one in worn:
        one.put(tokens(1, 40))
        stock.store.remove(one.ns, tokens(1, 40), from_block=2)
    text = json.dumps({**newer.identity.to_json(), "colour": "blue"}).encode()
    stock.store.index.write(lambda a: a.txn.put(NS + newer.nsid, U32.pack(newer.number) + text))
    assert [ns.nsid for ns in stock.store.namespaces()] == [stock.ns.nsid]
    result = collect(stock)
    assert [w.path.split("/")[3] for w in result.reclaimed.cleaned] == [stock.ns.name]
    assert [one.good(tokens(1, 40)) for one in worn] == [2, 2]
