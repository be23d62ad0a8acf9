"""Copies between a transformers cache and block rows: bytes as they are, all blocks at once.

Rows are a uint8 tensor [blocks, row_bytes] in host memory. They are gathered by views in a piece's
dtype and shape, one `copy_` for each tensor of the cache, and come back by a swap-in, so that
neither the number of blocks nor the device makes a difference to the code. No I/O, no state; a
cache belongs to one thread at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from kvfs.connectors.hf_layout import WINDOW, CacheLayout, Piece, layer_classes, tensors
from kvfs.errors import InputError
from kvfs.gpu.host_memory import Landed
from kvfs.gpu.paged import Spans
from kvfs.gpu.strategies import Direct, Staged
from kvfs.gpu.swap_in import Swapper
from kvfs.layout import Span


def held_tokens(layout: CacheLayout, cache: Any) -> int:
    """Tokens a cache holds. Raises InputError if its layers are not those of this layout."""
    classes = layer_classes(cache)
    if classes != layout.classes:
        ours = sorted(set(layout.classes))
        raise InputError(
            f"this cache has {len(classes)} layers ({', '.join(sorted(set(classes)))}), the model "
            f"{len(layout.classes)} ({', '.join(ours)}): use DynamicCache(config=model.config)"
        )
    held: int = cache.get_seq_length()
    if held >= layout.block_tokens:  # before, some tensors do not exist
        for piece in (*layout.blocks, *layout.state):
            _check(piece, tensors(cache.layers[piece.layer]).get(piece.field))
    return held


def new_rows(layout: CacheLayout, blocks: int) -> Any:
    """Rows for so many blocks; padding, where there is any, is zero."""
    make = torch.empty if layout.dense else torch.zeros
    return make((blocks, layout.row_bytes), dtype=torch.uint8)


def gather(layout: CacheLayout, cache: Any, first: int, end: int) -> Any:
    """The rows of blocks first..end-1 of a cache that holds them."""
    rows = new_rows(layout, end - first)
    for piece in layout.blocks:
        tensor = tensors(cache.layers[piece.layer])[piece.field][0]
        part = tensor.narrow(piece.axis, first * piece.rows, (end - first) * piece.rows)
        _cells(rows, piece).copy_(_by_block(part, piece))
    return rows


def scatter(layout: CacheLayout, rows: Any) -> dict[int, dict[str, Any]]:
    """The tensors of a cache that holds exactly these blocks: layer -> field -> tensor.

    By the swap-in of kvfs.gpu: a head's share of a block is a page of the tensor. rows: contiguous,
    in host memory.
    """
    out: dict[int, dict[str, Any]] = {}
    for device in dict.fromkeys(piece.device for piece in layout.blocks):
        pieces = [piece for piece in layout.blocks if piece.device == device]
        found = {(p.layer, p.field): _room(p, len(rows)) for p in pieces}
        if len(rows):
            _swap_in(layout, pieces, found, rows)
        for (number, field), tensor in found.items():
            out.setdefault(number, {})[field] = tensor[None]
    return out


def _room(piece: Piece, blocks: int) -> Any:
    """An empty tensor for a piece of so many blocks."""
    shape = list(piece.shape)
    shape[piece.axis] *= blocks
    return torch.empty(shape, dtype=piece.dtype, device=piece.device)


def _swap_in(
    layout: CacheLayout, pieces: Sequence[Piece], into: Mapping[tuple[int, str], Any], rows: Any
) -> None:
    """Copies rows into tensors. Raises RuntimeError, as torch does where that cannot be."""
    blocks, strategy = len(rows), Direct() if pieces[0].device.type == "cpu" else Staged()
    heads = [math.prod(piece.shape[: piece.axis]) for piece in pieces]
    kinds = list(dict.fromkeys(heads))  # pieces of as many heads go by one table
    names = [(piece.layer, piece.field) for piece in pieces]
    pages = {
        name: into[name].view(n * blocks, -1).view(torch.uint8)
        for name, n in zip(names, heads, strict=True)
    }
    spans = tuple(Span(p.layer, p.field, p.offset, p.length) for p in pieces)
    groups = {name: kinds.index(n) for name, n in zip(names, heads, strict=True)}
    tables = [
        (torch.arange(n)[None] * blocks + torch.arange(blocks)[:, None]).flatten() for n in kinds
    ]
    ticket = Landed(rows.view(-1).numpy(), layout.row_bytes, layout.row_bytes, blocks)
    row = Spans(spans, layout.row_bytes)
    with Swapper(pages, row, groups=groups, strategy=strategy, inline=True) as swapper:
        swap = swapper.load(ticket, tables)
        if swap.finish() < blocks:
            raise RuntimeError(swap.reason)


def gather_state(layout: CacheLayout, cache: Any, tokens: int) -> Any | None:
    """The state after `tokens` tokens as a uint8 tensor, or None if the cache has moved on.

    A window keeps what the next token needs and nothing older, so the state at a position can be
    taken when the cache is there, and later only as long as no window has lost a token of it.
    """
    held = cache.get_seq_length()
    state = torch.zeros((1, layout.state_bytes), dtype=torch.uint8)
    for piece in layout.state:
        tensor = tensors(cache.layers[piece.layer])[piece.field][0]
        if piece.field not in WINDOW:
            if held // piece.span != tokens // piece.span:
                return None
            _cells(state, piece)[0].copy_(tensor)
            continue
        count = min(tokens, piece.rows)
        skip = tokens - count - (held - tensor.shape[piece.axis])
        if skip < 0:
            return None
        cell = _cells(state, piece)[0].narrow(piece.axis, 0, count)
        cell.copy_(tensor.narrow(piece.axis, skip, count))
    return state[0]


def scatter_state(layout: CacheLayout, state: Any, tokens: int) -> dict[int, dict[str, Any]]:
    """The tensors of the state after `tokens` tokens: layer -> field -> tensor."""
    out: dict[int, dict[str, Any]] = {}
    for piece in layout.state:
        cell = _cells(state[None], piece)[0]
        if piece.field in WINDOW:
            cell = cell.narrow(piece.axis, 0, min(tokens, piece.rows))
        tensor = torch.empty(cell.shape, dtype=piece.dtype, device=piece.device)
        out.setdefault(piece.layer, {})[piece.field] = tensor.copy_(cell)[None]
    return out


def build(config: Any, contents: dict[int, dict[str, Any]], tokens: int) -> Any:
    """A DynamicCache of a model's configuration that holds `tokens` tokens.

    contents: layer -> field -> tensor, with the batch, as `scatter` and `scatter_state` make them.
    """
    cache = DynamicCache(config=config)
    for number, fields in contents.items():
        install(cache.layers[number], fields, tokens)
    return cache


def install(layer: Any, fields: dict[str, Any], tokens: int) -> None:
    """Puts tensors (with the batch) into a layer of a cache, as if it had computed them."""
    for field, tensor in fields.items():
        name, _, key = field.partition(".")
        if key:
            getattr(layer, name)[key] = tensor
        if name == "compressed_kv":
            layer.entry_count[key] = tensor.shape[1]
    if "indexer_keys" in fields:
        layer.lazy_initialization_indexer(fields["indexer_keys"])
        layer.indexer_keys = fields["indexer_keys"]
    if "keys" in fields:
        keys = fields["keys"]
        values = fields.get("values", keys)  # one tensor under both names in some models
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = tokens


def _cells(rows: Any, piece: Piece) -> Any:
    """The piece in all rows, [blocks, *piece.shape]: a view."""
    part = rows[:, piece.offset : piece.offset + piece.length]
    return part.view(piece.dtype).unflatten(1, piece.shape)


def _by_block(tensor: Any, piece: Piece) -> Any:
    """A tensor that holds whole blocks along the piece's axis as [blocks, *piece.shape]: a view."""
    return tensor.unflatten(piece.axis, (-1, piece.rows)).movedim(piece.axis, 0)


def _check(piece: Piece, tensor: Any) -> None:
    """Refuses a tensor of the cache that would not fit into its piece."""
    if tensor is None:
        raise InputError(f"the cache has no `{piece.field}` in layer {piece.layer}")
    shape = list(tensor.shape[1:])
    shape[piece.axis] = piece.rows
    if tensor.shape[0] != 1:
        raise InputError(f"one sequence at a time; this cache has a batch of {tensor.shape[0]}")
    if tuple(shape) != piece.shape or tensor.dtype != piece.dtype:
        raise InputError(
            f"`{piece.field}` of layer {piece.layer} is {tensor.dtype} {list(tensor.shape)}; "
            f"the model's own is {piece.dtype} {list(piece.shape)} a block"
        )
