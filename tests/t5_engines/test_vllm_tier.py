"""vLLM's tiered offloading with kvfs as the tier below host memory, whole engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm", reason="make test-engines")

from vllm_support import Place, Vllm, said
from vllm_tiny import make, prompt

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
