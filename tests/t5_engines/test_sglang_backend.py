"""The storage backend for SGLang against pools in memory: each of its three interfaces, and what
goes wrong. Runs with SGLang's own interface where that is installed, else with a small double."""

from __future__ import annotations

import errno
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import sglang_fake
import torch
from sglang_fake import FakePool, HiCacheStorageConfig
from vllm_support import Place

from kvfs.backend import PosixBackend
from kvfs.connectors.background import Background
from kvfs.errors import InputError
from kvfs.fetcher.ticket import Ticket
from kvfs.store import Store
from kvfs.testing.faults import Fail, FaultyBackend, Hold
from kvfs.testing.stock import flip

PARTS = sglang_fake.load()
PoolName, PoolHitPolicy = PARTS.storage.PoolName, PARTS.storage.PoolHitPolicy
KEYS = [f"{i:064x}" for i in range(12)]
Make = Callable[..., Any]
OFF = r"kvfs\.connectors\.sglang WARNING: kvfs is off"
MISS = r"WARNING: \w+ failed; it counts as a miss"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A store, and no server arguments to be found."""
    monkeypatch.setattr(PARTS.backend, "_server", lambda: (None, None))
    made = Place(tmp_path)
    monkeypatch.setenv("KVFS_RUNTIME", made.environment["KVFS_RUNTIME"])
    yield made
    made.close()


@pytest.fixture
def make(place: Place) -> Iterator[Make]:
    """Makes backends, each of which is closed in the end: `make(pool, interface_v1=1, ...)`."""
    made: list[Any] = []

    def begin(pool: FakePool, *, config: dict[str, Any] | None = None, **more: Any) -> Any:
        given = {
            "backend_name": "kvfs", "module_path": "kvfs.connectors.sglang",
            "class_name": "KvfsHiCache", "store": str(place.store),
            "index": str(place.index), "weights": "w0", "fetch": "inline", **more,
        }  # fmt: skip
        backend = PARTS.backend.KvfsHiCache(config_of(given, **(config or {})), {})
        backend.register_mem_pool_host(pool)
        made.append(backend)
        return backend

    yield begin
    for backend in made:
        backend.close()


def config_of(extra: dict[str, Any], **fields: Any) -> HiCacheStorageConfig:
    given = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
        "attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": False,
        "is_page_first_layout": True, "model_name": "m", **fields,
    }  # fmt: skip
    return HiCacheStorageConfig(extra_config=extra, **given)


def info(prefix: list[str] | None) -> Any:
    return SimpleNamespace(prefix_keys=prefix, extra_info=None)


def filled(layout: str = "page_first", **more: Any) -> FakePool:
    pool = FakePool(layout, **more)
    pool.fill()
    return pool


def same(a: FakePool, i: int, b: FakePool, j: int) -> bool:
    return bool(torch.equal(a.page(i), b.page(j)))


# the interfaces


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
@pytest.mark.parametrize("pointers", [True, False])
def test_pages_by_pointer(make: Make, layout: str, pointers: bool, dtype: Any) -> None:
    pool = filled(layout, dtype=dtype, pointers=pointers)
    backend = make(pool, interface_v1=1)
    assert backend.batch_exists(KEYS) == 0 and not backend.exists(KEYS[0])
    # Pages of the pool that do not lie in order.
    assert backend.batch_set_v1(KEYS[:3], pool.indices([7, 2, 5]), info([])) == [True] * 3
    assert backend.batch_exists(KEYS) == 3 and backend.exists(KEYS[2])

    other = FakePool(layout, dtype=dtype, pointers=pointers)
    second = make(other, interface_v1=1)
    good = second.batch_get_v1(KEYS[:5], other.indices([1, 3, 0, 9, 8]), info([]))
    assert good == [True] * 3 + [False] * 2
    assert same(pool, 7, other, 1) and same(pool, 2, other, 3) and same(pool, 5, other, 0)
    assert not other.page(9).to(torch.float32).any()
    # From the middle of the sequence on.
    assert second.batch_exists(KEYS[1:], info(KEYS[:1])) == 2
    assert second.batch_get_v1(KEYS[2:3], other.indices([4])) == [True]
    assert same(pool, 5, other, 4)


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_pages_as_tensors(make: Make, layout: str) -> None:
    pool, other = filled(layout), FakePool(layout)
    backend, second = make(pool), make(other)
    values = [pool.page(i) for i in range(4)]
    assert backend.batch_set(KEYS[:3], values[:3]) and backend.set(KEYS[3], values[3])
    targets = [other.get_dummy_flat_data_page() for _ in range(5)]
    got = second.batch_get(KEYS[:5], targets)
    assert [torch.equal(g, v) for g, v in zip(got[:4], values, strict=True)] == [True] * 4
    assert got[4] is None
    one = second.get(KEYS[2], other.get_dummy_flat_data_page())
    assert torch.equal(one, values[2]) and second.get("unknown", targets[0]) is None
    assert torch.equal(second.get(KEYS[1]), values[1])
    assert second.batch_exists(KEYS) == 4


def test_the_same_pages_as_tensors_and_by_pointer_are_not_mixed_up(make: Make) -> None:
    pool = filled("layer_first")
    assert make(pool, interface_v1=1).batch_set_v1(KEYS[:1], pool.indices([0])) == [True]
    assert make(pool).batch_exists(KEYS) == 0  # the order of the bytes is another


def test_through_the_fetch_process(make: Make) -> None:
    pool, other = filled(), FakePool()
    make(pool, interface_v1=1).batch_set_v1(KEYS[:6], pool.indices([0, 1, 2, 3, 4, 5]))
    small = {"fetch": "process", "arena_bytes": 32 << 20, "fetch_seconds": 60.0}
    second = make(other, interface_v1=1, **small)
    assert second.batch_get_v1(KEYS[:8], other.indices(list(range(8)))) == [True] * 6 + [False] * 2
    assert all(same(pool, i, other, i) for i in range(6))


def test_misses_of_the_fetch_process_are_counted_by_reason(make: Make, place: Place) -> None:
    """Where `kvctl stats` has them from."""
    pool, small = filled(), {"fetch": "process", "arena_bytes": 32 << 20, "fetch_seconds": 60.0}
    backend = make(pool, interface_v1=1, **small)
    backend.batch_set_v1(KEYS[:6], pool.indices(list(range(6))))
    (path,) = place.segments()
    flip(str(path), 4096 + 3 * 4096 + 5)
    assert backend.batch_get_v1(KEYS[:6], pool.indices(list(range(6)))).count(True) == 3
    counted = [k for k in backend._link.store.stats() if k.startswith("fetch_miss.")]
    assert counted == ["fetch_miss.checksum_of_part_kv"]


def transfer(
    name: Any, pool: FakePool | None, keys: list[str], pages: Any = None,
    policy: Any = PoolHitPolicy.ALL_PAGES, **more: Any,
) -> Any:  # fmt: skip
    indices = None if pool is None else pool.indices(list(pages))
    kind = getattr(PARTS.storage, "PoolTransfer", sglang_fake.PoolTransfer)
    return kind(name=name, host_indices=indices, keys=keys, hit_policy=policy, **more)


@pytest.mark.expect_logs("stores no pages of pool mamba: pool mamba is unknown")
def test_several_pools(make: Make) -> None:
    kv, swa, other = filled(), filled(layers=2, dim=4), FakePool(layers=2, dim=4)
    backend = make(kv, interface_v1=1)
    backend.register_mem_host_pool_v2(kv, PoolName.KV)
    backend.register_mem_host_pool_v2(swa, PoolName.SWA)
    backend.batch_set_v1(KEYS[:6], kv.indices(list(range(6))), info([]))
    window = transfer(PoolName.SWA, swa, KEYS[4:6], [4, 5])
    assert backend.batch_set_v2([window], info(KEYS[:4])) == {PoolName.SWA: [True, True]}

    trailing = transfer(PoolName.SWA, None, KEYS[-2:], policy=PoolHitPolicy.TRAILING_PAGES)
    found = backend.batch_exists_v2(KEYS, [trailing])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (6, [6])
    assert found.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.SWA: 6}

    second = make(FakePool(), interface_v1=1)
    second.register_mem_host_pool_v2(other, PoolName.SWA)
    loaded = second.batch_get_v2([transfer(PoolName.SWA, other, KEYS[4:7], [0, 1, 2])])
    assert loaded == {PoolName.SWA: [True, True, False]}
    assert same(swa, 4, other, 0) and same(swa, 5, other, 1)
    assert second.batch_get_v2([transfer(PoolName.MAMBA, other, KEYS[:1], [0])]) == {
        PoolName.MAMBA: [False]
    }


def test_a_pool_whose_pages_have_one_token(make: Make) -> None:
    mamba = filled(page_size=1, layers=1)
    backend = make(filled(), interface_v1=1)
    backend.register_mem_host_pool_v2(mamba, PoolName.MAMBA)
    assert backend.batch_set_v2([transfer(PoolName.MAMBA, mamba, KEYS[3:4], [9])]) == {
        PoolName.MAMBA: [True]
    }
    other = FakePool(page_size=1, layers=1)
    backend.register_mem_host_pool_v2(other, PoolName.MAMBA)
    second = make(filled(), interface_v1=1)
    second.register_mem_host_pool_v2(other, PoolName.MAMBA)
    second.batch_get_v2([transfer(PoolName.MAMBA, other, KEYS[3:4], [2])])
    assert same(mamba, 9, other, 2)


def test_hits_against_a_plain_model(make: Make) -> None:
    """Every policy, over random patterns of presence."""
    rng = random.Random(3)
    pools = {n: filled() for n in (PoolName.SWA, PoolName.INDEXER)}
    backend = make(filled(), interface_v1=1)
    for name, pool in pools.items():
        backend.register_mem_host_pool_v2(pool, name)
    for case in range(40):
        keys = [f"{case:032x}{i:032x}" for i in range(rng.randint(1, 8))]
        there = {
            n: {k for k in keys if rng.random() < 0.75}
            for n in (PoolName.KV, PoolName.SWA, PoolName.INDEXER)
        }
        for key in there[PoolName.KV]:
            backend.batch_set_v1([key], backend.mem_pool_host.indices([0]))
        for name, pool in pools.items():
            for key in there[name]:
                backend.batch_set_v2([transfer(name, pool, [key], [0])])
        window = min(len(keys), rng.randint(1, 3))
        needs = [
            transfer(PoolName.SWA, None, keys[-window:], policy=PoolHitPolicy.TRAILING_PAGES),
            transfer(PoolName.INDEXER, None, keys),
        ][: rng.randint(0, 2)]
        lengths = [
            n
            for n in range(1, len(keys) + 1)
            if set(keys[:n]) <= there[PoolName.KV]
            and (len(needs) < 1 or set(keys[max(0, n - window) : n]) <= there[PoolName.SWA])
            and (len(needs) < 2 or set(keys[:n]) <= there[PoolName.INDEXER])
        ]
        found = backend.batch_exists_v2(keys, needs)
        assert found.restorable_prefix_pages == lengths
        assert found.kv_hit_pages == max(lengths, default=0)


def test_block_groups_never_limit(make: Make) -> None:
    blocks = filled()
    backend = make(filled(), interface_v1=1)
    backend.register_mem_host_pool_v2(blocks, PoolName.INDEXER)
    backend.batch_set_v1(KEYS[:8], backend.mem_pool_host.indices(list(range(8))))
    groups = [f"group{i}" for i in range(6)]  # two keys stand for four pages
    backend.batch_set_v2([transfer(PoolName.INDEXER, blocks, groups[:3], [0, 1, 2])])
    need = transfer(
        PoolName.INDEXER, None, groups, policy=PoolHitPolicy.BLOCK_GROUPS, block_pages=4,
        group_pages=2,
    )  # fmt: skip
    found = backend.batch_exists_v2(KEYS[:8], [need])
    assert found.kv_hit_pages == 8
    assert found.extra_pool_hit_pages == {PoolName.KV: 8, PoolName.INDEXER: 4}


# who shares with whom


@pytest.mark.parametrize(
    ("settings", "ranks", "shape"),
    [
        ({"weights": "w1"}, {}, {}),
        ({"salt": "s"}, {}, {}),
        ({}, {"tp_rank": 1, "tp_size": 2}, {}),
        ({}, {"tp_size": 2}, {}),
        ({}, {"pp_rank": 1, "pp_size": 2}, {}),
        ({}, {"attn_cp_rank": 1, "attn_cp_size": 2}, {}),
        ({}, {}, {"layout": "layer_first"}),
        ({}, {}, {"dtype": torch.int32}),
        ({}, {}, {"page_size": 8}),
        ({}, {}, {"layers": 4}),
        ({}, {}, {"heads": 1, "dim": 16}),
    ],
)
def test_another_identity_finds_nothing(
    make: Make, settings: dict[str, Any], ranks: dict[str, Any], shape: dict[str, Any]
) -> None:
    pool = filled()
    make(pool, interface_v1=1).batch_set_v1(KEYS[:2], pool.indices([0, 1]))
    strange = make(FakePool(**shape), interface_v1=1, config=ranks, **settings)
    assert strange.batch_exists(KEYS) == 0
    assert make(FakePool(), interface_v1=1).batch_exists(KEYS) == 2


def test_the_ranks_of_latent_attention_share_one_copy(make: Make) -> None:
    pool = filled()
    for rank, found in ((0, 0), (1, 2)):
        config = {"is_mla_model": True, "tp_rank": rank, "tp_size": 2}
        backend = make(pool, interface_v1=1, config=config)
        assert backend.batch_exists(KEYS) == found
        backend.batch_set_v1(KEYS[:2], pool.indices([0, 1]))
        backend.register_mem_host_pool_v2(pool, PoolName.MAMBA)  # each rank has its own share
        one = [transfer(PoolName.MAMBA, pool, KEYS[:1], [0])]
        assert backend.batch_exists_v2(KEYS[:1], one).kv_hit_pages == 0
        backend.batch_set_v2(one)


@pytest.mark.expect_logs(f"{OFF}: .*give `weights`")
def test_without_weights_it_is_off(make: Make) -> None:
    pool = filled()
    off(make(pool, interface_v1=1, weights=""), pool)


def off(backend: Any, pool: FakePool) -> None:
    """Every method answers, with nothing."""
    assert backend.batch_set_v1(KEYS[:2], pool.indices([0, 1])) == [False, False]
    assert backend.batch_get_v1(KEYS[:2], pool.indices([0, 1])) == [False, False]
    assert not backend.set(KEYS[0], pool.page(0)) and not backend.batch_set(
        KEYS[:1], [pool.page(0)]
    )
    assert backend.get(KEYS[0], pool.page(0)) is None
    assert backend.batch_get(KEYS[:2], [pool.page(0)] * 2) == [None, None]
    assert backend.batch_exists(KEYS) == 0 and backend.exists(KEYS[0]) is False
    one = [transfer(PoolName.KV, pool, KEYS[:1], [0])]
    assert backend.batch_exists_v2(KEYS, []).kv_hit_pages == 0
    assert backend.batch_set_v2(one) == backend.batch_get_v2(one) == {PoolName.KV: [False]}
    assert backend.get_stats() is None and backend.counters() == {}


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"strore": "x"}, "unknown setting strore"), ({"fetch": "no"}, "fetch is"),
        ({"save_bytes": "1"}, "must be of type int"), ({"fetch_seconds": 0}, "must be positive"),
        ({"store": ""}, "needs `store`"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_right_stop_the_engine(
    make: Make, wrong: dict[str, Any], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        make(filled(), **wrong)


@pytest.mark.expect_logs(f"{OFF}: .*nowhere")
def test_a_store_that_is_away_switches_it_off(make: Make, tmp_path: Path) -> None:
    pool = filled()
    off(make(pool, interface_v1=1, store=str(tmp_path / "nowhere")), pool)


# what goes wrong


def test_a_damaged_page_is_a_miss_and_never_wrong_bytes(make: Make, place: Place) -> None:
    pool, other = filled(), FakePool()
    backend = make(pool, interface_v1=1)
    backend.batch_set_v1(KEYS[:6], pool.indices(list(range(6))))
    (path,) = place.segments()
    flip(str(path), 4096 + 3 * 4096 + 5)
    second = make(other, interface_v1=1)
    good = second.batch_get_v1(KEYS[:6], other.indices(list(range(6))))
    assert good == [True] * 3 + [False] * 3
    assert all(same(pool, i, other, i) for i in range(3)) and not other.page(3).any()
    assert backend.batch_exists(KEYS) == 3  # forgotten, so that it can be stored again
    assert backend.batch_set_v1(KEYS[:6], pool.indices(list(range(6)))) == [True] * 6
    assert second.batch_get_v1(KEYS[3:6], other.indices([3, 4, 5])) == [True] * 3
    assert all(same(pool, i, other, i) for i in range(6))


@pytest.fixture
def faults(place: Place, monkeypatch: pytest.MonkeyPatch) -> FaultyBackend:
    """Storage that fails on purpose below the backends that are made next."""
    faulty = FaultyBackend(PosixBackend(str(place.store)))
    opened = Store.open

    def open_faulty(path: str, **options: Any) -> Store:
        return opened(path, backend=faulty, **options)

    monkeypatch.setattr(PARTS.link.Store, "open", open_faulty)
    return faulty


@pytest.mark.expect_logs("not stored: .*Input/output error")
def test_a_disk_that_fails(make: Make, faults: FaultyBackend) -> None:
    pool, other = filled(), FakePool()
    backend = make(pool, interface_v1=1)
    with faults.during("writev", do=Fail(errno.EIO), times=None):
        assert backend.batch_set_v1(KEYS[:3], pool.indices([0, 1, 2])) == [False] * 3
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_set_v1(KEYS[:3], pool.indices([0, 1, 2])) == [True] * 3
    with faults.during("readv", do=Fail(errno.ETIMEDOUT), times=None):
        assert backend.batch_get_v1(KEYS[:3], other.indices([0, 1, 2])) == [False] * 3
    assert backend.counters()["loads_short"] == 1


def test_storage_that_did_not_answer_is_not_asked_for_a_moment(
    make: Make, faults: FaultyBackend
) -> None:
    pool = filled()
    backend = make(pool, interface_v1=1)
    backend.batch_set_v1(KEYS[:3], pool.indices([0, 1, 2]))
    now = 1000.0
    backend._link._clock = lambda: now
    with faults.during("readv", do=Fail(errno.ETIMEDOUT), times=None):
        backend.batch_get_v1(KEYS[:3], pool.indices([0, 1, 2]))
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_get_v1(KEYS[:3], pool.indices([0, 1, 2])) == [False] * 3
    assert backend.counters()["loads_short"] == 1  # the storage was asked once
    now += 2 * PARTS.link._REST_SECONDS
    assert backend.batch_exists(KEYS) == 3


@pytest.mark.parametrize(
    ("reason", "found"),
    [
        ("deadline", 0), ("backend down: no answer for 5.0 s", 0), ("busy: 128 tickets", 3),
        ("arena full", 3), ("fetcher gone: it hung up", 3), ("fetcher silent: no answer", 3),
    ],
)  # fmt: skip
def test_only_storage_that_does_not_answer_is_let_be(
    make: Make, monkeypatch: pytest.MonkeyPatch, reason: str, found: int
) -> None:
    """Not a fetch process that is busy or gone: what is stored may be had a moment later."""
    pool = filled()
    backend = make(pool, interface_v1=1)
    backend.batch_set_v1(KEYS[:3], pool.indices([0, 1, 2]))
    fetcher = SimpleNamespace(
        fetch=lambda ns, *_, **__: Ticket.missed(ns, 0, reason), close=lambda: None
    )
    monkeypatch.setattr(backend._link, "_fetcher", fetcher)
    assert backend.batch_get_v1(KEYS[:3], pool.indices([0, 1, 2])) == [False] * 3
    assert backend.batch_exists(KEYS) == found


@pytest.mark.expect_logs("not stored: not within 0.05 s")
def test_a_store_that_hangs_is_given_up_and_its_memory_is_not_read_again(
    make: Make, faults: FaultyBackend
) -> None:
    pool = filled()
    backend = make(pool, interface_v1=1, save_seconds=0.05, save_bytes=1536)
    page = pool.page(0)
    held = Hold()
    with faults.during("writev", do=held):
        try:
            assert backend.batch_set_v1(KEYS[:2], pool.indices([0, 1])) == [False, False]
            pool.kv_buffer.zero_()  # SGLang's memory is its own again
            # What does not fit beside it is dropped at once.
            assert backend.batch_set_v1(KEYS[2:8], pool.indices(list(range(6)))) == [False] * 6
        finally:
            held.release()
        backend._link._writer.submit(lambda: None).result()  # behind what hung
    assert backend.counters()["pages_dropped"] == 1
    other = FakePool()
    assert make(other, interface_v1=1).batch_get_v1(KEYS[:1], other.indices([0])) == [True]
    assert torch.equal(other.page(0), page)


def test_a_store_that_hangs_does_not_keep_the_process(place: Place) -> None:
    """Whose threads are left behind, not waited for."""
    script = (
        "import sys, threading\n"
        "from kvfs.connectors.keyed_link import Link\n"
        "from kvfs.connectors.settings import KeyedSettings\n"
        "link = Link(KeyedSettings(*sys.argv[1:], save_seconds=0.05, fetch='inline'))\n"
        "link._writer.submit(threading.Event().wait)\n"
        "link.close()\n"
    )
    command = [sys.executable, "-c", script, str(place.store), str(place.index)]
    subprocess.run(command, check=True, timeout=60, stderr=subprocess.DEVNULL)


def test_without_threads_it_is_off(
    make: Make, monkeypatch: pytest.MonkeyPatch, expect_logs: Any
) -> None:
    """And nothing stays open: the run's end looks for that."""
    expect_logs(f"{OFF}: can't start new thread")

    def refuse(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    pool = filled()
    with monkeypatch.context() as patched:
        patched.setattr(PARTS.link.Following, "start", refuse)
        backend = make(pool, interface_v1=1)
    off(backend, pool)


def test_what_was_submitted_is_done_or_cancelled() -> None:
    background, go, started = Background("t"), threading.Event(), threading.Event()
    first = background.submit(lambda: (started.set(), go.wait())[1])
    second = background.submit(lambda: 2)
    assert started.wait(60) and not background.close(0) and second.cancelled()
    go.set()
    assert first.result(60) and background.close(60)
    with pytest.raises(RuntimeError, match="closed"):
        background.submit(lambda: 3)
    failing = Background("t", threads=2)
    assert isinstance(failing.submit(lambda: 1 // 0).exception(60), ZeroDivisionError)
    last = failing.submit(lambda: 4)
    assert failing.close(60) and last.result() == 4


def test_stores_are_dropped_before_loads_are_delayed(
    make: Make, faults: FaultyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PARTS.link, "_HOLD_SECONDS", 0.01)
    pool, other = filled(), FakePool()
    backend = make(pool, interface_v1=1)
    backend.batch_set_v1(KEYS[:1], pool.indices([0]))
    held = Hold()
    with faults.during("readv", do=held):
        load = threading.Thread(target=lambda: backend.batch_get_v1(KEYS[:1], other.indices([0])))
        load.start()
        held.reached.wait()
        try:
            assert backend.batch_set_v1(KEYS[1:3], pool.indices([1, 2])) == [False, False]
        finally:
            held.release()
            load.join()
    assert backend.counters()["pages_dropped"] == 2
    assert backend.batch_set_v1(KEYS[1:3], pool.indices([1, 2])) == [True, True]


def test_only_what_is_missing_is_copied(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = filled()
    backend = make(pool, interface_v1=1)
    backend.batch_set_v1(KEYS[2:4], pool.indices([2, 3]), info(KEYS[:2]))
    taken: list[int] = []
    pages = backend._pool("kv").pages
    monkeypatch.setattr(pages, "_places", recorded(pages._places, taken))
    assert backend.batch_set_v1(KEYS[:6], pool.indices(list(range(6))), info([])) == [True] * 6
    assert taken == [0, 1, 4, 5]
    assert backend.batch_set_v1(KEYS[:6], pool.indices(list(range(6))), info([])) == [True] * 6
    assert taken == [0, 1, 4, 5]


def recorded(places: Any, taken: list[int]) -> Any:
    def call(indices: Any, page: int) -> Any:
        taken.append(page)
        return places(indices, page)

    return call


def test_more_than_the_memory_for_stores_goes_in_parts(make: Make) -> None:
    pool, other = filled(), FakePool()
    backend = make(pool, interface_v1=1, save_bytes=6 * 1536)
    assert backend.batch_set_v1(KEYS, pool.indices(list(range(12)))) == [True] * 12
    second = make(other, interface_v1=1)
    assert second.batch_get_v1(KEYS, other.indices(list(range(12)))) == [True] * 12
    assert all(same(pool, i, other, i) for i in range(12))


def test_prefix_keys_tell_what_belongs_together(make: Make) -> None:
    pool = filled()
    backend = make(pool, interface_v1=1)
    backend.batch_set_v1(KEYS[:3], pool.indices([0, 1, 2]), info([]))
    backend.batch_set_v1(KEYS[3:5], pool.indices([3, 4]), info(KEYS[:3]))
    store = backend._link.store
    (ns,) = store.namespaces()
    runs = sorted((r.block, r.count, r.parent) for r in store.index.all_runs(ns.number))
    assert [(block, count) for block, count, _ in runs] == [(0, 3), (3, 2)]
    assert runs[1][2] == ns.keys(KEYS[:3]).digest(3)


@pytest.mark.expect_logs(MISS)
def test_indices_that_do_not_fit_are_a_miss(make: Make) -> None:
    pool = filled()
    backend = make(pool, interface_v1=1)
    assert backend.batch_set_v1(KEYS[:3], pool.indices([0, 1])) == [False] * 3
    assert backend.batch_get_v2([transfer(PoolName.KV, None, KEYS[:2])]) == {
        PoolName.KV: [False, False]
    }
    assert backend.counters()["errors"] == 2


@pytest.mark.expect_logs(MISS)
def test_whatever_a_pool_raises_is_a_miss(make: Make) -> None:
    class Broken(FakePool):
        def get_page_buffer_meta(self, indices: Any) -> Any:
            if len(indices) and int(indices[0]):
                raise RuntimeError("no such page")
            return super().get_page_buffer_meta(indices)

    pool = Broken()
    backend = make(pool, interface_v1=1)
    assert backend.batch_set_v1(KEYS[:2], pool.indices([3, 4])) == [False, False]


@pytest.mark.expect_logs("kvfs is off until the backend is attached again")
def test_asked_to_clear_it_is_off(make: Make) -> None:
    pool = filled()
    backend = make(pool, interface_v1=1)
    backend.batch_set_v1(KEYS[:2], pool.indices([0, 1]))
    backend.clear()
    off(backend, pool)
    assert make(pool, interface_v1=1).batch_exists(KEYS) == 2  # others keep what is theirs


def test_figures(make: Make) -> None:
    pool = filled()
    backend = make(pool, interface_v1=1)
    backend.batch_set_v1(KEYS[:4], pool.indices([0, 1, 2, 3]))
    backend.batch_get_v1(KEYS[:3], pool.indices([0, 1, 2]))
    stats = backend.get_stats()
    assert (stats.prefetch_pgs, stats.backup_pgs) == ([3], [4])
    assert len(stats.prefetch_bandwidth) == len(stats.backup_bandwidth) == 1
    assert backend.get_stats().prefetch_pgs == []
    assert backend.counters() == {"stored_pages": 4, "loaded_pages": 3, "pages_not_loaded": 0}
