"""The state of models with sliding windows: taken, refused, and made anew by a replay."""

from __future__ import annotations

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
)  # fmt: skip
from transformers import DynamicCache, cache_utils

from kvfs import Store
from kvfs.connectors import hf_copy
from kvfs.errors import InputError
from kvfs.peers.client import PeerClient
from kvfs.peers.service import PeerService
from kvfs.state.slots import SlotPool
from kvfs.testing.peers import SECRET

# taken and refused


def test_a_state_can_be_taken_as_long_as_the_window_is_whole(store: Store, mistral: Any) -> None:
    cs = cache_store(store, mistral)
    short = IDS[:, :199]  # window 200: nothing dropped yet
    cache = filled(mistral, short)
    cs.save(short, cache)
    state = cs.state(short, cache)
    ids = IDS[:, :230]
    loaded, tokens = cs.load(ids, state)
    assert tokens == BLOCK
    at_block = filled(mistral, ids[:, :BLOCK])
    expected = tiny_models.logits(mistral, ids, at_block)
    assert torch.allclose(tiny_models.logits(mistral, ids, loaded), expected, atol=1e-5)
    assert cs.state(IDS, filled(mistral, IDS)) is None, "it has gone on, and dropped what is needed"


def test_blocks_without_a_state_are_a_miss(store: Store, mistral: Any) -> None:
    cs = cache_store(store, mistral)
    cs.prefill(IDS)
    cache, tokens = cs.load(IDS)
    assert tokens == 0
    whole = tiny_models.logits(mistral, IDS, DynamicCache(config=mistral.config))
    assert torch.equal(tiny_models.logits(mistral, IDS, cache), whole)


def test_a_state_without_its_blocks_is_a_miss(store: Store) -> None:
    model = tiny_models.build("gpt_oss")
    cs = cache_store(store, model)
    state = cs.prefill(IDS).state
    store.remove(cs.ns, IDS[0], from_block=1)
    assert cs.load(IDS, state)[1] == 0


