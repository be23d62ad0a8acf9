"""Requests that wait for what is stored of their prompts, before a DeepInfer engine sees them.

A request with a hit is not queued at once. Its blocks are allocated, the fetch process brings what
is stored, a swap-in copies it into the blocks, and the sliding windows are taken from a slot, or
left to a replay; then the request is queued as one that has so many tokens already. Others are
computed meanwhile. Whatever goes wrong, it is queued with less or nothing.

`poll` moves all of it on, in the engine's thread, and waits for nothing.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvfs.chain import PrefixHasher
from kvfs.connectors.background import Background
from kvfs.connectors.deepinfer_layout import Memory
from kvfs.connectors.deepinfer_state import Account
from kvfs.fetcher.engine import Fetcher
from kvfs.gpu.host_memory import Landed
from kvfs.gpu.swap_in import SwapIn, Swapper
from kvfs.namespace import Namespace
from kvfs.peers.client import PeerClient
from kvfs.peers.load import Loaded, load_state
from kvfs.plan import Plan
from kvfs.state.decision import Replay, decide_length
from kvfs.state.slots import Slot, SlotPool
from kvfs.store import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """fetch_seconds: after which what has come is used, and a request that got no blocks is queued;
    state_seconds: for a slot; lookahead: tokens the engine wants in any chunk; replay: whether the
    engine may compute a window anew, for which it must cut prompts."""

    fetch_seconds: float
    state_seconds: float
    lookahead: int
    replay: bool


@dataclass(slots=True)
class Held:
    """A request on its way."""

    seq: Any
    account: Account
    plan: Plan
    ticket: Any
    state: Future[Loaded] | None
    until: float
    swap: SwapIn | None = None
    allocated: bool = False
    aborted: bool = False


class Loader:
    """See the module docstring. Its methods are for the engine's thread."""

    def __init__(
        self, store: Store, ns: Namespace, memory: Memory, swapper: Swapper, fetcher: Fetcher,
        scheduler: Any, limits: Limits, *, pool: SlotPool | None, client: PeerClient | None,
        counts: Counter[str],
    ) -> None:  # fmt: skip
        self.store, self.ns, self.memory, self.swapper = store, ns, memory, swapper
        self.held: list[Held] = []
        self._fetcher, self._scheduler, self._limits = fetcher, scheduler, limits
        self._pool, self._client, self._counts = pool, client, counts
        self._rows: dict[int, bytes] = {}
        self._queued: dict[int, Held] = {}
        """Queued with blocks, and not run yet."""
        self._thread = Background("kvfs-state")

    def hold(self, seq: Any, account: Account, plan: Plan, hasher: PrefixHasher) -> None:
        """Begins to bring what is stored of a request that is not queued yet. One of which nothing
        can be brought, because there is no thread for it, is queued."""
        ticket = None
        try:
            ticket = self._fetcher.fetch(self.ns, plan, hasher, deadline=self._limits.fetch_seconds)
            self.held.append(self._held(seq, account, plan, hasher, ticket))
        except Exception as e:
            self._failed(seq, e)
            if ticket is not None:
                ticket.release()
            self._scheduler.add_sequence(seq)

    def _held(
        self, seq: Any, account: Account, plan: Plan, hasher: PrefixHasher, ticket: Any
    ) -> Held:
        limits, state = self._limits, None
        if self.memory.ring is not None:
            prefix = self.ns.hasher(hasher.buffer)  # of its own: a hasher belongs to one thread
            state = self._thread.submit(partial(
                load_state, self.store, self.ns, plan, prefix, limits.state_seconds,
                pool=self._pool, client=self._client,
            ))  # fmt: skip
        until = time.monotonic() + limits.fetch_seconds
        return Held(seq, account, plan, ticket, state, until)

    def poll(self) -> None:
        """Moves every request on as far as it can without waiting."""
        self.relieve()
        if self.held:
            self.held = [held for held in self.held if not self._advance(held)]

    def began(self, seq_id: int) -> None:
        """The engine runs a request now."""
        self._queued.pop(seq_id, None)

    def relieve(self) -> None:
        """Takes the blocks of a request that waits with some, if else the engine could go no
        further: in front of it is one that has none, nothing runs, and all are taken."""
        scheduler = self._scheduler
        if not self._queued or scheduler.running:
            return
        waiting = scheduler.waiting
        if not waiting or len(waiting[0].block_table):
            return
        held = self._queued.pop(next(reversed(self._queued)))
        seq = held.seq
        if not len(seq.block_table):
            return  # it was aborted
        free(scheduler, seq)
        seq.num_cached_tokens = seq.cached_hit_tokens = seq.swa_valid_start = 0
        held.account.again()
        self._rows.pop(seq.seq_id, None)
        self._counts["hits_given_back"] += 1

    def settle(self, timeout: float) -> bool:
        """Waits for storage and copies, and not for blocks, which only steps of the engine free.

        For an engine that has nothing else to do. Says whether no request is on its way any more.
        """
        until = time.monotonic() + timeout
        self.poll()
        while time.monotonic() < until:
            busy = [h for h in self.held if h.swap is not None or not h.ticket.done]
            if not busy:
                break
            if busy[0].swap is not None:
                busy[0].swap.over(0.01)
            else:
                busy[0].ticket.wait(timeout=0.01)
            self.poll()
        return not self.held

    def abort(self, request_ids: set[str]) -> list[Any]:
        """Gives requests up; returns their sequences. They are queued as aborted once nothing is
        copied into their blocks any more, so that the engine tells whoever asked."""
        aborted = [held for held in self.held if held.seq.request_id in request_ids]
        for held in aborted:
            held.aborted = True
            if held.swap is not None:
                held.swap.abort(0)
        self.poll()
        return [held.seq for held in aborted]

    def _advance(self, held: Held) -> bool:
        """One request; whether it is on its way no longer."""
        try:
            return self._step(held)
        except Exception as e:  # of the engine or ours: the request is computed
            self._failed(held.seq, e)
        try:
            if held.swap is not None:
                held.swap.abort()
            held.ticket.release()
            self._queue(held)
        except Exception:  # of an engine that takes nothing: the others go on
            log.exception("%s: not queued", held.seq.request_id)
        return True

    def _failed(self, seq: Any, error: Exception) -> None:
        log.warning("%s: no hit: %s", seq.request_id, error, exc_info=True)
        self._counts["loads_failed"] += 1

    def _step(self, held: Held) -> bool:
        if held.swap is None and not self._begin(held):
            return not held.allocated and self._given_up(held)
        assert held.swap is not None
        if not held.swap.over(0) or (held.state is not None and not held.state.done()):
            return False
        if not held.aborted:
            self._admit(held, held.swap.finish())
        self._queue(held)
        return True

    def _begin(self, held: Held) -> bool:
        """Gets blocks and begins to copy into them; False if there are none yet."""
        if held.aborted or not self._scheduler.try_allocate_seq(held.seq):
            return False
        held.allocated = True
        size = held.plan.hit_blocks * self.memory.per_block
        table = list(held.seq.block_table)[:size]
        held.swap = self.swapper.swap_in(held.plan, held.ticket, table)
        return True

    def _given_up(self, held: Held) -> bool:
        if not held.aborted and time.monotonic() < held.until:
            return False
        held.ticket.release()
        self._counts["loads_without_room"] += not held.aborted
        self._queue(held)
        return True

    def _queue(self, held: Held) -> None:
        """Into the engine's queue, where one that was aborted is told of and dropped."""
        if held.aborted:
            if held.allocated:
                free(self._scheduler, held.seq)
            held.seq.status = type(held.seq.status).FINISHED_ABORTED
        elif held.allocated:
            self._queued[held.seq.seq_id] = held
        self._scheduler.add_sequence(held.seq)

    # what is hit

    def _admit(self, held: Held, blocks: int) -> None:
        """Tells the sequence what it has. blocks: that are in its memory, whole."""
        size, tokens = self.ns.block_tokens, held.seq.get_len()
        if self.memory.ring is None:
            return self._has(held, blocks * size, blocks * size)
        loaded = None if held.state is None else held.state.result()
        if loaded is not None and loaded.slot is not None:
            anchor = loaded.slot.meta.position
            if anchor <= blocks * size:
                if self._fits(anchor, tokens):
                    self._put_state(held.seq, loaded.slot)
                    held.account.start = anchor - self.memory.ring.layout.window
                    self._has(held, anchor, anchor)
                return
        decision = decide_length(self.ns.identity, tokens, blocks * size)
        if decision.replay is not None and self._limits.replay:
            self._replay(held, decision.replay)

    def _fits(self, start: int, tokens: int) -> bool:
        """Whether the engine can begin there."""
        lookahead = max(1, self._limits.lookahead)
        return start >= lookahead and tokens - start >= lookahead

    def _has(self, held: Held, hit: int, start: int) -> None:
        if not self._fits(start, held.seq.get_len()):
            return
        held.seq.num_cached_tokens = start
        held.seq.cached_hit_tokens = hit
        held.account.saved = hit // self.ns.block_tokens
        self._counts["hit_tokens"] += hit
        self._counts["replayed_tokens"] += hit - start

    def _put_state(self, seq: Any, slot: Slot) -> None:
        assert self.memory.ring is not None
        place = slot.meta.position % self.memory.ring.size
        data = slot.data
        if slot.meta.rotation != place:
            data = self.memory.ring.turn(data, slot.meta.rotation, place)
        states = self.memory.states
        state = self.memory.state_of(data).to(states.device)
        self.memory.cache.load_state_from_store_to_prefill_cache(
            seq.state_id, slot.meta.position, state, states
        )

    # replay

    def _replay(self, held: Held, replay: Replay) -> None:
        """The engine computes the window anew, with nothing before it, up to a cut at its end.

        It does so in all layers and writes the block's KV: what is stored is put back then, by
        `restore`, before anything else is computed.
        """
        block = replay.end // self.ns.block_tokens - 1
        if replay.tokens != self.ns.block_tokens or not self._fits(
            replay.start, held.seq.get_len()
        ):
            return
        n = self.memory.per_block
        pages = list(held.seq.block_table)[block * n : (block + 1) * n]
        out = self.swapper.swap_out(pages)
        try:
            row = bytes(out.rows())
        finally:
            out.buffer.close()
        if not row:  # it could not be put back
            return
        self._rows[held.seq.seq_id] = row
        held.account.replaying = block
        held.account.start = replay.start
        held.seq.swa_valid_start = replay.start
        held.seq.chunk_checkpoints = sorted({*held.seq.chunk_checkpoints, replay.end})
        self._has(held, replay.end, replay.start)

    def restore(self, seq: Any, account: Account, computed: int) -> None:
        """Puts the KV of a replayed block back, before the step that follows the block's end.

        computed: tokens of the sequence that are, this step's included.
        """
        block = account.replaying
        if block is None or computed < (block + 1) * self.ns.block_tokens:
            return
        account.replaying = None
        row = self._rows.pop(seq.seq_id, b"")
        if not row:
            return
        n, size = self.memory.per_block, len(row)
        pages = list(seq.block_table)[block * n : (block + 1) * n]
        swap = self.swapper.load(Landed(row, size, size, 1), pages)
        if swap.finish() != 1:
            log.warning("%s: block %d keeps what the replay computed", seq.request_id, block)

    def forget(self, seq_ids: set[int]) -> None:
        """Sequences that have ended."""
        for seq_id in seq_ids:
            self._rows.pop(seq_id, None)
            self._queued.pop(seq_id, None)

    def close(self) -> None:
        """Gives up what is on its way; the sequences stay with the engine."""
        for held in self.held:
            if held.swap is not None:
                held.swap.abort()
            held.ticket.release()
        self.held.clear()
        # What is under way has the time of a state at most; a peer or storage that hangs is left.
        self._thread.close(self._limits.fetch_seconds, drop=True)
        self._fetcher.close()


def free(scheduler: Any, seq: Any) -> None:
    """Frees what a sequence has that the engine never ran, and lets the engine see that."""
    scheduler.free_seq(seq)
    seq.state_id = -1
