"""kvfs in DeepInfer: fills the hooks that its engine leaves for a KV cache that outlives it.

    from deepinfer.engine.llm_engine import LLMEngine
    from kvfs.connectors.deepinfer import KvfsMixin, Settings

    class Engine(KvfsMixin, LLMEngine):
        pass

    engine = Engine.from_engine_args(args)
    engine.start_kvfs(Settings(store="/srv/kvfs", weights=REVISION, tokenizer=REVISION))

Saves whole blocks and the sliding windows at the end of a prefill and when a request ends; gives a
request what is stored of its prompt before the engine sees it. A best-effort cache: whatever goes
wrong means that the engine computes. Only settings that cannot be right are refused, at the start.

Written against release 0.1.0, whose hooks are called in the engine's own thread; so are all methods
here. The release's Python shows all of a sequence but its block table: docs/deepinfer.md has the
line that adds it.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch

from kvfs.connectors.deepinfer_cache import Cache, Settings
from kvfs.connectors.deepinfer_load import free
from kvfs.connectors.deepinfer_save import State
from kvfs.connectors.deepinfer_state import Account
from kvfs.errors import ConfigError, KvfsError
from kvfs.peers.client import PeerClient

__all__ = ["KvfsMixin", "Release", "Settings"]

log = logging.getLogger(__name__)
_PRUNE_STEPS = 1024
_Base: Any = object


class Release(NamedTuple):
    """What kvfs has to know of the release besides the engine's memory.

    sequence: its class Sequence; in_flight: tokens that a step under way may have written behind
    what a sequence is said to have; format: what the bytes mean besides their sizes.
    """

    sequence: Any
    in_flight: int
    format: str

    @classmethod
    def installed(cls) -> Release:
        """The one this process runs."""
        import deepinfer
        from deepinfer.sequence import Sequence

        envs = deepinfer.envs
        steps = int(bool(envs.DEEPINFER_ZERO_OVERHEAD_SCHEDULING))
        in_flight = steps * (int(envs.DEEPINFER_USE_NEXTN_DECODE) + 1)
        return cls(Sequence, in_flight, f"{deepinfer.__version__},{envs.DEEPINFER_ACCELERATOR}")


class _NoEvent:
    """Stands for torch.cuda.Event where copies are done when they return."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class KvfsMixin(_Base):  # type: ignore[misc]
    """See the module docstring. In front of LLMEngine in the list of bases."""

    kvfs: Cache | None = None

    def start_kvfs(
        self, settings: Settings, *, client: PeerClient | None = None,
        release: Release | None = None,
    ) -> None:  # fmt: skip
        """Opens the store and begins to use it. To be called once, before the first request.

        client: who asks other hosts for slots; release: None for the one that is installed. Raises
        ConfigError for an engine it cannot serve, InputError for settings that cannot be right,
        BackendError.
        """
        engine: Any = self
        about = release or Release.installed()
        _check(engine, about.sequence)
        cache = Cache(engine, settings, client, about.in_flight, about.format)
        if cache.copy_states is not None:
            engine.copy_state = cache.copy_states
            cuda = cache.memory.states.is_cuda
            engine.copy_state_event = torch.cuda.Event() if cuda else _NoEvent()
        self.kvfs = cache

    def _engine(self) -> Any:
        """The engine without this mixin."""
        return super()

    # requests

    def add_request(
        self, /, user_id: str, request_id: str, sampling_params: Any, prompt_token_ids: Any,
        multi_modal_data: Any = None, arrival_time: float | None = None, extra: Any = None,
        enqueue: bool = True, chunk_checkpoints: list[int] | None = None,
    ) -> Any:  # fmt: skip
        cache, engine = self.kvfs, self._engine()
        plain = (user_id, request_id, sampling_params, prompt_token_ids, multi_modal_data,
                 arrival_time, extra)  # fmt: skip
        pixels = multi_modal_data is not None or "multi_modal_data" in (extra or {})
        if cache is None or pixels or not enqueue or _needs_all(sampling_params):
            return _add(engine, plain, enqueue, chunk_checkpoints)
        plan, hasher = self._look(cache, prompt_token_ids)
        hit = plan is not None and plan.hit_blocks > 0
        seq = _add(engine, plain, not hit, chunk_checkpoints)
        if seq is None:
            return None
        cache.accounts[seq.seq_id] = account = Account()
        if hit:
            cache.loader.hold(seq, account, plan, hasher)
        return seq

    def _look(self, cache: Cache, tokens: Any) -> tuple[Any, Any]:
        try:
            hasher = cache.ns.hasher(tokens)
            return cache.store.check(cache.ns, hasher), hasher
        except KvfsError as e:
            log.warning("%s: no look-up: %s", cache.store.path, e)
            return None, None

    def abort_request(self, request_id: Any) -> tuple[int, int]:
        cache, engine = self.kvfs, self._engine()
        ids = {request_id} if isinstance(request_id, str) else set(request_id)
        if cache is None:
            count, tokens = engine.abort_request(list(ids))
            return count, tokens
        # The scheduler drops what waits with blocks, and frees them only for what it ran.
        scheduler = self.scheduler
        waiting = [s for s in scheduler.waiting if s.request_id in ids and len(s.block_table)]
        count, tokens = engine.abort_request(list(ids))
        for seq in waiting:
            free(scheduler, seq)
        ours = cache.loader.abort(ids)
        return count + len(ours), tokens + sum(seq.get_len() for seq in ours)

    def has_unfinished_requests(self) -> bool:
        more: bool = super().has_unfinished_requests()
        return more or (self.kvfs is not None and bool(self.kvfs.loader.held))

    def get_num_unfinished_requests(self) -> int:
        count: int = super().get_num_unfinished_requests()
        return count + (0 if self.kvfs is None else len(self.kvfs.loader.held))

    # a step

    def step(self) -> Any:
        cache = self.kvfs
        if cache is not None:
            cache.loader.poll()
            cache.steps += 1
            if not cache.steps % _PRUNE_STEPS:
                scheduler = self.scheduler
                queues = (*scheduler.waiting, *scheduler.running)
                cache.prune({seq.seq_id for seq in queues})
        return super().step()

    def post_schedule(self, scheduler_outputs: Any) -> None:
        super().post_schedule(scheduler_outputs)
        cache = self.kvfs
        if cache is None or not scheduler_outputs.prompt_run:
            return
        for seq in scheduler_outputs.scheduled_seqs:
            account = cache.account(seq)
            if account.scheduled and not seq.num_cached_tokens:
                account.again()  # it had been put aside
            account.scheduled = True
            cache.loader.began(seq.seq_id)

    def should_copy_state(self, seq: Any) -> bool:
        cache = self.kvfs
        if cache is None or cache.slots is None or seq.state_id == -1:
            return False
        account = cache.account(seq)
        return account.cacheable and cache.slots.wants_copy(account, seq.num_cached_tokens)

    def pe_do_save_kvcache(self, scheduled: list[Any], finished: list[Any]) -> None:
        super().pe_do_save_kvcache(scheduled, finished)
        cache = self.kvfs
        for seq in scheduled if cache is not None else ():
            assert cache is not None
            account = cache.account(seq)
            if account.replaying is not None:
                cache.loader.restore(seq, account, seq.get_len() - seq.chunked_rest_len)
            if account.cacheable and not seq.chunked_rest_len:
                self._save_prefill(cache, seq, account)

    def _save_prefill(self, cache: Cache, seq: Any, account: Account) -> None:
        tokens = seq.get_len()
        states: list[State] = []
        if cache.slots is not None:
            cache.slots.begin(account, tokens)
            if cache.pool is not None and seq.state_id != -1:
                anchors = cache.slots.after_prefill(account, tokens)
                states = [self._state(cache, a, tokens, cache.memory.states, seq) for a in anchors]
        self._save(cache, seq, account, tokens, states)

    def do_save_kvcache(self, scheduled: list[Any], finished: list[Any]) -> None:
        super().do_save_kvcache(scheduled, finished)
        cache = self.kvfs
        if cache is None:
            return
        if cache.slots is not None:
            for seq in (*scheduled, *finished):
                cache.slots.completed(cache.account(seq))
        for seq in finished:
            account = cache.account(seq)
            del cache.accounts[seq.seq_id]
            if account.cacheable and len(seq.block_table):
                self._save_end(cache, seq, account)

    def _save_end(self, cache: Cache, seq: Any, account: Account) -> None:
        states: list[State] = []
        if cache.slots is not None and cache.pool is not None and seq.state_id != -1:
            copy = cache.slots.at_end(account)
            if copy is not None:
                written = copy.anchor + copy.overshoot
                states = [self._state(cache, copy.anchor, written, cache.copy_states, seq)]
        self._save(cache, seq, account, seq.num_cached_tokens, states)

    def _state(self, cache: Cache, anchor: int, written: int, source: Any, seq: Any) -> State:
        """A state to keep. Where the engine's ring is longer than a slot's, what it hands over ends
        at the anchor; else it is the ring as it is."""
        assert cache.memory.ring is not None and cache.memory.big is not None
        longer = cache.memory.big.size > cache.memory.ring.size
        overshoot = 0 if longer else min(written - anchor, cache.memory.ring.layout.backtrack)
        return State(anchor, overshoot, source, seq.state_id)

    def _save(
        self, cache: Cache, seq: Any, account: Account, tokens: int, states: list[State]
    ) -> None:
        first, end = account.saved, tokens // cache.ns.block_tokens
        if first >= end and not states:
            return
        first, n = min(first, end), cache.memory.per_block
        pages = list(seq.block_table)[first * n : end * n]
        try:
            if cache.saver.take(seq.data.get_token_ids, first, end, pages, states):
                account.saved = end
        except Exception as e:  # the engine goes on
            cache.counts["failed"] += 1
            log.warning("%s: not stored: %s", seq.request_id, e, exc_info=True)

    # the end

    def close(self) -> None:
        cache, self.kvfs = self.kvfs, None
        if cache is not None:
            cache.close()
        super().close()


def _add(engine: Any, plain: tuple[Any, ...], enqueue: bool, checkpoints: Any) -> Any:
    return engine.add_request(*plain, enqueue=enqueue, chunk_checkpoints=checkpoints)


def _needs_all(sampling_params: Any) -> bool:
    """Whether a request wants something computed of every token, or a grammar that the engine
    builds while the request waits in its queue."""
    for name in ("prompt_logprobs", "so_args"):
        if isinstance(sampling_params, dict):
            value = sampling_params.get(name)
        else:
            value = getattr(sampling_params, name, None)
        if value:
            return True
    return False


def _check(engine: Any, sequence: Any) -> None:
    """Raises ConfigError for an engine whose memory is not all here, or not to be seen."""
    kind = getattr(engine.engine_type, "name", str(engine.engine_type))
    if kind != "NORMAL":
        raise ConfigError(f"an engine of type {kind}: kvfs is for NORMAL ones")
    ranks = int(engine.parallel_config.context_parallel_size)
    if ranks > 1:
        raise ConfigError(f"{ranks} context-parallel ranks: kvfs sees the memory of one")
    if not hasattr(sequence, "block_table"):
        raise ConfigError("Sequence has no `block_table`: docs/deepinfer.md has the line to add")
