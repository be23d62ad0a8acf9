"""Caches of transformers models through a real store, and back in another process.

What is compared is the logits of the continuation, bit by bit: a cache that went through the store
must continue exactly as the one that never left memory.
"""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny_models
import torch
from hf_support import (
    BLOCK,
    HELD,
    HYBRID,
    IDS,
    LOGGER,
    Child,
    cache_store,
    filled,
    noise,
    overwrite,
)
from transformers import DynamicCache

from kvfs import Store
from kvfs.backend import PosixBackend
from kvfs.connectors import hf_copy
from kvfs.connectors import transformers as connector
from kvfs.testing.faults import Fail, FaultyBackend

# through the store and back


@pytest.mark.parametrize("name", tiny_models.STORED)
def test_comes_back_in_a_new_process(
    name: str, child: Child, store: Store, store_dir: Path
) -> None:
    model = tiny_models.build(name)
    cs = cache_store(store, model)
    assert cs.hybrid == (name in HYBRID)
    cache = filled(model, IDS[:, :HELD])
    assert cs.save(IDS, cache) == HELD
    state = cs.state(IDS, cache)
    assert (state is not None) == cs.hybrid
    in_memory = tiny_models.logits(model, IDS, cache)

    tokens, logits = child.restored(name, store_dir, IDS, state)
    assert tokens == HELD
    assert torch.equal(logits, in_memory)
    whole = tiny_models.logits(model, IDS, DynamicCache(config=model.config))
    assert torch.allclose(logits, whole[HELD:], atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "deepseek_v4"])
