"""Layouts of known models, computed from the dimensions in their published config.json.

A preset is a layout and not an identity: which weights and which tokenizer run is for the caller to
say. The numbers below are fields of the models' config files, by their names there; every size is
computed from them. docs/identity.md shows the arithmetic of each.

This module does no I/O and keeps no state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm

from kvfs.errors import InputError
from kvfs.layout import Identity, Partition, Span, StateLayout

BLOCK_TOKENS = 128
_BF16 = 2


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a preset decides: one partition's row, the format of its bytes, and the state."""

    spans: tuple[Span, ...]
    row_bytes: int
    record_format: str
    state: StateLayout | None = None


def names() -> tuple[str, ...]:
    """Names of all presets, in the order of the documentation."""
    return tuple(_PRESETS)


def get(
    name: str,
    *,
    weights: str,
    tokenizer: str,
    partition: Partition | None = None,
    adapter: str = "",
    hash: str = "xxh3-128",
    salt: str = "",
) -> Identity:
    """Returns the identity of the preset `name` with the caller's weights and tokenizer.

    weights: revision or digest of the weights; tokenizer: digest of the tokenizer;
    partition: this rank's share, default the whole model; adapter, hash, salt: as in Identity.
    Raises InputError for an unknown name, or a partition that this model cannot be cut into.
    """
    build = _PRESETS.get(name)
    if build is None:
        raise InputError(f"no preset {name!r}; there are {', '.join(_PRESETS)}")
    share = Partition() if partition is None else partition
    if share.cp_size > 1:
        raise InputError(
            "presets hold whole blocks; a context-parallel rank needs its own identity"
        )
    layout = build(share)
    return Identity(
        model=name,
        weights=weights,
        tokenizer=tokenizer,
        spans=layout.spans,
        row_bytes=layout.row_bytes,
        record_format=layout.record_format,
        block_tokens=BLOCK_TOKENS,
        partition=share,
        adapter=adapter,
        hash=hash,
        salt=salt,
        state=layout.state,
    )


