"""vLLM with the connector, whole engines: what one process has stored, another one is served.

Ruled out are keys without the whole identity, a part of a block missing, a full hit that leaves
nothing to compute, and an I/O error that kills a worker, or is served.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm", reason="make test-engines")

from vllm_support import BLOCK, Place, Vllm, said
from vllm_tiny import greedy, make, prompt

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

LENGTHS = {"llama": 600, "gpt_oss": 1000}
PROMPTS = 3


class Scene(NamedTuple):
    """A place, prompts, what they give without kvfs, and an engine that found them stored."""

    place: Place
    prompts: list[list[int]]
    plain: list[Any]
    engine: Vllm
    model: Path


def stage(name: str, base: Path, models: Path) -> Iterator[Scene]:
    model, length = make(name, models), LENGTHS[name]
    prompts = [prompt(length, seed) for seed in range(PROMPTS)]
    chunks = {"max_num_batched_tokens": 384}  # prompts come in several steps
    place = Place(base)
    with Vllm(model, **chunks) as engine:
        plain = [engine.generate(ids)[0] for ids in prompts]
    with Vllm(model, place.transfer(), environment=place.environment, **chunks) as engine:
        assert [said(engine.generate(ids)[0]) for ids in prompts] == [said(p) for p in plain]
    with Vllm(model, place.transfer(), environment=place.environment, **chunks) as engine:
        yield Scene(place, prompts, plain, engine, model)
    place.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", params=list(LENGTHS))
def scene(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, models: Path
) -> Iterator[Scene]:
    yield from stage(request.param, tmp_path_factory.mktemp(request.param), models)


def whole(ids: list[int]) -> int:
    return (len(ids) - 1) // BLOCK * BLOCK


def test_another_process_computes_the_tail_alone(scene: Scene) -> None:
    for ids, plain in zip(scene.prompts, scene.plain, strict=True):
        (answer,) = scene.engine.generate(ids)
        assert answer["cached"] == whole(ids)
        assert scene.engine.news["hit_tokens"] == whole(ids)
        assert scene.engine.news["miss_tokens"] == len(ids) - whole(ids)
        assert said(answer) == said(plain)


def test_the_tokens_are_those_of_transformers(scene: Scene) -> None:
    assert [p["tokens"] for p in scene.plain] == greedy(scene.model, scene.prompts)


def test_prompts_together(scene: Scene) -> None:
    answers = scene.engine.generate(*scene.prompts)
    assert [a["cached"] for a in answers] == [whole(ids) for ids in scene.prompts]
    assert [a["tokens"] for a in answers] == [p["tokens"] for p in scene.plain]


def test_a_token_is_always_left_to_compute(scene: Scene) -> None:
    """With every block stored, at and around the ends of blocks."""
    ids = scene.prompts[0]
    for length in (1, 127, 128, 129, 255, 256, 257, 384, 512):
        (answer,) = scene.engine.generate(ids[:length], tokens=1)
        assert answer["cached"] == (length - 1) // BLOCK * BLOCK
        assert answer["reason"] == "length" and len(answer["tokens"]) == 1


def test_a_tenant_has_blocks_of_its_own(scene: Scene) -> None:
    ids, plain = scene.prompts[0], scene.plain[0]
    for salt in ("a", "b"):
        first = scene.engine.generate(ids, cache_salt=salt)[0]
        again = scene.engine.generate(ids, cache_salt=salt)[0]
        assert (first["cached"], again["cached"]) == (0, whole(ids))
        assert said(first) == said(again) == said(plain)


def test_what_was_generated_is_found_in_the_next_turn(scene: Scene) -> None:
    (first,) = scene.engine.generate(prompt(200, seed=50), tokens=80)
    turn = prompt(200, seed=50) + first["tokens"] + prompt(60, seed=51)
    (answer,) = scene.engine.generate(turn)
    assert answer["cached"] == 256  # of which 56 tokens were generated


def test_a_damaged_block_is_computed_and_stored_again(scene: Scene) -> None:
    """The flipped byte lies in one part of one layer; the prefix ends before that block."""
    ids, plain = scene.prompts[1], scene.plain[1]
    with scene.place.open() as store:
        ns = next(n for n in store.namespaces() if store.check(n, ids).stored_blocks)
        plan = store.check(ns, ids)
        extent = next(e for e in plan.extents if e.block <= 2 < e.block + e.count)
        path = scene.place.store / extent.segment
        at = extent.geometry.offset(extent.slot + 2 - extent.block) + ns.row_bytes * 3 // 4
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))
    scene.place.evict()
    (answer,) = scene.engine.generate(ids)
    assert answer["cached"] == 2 * BLOCK and scene.engine.news["fetches_short"] == 1
    assert said(answer) == said(plain)
    (again,) = scene.engine.generate(ids)
    assert again["cached"] == whole(ids) and said(again) == said(plain)


def test_expired_blocks_are_computed(scene: Scene) -> None:
    ids, plain = scene.prompts[2], scene.plain[2]
    with scene.place.open() as store:
        ns = next(n for n in store.namespaces() if store.check(n, ids).stored_blocks)
        store.define_class("moment", 1)
        assert store.touch(ns, ids, ttl_class="moment")
    time.sleep(2)  # until it is over, and the engine's index has heard of it
    (answer,) = scene.engine.generate(ids)
    assert answer["cached"] == 0 and said(answer) == said(plain)


def test_a_store_that_goes_away_and_comes_back(scene: Scene) -> None:
    """Nothing can be read or written meanwhile; no request fails, nothing is forgotten."""
    ids, plain = scene.prompts[0], scene.plain[0]
    away = scene.place.store.with_name("away")
    scene.place.store.rename(away)
    scene.place.evict()
    try:
        (answer,) = scene.engine.generate(ids)
        other = scene.engine.generate(prompt(300, seed=60))[0]
    finally:
        away.rename(scene.place.store)
    assert said(answer) == said(plain)
    assert (answer["reason"], other["reason"]) == ("length", "length")
    (again,) = scene.engine.generate(ids)
    assert again["cached"] == whole(ids) and said(again) == said(plain)


def test_vanished_segments(scene: Scene) -> None:
    """And the fetch process with them, which still had them open."""
    ids, plain = scene.prompts[0], scene.plain[0]
    for segment in scene.place.segments():
        segment.unlink()
    scene.place.close()
    (answer,) = scene.engine.generate(ids)
    assert answer["cached"] == 0 and said(answer) == said(plain)
    scene.place.close(again=True)


def test_scheduler_and_worker_in_processes_of_their_own(tmp_path: Path, models: Path) -> None:
    """As `vllm serve` runs them; what the first engine took is stored although it ends at once."""
    place, model, ids = Place(tmp_path), make("llama", models), prompt(600)
    environment = {**place.environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    answers = []
    for _ in range(2):
        # Four processes begin at once: on a busy machine the first fetch takes its time.
        transfer = place.transfer(fetch_seconds=30.0)
        with Vllm(model, transfer, environment=environment) as engine:
            answers += engine.generate(ids)
    place.close()
    assert [a["cached"] for a in answers] == [0, 512]
    assert said(answers[0]) == said(answers[1])


def test_other_weights_under_the_same_name_share_nothing(tmp_path: Path, models: Path) -> None:
    """New weights in the directory, then another dtype, each with the others' blocks there."""
    place, ids = Place(tmp_path), prompt(600)
    path = tmp_path / "model"
    answers = {}
    for what, seed, dtype in (("", 1234, "float32"), ("w", 5, "float32"), ("d", 5, "bfloat16")):
        shutil.copytree(make("llama", models, seed), path, dirs_exist_ok=True)
        environment = place.environment
        with Vllm(path, place.transfer(), environment=environment, dtype=dtype) as engine:
            (answers[what],) = engine.generate(ids)
    place.close()
    assert [a["cached"] for a in answers.values()] == [0, 0, 0]
    assert answers[""]["tokens"] != answers["w"]["tokens"]
