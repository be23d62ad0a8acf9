"""A small engine that calls its hooks in the order DeepInfer 0.1.0 does.

Scheduler, block manager, state slots and step are the release's in Python, as far as the hooks see
them: chunked prefill, decoding with drafts that are taken back, preemption, aborts, blocks with
reference counts. What is "computed" of a token is a digest of all tokens up to it, so
that every byte of every row and ring is known beforehand. Freed blocks are overwritten at once.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

BLOCK, WINDOW, BACKTRACK, NEXTN = 128, 128, 6, 5
RING = WINDOW + BACKTRACK
LAYOUT = [(2, 0, 2 * BLOCK), (5, 2 * BLOCK, 3 * BLOCK)]  # (layer, offset, bytes)
BLOCK_BYTES = 5 * BLOCK + 64
STATE_LAYERS, DROPPED, TOKEN_BYTES = 2, 1, 16
FREED, DRAFT, REPLAYED = 0xEE, 0xDD, 0xCC


class Status(enum.Enum):
    WAITING = 0
    RUNNING = 1
    FINISHED_STOPPED = 3
    FINISHED_ABORTED = 5


def _next(state: Any, token: int) -> bytes:
    state.update(token.to_bytes(4, "little"))
    return bytes(state.copy().digest())


def digests(tokens: list[int]) -> np.ndarray[Any, Any]:
    """Of every token, 32 bytes that depend on all tokens up to it: uint8 [tokens, 32]."""
    state = blake2b(digest_size=32)
    return np.frombuffer(b"".join(_next(state, t) for t in tokens), dtype=np.uint8).reshape(-1, 32)


def row_of(tokens: list[int], block: int) -> bytes:
    """The bytes of a block as the engine computes them."""
    row = np.zeros(BLOCK_BYTES, dtype=np.uint8)
    part = digests(tokens)[block * BLOCK : (block + 1) * BLOCK]
    row[: 5 * BLOCK] = np.concatenate([part[:, :2].ravel(), part[:, 2:5].ravel()])
    return row.tobytes()


def window_of(tokens: list[int], anchor: int) -> np.ndarray[Any, Any]:
    """The window before an anchor, in order: uint8 [layers, window, token bytes]."""
    part = digests(tokens[:anchor])[anchor - WINDOW :]
    return np.stack([part[:, :16] ^ layer for layer in range(STATE_LAYERS)])


class Blocks:
    """Blocks or state slots, with reference counts; number 0 is nobody's."""

    def __init__(self, count: int, memory: Any) -> None:
        self.free, self.count = deque(range(1, count)), [0] * count
        self.memory = memory

    def allocate(self, n: int) -> list[int]:
        taken = [self.free.popleft() for _ in range(n)]
        self.pin_blocks(taken, new=True)
        return taken

    def pin_blocks(self, ids: Any, new: bool = False) -> None:
        for i in ids:
            assert new or self.count[i] > 0, "a free block was pinned"
            self.count[i] += 1

    def unpin_blocks(self, ids: Any) -> None:
        for i in reversed(list(ids)):
            self.count[i] -= 1
            assert self.count[i] >= 0, "a block was freed twice"
            if not self.count[i]:
                self.memory[i] = FREED
                self.free.append(i)


@dataclass(eq=False)
class Sequence:
    seq_id: int
    request_id: str
    tokens: list[int]
    prompt_len: int
    output: int
    status: Status = Status.WAITING
    multi_modal_data: Any = None
    schedulable: bool = True
    num_cached_tokens: int = 0
    cached_hit_tokens: int = 0
    swa_valid_start: int = 0
    state_id: int = -1
    last_copy_state_token_idx: int = 0
    chunked_rest_len: int = 0
    chunk_checkpoints: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    chunk: int = 0
    chain: Any = field(default_factory=lambda: ([], blake2b(digest_size=32)))

    def known(self, drafts: list[int] | None = None) -> np.ndarray[Any, Any]:
        """As `digests` of its tokens and some more."""
        found, state = self.chain
        for token in self.tokens[len(found) :]:
            found.append(_next(state, token))
        state, more = state.copy(), []
        for token in drafts or ():
            more.append(_next(state, token))
        both = b"".join(found + more)
        return np.frombuffer(both, dtype=np.uint8).reshape(-1, 32)

    @property
    def data(self) -> Any:
        return SimpleNamespace(get_token_ids=lambda: list(self.tokens))

    def get_len(self) -> int:
        return len(self.tokens)

    @property
    def finished(self) -> bool:
        return self.status not in (Status.WAITING, Status.RUNNING)


