"""What of a DeepInfer engine's memory is a block row and what is a slot, and who they belong to.

A row: for each layer that owns compressed KV, the bytes the engine's own layout gives it, indexer
and main KV in one, so that neither comes without the other. A slot: the sliding windows of the
layers whose state the engine keeps on disk, as its own functions hand them over: a ring of window
plus backtracking tokens in each layer, the token at position x in place x mod ring.

Plain data, made once at the start. Needs torch and no DeepInfer; what it reads of the engine are
attributes of its cache engine, named in `measure`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch

from kvfs.errors import ConfigError, InputError
from kvfs.layout import Identity, Span, StateLayout
from kvfs.state.ring import Ring

GRAIN = 128
"""Tokens at whose multiples the engine hands over state."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The engine's memory as kvfs sees it.

    blocks: uint8 [blocks, bytes of a block]; states: uint8 [state slots, bytes of a state]; cache:
    its GPUCacheInterface, whose functions take state out and put it back; state_bytes: of the part
    of a state that is kept; pad: bytes of a layer in it, padding included; big: the ring as long as
    it is in `states`, where the engine keeps extra tokens for prefill.
    """

    identity: Identity
    per_block: int
    blocks: Any
    states: Any
    cache: Any
    state_bytes: int
    pad: int
    ring: Ring | None
    big: Ring | None

    def tensors(self) -> dict[tuple[int, str], Any]:
        """For Swapper: the layers' pages."""
        out = {}
        for span in self.identity.spans:
            start, size = span.offset // self.per_block, span.length // self.per_block
            out[span.layer, span.part] = self.blocks[:, start : start + size]
        return out

    def slot_of(self, state: Any) -> Any:
        """A kept state (uint8 [state_bytes], host) as a slot's data, without padding."""
        assert self.identity.state is not None
        layers = self.identity.state.layers
        layer = self.identity.state.slot_bytes // layers
        return state.view(layers, self.pad)[:, :layer].contiguous().view(-1)

    def state_of(self, data: Any) -> Any:
        """The inverse: a slot's data as a kept state in host memory."""
        assert self.identity.state is not None
        layers = self.identity.state.layers
        state = torch.zeros(self.state_bytes, dtype=torch.uint8)
        given = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(layers, -1)
        state.view(layers, self.pad)[:, : given.shape[1]] = given
        return state


def measure(
    cache_engine: Any, *, model: str, weights: str, tokenizer: str, salt: str = "",
    format: str = "",
) -> Memory:  # fmt: skip
    """The memory of an engine's CacheEngine.

    weights, tokenizer: revisions or digests; format: what the bytes mean besides their sizes
    (release, accelerator). Raises ConfigError for blocks that kvfs's do not fit, InputError.
    """
    block = int(cache_engine.cache_config.block_size)
    if block <= 0 or (GRAIN % block and block % GRAIN):
        raise ConfigError(f"blocks of {block} tokens: neither a part nor a multiple of {GRAIN}")
    tokens = max(block, GRAIN)
    per_block = tokens // block
    layout, kept = cache_engine.get_kvcache_layout(cache_engine.cfg, block)
    blocks, states = cache_engine.gpu_blocks, cache_engine.gpu_states
    row = int(blocks.shape[1])
    spans = tuple(
        Span(int(layer), "kv", int(offset) * per_block, int(length) * per_block)
        for layer, offset, length in layout
    )
    cache = cache_engine.gpu_cache
    state, pad, extra = _state(cache_engine, cache, int(kept))
    facts = [layout, row, block, kept, pad, extra, format]
    digest = blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()
    identity = Identity(
        model=model, weights=weights, tokenizer=tokenizer, spans=spans, row_bytes=row * per_block,
        record_format=f"deepinfer:{digest}", block_tokens=tokens, salt=salt, state=state,
    )  # fmt: skip
    ring = Ring.of(identity)
    big = None
    if ring is not None and state is not None:
        longer = StateLayout(state.window, state.backtrack + extra, state.layers, state.token_bytes)
        big = Ring(longer, tokens)
    return Memory(identity, per_block, blocks, states, cache, int(kept), pad, ring, big)


def _state(cache_engine: Any, cache: Any, kept: int) -> tuple[StateLayout | None, int, int]:
    """(layout of the kept state, bytes of a layer in it, tokens of the ring beyond it)."""
    if not kept:
        return None, 0, 0
    window = int(cache_engine.cfg.window_size[0])
    ring, longer = int(cache.swa_block_size_inference), int(cache.swa_block_size_kvstore)
    layers, pad = int(cache.swa_store_num_layer), int(cache.swa_bytes_per_layer_inference_pad)
    layer = int(cache.swa_bytes_per_layer_inference)
    if layers * pad != kept or layer % ring or not window <= ring <= longer:
        raise InputError(f"a state of {kept} bytes is not {layers} rings of {ring} tokens")
    return StateLayout(window, ring - window, layers, layer // ring), pad, longer - ring