def test_a_state_that_does_not_fit_is_a_miss(
    store: Store, mistral: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cs = cache_store(store, mistral)
    other = cache_store(store, mistral, weights="another revision")
    state = cs.prefill(IDS).state
    assert state is not None and cs.load(IDS, state)[1] == HELD
    flipped = bytearray(state)
    flipped[-1] ^= 1
    elsewhere = IDS.clone()
    elsewhere[0, 0] += 1
    for why, bad in {
        "state is damaged": bytes(flipped), "description has 136 bytes": state[:63],
        "not the description of a slot": b"X" + state[1:],
        "of another model": other.state(IDS[:, :HELD], filled(mistral, IDS[:, :HELD])),
        "of other tokens": cs.prefill(elsewhere).state,
    }.items():  # fmt: skip
        caplog.clear()
        with caplog.at_level(logging.INFO, LOGGER):
            assert cs.load(IDS, bad)[1] == 0
        assert why in caplog.text


# kept in slots


@pytest.mark.parametrize("name", HYBRID)
def test_a_slot_is_found_by_a_new_process(
    name: str, child: Child, store: Store, store_dir: Path, tmp_path: Path
) -> None:
    model = tiny_models.build(name)
    cs = cache_store(store, model)
    with SlotPool.open(cs.identity, 1 << 20, directory=str(tmp_path)) as cs.slots:
        cache = cs.prefill(IDS).cache
        in_memory = tiny_models.logits(model, IDS, cache)
        tokens, logits = child.restored(name, store_dir, IDS, slots=tmp_path)
    assert tokens == HELD
    assert torch.equal(logits, in_memory)


def test_the_slot_of_the_longest_prefix_is_taken(
    store: Store, mistral: Any, tmp_path: Path
) -> None:
    cs = cache_store(store, mistral)
    ids = tiny_models.prompt(600)
    with SlotPool.open(cs.identity, 1 << 20, directory=str(tmp_path)) as cs.slots:
        for held in (BLOCK, 3 * BLOCK):
            cs.prefill(ids[:, : held + 1])
        cs.save(ids, filled(mistral, ids))  # four blocks, and no state at the end of the fourth
        assert cs.slots.stats()["used"] == 2
        assert [cs.load(ids[:, :length])[1] for length in (600, 385, 384)] == [384, 384, 128]
        store.remove(cs.ns, ids[0], from_block=2)
        assert cs.load(ids)[1] == 128


def test_a_slot_is_taken_unless_a_replay_saves_more(store: Store, tmp_path: Path) -> None:
    """A replay saves the tokens before its start, a slot those before its position."""
    model = tiny_models.build("gemma3_text", sliding_window=16)  # 46 tokens are replayed
    cs = cache_store(store, model)
    ids = tiny_models.prompt(600)
    with SlotPool.open(cs.identity, 1 << 20, directory=str(tmp_path)) as cs.slots:
        cs.prefill(ids[:, : 2 * BLOCK + 1])
        cs.save(ids, filled(model, ids))
        assert cs.load(ids)[1] == 4 * BLOCK, "a replay from 384 on"
        assert cs.load(ids[:, :512])[1] == 2 * BLOCK, "a replay would begin at 256 too"


def test_a_slot_is_pulled_from_another_host(store_dir: Path, tmp_path: Path) -> None:
    model = tiny_models.build("gpt_oss", sliding_window=200)  # a replay would take all of it
    for host in "ab":
        (tmp_path / host).mkdir()
    with (
        Store.init(store_dir, index=str(tmp_path / "a" / "index")) as here,
        Store.open(store_dir, index=str(tmp_path / "b" / "index")) as there,
        PeerClient(SECRET) as client,
    ):
        a, b = cache_store(here, model), cache_store(there, model)
        assert a.ns.name == b.ns.name
        with SlotPool.open(a.identity, 1 << 20, directory=str(tmp_path / "a")) as a.slots:
            cache = a.prefill(IDS).cache
            service = PeerService(here, "127.0.0.1:0", SECRET, directory=str(tmp_path / "a"))
            with service:
                service.announcer.turn()
                there.catch_up()
                assert b.load(IDS)[1] == 0, "nobody to ask with"
                b.peers, b.peer_seconds = client, 60.0
                loaded, tokens = b.load(IDS)
                assert tokens == HELD
                assert service.app.counters["get.200"] == 1
            in_memory = tiny_models.logits(model, IDS, cache)
            assert torch.equal(tiny_models.logits(model, IDS, loaded), in_memory)
            assert b.load(IDS)[1] == 0, "the other host has left, and a replay is of no use"
            b.peers = None


def test_a_pool_of_another_model_is_refused(store: Store, mistral: Any, tmp_path: Path) -> None:
    cs, other = (cache_store(store, mistral, weights=w) for w in "ab")
    pool = SlotPool.open(other.identity, 1 << 20, directory=str(tmp_path))
    with pool, pytest.raises(InputError, match="another namespace"):
        cs.slots = pool


# made anew


@pytest.mark.parametrize(
    ("name", "window", "attention"),
    [
        ("mistral", 16, "eager"), ("gemma3_text", 16, "sdpa"), ("gemma3_text", 64, "eager"),
        ("gpt_oss", 128, "eager"), ("deepseek_v4", 16, "eager"),
    ],
)  # fmt: skip
def test_a_replay_gives_what_was_computed(
    name: str, window: int, attention: str, store: Store
) -> None:
    model = tiny_models.build(name, sliding_window=window, attention=attention)
    cs = cache_store(store, model)
    ids = tiny_models.prompt(461)
    in_memory = tiny_models.logits(model, ids, cs.prefill(ids).cache)
    written = store.stats()["put_blocks"]
    table = dict(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING)

    cache, tokens = cs.load(ids)
    assert tokens == 3 * BLOCK
    assert torch.allclose(tiny_models.logits(model, ids, cache), in_memory, atol=1e-5)
    assert store.stats()["put_blocks"] == written, "a replay writes no block"
    assert table == cache_utils.DYNAMIC_LAYER_TYPE_MAPPING
    assert cs.load(ids, replay="never")[1] == 0


def test_a_replay_of_one_window_is_an_approximation(store: Store) -> None:
    model = tiny_models.build("gpt_oss")  # window 128 in layers 0 and 2
    cs = cache_store(store, model)
    ids = tiny_models.prompt(461)
    cache = cs.prefill(ids).cache
    loaded, tokens = cs.load(ids, replay="window")
    assert tokens == 3 * BLOCK
    for layer, exact in ((0, True), (1, True), (2, False), (3, True)):
        ours, theirs = loaded.layers[layer].keys, cache.layers[layer].keys
        assert torch.allclose(ours, theirs, atol=1e-5) == exact, layer
    ours, theirs = (tiny_models.logits(model, ids, c) for c in (loaded, cache))
    print(f"logits differ by {(ours - theirs).abs().max():.2g} of a spread of {theirs.std():.2g}")


def test_a_replay_stops_at_a_damaged_block(store: Store, store_dir: Path) -> None:
    model = tiny_models.build("gemma3_text", sliding_window=16)
    cs = cache_store(store, model)
    ids = tiny_models.prompt(461)
    cache = cs.prefill(ids).cache
    row = hf_copy.gather(cs.layout, cache, 2, 3)[0]
    overwrite(store_dir, row, noise(row))
    loaded, tokens = cs.load(ids)
    assert tokens == 2 * BLOCK
    in_memory = tiny_models.logits(model, ids, cache)
    assert torch.allclose(tiny_models.logits(model, ids, loaded)[BLOCK:], in_memory, atol=1e-5)


def test_a_replay_has_three_forms(store: Store, mistral: Any) -> None:
    with pytest.raises(InputError, match="exact, window or never"):
        cache_store(store, mistral).load(IDS, replay="bounded")  # type: ignore[arg-type]
