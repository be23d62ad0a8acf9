"""vLLM's tiered offloading with kvfs as the tier below host memory, whole engines."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm", reason="make test-engines")

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, make_offload_key
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm_support import Place, Vllm, said
from vllm_tiny import make, prompt

from kvfs.connectors.background import Background
from kvfs.connectors.settings import KeyedSettings
from kvfs.connectors.vllm_tier import KvfsTier

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


def transfer(place: Place) -> dict[str, Any]:
    tier = {"type": "KvfsTier", "module_path": "kvfs.connectors.vllm_tier", **place.settings()}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {
            "spec_name": "CpuTiers", "spec_module_path": "vllm_cpu_tier",
            "cpu_bytes_to_use": 64 << 20, "secondary_tiers": [tier],
        },
    }  # fmt: skip


def test_nothing_raises_into_vllm(expect_logs: Any) -> None:
    """And vllm hears of every job, also of one that could not begin: it waits for each."""
    expect_logs("lookup failed; it counts as a miss: no such thing")
    expect_logs("submit_load failed; it counts as a miss")
    expect_logs("_submit_store failed; it counts as a miss")
    threads, counted = Background("t"), Counter[str]()
    assert threads.close(60)

    def have(identity: Any, keys: Any) -> list[bool]:
        raise OSError("no such thing")

    tier = object.__new__(KvfsTier)
    tier._link = SimpleNamespace(have=have, count=lambda name: counted.update([name]))
    tier._settings, tier._block_size_bytes = KeyedSettings("/s"), 512
    tier._lock, tier._done, tier._missing = threading.Lock(), [], {}
    tier._storing = tier._loading = threads
    tier._storing_bytes, tier._with_events, tier._identities = 0, False, {0: object()}
    key = make_offload_key(bytes(32), 0)
    assert tier.lookup(key, None) is LookupResult.MISS
    context = SimpleNamespace(get_offload_key_position=lambda key: None)
    for number, is_promotion in enumerate((True, False)):
        job = TransferJob(number, [key], np.zeros(1, int), is_promotion, context)
        (tier.submit_load if is_promotion else tier.submit_store)(job)
    assert [(done.job_id, done.success) for done in tier.get_finished_jobs()] == [
        (0, False), (1, False),
    ]  # fmt: skip
    assert (tier._storing_bytes, counted["errors"]) == (0, 3)


class Scene(NamedTuple):
    place: Place
    prompts: list[list[int]]
    plain: list[Any]
    engine: Vllm


@pytest.fixture(scope="module", params=["llama", "gpt_oss"])
def scene(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    """An engine that has other processes' chunks of three prompts before it."""
    base = tmp_path_factory.mktemp(f"tier-{request.param}")
    place, model = Place(base), make(request.param, base)
    environment = {**place.environment, "PYTHONPATH": str(Path(__file__).parent)}
    prompts = [prompt(600, seed) for seed in range(3)]
    with Vllm(model) as engine:
        plain = [engine.generate(ids)[0] for ids in prompts]
    with Vllm(model, transfer(place), environment=environment) as engine:
        assert [said(engine.generate(ids)[0]) for ids in prompts] == [said(p) for p in plain]
    with Vllm(model, transfer(place), environment=environment) as engine:
        yield Scene(place, prompts, plain, engine)
    place.close()


def hits(engine: Vllm) -> float:
    return engine.metrics.get("vllm:kv_offload_tiering_chunk_hits", 0)


def test_another_process_computes_the_tail_alone(scene: Scene) -> None:
    (answer,) = scene.engine.generate(scene.prompts[0])
    assert answer["cached"] == 512 and said(answer) == said(scene.plain[0])
    assert hits(scene.engine) >= 4


def test_prefixes_are_chains(scene: Scene) -> None:
    """Of the group that keeps all of its blocks: a prompt is one prefix, not as many as chunks."""
    with scene.place.open() as store:
        chains = {
            ns.name: sorted((r.block, r.count) for r in store.index.all_runs(ns.number))
            for ns in store.namespaces()
        }
    assert [(0, 4)] * 3 in chains.values(), chains


def test_damage_is_computed(scene: Scene) -> None:
    """Every chunk of one prompt has a flipped bit; vLLM is told of each, and computes."""
    for segment in scene.place.segments():
        data = bytearray(segment.read_bytes())
        data[5000::1000] = bytes(b ^ 1 for b in data[5000::1000])
        segment.write_bytes(data)
    scene.place.evict()
    (answer,) = scene.engine.generate(scene.prompts[1])
    assert answer["reason"] == "length" and said(answer) == said(scene.plain[1])


def test_a_store_that_goes_away(scene: Scene) -> None:
    away = scene.place.store.with_name("away")
    scene.place.store.rename(away)
    scene.place.evict()
    try:
        answers = scene.engine.generate(scene.prompts[2], prompt(300, seed=70))
    finally:
        away.rename(scene.place.store)
    assert answers[0]["tokens"] == scene.plain[2]["tokens"]
    assert [a["reason"] for a in answers] == ["length", "length"]
