"""What of a transformers cache is kept and where it lies: measured, not known by name.

One block of tokens is run through the model; what the layers of its cache then hold is the layout.
Tensors that grow with the tokens go into block rows: keys and values, and what compressed attention
makes of them, as part "kv", the indexer's as part "index". Those that do not are the state of the
sequence: the sliding windows, and what a compressor carries from one window to the next. A layer
that holds anything this module does not know is refused, since a cache restored without it would
be silently wrong.

Row and state: pieces one behind the other, each aligned to 64 bytes, in the dtype and in the order
of dimensions the cache has. Immutable after `measure`; no I/O.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache

from kvfs.errors import InputError
from kvfs.layout import Span, StateLayout

ALIGN = 64
_BATCH = 1

# Classes whose whole content is known here. An exact match: a subclass may hold more.
_LAYERS = frozenset(
    {"DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer", "DeepseekV4HCACache",
     "DeepseekV4CSACache", "DummyLayer"}
)  # fmt: skip
# Tensor of a layer -> (part, axis that counts tokens or entries, the batch left out).
_GROWING = {
    "keys": ("kv", 1),
    "values": ("kv", 1),
    "compressed_kv.compressor": ("kv", 0),
    "compressed_kv.indexer": ("index", 0),
    "indexer_keys": ("index", 0),
}
WINDOW = frozenset({"keys", "values"})
# What a compressor keeps of its last window for the next one.
_CARRIED = frozenset(
    {"overlap_kv.compressor", "overlap_kv.indexer", "overlap_gate.compressor",
     "overlap_gate.indexer"}
)  # fmt: skip
# Derived from the configuration, or the same tensor under a second name.
_NOT_CONTENT = frozenset({"_sliding_window_tensor"})
_PART_ORDER = ("kv", "index", "state")


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of one layer in a block row, or in the state.

    layer, field   which tensor: an attribute of the cache's layer, or "attribute.key" of a dict
    part           "kv" or "index" in a row, "state" in the state
    shape, dtype   as in the cache, without the batch; along `axis` what one block has, or the most
                   that the state has
    offset         bytes from the start of the row or the state
    span           tokens that one row along `axis` stands for; of what a compressor carries over:
                   tokens after which it is replaced
    device         where the model keeps it; no part of the layout
    """

    layer: int
    field: str
    part: str
    shape: tuple[int, ...]
    axis: int
    dtype: Any
    span: int
    device: Any
    offset: int = 0

    @property
    def length(self) -> int:
        """Bytes."""
        size: int = self.dtype.itemsize
        return math.prod(self.shape) * size

    @property
    def rows(self) -> int:
        return self.shape[self.axis]

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.layer}.{self.field}={self.part}:{dtype}{list(self.shape)}/{self.axis}"
            f"x{self.span}@{self.offset}"
        )


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Where everything of one model's cache lies. `measure` makes it.

    blocks, row_bytes    the pieces of a block row, and its size
    state, state_bytes   the pieces of the state, and its size; none and 0 without sliding windows
    windows              sliding window of each layer that has one
    classes              class of each layer of the cache
    """

    block_tokens: int
    blocks: tuple[Piece, ...]
    row_bytes: int
    state: tuple[Piece, ...]
    state_bytes: int
    windows: tuple[int, ...]
    classes: tuple[str, ...]

    @property
    def dense(self) -> bool:
        """No padding between the pieces of a row."""
        return sum(piece.length for piece in self.blocks) == self.row_bytes

    @property
    def dtypes(self) -> str:
        names = {str(p.dtype).removeprefix("torch.") for p in (*self.blocks, *self.state)}
        return "+".join(sorted(names))

    def spans(self) -> tuple[Span, ...]:
        """The row for kvfs.layout.Identity: one span for each part of each layer.

        A model whose layers all slide has nothing to keep in blocks; its row is a span "none" that
        only marks the prefix as seen, so that its states have a chain to belong to.
        """
        out: list[Span] = []
        for p in self.blocks:
            end = p.offset + p.length
            if out and (out[-1].layer, out[-1].part) == (p.layer, p.part):
                last = out.pop()
                out.append(replace(last, length=end - last.offset))
            else:
                out.append(Span(p.layer, p.part, p.offset, p.length))
        return tuple(out) or (Span(0, "none", 0, self.row_bytes),)

    def state_layout(self) -> StateLayout | None:
        """The state for kvfs.layout.Identity: a slot of its size holds `state_bytes`."""
        if not self.state:
            return None
        window = max(self.windows)
        widths: dict[int, int] = {}
        for p in self.state:
            width = p.length // p.rows if p.field in WINDOW else 0
            widths[p.layer] = widths.get(p.layer, 0) + width
        # Layers that differ, or keep more than a window, have no width in common: take the mean.
        width = max(widths.values()) if len(set(widths.values())) == 1 else 0
        mean = -(-self.state_bytes // (window * len(widths)))
        return StateLayout(window, 0, len(widths), max(width, mean))

    def describe(self) -> str:
        """Every piece in words, for a digest: two layouts that differ anywhere differ in it."""
        return "\n".join(str(piece) for piece in (*self.blocks, *self.state))


def measure(model: Any, block_tokens: int) -> CacheLayout:
    """The layout of a model's cache, from running one block of tokens through it.

    Raises InputError for a model that holds its cache in another way than this module knows.
    """
    cache = _probe(model, block_tokens)
    blocks: list[Piece] = []
    state: list[Piece] = []
    for number, layer in enumerate(cache.layers):
        for piece in _pieces(number, layer, block_tokens):
            (state if piece.part == "state" else blocks).append(piece)
    placed, row_bytes = _place(blocks)
    state_placed, state_bytes = _place(state)
    return CacheLayout(
        block_tokens, placed, row_bytes or ALIGN, state_placed, state_bytes,
        tuple(layer.sliding_window for layer in cache.layers if is_sliding(layer)),
        layer_classes(cache),
    )  # fmt: skip


def layer_classes(cache: Any) -> tuple[str, ...]:
    """Class of each layer of a cache."""
    return tuple(type(layer).__name__ for layer in cache.layers)


def is_sliding(layer: Any) -> bool:
    return bool(getattr(layer, "is_sliding", False))


def tensors(layer: Any) -> dict[str, Any]:
    """All tensors a layer of a cache holds: attribute, or "attribute.key", -> tensor.

    Values that are the keys themselves are left out.
    """
    found = {}
    for name, value in vars(layer).items():
        items = value.items() if isinstance(value, dict) else ((None, value),)
        for key, tensor in items:
            if torch.is_tensor(tensor) and name not in _NOT_CONTENT:
                found[name if key is None else f"{name}.{key}"] = tensor
    if "values" in found and found["values"] is found.get("keys"):
        del found["values"]
    return found


def forward(model: Any, input_ids: Any, cache: Any) -> None:
    """Runs tokens [1, n] through the model into its cache; logits are made of the last alone."""
    options = {"input_ids": input_ids, "past_key_values": cache, "use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    with torch.no_grad():
        model(**options)


def _probe(model: Any, block_tokens: int) -> Any:
    """The cache of one block. Which tokens they are does not matter for its shape."""
    cache = DynamicCache(config=model.config)
    unknown = sorted(set(layer_classes(cache)) - _LAYERS)
    if unknown:
        raise InputError(
            f"{type(model).__name__} keeps its cache in layers of class {', '.join(unknown)}, "
            "which kvfs does not store"
        )
    ids = torch.zeros((_BATCH, block_tokens), dtype=torch.long, device=model.device)
    forward(model, ids, cache)
    return cache


def _pieces(number: int, layer: Any, block_tokens: int) -> Iterator[Piece]:
    for field, tensor in tensors(layer).items():
        if field.startswith("buffer_") and tensor.numel() == 0:
            continue  # tokens on their way into a compressed entry: none at the end of a block
        piece = _piece(number, layer, field, tensor, block_tokens)
        if piece is None:
            raise InputError(
                f"layer {number} ({type(layer).__name__}) holds `{field}` of shape "
                f"{list(tensor.shape)} after one block, which kvfs does not know how to store"
            )
        yield piece


def _piece(number: int, layer: Any, field: str, tensor: Any, block_tokens: int) -> Piece | None:
    """The piece of one tensor, as it is after one block; None for what is not known."""
    shape = tuple(tensor.shape[1:])
    part, axis = _GROWING.get(field, ("state", 0))
    if field in _CARRIED:
        span = layer.compress_rate
    elif field in WINDOW and is_sliding(layer):
        # As many rows as a long prompt leaves; the probe may be shorter than the window.
        part, span = "state", 1
        shape = (*shape[:axis], layer.sliding_window - 1, *shape[axis + 1 :])
    elif field in _GROWING and shape[axis] and block_tokens % shape[axis] == 0:
        span = block_tokens // shape[axis]
    else:
        return None
    if tensor.shape[0] != _BATCH:
        return None
    return Piece(number, field, part, shape, axis, tensor.dtype, span, tensor.device)


def _place(pieces: Sequence[Piece]) -> tuple[tuple[Piece, ...], int]:
    """The pieces by layer and part, with their offsets; and the bytes they take."""
    order = sorted(pieces, key=lambda p: (p.layer, _PART_ORDER.index(p.part)))
    out, at = [], 0
    for piece in order:
        out.append(replace(piece, offset=at))
        at += -(-piece.length // ALIGN) * ALIGN
    return tuple(out), at
