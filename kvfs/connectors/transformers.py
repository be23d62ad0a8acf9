"""Save and restore the KV cache of a transformers model: the simplest way to try kvfs.

    from kvfs import Store
    from kvfs.connectors.transformers import CacheStore, digest_weights

    with Store.open("/path/of/store") as store:
        cs = CacheStore(store, model, weights=digest_weights(model), tokenizer="v1")
        cache, n = cs.load(input_ids)                # the first n tokens, verified
        model.generate(input_ids, past_key_values=cache)
        cs.save(input_ids, cache)                    # whole blocks of what the cache holds

What the storage does never raises here: a block that is missing, damaged or somebody else's ends
the prefix, and the model computes the rest. InputError is for what the caller got wrong.

Threads: a CacheStore may be used from several threads, a cache and its model only as transformers
allows. Blocking: `save` and `load` read or write the shared storage. docs/transformers.md has more.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from kvfs.chain import TOKEN_BYTES, PrefixHasher, as_u32
from kvfs.connectors import hf_copy, hf_replay, hf_state
from kvfs.connectors.hf_identity import digest_tokenizer, digest_weights, identity
from kvfs.connectors.hf_layout import forward, measure
from kvfs.errors import BusyError, InputError, KvfsError
from kvfs.layout import Partition
from kvfs.peers.client import PeerClient
from kvfs.state.slots import SlotPool
from kvfs.store import Store

__all__ = ["CacheStore", "Prefilled", "digest_tokenizer", "digest_weights"]

log = logging.getLogger(__name__)

Replay = Literal["exact", "window", "never"]
PEER_SECONDS = 1.0

# Rows are gathered so many bytes at a time: one buffer, however long the prompt.
_BATCH_BYTES = 64 << 20


class Prefilled(NamedTuple):
    """What `CacheStore.prefill` returns."""

    cache: Any
    """A DynamicCache that holds all but the last 1 to block_tokens tokens of the prompt."""
    hit_tokens: int
    """Tokens that came from the store."""
    state: bytes | None
    """The state at the cache's position, for a later `load`; None if the model needs none."""


@dataclass(frozen=True, slots=True)
class _Way:
    """How to go on from stored blocks: with a state's data, or a replay from `start`."""

    blocks: int
    data: Any = None
    start: int = 0


