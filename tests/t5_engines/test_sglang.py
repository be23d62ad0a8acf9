"""SGLang with kvfs below it: its own pools, its own file backend beside ours, whole engines."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang.srt.server_args", reason="make test-sglang")

import torch
import vllm_tiny
from sglang.srt.mem_cache import hicache_storage as storage
from sglang_support import Sglang, host_pool, settings
from vllm_support import Place

from kvfs import Store
from kvfs.connectors import sglang as backend_module
from kvfs.connectors.sglang import KvfsHiCache
from kvfs.frames import RenewEntry
from kvfs.testing.stock import flip

# An engine takes half a minute to start, where the machine has nothing else to do.
pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

PAGE, LENGTH = 128, 600
STORED = LENGTH // PAGE * PAGE


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.close()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine: nobody says which model is run."""
    monkeypatch.setattr(backend_module, "_server", lambda: (None, None))


def config(extra: dict[str, Any], **more: Any) -> storage.HiCacheStorageConfig:
    given = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
        "attn_cp_size": 1, "is_mla_model": True, "enable_storage_metrics": False,
        "is_page_first_layout": True, "model_name": "m", **more,
    }  # fmt: skip
    return storage.HiCacheStorageConfig(extra_config=extra, **given)


def open_backend(place: Place, pool: Any, **more: Any) -> KvfsHiCache:
    extra = settings(place, weights="w", fetch="inline", **more)
    for key in ("prefetch_threshold", "hicache_storage_pass_prefix_keys"):
        del extra[key]  # SGLang takes these out
    backend = KvfsHiCache(config(extra), {})
    backend.register_mem_pool_host(pool)
    return backend


# parts


@pytest.mark.parametrize("pointers", [1, 0])
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("mha", "page_first"), ("mha", "layer_first"), ("mha", "page_first_direct"),
        ("mla", "page_first"), ("mla", "layer_first"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("alone")
def test_pools_of_sglang(place: Place, kind: str, layout: str, pointers: int) -> None:
    keys = [f"{i:064x}" for i in range(5)]
    pool, other = host_pool(kind, layout), host_pool(kind, layout)
    noise = torch.Generator().manual_seed(1)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=noise))
    other.kv_buffer.zero_()
    page = pool.page_size
    own, theirs = torch.arange(page, 6 * page), torch.arange(3 * page, 8 * page)
    backend = open_backend(place, pool, interface_v1=pointers)
    second = open_backend(place, other, interface_v1=pointers)
    if pointers:
        assert backend.batch_set_v1(keys, own) == [True] * 5
        assert second.batch_get_v1(keys, theirs) == [True] * 5
    else:
        pages = [pool.get_data_page(int(own[i * page])) for i in range(5)]
        assert backend.batch_set(keys, pages)
        got = second.batch_get(keys, [other.get_dummy_flat_data_page() for _ in keys])
        for i, data in enumerate(got):
            other.set_from_flat_data_page(int(theirs[i * page]), data)
    for i in range(5):
        a, b = (p.get_data_page(int(at[i * page])) for p, at in ((pool, own), (other, theirs)))
        assert torch.equal(a, b) and a.any()
    for one in (backend, second):
        one.close()


@pytest.mark.usefixtures("alone")
def test_hits_are_those_of_sglangs_own_file_backend(place: Place, tmp_path: Path) -> None:
    files = tmp_path / "files"
    reference = storage.HiCacheFile(config({"file_storage_path": str(files)}))
    pools = {n: host_pool("mla", "page_first", tokens=32) for n in ("kv", "swa", "indexer")}
    backend = open_backend(place, pools["kv"])
    for name in ("swa", "indexer"):
        backend.register_mem_host_pool_v2(pools[name], storage.PoolName(name))
    rng, one = random.Random(5), torch.arange(16)
    disagreements = []
    for case in range(150):
        keys = [f"{case:032x}{i:032x}" for i in range(rng.randint(1, 10))]
        share = rng.choice([0.5, 0.8, 0.95])
        for key in keys:
            for name in pools:
                if rng.random() < share:
                    stem = reference._get_component_key(key, None if name == "kv" else name)
                    (files / f"{stem}.bin").touch()
                    pool = storage.PoolName(name)
                    backend.batch_set_v2([storage.PoolTransfer(pool, one, keys=[key])])
        transfers = [
            storage.PoolTransfer(
                storage.PoolName.SWA, keys=keys[-rng.randint(1, 3) :],
                hit_policy=storage.PoolHitPolicy.TRAILING_PAGES,
            ),
            storage.PoolTransfer(storage.PoolName.INDEXER, keys=keys),
        ]  # fmt: skip
        rng.shuffle(transfers)
        transfers = transfers[: rng.randint(0, 2)]
        theirs = reference.batch_exists_v2(keys, transfers)
        ours = backend.batch_exists_v2(keys, transfers)
        if theirs != ours:
            disagreements.append((theirs, ours))
        assert reference.batch_exists(keys) == backend.batch_exists(keys)
    assert disagreements == []
    assert backend.counters().get("errors", 0) == 0
    backend.close()


