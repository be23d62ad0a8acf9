"""Makes the sliding windows at a block's end anew, where they were not kept: bounded replay.

The tokens before the end run through the model once more. Layers whose KV is stored give out what
is stored and take nothing in; layers with a window begin with none. A layer's window depends on the
layer before at the window's tokens before that, so what is missing at the start reaches one window
further with each layer, and a replay of as many windows as there are such layers is exact. No I/O.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import DynamicIndexedLayer

from kvfs.connectors.hf_copy import gather_state
from kvfs.connectors.hf_layout import CacheLayout, forward, is_sliding
from kvfs.layout import Identity
from kvfs.state.decision import replay_before

Contents = dict[int, dict[str, Any]]


def replay_start(identity: Identity, end: int, *, exact: bool) -> int:
    """The block boundary at which a replay up to `end` begins; 0: it would save nothing.

    exact: go back as far as the windows' rows depend on; else one window, as an approximation.
    """
    replay = None if identity.state is None else replay_before(identity.state, end, exact=exact)
    start = 0 if replay is None else replay.start
    return start // identity.block_tokens * identity.block_tokens


def replay(
    model: Any, layout: CacheLayout, contents: Contents, ids: Any, start: int, end: int
) -> Any:
    """The state after `end` tokens as a uint8 tensor, from computing tokens start..end-1.

    contents: the tensors of all blocks before `end`, as kvfs.connectors.hf_copy.scatter makes them;
    ids: the tokens [end or more]; start, end: boundaries of blocks.
    """
    cache = DynamicCache(config=model.config)
    for number, layer in enumerate(cache.layers):
        if is_sliding(layer):
            _begin(layer, contents.get(number, {}), start)
        elif number in contents:
            cache.layers[number] = _Stored(contents[number], start)
    forward(model, ids[None, start:end].to(model.device), cache)
    return gather_state(layout, cache, end)


class _Stored(DynamicIndexedLayer):  # type: ignore[misc]  # the base has no types
    """A layer that holds stored KV and gives it out as far as the replay has come."""

    def __init__(self, fields: dict[str, Any], start: int) -> None:
        super().__init__()
        self._fields = fields
        self._seen = self._indexed = start

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        self._seen += key_states.shape[-2]
        keys = self._fields["keys"]
        values = self._fields.get("values", keys)
        return keys[..., : self._seen, :], values[..., : self._seen, :]

    def update_indexer(self, indexer_key_states: Any) -> Any:
        self._indexed += indexer_key_states.shape[1]
        return self._fields["indexer_keys"][:, : self._indexed]

    def get_seq_length(self) -> int:
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._seen + query_length, 0


# Layers with a window are changed one by one and not by class: transformers enters a subclass of
# theirs into its table of layer types, for all caches to come.


def _begin(layer: Any, fields: dict[str, Any], start: int) -> None:
    """Lets a new layer with a window begin at a position, with nothing before it."""
    layer.cumulative_length = start
    layer.get_mask_sizes = partial(_mask_sizes, layer)
    if hasattr(layer, "compressed_kv"):
        for name in layer.entry_count:
            layer.entry_count[name] = start // layer.compress_rate
        layer.update_compressor_states = partial(_stored_entries, layer, fields)


def _mask_sizes(layer: Any, query_length: int) -> tuple[int, int]:
    """Rows that attention sees and the position of the first, where fewer than a window exist."""
    held = layer.keys.shape[-2] if layer.is_initialized and layer.keys.numel() else 0
    return held + query_length, layer.cumulative_length - held


def _stored_entries(layer: Any, fields: dict[str, Any], name: str, compressed: Any) -> Any:
    """The stored compressed entries up to where the replay has come, instead of the computed."""
    layer.entry_count[name] += compressed.shape[1]
    return fields[f"compressed_kv.{name}"][:, : layer.entry_count[name]]