def _align(size: int, unit: int) -> int:
    """`size` rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit


def _row(
    pieces: Sequence[tuple[int, str, int]], *, piece_align: int = 1, row_align: int = 1
) -> tuple[tuple[Span, ...], int]:
    """Lays pieces (layer, part, bytes) one behind the other; returns the spans and row_bytes."""
    spans, at = [], 0
    for layer, part, length in pieces:
        spans.append(Span(layer=layer, part=part, offset=at, length=length))
        at += _align(length, piece_align)
    return tuple(spans), _align(at, row_align)


def _pipeline_layers(count: int, partition: Partition) -> range:
    """The contiguous layers of a pipeline rank; the first ranks take one more if uneven."""
    each, extra = divmod(count, partition.pp_size)
    if each == 0:
        raise InputError(f"{count} layers cannot be cut into {partition.pp_size} pipeline ranks")
    rank = partition.pp_rank
    first = rank * each + min(rank, extra)
    return range(first, first + each + (rank < extra))


def _scaled(elements: int, bits: int, group: int) -> int:
    """Bytes of a quantised vector: `bits` per element and a scale byte per `group` elements."""
    return elements * bits // 8 + elements // group


def _deepseek_v41_flash(partition: Partition) -> _Layout:
    """DeepSeek-V4.1-Flash: sparse attention over compressed KV, and a sliding window.

    config.json: num_hidden_layers 40, head_dim 512 with num_key_value_heads 1, index_head_dim 128,
    sliding_window 128, kv_source_layer_ids and compress_ratios as below, dspark_block_size 5.
    Only source layers own KV; all others read a source's. In a source, `ratio` tokens share one
    entry of FP4 main KV (scale per 16) and one of FP4 indexer K (scale per 32), laid out
    [index | kv], each padded to 32 bytes, the row to a multiple of lcm(128, main entry).
    The window of the layers before the first of ratio 1 is stored, in MXFP8 (scale per 32); the
    ring has room for the drafted tokens and one more.

    One KV head: every tensor rank holds the whole row. Layers read other layers' KV, so there is
    no cut into pipeline ranks.
    """
    ratios = (0,) * 2 + (2,) * 18 + (1,) * 20
    sources = (2, 8, 14, 20)
    if partition.pp_size > 1:
        raise InputError("this model's layers share KV across layers: no pipeline ranks")
    kv_bytes = _scaled(512, bits=4, group=16)
    index_bytes = _scaled(128, bits=4, group=32)
    pieces = []
    for layer in sources:
        entries = BLOCK_TOKENS // ratios[layer]
        pieces.append((layer, "index", entries * index_bytes))
        pieces.append((layer, "kv", entries * kv_bytes))
    spans, row_bytes = _row(pieces, piece_align=32, row_align=lcm(128, kv_bytes))
    state = StateLayout(
        window=128,
        backtrack=5 + 1,
        layers=ratios.index(1),
        token_bytes=_scaled(512, bits=8, group=32),
    )
    return _Layout(
        spans, row_bytes, "index:e2m1/32ue8m0,kv:e2m1/16e4m3,state:e4m3/32ue8m0,interleaved", state
    )


def _llama_31_8b(partition: Partition) -> _Layout:
    """Llama-3.1-8B in bf16: grouped-query attention.

    config.json: num_hidden_layers 32, num_key_value_heads 8, head_dim 128 (hidden_size 4096 over
    num_attention_heads 32), torch_dtype bfloat16. Per layer K then V, each [token][head][dim].
    Tensor ranks divide the KV heads, pipeline ranks the layers.
    """
    heads, head_dim = 8, 128
    if heads % partition.tp_size:
        raise InputError(f"{heads} KV heads cannot be divided by {partition.tp_size} tensor ranks")
    length = BLOCK_TOKENS * (heads // partition.tp_size) * head_dim * _BF16
    layers = _pipeline_layers(32, partition)
    spans, row_bytes = _row([(layer, part, length) for layer in layers for part in ("k", "v")])
    return _Layout(spans, row_bytes, "bf16,token-head-dim")


def _deepseek_v3(partition: Partition) -> _Layout:
    """DeepSeek-V3 in bf16: multi-head latent attention.

    config.json: num_hidden_layers 61, kv_lora_rank 512, qk_rope_head_dim 64. Per layer one latent
    vector a token, [token][latent | rope]. The latent has no heads: every tensor rank holds the
    whole row; pipeline ranks divide the layers.
    """
    length = BLOCK_TOKENS * (512 + 64) * _BF16
    layers = _pipeline_layers(61, partition)
    spans, row_bytes = _row([(layer, "kv", length) for layer in layers])
    return _Layout(spans, row_bytes, "bf16,token-latent-rope")


def _tiny(partition: Partition) -> _Layout:
    """No model: one layer of 64 bytes a block, to drive a store with traces at no cost."""
    layers = _pipeline_layers(1, partition)
    spans, row_bytes = _row([(layer, "kv", 64) for layer in layers])
    return _Layout(spans, row_bytes, "opaque")


def _tiny_swa(partition: Partition) -> _Layout:
    """`tiny` with a sliding window: the window and draft length of deepseek-v4.1-flash."""
    tiny = _tiny(partition)
    state = StateLayout(window=128, backtrack=6, layers=1, token_bytes=16)
    return _Layout(tiny.spans, tiny.row_bytes, tiny.record_format, state)


_PRESETS: dict[str, Callable[[Partition], _Layout]] = {
    "deepseek-v4.1-flash": _deepseek_v41_flash,
    "llama-3.1-8b": _llama_31_8b,
    "deepseek-v3": _deepseek_v3,
    "tiny": _tiny,
    "tiny-swa": _tiny_swa,
}