class Outputs(SimpleNamespace):
    scheduled_seqs: list[Sequence]
    finished_seqs: list[Sequence]
    ignored_seqs: list[Sequence]
    prompt_run: bool


class Scheduler:
    def __init__(self, engine: FakeEngine, budget: int, seqs: int) -> None:
        self.engine, self.budget, self.seqs = engine, budget, seqs
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preempted = 0

    def add_sequence(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def abort_sequence(self, ids: list[str]) -> list[Sequence]:
        found = [
            s for s in (*self.running, *self.waiting) if s.request_id in ids and not s.finished
        ]
        for seq in found:
            seq.status = Status.FINISHED_ABORTED
        return found

    def try_allocate_seq(self, seq: Sequence) -> bool:
        assert seq.status is Status.WAITING and not seq.block_table and seq.state_id == -1
        n = -(-seq.get_len() // BLOCK)
        if len(self.engine.block_manager.free) < n or not self.engine.state_manager.free:
            return False
        self._allocate(seq, n)
        return True

    def _allocate(self, seq: Sequence, n: int) -> None:
        seq.block_table = self.engine.block_manager.allocate(n)
        (seq.state_id,) = self.engine.state_manager.allocate(1)

    def free_seq(self, seq: Sequence) -> None:
        if seq.state_id != -1:  # like the release, it leaves the number there
            self.engine.state_manager.unpin_blocks([seq.state_id])
        self.engine.block_manager.unpin_blocks(seq.block_table)
        seq.block_table = []

    def schedule(self, prefill: bool) -> Outputs:
        return (self._prefill() if prefill else None) or self._decode()

    def _prefill(self) -> Outputs | None:
        scheduled, ignored, left = [], [], self.budget
        while self.waiting and left:
            seq = self.waiting[0]
            if seq.finished:
                ignored.append(self.waiting.popleft())
                continue
            if not seq.block_table:
                n = -(-seq.get_len() // BLOCK)
                room = len(self.engine.block_manager.free) >= n and self.engine.state_manager.free
                if not room:
                    break
            if len(self.running) + len(scheduled) >= self.seqs:
                break
            want = seq.get_len() - seq.num_cached_tokens
            seq.chunk = min(want, left)
            cuts = [c for c in seq.chunk_checkpoints if c > seq.num_cached_tokens]
            if cuts and seq.num_cached_tokens + seq.chunk >= cuts[0]:
                seq.chunk = cuts[0] - seq.num_cached_tokens
            if not seq.block_table:
                self._allocate(seq, -(-seq.get_len() // BLOCK))
            seq.chunked_rest_len = want - seq.chunk
            if not seq.chunked_rest_len:
                seq.status = Status.RUNNING
            left -= seq.chunk
            scheduled.append(self.waiting.popleft())
            if seq.chunked_rest_len:
                break
        if not scheduled and not ignored:
            return None
        return Outputs(
            scheduled_seqs=scheduled, finished_seqs=[], ignored_seqs=ignored, prompt_run=True
        )

    def _decode(self) -> Outputs:
        finished = [s for s in self.running if s.finished]
        ignored = [s for s in self.waiting if s.finished]
        self.waiting = deque(s for s in self.waiting if not s.finished)
        scheduled, todo = [], [s for s in self.running if not s.finished]
        while todo:
            seq = todo.pop()
            need = -(-(seq.get_len() + NEXTN) // BLOCK) - len(seq.block_table)
            while need > len(self.engine.block_manager.free) and todo:
                self.preempt(todo.pop(0))
            if need > len(self.engine.block_manager.free):
                self.preempt(seq)
                continue
            if need > 0:
                seq.block_table += self.engine.block_manager.allocate(need)
            scheduled.append(seq)
        self.running = list(scheduled)
        return Outputs(
            scheduled_seqs=scheduled, finished_seqs=finished, ignored_seqs=ignored, prompt_run=False
        )

    def preempt(self, seq: Sequence) -> None:
        self.free_seq(seq)
        seq.num_cached_tokens = seq.swa_valid_start = 0
        seq.status = Status.WAITING
        seq.state_id = -1
        self.waiting.appendleft(seq)
        self.preempted += 1


class GPUCacheInterface:
    """The release's functions for state, with its reference arithmetic of rings."""

    def __init__(self, extra: int) -> None:
        self.extra = extra
        self.swa_block_size_inference, self.swa_block_size_kvstore = RING, RING + extra
        self.swa_store_num_layer, self.swa_drop_num_layer = STATE_LAYERS, DROPPED
        self.swa_bytes_per_layer_inference = RING * TOKEN_BYTES
        self.swa_bytes_per_layer_inference_pad = -(-RING * TOKEN_BYTES // 32) * 32
        self.layer_pad = -(-(RING + extra) * TOKEN_BYTES // 32) * 32
        self.kept = STATE_LAYERS * self.swa_bytes_per_layer_inference_pad

    def rings(self, state: Any, ring: int, pad: int) -> Any:
        layers = len(state) // pad
        return (
            state[: layers * pad]
            .view(layers, pad)[:, : ring * TOKEN_BYTES]
            .view(layers, ring, TOKEN_BYTES)
        )

    def _both(self, state_id: int, cache: Any, state: Any) -> tuple[Any, Any]:
        """As numpy: torch would wake its threads for every little copy."""
        big = self.rings(cache[state_id], RING + self.extra, self.layer_pad)[:STATE_LAYERS]
        small = self.rings(state, RING, self.swa_bytes_per_layer_inference_pad)
        return big.numpy(), small.numpy()

    def select_state_slice_to_store(
        self, state_id: int, position: int, cache: Any, state: Any = None, TO_CE: bool = False
    ) -> Any:
        assert position % 128 == 0 and not TO_CE
        if not self.extra:
            state.copy_(cache[state_id, : self.kept])
            return state
        big, small = self._both(state_id, cache, state)
        index = np.arange(position - RING, position)
        small[:, index % RING] = big[:, index % (RING + self.extra)]
        return state

    def load_state_from_store_to_prefill_cache(
        self, state_id: int, position: int, state: Any, cache: Any
    ) -> None:
        if not self.extra:
            cache[state_id, : self.kept] = state
            return
        big, small = self._both(state_id, cache, state)
        index = np.arange(position - RING, position)
        big[:, index % (RING + self.extra)] = small[:, index % RING]


class FakeEngine:
    """The part of LLMEngine that the mixin knows. `prefill`: whether the next step may prefill."""

    def __init__(
        self, *, blocks: int = 40, states: int = 8, budget: int = 300, extra: int = 128,
        seed: int = 0,
    ) -> None:  # fmt: skip
        cache = GPUCacheInterface(extra)
        size = (STATE_LAYERS + DROPPED) * cache.layer_pad
        gpu_blocks = torch.full((blocks, BLOCK_BYTES), FREED, dtype=torch.uint8)
        gpu_states = torch.full((states, size), FREED, dtype=torch.uint8)
        self.random = Random(seed)
        self.model_config = SimpleNamespace(model="/models/fake")
        self.cache_config = SimpleNamespace(block_size=BLOCK, lookahead_tokens=0)
        self.parallel_config = SimpleNamespace(context_parallel_size=1)
        self.scheduler_config = SimpleNamespace(chunked_prefill=True)
        self.engine_type = SimpleNamespace(name="NORMAL")
        engine = SimpleNamespace(
            cache_config=self.cache_config, cfg=SimpleNamespace(window_size=[WINDOW]),
            gpu_blocks=gpu_blocks, gpu_states=gpu_states, gpu_cache=cache,
            get_kvcache_layout=lambda cfg, block: (LAYOUT, cache.kept),
        )  # fmt: skip
        self.driver_worker = SimpleNamespace(cache_engine=engine)
        self.block_manager, self.state_manager = (
            Blocks(blocks, gpu_blocks),
            Blocks(states, gpu_states),
        )
        self.scheduler = Scheduler(self, budget, states - 1)
        self.copy_state: Any = None
        self.copy_state_event: Any = None
        self.prefill, self.closed, self.numbers = True, False, 0
        self.ended: dict[str, Status] = {}

    # requests

    def add_request(
        self, /, user_id: str, request_id: str, sampling_params: Any, prompt_token_ids: Any,
        multi_modal_data: Any = None, arrival_time: Any = None, extra: Any = None,
        enqueue: bool = True, chunk_checkpoints: list[int] | None = None,
    ) -> Sequence:  # fmt: skip
        tokens = [int(t) for t in prompt_token_ids]
        self.numbers += 1
        seq = Sequence(
            self.numbers, request_id, tokens, len(tokens), int(sampling_params["max_tokens"]),
            multi_modal_data=multi_modal_data, chunk_checkpoints=list(chunk_checkpoints or ()),
        )  # fmt: skip
        if enqueue:
            self.scheduler.add_sequence(seq)
        return seq

    def abort_request(self, request_id: Any) -> tuple[int, int]:
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        found = self.scheduler.abort_sequence(ids)
        return len(found), sum(s.get_len() for s in found)

    def has_unfinished_requests(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def get_num_unfinished_requests(self) -> int:
        return len(self.scheduler.waiting) + len(self.scheduler.running)

    # the hooks, empty as in the release

    def finalize_seq(self, seq: Sequence) -> None:
        self.scheduler.free_seq(seq)

    def post_schedule(self, outputs: Outputs) -> None: ...

    def should_copy_state(self, seq: Sequence) -> bool:
        return False

    def do_save_kvcache(self, scheduled: list[Any], finished: list[Any]) -> None: ...

    def pe_prepare_save_kvcache(self, scheduled: list[Any], finished: list[Any]) -> None: ...

    def pe_do_save_kvcache(self, scheduled: list[Any], finished: list[Any]) -> None: ...

    def post_process_model_outputs(self) -> None: ...

    def close(self) -> None:
        self.closed = True

    # a step, in the release's order

    def step(self) -> Outputs:
        outputs = self.scheduler.schedule(self.prefill)
        self.post_schedule(outputs)
        if not outputs.prompt_run and self.copy_state is not None:
            both = outputs.scheduled_seqs + outputs.finished_seqs
            due = [seq for seq in both if self.should_copy_state(seq)]
            if due:
                self.do_copy_state(due)
                self.copy_state_event.record()
        written = [self._forward(seq, outputs.prompt_run) for seq in outputs.scheduled_seqs]
        self._pre_sampler_sync(outputs)
        if outputs.prompt_run:
            self.pe_do_save_kvcache(outputs.scheduled_seqs, outputs.finished_seqs)
        self._process(outputs, written)
        self.post_process_model_outputs()
        for seq in outputs.ignored_seqs + outputs.finished_seqs:
            self.ended[seq.request_id] = seq.status
        return outputs

    def do_copy_state(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            if seq.state_id != -1:
                states = self.driver_worker.cache_engine.gpu_states
                self.copy_state[seq.state_id].copy_(states[seq.state_id])
                seq.last_copy_state_token_idx = seq.num_cached_tokens

    def _pre_sampler_sync(self, outputs: Outputs) -> None:
        if outputs.prompt_run:
            self.pe_prepare_save_kvcache(outputs.scheduled_seqs, outputs.finished_seqs)
        else:
            if self.copy_state_event is not None:
                self.copy_state_event.synchronize()
            self.do_save_kvcache(outputs.scheduled_seqs, outputs.finished_seqs)
        for seq in outputs.finished_seqs:
            self.finalize_seq(seq)

    def _forward(self, seq: Sequence, prompt: bool) -> list[int]:
        """Computes a chunk, or a step with drafts of which some are right; returns new tokens."""
        first = seq.num_cached_tokens
        if prompt:
            self.check(seq, first)
            self._write(seq, [], first, first + seq.chunk)
            return []
        accepted = self.random.randint(0, NEXTN)
        new = [self.random.randrange(1000) for _ in range(accepted + 1)]
        drafts = [*new[:accepted], *(DRAFT for _ in range(NEXTN - accepted))]
        self._write(seq, drafts, first, first + 1 + NEXTN, right=1 + accepted)
        return new

    def _write(
        self, seq: Sequence, drafts: list[int], first: int, end: int, right: int | None = None
    ) -> None:
        """KV and state of tokens first..end-1, of which `right` are not garbage."""
        value = seq.known(drafts)[first:end].copy()
        where = np.arange(first, end)
        if right is not None:
            value[right:] = DRAFT
        self._rings(seq)[:STATE_LAYERS, where % self.ring] = np.stack(
            [value[:, :16] ^ layer for layer in range(STATE_LAYERS)]
        )
        if seq.swa_valid_start:  # without the window before it: not what was stored
            value[where < seq.swa_valid_start + WINDOW] = REPLAYED
        blocks = self.driver_worker.cache_engine.gpu_blocks.numpy()
        there = where // BLOCK < len(seq.block_table)
        where, value = where[there], value[there]
        pages = np.asarray(seq.block_table, dtype=np.int64)[where // BLOCK]
        for byte in range(5):
            at = (
                2 * (where % BLOCK) + byte
                if byte < 2
                else 2 * BLOCK + 3 * (where % BLOCK) + byte - 2
            )
            blocks[pages, at] = value[:, byte]

    @property
    def ring(self) -> int:
        return RING + int(self.driver_worker.cache_engine.gpu_cache.extra)

    def _rings(self, seq: Sequence) -> Any:
        cache = self.driver_worker.cache_engine
        layer_pad = cache.gpu_cache.layer_pad
        return cache.gpu_cache.rings(cache.gpu_states[seq.state_id], self.ring, layer_pad).numpy()

    def check(self, seq: Sequence, position: int) -> None:
        """All KV before a position, and the window the next token reads, are the sequence's."""
        known = seq.known()
        blocks = self.driver_worker.cache_engine.gpu_blocks.numpy()
        for block in range(position // BLOCK):
            part = known[block * BLOCK : (block + 1) * BLOCK]
            want = np.concatenate([part[:, :2].ravel(), part[:, 2:5].ravel()])
            have = blocks[seq.block_table[block], : 5 * BLOCK]
            assert np.array_equal(have, want), (seq.request_id, block)
        start = max(seq.swa_valid_start, position - WINDOW, 0)
        have = self._rings(seq)[:STATE_LAYERS, np.arange(start, position) % self.ring]
        want = np.stack([known[start:position, :16] ^ layer for layer in range(STATE_LAYERS)])
        assert np.array_equal(have, want), (seq.request_id, position)

    def _process(self, outputs: Outputs, written: list[list[int]]) -> None:
        for seq, new in zip(outputs.scheduled_seqs, written, strict=True):
            if outputs.prompt_run:
                seq.num_cached_tokens += seq.chunk
                if seq.chunked_rest_len:
                    self.scheduler.waiting.appendleft(seq)
                    continue
                new = [self.random.randrange(1000)]
                self.scheduler.running.append(seq)
            if seq.finished:
                continue
            taken = new[: max(0, seq.output - (seq.get_len() - seq.prompt_len))]
            seq.tokens += taken
            if not outputs.prompt_run:
                seq.num_cached_tokens += len(taken)
            if seq.get_len() - seq.prompt_len >= seq.output:
                seq.status = Status.FINISHED_STOPPED
