"""Presets: sizes follow from dimensions, and partitions from the model's structure."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kvfs import presets
from kvfs.errors import InputError
from kvfs.layout import Identity, Partition


def get(name: str, **changes: Any) -> Identity:
    return presets.get(name, weights="w", tokenizer="t", **changes)


def payload(identity: Identity) -> int:
    return sum(span.length for span in identity.spans)


def test_names_are_in_the_documented_order() -> None:
    assert presets.names() == (
        "deepseek-v4.1-flash",
        "llama-3.1-8b",
        "deepseek-v3",
        "tiny",
        "tiny-swa",
    )


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_is_an_identity(name: str) -> None:
    identity = get(name)
    assert identity.model == name
    assert identity.block_tokens == 128
    assert Identity.from_json(identity.to_json()) == identity
    assert 0 <= identity.row_bytes - payload(identity) < 4096


def test_no_two_presets_share_a_namespace() -> None:
    assert len({get(name).fingerprint for name in presets.names()}) == len(presets.names())


# deepseek-v4.1-flash


def test_flash_is_890_bytes_a_token() -> None:
    identity = get("deepseek-v4.1-flash")
    assert payload(identity) == 890 * 128
    assert [span.layer for span in identity.spans] == [2, 2, 8, 8, 14, 14, 20, 20]
    assert [span.part for span in identity.spans] == ["index", "kv"] * 4
    entries = [64] * 6 + [128] * 2
    for span, count in zip(identity.spans, entries, strict=True):
        assert span.length == count * {"index": 68, "kv": 288}[span.part]
        assert span.offset % 32 == 0
    assert [span.offset for span in identity.spans] == [
        0,
        *itertools.accumulate(span.length for span in identity.spans[:-1]),
    ]


def test_flash_row_has_the_engines_alignment() -> None:
    assert get("deepseek-v4.1-flash").row_bytes == 114_048 == 99 * 1152


def test_flash_state_slot() -> None:
    state = get("deepseek-v4.1-flash").state
    assert state is not None
    assert (state.layers, state.ring, state.token_bytes) == (20, 134, 528)
    assert state.slot_bytes == 1_415_040


def test_flash_main_kv_is_the_first_part() -> None:
    assert get("deepseek-v4.1-flash").parts == ("kv", "index")


def test_flash_row_is_whole_on_every_tensor_rank() -> None:
    ranks = [get("deepseek-v4.1-flash", partition=Partition(rank, 2)) for rank in range(2)]
    assert len({rank.spans for rank in ranks}) == 1
    assert len({rank.fingerprint for rank in ranks}) == 2


def test_flash_has_no_pipeline_ranks() -> None:
    with pytest.raises(InputError, match="pipeline"):
        get("deepseek-v4.1-flash", partition=Partition(pp_size=2))


# llama-3.1-8b


def test_llama_row() -> None:
    identity = get("llama-3.1-8b")
    assert identity.row_bytes == 128 * 131_072  # the well-known 128 KiB a token
    assert len(identity.spans) == 64
    assert {span.length for span in identity.spans} == {128 * 8 * 128 * 2}
    assert [(s.layer, s.part) for s in identity.spans[:3]] == [(0, "k"), (0, "v"), (1, "k")]
    assert identity.state is None


@pytest.mark.parametrize("tp, pp", list(itertools.product((1, 2, 4, 8), (1, 2, 3, 32))))
def test_llama_ranks_add_up_to_the_model(tp: int, pp: int) -> None:
    ranks = [
        get("llama-3.1-8b", partition=Partition(t, tp, p, pp)) for p in range(pp) for t in range(tp)
    ]
    assert sum(rank.row_bytes for rank in ranks) == get("llama-3.1-8b").row_bytes
    layers = [span.layer for rank in ranks[::tp] for span in rank.spans[::2]]
    assert layers == list(range(32))
    assert len({rank.name for rank in ranks}) == tp * pp


@pytest.mark.parametrize("tp", [3, 5, 16])
def test_llama_heads_must_divide(tp: int) -> None:
    with pytest.raises(InputError, match="KV heads"):
        get("llama-3.1-8b", partition=Partition(tp_size=tp))


def test_more_pipeline_ranks_than_layers_are_refused() -> None:
    with pytest.raises(InputError, match="pipeline"):
        get("llama-3.1-8b", partition=Partition(pp_size=33))


# deepseek-v3


def test_v3_row() -> None:
    identity = get("deepseek-v3")
    assert identity.row_bytes == 128 * 61 * 576 * 2 == 128 * 70_272
    assert [span.layer for span in identity.spans] == list(range(61))


def test_v3_latent_is_whole_on_every_tensor_rank() -> None:
    ranks = [get("deepseek-v3", partition=Partition(rank, 16)) for rank in range(16)]
    assert {rank.row_bytes for rank in ranks} == {get("deepseek-v3").row_bytes}
    assert len({rank.fingerprint for rank in ranks}) == 16


def test_v3_first_pipeline_ranks_take_the_odd_layers() -> None:
    ranks = [get("deepseek-v3", partition=Partition(pp_rank=rank, pp_size=4)) for rank in range(4)]
    assert [len(rank.spans) for rank in ranks] == [16, 15, 15, 15]
    assert [span.layer for rank in ranks for span in rank.spans] == list(range(61))


# tiny


def test_tiny_presets() -> None:
    tiny, swa = get("tiny"), get("tiny-swa")
    assert tiny.row_bytes == swa.row_bytes == 64
    assert tiny.hit_cap(129) == 128 and tiny.hit_cap(128) == 0
    assert swa.hit_cap(262) == 128 and swa.hit_cap(261) == 0


# arguments


def test_arguments_reach_the_identity() -> None:
    share = Partition(tp_rank=1, tp_size=2)
    identity = presets.get(
        "tiny",
        weights="W",
        tokenizer="T",
        partition=share,
        adapter="A",
        hash="blake3",
        salt="S",
    )
    assert (identity.weights, identity.tokenizer, identity.partition) == ("W", "T", share)
    assert (identity.adapter, identity.hash, identity.salt) == ("A", "blake3", "S")


def test_weights_and_tokenizer_must_be_given() -> None:
    with pytest.raises(TypeError):
        presets.get("tiny")  # type: ignore[call-arg]
    with pytest.raises(InputError, match="weights"):
        presets.get("tiny", weights="", tokenizer="t")


def test_unknown_presets_are_refused_with_the_known_names() -> None:
    with pytest.raises(InputError, match="deepseek-v4.1-flash, llama-3.1-8b"):
        get("gpt-2")


@pytest.mark.parametrize("name", presets.names())
def test_context_parallel_ranks_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="context-parallel"):
        get(name, partition=Partition(cp_size=2))
