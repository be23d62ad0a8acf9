"""kvfs beside the layout code of DeepInfer's own release, which `make test-deepinfer` fetches."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepinfer_real as real
import numpy as np
import pytest
import torch

from kvfs import presets
from kvfs.connectors.deepinfer_layout import Memory, measure

SOURCE = os.environ.get("KVFS_DEEPINFER_SOURCE", "")
pytestmark = pytest.mark.skipif(
    not SOURCE, reason="no source of DeepInfer: `make test-deepinfer` fetches it"
)
PRESET = presets.get("deepseek-v4.1-flash", weights="w", tokenizer="t")


@pytest.fixture(scope="module")
def release() -> Any:
    return real.cache_engine(Path(SOURCE))


def engine(release: Any, block: int = 128, states: int = 4) -> Any:
    """A CacheEngine whose memory is a CPU's."""
    release.GPUCacheInterface.kvcache_layout_logged = True
    cfg = real.flash(release.AttrDict)
    made = release.CacheEngine(SimpleNamespace(block_size=block), cfg, states, False, 3)
    (size,) = made.get_block_shape(cfg, block)
    _, state = made.get_state_shape(cfg, states)
    made.gpu_blocks = torch.zeros((3, size), dtype=torch.uint8)
    made.gpu_states = torch.randint(0, 256, (states, state), dtype=torch.uint8)
    made.gpu_cache = release.GPUCacheInterface(
        cache_config=made.cache_config, cfg=cfg, gpu_blocks=made.gpu_blocks,
        state_blocks=made.gpu_states,
    )  # fmt: skip
    return made


def memory_of(release: Any, **options: Any) -> Memory:
    return measure(engine(release, **options), model="m", weights="w", tokenizer="t")


def test_row_and_slot_are_those_of_the_preset(release: Any) -> None:
    identity = memory_of(release).identity
    assert identity.row_bytes == PRESET.row_bytes == 114_048
    assert identity.state == PRESET.state
    assert identity.state is not None and identity.state.slot_bytes == 1_415_040
    sizes: dict[int, int] = {}
    for span in PRESET.spans:
        sizes[span.layer] = max(sizes.get(span.layer, 0), span.end)
    assert {s.layer: s.end for s in identity.spans} == sizes


def test_indexer_and_main_kv_of_a_layer_are_one_part(release: Any) -> None:
    """What the engine's views of a block write is, all of it, in the spans: none comes alone."""
    made = engine(release)
    memory = measure(made, model="m", weights="w", tokenizer="t")
    for layer in made.gpu_cache.cache_list:
        for view in (layer.ica_cache, layer.ca_cache):
            if view is not None:
                view[1] = 0xFF
    pages = [t[1].numpy() for t in memory.tensors().values()]
    assert sum(int((p == 0xFF).sum()) for p in pages) == int((made.gpu_blocks[1] == 0xFF).sum())
    assert all((p == 0xFF).any() for p in pages)


@pytest.mark.parametrize("block", [64, 128, 256])
def test_blocks_of_other_sizes(release: Any, block: int) -> None:
    memory = memory_of(release, block=block)
    assert memory.identity.block_tokens == max(128, block)
    assert memory.per_block == max(1, 128 // block)


@pytest.mark.parametrize("extra", [0, 128, 256])
def test_states_go_out_and_in(release: Any, extra: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the release's own functions, into another state slot: the same windows."""
    monkeypatch.setattr(real.Envs, "DEEPINFER_PREFILL_STORE_EXTRA_STATE", bool(extra))
    monkeypatch.setattr(real.Envs, "DEEPINFER_PREFILL_STORE_EXTRA_SIZE", extra)
    memory = memory_of(release)
    assert memory.ring is not None and memory.big is not None
    assert memory.big.size == memory.ring.size + extra == 134 + extra
    state, anchor = torch.empty(memory.state_bytes, dtype=torch.uint8), 1280
    memory.cache.select_state_slice_to_store(1, anchor, memory.states, state)
    slot = memory.slot_of(state).numpy().tobytes()
    before = windows(memory, 1, anchor)
    kept = np.frombuffer(memory.ring.window_of(slot, anchor % 134), dtype=np.uint8)
    assert np.array_equal(kept.reshape(before.shape), before)
    memory.cache.load_state_from_store_to_prefill_cache(
        2, anchor, memory.state_of(slot), memory.states
    )
    assert np.array_equal(windows(memory, 2, anchor), before)
    assert not np.array_equal(windows(memory, 3, anchor), before)


def windows(memory: Memory, state_id: int, anchor: int) -> np.ndarray[Any, Any]:
    """The stored layers' tokens before the anchor, from where the engine's views have them."""
    assert memory.identity.state is not None and memory.big is not None
    layers = memory.cache.cache_list[: memory.identity.state.layers]
    places = [p % memory.big.size for p in range(anchor - 128, anchor)]
    return np.stack([layer.swa_cache[state_id, places, 0].numpy() for layer in layers])