def test_it_is_swapped_in(name: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a cache in one swap-in, into memory that holds something else before."""
    model = tiny_models.build(name)
    cs = cache_store(store, model)
    cache, _, state = cs.prefill(IDS)
    swaps = []
    load, room = hf_copy.Swapper.load, hf_copy._room

    def spy(self: Any, *args: Any) -> Any:
        swaps.append(load(self, *args))
        return swaps[-1]

    monkeypatch.setattr(hf_copy.Swapper, "load", spy)
    monkeypatch.setattr(hf_copy, "_room", lambda piece, n: room(piece, n).fill_(7))
    again, tokens = cs.load(IDS, state)
    assert tokens == HELD and [swap.finish() for swap in swaps] == [HELD // BLOCK]
    want = tiny_models.logits(model, IDS, cache)
    assert torch.equal(tiny_models.logits(model, IDS, again), want)


@pytest.mark.parametrize("name", [name for name in tiny_models.STORED if name != "mistral"])
def test_noise_in_a_block_is_not_served(
    name: str, child: Child, store: Store, store_dir: Path
) -> None:
    model = tiny_models.build(name)
    cs = cache_store(store, model)
    cache, _, state = cs.prefill(IDS)
    rows = hf_copy.gather(cs.layout, cache, 0, 2)
    in_memory = tiny_models.logits(model, IDS, cache)
    overwrite(store_dir, rows[1], noise(rows[1]))

    tokens, logits = child.restored(name, store_dir, IDS, state)
    # The good block alone; a model with windows has none at its end.
    assert tokens == (0 if cs.hybrid else BLOCK)
    assert torch.allclose(logits[HELD - tokens :], in_memory, atol=1e-5), "recomputed"

    # Had the noise been served, it would have been noticed here.
    noisy = filled(model, IDS[:, :HELD])
    rows[1] = noise(rows[1])
    for layer, fields in hf_copy.scatter(cs.layout, rows).items():
        hf_copy.install(noisy.layers[layer], fields, HELD)
    assert (tiny_models.logits(model, IDS, noisy) - in_memory).abs().max() > 0.01


def test_llama_recomputes_the_same_behind_a_bad_block(
    child: Child, store: Store, store_dir: Path, llama: Any
) -> None:
    cs = cache_store(store, llama)
    rows = hf_copy.gather(cs.layout, cs.prefill(IDS).cache, 0, 2)
    overwrite(store_dir, rows[1], noise(rows[1]))
    one_block = hf_copy.build(llama.config, hf_copy.scatter(cs.layout, rows[:1]), BLOCK)

    tokens, logits = child.restored("llama", store_dir, IDS)
    assert tokens == BLOCK
    assert torch.equal(logits, tiny_models.logits(llama, IDS, one_block))


def test_a_bad_block_is_stored_again(store: Store, store_dir: Path, llama: Any) -> None:
    cs = cache_store(store, llama)
    row = hf_copy.gather(cs.layout, cs.prefill(IDS).cache, 0, 2)[1]
    overwrite(store_dir, row, noise(row))
    assert [cs.prefill(IDS).hit_tokens for _ in range(2)] == [BLOCK, HELD]


def test_a_damaged_index_key_is_named(
    store: Store, store_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Indexer keys are in the same record; damage to them alone ends the prefix."""
    model = tiny_models.build("deepseek_v32")
    cs = cache_store(store, model)
    row = hf_copy.gather(cs.layout, cs.prefill(IDS).cache, 0, 2)[1]
    span = next(s for s in cs.identity.spans if s.part == "index")
    damaged = row.clone()
    damaged[span.offset + 5] ^= 1
    overwrite(store_dir, row, damaged)
    with caplog.at_level(logging.INFO, LOGGER):
        assert cs.load(IDS)[1] == BLOCK
    assert "checksum of part index at block 1" in caplog.text


def test_bfloat16_is_kept_bit_by_bit(store: Store) -> None:
    model = tiny_models.build("llama", dtype="bfloat16")
    cs = cache_store(store, model)
    cache = cs.prefill(IDS).cache
    loaded, tokens = cs.load(IDS)
    assert tokens == HELD
    for ours, theirs in zip(loaded.layers, cache.layers, strict=True):
        assert ours.keys.dtype == torch.bfloat16
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v4"])
def test_generate_goes_on_from_a_loaded_cache(name: str, store: Store) -> None:
    model = tiny_models.build(name)
    cs = cache_store(store, model)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(IDS, **options)
    _, hit, state = cs.prefill(IDS)
    assert hit == 0
    cache, hit, _ = cs.prefill(IDS, state)
    assert hit == HELD
    assert torch.equal(model.generate(IDS, past_key_values=cache, **options), plain)
    assert cs.save(plain, cache) == HELD


# how much


@pytest.mark.parametrize("length", [1, 127, 128, 129, 255, 256, 257, 333])
def test_a_token_is_left_to_compute(length: int, store: Store, llama: Any) -> None:
    """Also where every token of the prompt is stored."""
    cs = cache_store(store, llama)
    ids = IDS[:, :length]
    assert cs.save(ids, filled(llama, ids)) == length // BLOCK * BLOCK
    cache, tokens = cs.load(ids)
    assert tokens == cache.get_seq_length() == (length - 1) // BLOCK * BLOCK


def test_a_state_at_the_end_of_the_prompt_is_of_no_use(store: Store, mistral: Any) -> None:
    cs = cache_store(store, mistral)
    ids = IDS[:, :HELD]
    cache = filled(mistral, ids)
    cs.save(ids, cache)
    state = cs.state(ids, cache)
    assert cs.load(ids, state)[1] == 0
    assert cs.load(IDS, state)[1] == HELD


def test_only_new_blocks_are_written(
    store: Store, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cs = cache_store(store, llama)
    monkeypatch.setattr(connector, "_BATCH_BYTES", 2 * cs.ns.row_bytes)
    ids = tiny_models.prompt(5 * BLOCK + 9)
    cache = filled(llama, ids)
    written = []
    for length in (BLOCK, 5 * BLOCK, 5 * BLOCK):
        assert cs.save(ids[:, :length], cache) == length
        written.append(store.stats()["put_blocks"])
    assert written == [1, 5, 5]
    loaded, tokens = cs.load(ids)
    assert tokens == 5 * BLOCK
    assert torch.equal(loaded.layers[3].values, cache.layers[3].values[:, :, : 5 * BLOCK])


def test_tokens_come_in_any_form(store: Store, llama: Any) -> None:
    cs = cache_store(store, llama)
    cs.save(IDS[0].tolist(), filled(llama, IDS))
    for ids in (IDS, IDS[0], IDS.int(), IDS[0].numpy(), IDS[0].tolist()):
        assert cs.load(ids)[1] == HELD


# storage that fails


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES])
def test_storage_that_fails_is_a_miss(code: int, store_dir: Path, llama: Any) -> None:
    """The model computes what the storage does not give."""
    faults = FaultyBackend(PosixBackend(str(store_dir)))
    with Store.init(store_dir, backend=faults) as store:
        cs = cache_store(store, llama)
        cs.prefill(IDS)
        faults.on("readv", "seg/*", times=None, do=Fail(code))
        cache, tokens = cs.load(IDS)
        assert tokens == 0
        whole = tiny_models.logits(llama, IDS, DynamicCache(config=llama.config))
        assert torch.equal(tiny_models.logits(llama, IDS, cache), whole)


@pytest.mark.expect_logs("not all stored")
def test_a_store_that_is_full_stores_less(store_dir: Path, llama: Any) -> None:
    faults = FaultyBackend(PosixBackend(str(store_dir)))
    with Store.init(store_dir, backend=faults) as store:
        cs = cache_store(store, llama)
        faults.on("writev", "seg/*", times=None, do=Fail(errno.ENOSPC))
        assert cs.prefill(IDS).hit_tokens == 0
        faults.clear()
        assert cs.load(IDS)[1] == 0