# whole engines


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vllm_tiny.make("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [vllm_tiny.prompt(LENGTH, seed) for seed in range(7, 12)]


@pytest.fixture(scope="module")
def expected(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    return vllm_tiny.greedy(model, prompts)


def test_without_kvfs(model: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    with Sglang(model, None, dict(os.environ)) as engine:
        assert [engine.generate(ids) for ids in prompts] == [(e, 0) for e in expected]


def wait_for_blocks(place: Place, count: int) -> None:
    """Until so many blocks are stored; SGLang stores behind its answer."""
    until = time.monotonic() + 120
    while True:
        with place.open() as store:
            found = sum(
                r.count for ns in store.namespaces() for r in store.index.all_runs(ns.number)
            )
        if found >= count:
            assert found == count
            return
        assert time.monotonic() < until, f"{found} of {count} blocks were stored"
        time.sleep(0.1)


def test_a_second_engine_is_served_from_the_store(
    place: Place, model: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with Sglang(model, settings(place), place.environment) as first:
        for i in range(4):
            assert first.generate(prompts[i]) == (expected[i], 0)
            wait_for_blocks(place, (i + 1) * STORED // PAGE)  # one behind the other
    with Sglang(model, settings(place), place.environment) as engine:
        assert engine.generate(prompts[0]) == (expected[0], STORED)
        damaged(place, engine, prompts, expected)


def damaged(
    place: Place, engine: Sglang, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Whatever becomes of what is stored, the tokens are the same and no request fails."""
    with Store.open(place.store, index=str(place.index)) as store:  # the engine's own index
        (ns,) = store.namespaces()
        runs = sorted(store.index.all_runs(ns.number), key=lambda r: r.written_ms)
        assert [r.count for r in runs] == [STORED // PAGE] * 4
        segment = store.index.segment(runs[1].seg)
        offset = segment.geometry.offset(runs[1].slot + 2)
        flip(str(place.store / segment.path), offset + 1000)
        assert engine.generate(prompts[1]) == (expected[1], 2 * PAGE)  # up to the damaged block

        now = store.now_ms()
        store.writer().publish([], [RenewEntry(ns.nsid, runs[2].head, now, now, "", True)])
        assert engine.generate(prompts[2]) == (expected[2], 0)  # expired

    engine.flush()
    place.evict()
    for path in place.segments():
        os.truncate(path, 0)
    assert engine.generate(prompts[3]) == (expected[3], 0)  # vanished
    shutil.rmtree(place.store / "seg")
    (place.store / "seg").touch()
    assert engine.generate(prompts[4]) == (expected[4], 0)  # nothing can be stored
    assert engine.generate(prompts[0]) == (expected[0], 0)


@pytest.mark.parametrize(("pointers", "layout"), [(0, "page_first"), (1, "layer_first")])
def test_the_other_interfaces(
    place: Place, model: Path, prompts: list[list[int]], expected: list[list[int]], pointers: int,
    layout: str,
) -> None:  # fmt: skip
    extra = settings(place, interface_v1=pointers)
    with Sglang(model, extra, place.environment, hicache_mem_layout=layout) as engine:
        assert engine.generate(prompts[0]) == (expected[0], 0)
        wait_for_blocks(place, STORED // PAGE)
        engine.flush()
        assert engine.generate(prompts[0]) == (expected[0], STORED)
        # A prompt that shares its first half only.
        other = prompts[0][: 2 * PAGE] + prompts[1][2 * PAGE :]
        engine.flush()
        tokens, stored = engine.generate(other)
        assert stored == 2 * PAGE
        engine.flush()
        assert engine.generate(other)[0] == tokens
        # Of a prompt that is stored whole, something is left to compute.
        whole = prompts[0][:STORED]
        tokens, stored = engine.generate(whole)
        engine.flush()
        again, stored = engine.generate(whole)
        assert again == tokens and 0 < stored < STORED