class CacheStore:
    """The caches of one model in one store.

    Measures the cache's layout by running one block through the model, and makes the namespace.

        cs.identity   what has to be equal for two processes to share blocks
        cs.ns         its namespace in the store
        cs.hybrid     the model has sliding windows: it goes on from blocks and a state, not from
                      blocks alone
        cs.slots      the slot pool of such a model's states on this host, None until one is set:
                      with SlotPool.open(cs.identity, 1 << 30) as cs.slots: ...
        cs.peers      a PeerClient (kvfs.peers.client) to ask other hosts for such states with,
                      None until one is set; cs.peer_seconds: how long at most for one prompt
    """

    def __init__(
        self, store: Store, model: Any, *, weights: str, tokenizer: str, name: str = "",
        adapter: str = "", salt: str = "", hash: str = "xxh3-128",
        partition: Partition | None = None, block_tokens: int = 128, ttl_class: str = "",
    ) -> None:  # fmt: skip
        """store: an open store; model: a causal language model in eval mode.

        weights: revision or digest of the weights (`digest_weights`), not a name that may come to
        mean others; tokenizer: digest of the tokenizer (`digest_tokenizer`); name: for people,
        default the model's type; adapter: name and revision of a loaded adapter; salt, hash,
        partition: as in kvfs.layout.Identity; ttl_class: of what is saved.
        Raises InputError for a model kvfs cannot store, BackendError.
        """
        self.store = store
        self.model = model
        self.layout = measure(model, block_tokens)
        self.identity = identity(
            model, self.layout, weights=weights, tokenizer=tokenizer, name=name, adapter=adapter,
            salt=salt, hash=hash, partition=partition,
        )  # fmt: skip
        self.ns = store.create_namespace(self.identity, default_class=ttl_class)
        self._slots: SlotPool | None = None
        self.peers: PeerClient | None = None
        self.peer_seconds = PEER_SECONDS

    @property
    def hybrid(self) -> bool:
        return bool(self.layout.state)

    @property
    def slots(self) -> SlotPool | None:
        return self._slots

    @slots.setter
    def slots(self, pool: SlotPool | None) -> None:
        if pool is not None and pool.identity.fingerprint != self.identity.fingerprint:
            raise InputError(f"the slot pool is of another namespace than {self.ns.name}")
        self._slots = pool

    # saving

    def save(self, input_ids: Any, cache: Any) -> int:
        """Stores the whole blocks of a prompt that a cache holds and the store does not.

        Of a hybrid model the state too, if there are `slots` and the cache is at a block's end.
        input_ids: the tokens from the first on, [n] or [1, n], unpadded; the cache may hold more or
        fewer of them. cache: of this model, a DynamicCache(config=model.config).
        Returns the tokens that are stored now, a multiple of the block. Raises InputError.
        """
        data = as_u32(_one_sequence(input_ids))
        held = hf_copy.held_tokens(self.layout, cache)
        blocks = min(held, len(data) // TOKEN_BYTES) // self.ns.block_tokens
        try:
            stored = self._save(data, cache, blocks) * self.ns.block_tokens
        except InputError:
            raise
        except KvfsError as e:
            log.warning("%s: nothing stored: %s", self.ns.name, e)
            return 0
        self._keep(data, cache, stored)
        return stored

    def _keep(self, data: memoryview, cache: Any, tokens: int) -> None:
        """Puts the state at the end of what is stored into a slot, if there it can be taken."""
        state = None if self.slots is None else self._state(cache, tokens)
        if self.slots is None or state is None:
            return
        try:
            hf_state.keep(self.slots, self.ns.hasher(data), state)
        except BusyError as e:
            log.info("%s: no slot: %s", self.ns.name, e)

    def _save(self, data: memoryview, cache: Any, blocks: int) -> int:
        """Puts batch after batch; returns the stored blocks."""
        if not blocks:
            return 0
        size = self.ns.block_tokens * TOKEN_BYTES
        head = self.ns.hasher(data[: blocks * size])
        done = self.store.check(self.ns, head).stored_tokens // self.ns.block_tokens
        step = max(1, _BATCH_BYTES // self.ns.row_bytes)
        head = self.ns.hasher(data[: done * size])
        while True:
            end = min(done + step, blocks)
            head.extend(data[done * size : end * size])
            rows = hf_copy.gather(self.layout, cache, done, end) if done < end else []
            # With no rows it renews the lease of what is there.
            result = self.store.put(self.ns, head, rows, first_block=done)
            if result.error is not None:
                log.warning("%s: not all stored: %s", self.ns.name, result.error)
            done = result.stored + result.existing
            if done < end or end == blocks:
                return done

    def state(self, input_ids: Any, cache: Any) -> bytes | None:
        """The state of a hybrid model at the last whole block of the tokens: windows and the like.

        Opaque bytes of a fixed size, good for these tokens and this model only. None if the model
        has none, if there is no whole block, or if the cache is already beyond that block's end
        and has dropped tokens of its windows: take it there, or let `prefill` do it.
        Raises InputError.
        """
        if not self.hybrid:
            return None
        hasher = self.ns.hasher(_one_sequence(input_ids))
        held = hf_copy.held_tokens(self.layout, cache)
        size = self.ns.block_tokens
        state = self._state(cache, min(hasher.n_tokens, held) // size * size)
        return None if state is None else hf_state.seal(self.ns, hasher, state)

    def _state(self, cache: Any, tokens: int) -> hf_state.State | None:
        payload = hf_copy.gather_state(self.layout, cache, tokens) if tokens else None
        if payload is None:
            return None
        return hf_state.State(tokens, hf_state.fill(self.ns, payload.numpy()))

    # loading

    def load(
        self, input_ids: Any, state: bytes | None = None, *, replay: Replay = "exact"
    ) -> tuple[Any, int]:
        """A cache with the first n tokens of a prompt, and n: as many as are stored and of use.

        n is a multiple of the block and less than the prompt, so that there is a token to compute.
        n = 0 is a miss, with an empty cache that works all the same.

        A hybrid model cannot go on from its blocks alone. With a `state` that fits, n is its
        position; else a slot is looked for. Without one, the windows are made anew by running the
        model over the tokens before n:
        replay   "exact": as many as the windows depend on, and a miss where that are all of them
                 "window": one window, a cheap approximation: logits then differ a little
                 "never": a miss
        Raises InputError for tokens that are none.
        """
        if replay not in ("exact", "window", "never"):
            raise InputError(f"replay is {replay!r}; it can be exact, window or never")
        ids = _one_sequence(input_ids)
        hasher = self.ns.hasher(ids)
        way, rows = self._fetch(hasher, state, replay)
        if way is None:
            return hf_copy.build(self.model.config, {}, 0), 0
        tokens = way.blocks * self.ns.block_tokens
        contents = hf_copy.scatter(self.layout, rows)
        if self.hybrid:
            flat = torch.as_tensor(ids, dtype=torch.long)
            payload = (
                hf_replay.replay(self.model, self.layout, contents, flat, way.start, tokens)
                if way.data is None
                else torch.frombuffer(bytearray(way.data), dtype=torch.uint8)
            )
            for layer, fields in hf_copy.scatter_state(self.layout, payload, tokens).items():
                contents.setdefault(layer, {}).update(fields)
        return hf_copy.build(self.model.config, contents, tokens), tokens

    def _way(
        self, hasher: PrefixHasher, stored: int, state: bytes | None, replay: Replay
    ) -> _Way | None:
        """How to go on, with so many blocks stored; None for a miss."""
        # A state is the whole window, and a cache of transformers takes no token back: other than
        # in kvfs.state no ring is left to compute, one token is.
        size = self.ns.block_tokens
        most = min(stored, max(0, hasher.n_tokens - 1) // size)
        if not self.hybrid:
            return _Way(most) if most else None
        if state is not None:
            given = hf_state.unseal(self.ns, hasher, state)
            if isinstance(given, str):
                log.info("%s: %s", self.ns.name, given)
            elif given.tokens <= most * size:
                return _Way(given.tokens // size, given.data)
        start = self._replay_start(most * size, replay)
        if self.slots is not None or self.peers is not None:
            # A slot before the replay's start would save less than the replay does.
            blocks = range(most, max(0, start // size - 1), -1)
            places = hf_state.Places(self.slots, self.peers, self.peer_seconds)
            found = hf_state.find(self.store, self.ns, hasher, blocks, places)
            if found is not None:
                return _Way(found.tokens // size, found.data)
        return _Way(most, start=start) if start else None

    def _replay_start(self, tokens: int, replay: Replay) -> int:
        if replay == "never":
            return 0
        return hf_replay.replay_start(self.identity, tokens, exact=replay == "exact")

    def _fetch(
        self, hasher: PrefixHasher, state: bytes | None, replay: Replay
    ) -> tuple[_Way | None, Any]:
        """How to go on with what could be fetched, and the rows for it."""
        try:
            plan = self.store.check(self.ns, hasher)
        except InputError:
            raise
        except KvfsError as e:
            log.warning("%s: cannot check: %s", self.ns.name, e)
            return None, None
        way = self._way(hasher, plan.stored_blocks, state, replay)
        if way is None:
            why = "no state" if self.hybrid and plan.stored_blocks else plan.reason
            log.info("%s: a miss: %d blocks stored, %s", self.ns.name, plan.stored_blocks, why)
            return None, None
        rows = hf_copy.new_rows(self.layout, way.blocks)
        got = self.store.fetch(self.ns, plan, hasher, rows.view(-1).numpy(), blocks=way.blocks)
        if not got.complete:
            log.info("%s: %s at block %d", self.ns.name, got.reason, got.blocks)
            way = self._way(hasher, got.blocks, state, replay)
        return way, rows[: way.blocks if way else 0]

    # both

    def prefill(
        self, input_ids: Any, state: bytes | None = None, *, replay: Replay = "exact"
    ) -> Prefilled:
        """Loads what is stored of a prompt, computes and saves the other whole blocks.

        input_ids, state, replay: as for `load`.

        The cache ends at the last block that leaves a token to compute, which is where a hybrid
        model's state can be taken; `model.generate(input_ids, past_key_values=cache)` goes on.
        Runs the model without gradients. Raises InputError.
        """
        ids = torch.as_tensor(_one_sequence(input_ids), dtype=torch.long)
        cache, hit = self.load(ids, state, replay=replay)
        end = max(0, len(ids) - 1) // self.ns.block_tokens * self.ns.block_tokens
        if end > hit:
            forward(self.model, ids[None, hit:end].to(self.model.device), cache)
        self.save(ids[:end], cache)
        return Prefilled(cache, hit, self.state(ids[:end], cache))


def _one_sequence(input_ids: Any) -> Any:
    """The tokens as a flat sequence. Raises InputError for a batch of several."""
    shape = getattr(input_ids, "shape", None)
    if shape is None or len(shape) != 2:
        return input_ids
    if shape[0] != 1:
        raise InputError(f"one sequence at a time; these are {shape[0]}")
    return input_ids[0]
