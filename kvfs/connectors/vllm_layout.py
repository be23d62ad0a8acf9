"""How the KV cache of a vLLM worker becomes block rows: which groups, which bytes, in which order.

A row holds one block of tokens of every group a prefix can be restored from, layer after layer, so
that a prefix has all its parts or ends. What a group needs of a hit is decided by the class of its
spec alone: with the hybrid allocator off, vLLM calls a sliding layer a full one that still carries
a window, and to load only the window there would give wrong tokens.

Immutable after `measure`. Copies run on the caller's thread and device stream.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch

from kvfs.errors import InputError
from kvfs.gpu.paged import Spans
from kvfs.gpu.strategies import STAGING_BYTES
from kvfs.gpu.swap_in import Swapper
from kvfs.layout import Span

# Classes whose whole meaning is known here. An exact match: a subclass may hold more.
_FULL = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
_WINDOW = frozenset({"SlidingWindowSpec", "SlidingWindowMLASpec"})
NULL_BLOCK = 0
"""vLLM's block that stands for tokens outside a window."""


@dataclass(frozen=True, slots=True)
class Group:
    """A KV cache group: `index` of vLLM's list, its layers, tokens of a vLLM block; window: None if
    every block of a prefix is needed, else the tokens before its end that are."""

    index: int
    layers: tuple[str, ...]
    block_tokens: int
    window: int | None

    def needed(self, tokens: int) -> range:
        """The vLLM blocks that a prefix of so many tokens (whole blocks) needs."""
        blocks = tokens // self.block_tokens
        if self.window is None:
            return range(blocks)
        return range(max(0, (tokens - self.window + 1) // self.block_tokens), blocks)


def groups_of(kv_cache_config: Any) -> tuple[Group, ...]:
    """The groups of a worker's or scheduler's KVCacheConfig that a prefix is restored from.

    A group whose window vLLM replays (DeepSeek-V4.1) is none of them. Raises InputError for a kind
    of cache that is not known here.
    """
    groups = tuple(group_at(kv_cache_config, i) for i in kv_cache_config.prefix_cacheable_group_ids)
    if not groups:
        raise InputError("the model has no KV cache that a prefix could be restored from")
    return groups


def group_at(kv_cache_config: Any, index: int) -> Group:
    """One of vLLM's groups. Raises InputError for a kind of cache that is not known here."""
    group = kv_cache_config.kv_cache_groups[index]
    spec = group.kv_cache_spec
    return Group(index, tuple(group.layer_names), spec.block_size, _window(spec))


def _window(spec: Any) -> int | None:
    """None for full attention; the window of a sliding one. Raises InputError for other kinds."""
    name = type(spec).__name__
    if name == "UniformTypeKVCacheSpecs":
        windows = {_window(inner) for inner in spec.kv_cache_specs.values()}
        if len(windows) != 1:
            raise InputError("one KV cache group with different windows")
        return windows.pop()
    if name in _FULL:
        return None
    if name in _WINDOW:
        return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
    raise InputError(f"KV cache of kind {name} is not known to kvfs")


def block_tokens_for(groups: Sequence[Group], wanted: int) -> int:
    """Tokens of a kvfs block: the least multiple of all vLLM blocks that is at least `wanted`."""
    unit = math.lcm(*(g.block_tokens for g in groups))
    return -(-wanted // unit) * unit


@dataclass(frozen=True, slots=True)
class Piece:
    """One layer in a row: `length` bytes at `offset`, for one vLLM block after the other."""

    layer: str
    group: int
    """Position in `Layout.groups`."""
    offset: int
    page_bytes: int
    pages: int

    @property
    def length(self) -> int:
        return self.page_bytes * self.pages


@dataclass(frozen=True, slots=True)
class Layout:
    """The rows of a worker, and its layers' memory as pages of bytes, a page a vLLM block."""

    groups: tuple[Group, ...]
    block_tokens: int
    pieces: tuple[Piece, ...]
    pages: Mapping[str, Any]
    """Layer -> uint8 tensor [vLLM blocks, page bytes] over the engine's memory."""
    description: str
    """Digest of what the shapes do not say: classes, dtypes, order of dimensions."""

    @property
    def row_bytes(self) -> int:
        return self.pieces[-1].offset + self.pieces[-1].length

    def spans(self) -> tuple[Span, ...]:
        """The pieces by layer and part, as an identity describes them."""
        taken: set[tuple[int, str]] = set()
        out = []
        for order, piece in enumerate(self.pieces):
            found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", piece.layer)
            layer = int(found[1]) if found else order
            part = "index" if "index" in piece.layer else "kv"
            if (layer, part) in taken:
                part = f"{part}-{piece.layer.rpartition('.')[2]}-{order}"
            taken.add((layer, part))
            out.append(Span(layer, part, piece.offset, piece.length))
        return tuple(out)

    def slots(self, group: int, block: int) -> range:
        """Positions in a group's block table of kvfs block number `block`."""
        n = self.block_tokens // self.groups[group].block_tokens
        return range(block * n, (block + 1) * n)

    def gather(self, tables: Sequence[Sequence[int]], into: Any = None) -> Any:
        """Rows in host memory: a uint8 tensor [blocks, row_bytes].

        tables: for each group, the vLLM blocks that hold the tokens, in order; into: a tensor of as
        many bytes, else it is new memory.
        """
        count = len(tables[0]) // len(self.slots(0, 0))
        if into is None:
            into = torch.empty(count * self.row_bytes, dtype=torch.uint8)
        rows = into.view(count, self.row_bytes)
        if self.pages[self.pieces[0].layer].device.type == "cpu":
            for piece in self.pieces:
                _gather_here(self.pages[piece.layer], tables[piece.group], rows, piece)
        else:
            _gather_there(self.pages, tables, rows, self.pieces)
        return rows

    def swapper(self) -> Swapper:
        """What copies rows into vLLM's blocks: a block table for each group, holes where a block is
        not to be loaded."""
        spans = self.spans()
        tensors, groups = {}, {}
        for span, piece in zip(spans, self.pieces, strict=True):
            tensors[span.layer, span.part] = self.pages[piece.layer]
            groups[span.layer, span.part] = piece.group
        return Swapper(tensors, Spans(spans, self.row_bytes), groups=groups, inline=True)


def _gather_here(pages: Any, table: Sequence[int], rows: Any, piece: Piece) -> None:
    """One layer of rows, by plain copies: torch would wake its threads for each, which on a busy
    host takes far longer than the copy."""
    source, target = pages.numpy(), rows.numpy()
    for i, block in enumerate(table):
        row, page = divmod(i, piece.pages)
        at = piece.offset + page * piece.page_bytes
        target[row, at : at + piece.page_bytes] = source[block]


def _gather_there(
    pages: Mapping[str, Any], tables: Sequence[Sequence[int]], rows: Any, pieces: Sequence[Piece]
) -> None:
    """All layers on a GPU: rows are put together there, as many at a time as a swap-in takes, and
    come in one copy. A copy for each layer would wait for the device each time."""
    device = pages[pieces[0].layer].device
    which = [torch.tensor(table, dtype=torch.long, device=device) for table in tables]
    step = max(1, STAGING_BYTES // rows.shape[1])
    for first in range(0, len(rows), step):
        part = rows[first : first + step]
        there = torch.empty(part.shape, dtype=torch.uint8, device=device)
        for piece in pieces:
            n = piece.pages
            wanted = which[piece.group][first * n : (first + len(part)) * n]
            found = pages[piece.layer].index_select(0, wanted).view(len(part), piece.length)
            there[:, piece.offset : piece.offset + piece.length] = found
        part.copy_(there)


def measure(
    kv_cache_config: Any, kv_caches: Mapping[str, Any], wanted_tokens: int, extra: str = ""
) -> Layout:
    """The layout of the tensors a worker registers.

    kv_caches: layer -> its KV cache; extra: what else decides the meaning of the bytes.
    Raises InputError for memory whose blocks are not dense.
    """
    groups = groups_of(kv_cache_config)
    size = block_tokens_for(groups, wanted_tokens)
    return measure_groups(kv_cache_config, kv_caches, groups, size, extra)


def measure_groups(
    kv_cache_config: Any, kv_caches: Mapping[str, Any], groups: tuple[Group, ...], size: int,
    extra: str = "",
) -> Layout:  # fmt: skip
    """The same for rows that hold `size` tokens of some groups, whole vLLM blocks of each."""
    pieces: list[Piece] = []
    pages: dict[str, Any] = {}
    facts: list[Any] = [extra, str(getattr(kv_cache_config, "kv_cache_layout", None))]
    at = 0
    for position, group in enumerate(groups):
        spec = kv_cache_config.kv_cache_groups[group.index].kv_cache_spec
        facts.append([type(spec).__name__, group.block_tokens, group.window])
        for layer in group.layers:
            if layer not in kv_caches:
                raise InputError(f"no KV cache was registered for layer {layer}")
            view, shape = pages_of(kv_caches[layer], kv_cache_config.num_blocks)
            pages[layer] = view
            piece = Piece(layer, position, at, view.shape[1], size // group.block_tokens)
            facts.append([layer, *shape])
            pieces.append(piece)
            at += piece.length
    digest = blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()
    return Layout(groups, size, tuple(pieces), pages, digest)


def pages_of(tensor: Any, num_blocks: int) -> tuple[Any, list[str]]:
    """A KV cache as bytes [num_blocks, page bytes], and what its dimensions are.

    Dimensions may be in any order in memory, as long as a block's bytes are dense; a block may be
    cut into several of the kernel's. Raises InputError otherwise.
    """
    if tensor.dim() < 2 or tensor.shape[0] % num_blocks:
        raise InputError(f"a KV cache of shape {tuple(tensor.shape)} does not begin with blocks")
    if tensor.shape[0] != num_blocks:
        tensor = tensor.unflatten(0, (num_blocks, -1))
    strides = tensor.stride()
    order = sorted(range(1, tensor.dim()), key=lambda d: (-strides[d], d))
    dense = tensor.permute(0, *order)
    if not dense[0].is_contiguous():
        raise InputError(f"blocks of a KV cache are not dense: strides {strides}")
    facts = [str(tensor.dtype), str(list(tensor.shape[1:])), str(order)]
    return dense.flatten(1).view(torch.uint8), facts
