"""kvfs in vLLM: what one process has computed of a prompt, another one does not compute again.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvfsConnector",
        "kv_connector_module_path": "kvfs.connectors.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": "/srv/kvfs"}}'

vLLM makes one object in its scheduler and one in each worker; vllm_scheduler and vllm_worker are
what they do, this module is vLLM's interface and the start. A best-effort cache: a store that is
away, a model that cannot be cached, a load that fails mean that vLLM computes, never an error of a
request. Only settings that cannot be right stop the engine, when it starts. docs/vllm.md has more.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import vllm
from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvfs.connectors.fetching import fetcher_of
from kvfs.connectors.guard import never_raises
from kvfs.connectors.vllm_adapters import Adapters
from kvfs.connectors.vllm_identity import (
    base_identity,
    find_draft,
    find_tokenizer,
    find_weights,
)
from kvfs.connectors.vllm_layout import Layout, groups_of, measure
from kvfs.connectors.vllm_meta import Hello, KvfsPromMetrics, KvfsStats, Meta
from kvfs.connectors.vllm_scheduler import SchedulerSide, check_groups
from kvfs.connectors.vllm_settings import Settings
from kvfs.connectors.vllm_slots import Finder, Keeper
from kvfs.connectors.vllm_window import (
    loaded_group_ids,
    measure_window,
    window_groups,
    with_window,
)
from kvfs.connectors.vllm_worker import WorkerSide
from kvfs.errors import InputError, KvfsError
from kvfs.fetcher.engine import Fetcher
from kvfs.index.place import default_root
from kvfs.layout import Identity, Partition
from kvfs.store import Store

__all__ = ["KvfsConnector"]

log = logging.getLogger(__name__)
_MEDIUM = "STORAGE"


class KvfsConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module docstring. Settings: kvfs.connectors.vllm_settings.Settings."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises InputError for settings that cannot be right."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = Settings.parse(self._kv_transfer_config.kv_connector_extra_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._adapters: Adapters | None = None
        self._hash_tokens = 0
        self._events = bool(getattr(vllm_config.kv_events_config, "enable_kv_cache_events", False))
        if role is KVConnectorRole.SCHEDULER:
            self._start_scheduler()
        atexit.register(self.shutdown)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a dropped save is a miss later, nothing else

    # the start

    def _start_scheduler(self) -> None:
        # Read after this: of a cache, a failed load must never be a failed request.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        config, settings = self._kv_transfer_config, self._settings
        try:
            with ExitStack() as undo:
                groups = groups_of(self._kv_cache_config)
                store = _open(settings)
                undo.callback(store.close)
                adapters = Adapters(_digests(settings))
                undo.callback(adapters.close)
                self._scheduler = SchedulerSide(
                    settings, store, groups, loads=config.is_kv_consumer,
                    saves=config.is_kv_producer, adapters=adapters,
                )  # fmt: skip
                self._adapters = adapters
                undo.pop_all()
        except Exception as e:
            _off("kvfs is off", e)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        try:
            with ExitStack() as undo:
                self._worker = self._make_worker(kv_caches, undo)
                undo.pop_all()
        except Exception as e:
            _off("kvfs is off in this worker, and so in the engine", e)

    def _make_worker(self, kv_caches: dict[str, Any], undo: ExitStack) -> WorkerSide:
        """undo: gets what is to be closed if this raises, which it may do in any way."""
        settings = self._settings
        backend = _backends(self._vllm_config, kv_caches)
        layout = measure(self._kv_cache_config, kv_caches, settings.block_tokens, backend)
        identity = self._identity(layout, backend)
        window = measure_window(self._kv_cache_config, kv_caches, layout.block_tokens)
        if window is not None:
            identity = with_window(identity, window)
        store = _open(settings)
        undo.callback(store.close)
        store.create_namespace(identity, default_class=settings.ttl_class)
        fetcher = _fetcher(settings, store)
        if fetcher is not None:
            undo.callback(fetcher.close)
        keeper = None if window is None else Keeper.open(settings, store, identity, window)
        if keeper is not None:
            undo.callback(keeper.close)
        return WorkerSide(settings, store, identity, layout, fetcher, keeper)

    def _identity(self, layout: Layout, backend: str) -> Identity:
        """This worker's. Raises InputError if something of it cannot be told."""
        settings, config = self._settings, self._vllm_config
        digests = _digests(settings)
        weights = settings.weights or find_weights(config, digests)
        return base_identity(
            config, layout, vllm.__version__, _partition(config), weights=weights,
            tokenizer=find_tokenizer(config, digests), salt=settings.salt, backend=backend,
            draft=find_draft(config, weights, digests),
        )  # fmt: skip

    @never_raises(lambda self: None)
    def get_handshake_metadata(self) -> Hello | None:
        if self._worker is None:
            return None
        keeper = self._worker.keeper
        pool = b"" if keeper is None else keeper.pool_id
        return Hello(self._worker.identity.to_json(), pool)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._hear(list(metadata.values()))

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._hear(list(metadata.values()))

    @never_raises(lambda self, hellos: None)
    def _hear(self, hellos: list[Hello]) -> None:
        """All workers have said who they are; one that is missing keeps kvfs off."""
        parallel = self._vllm_config.parallel_config
        if self._scheduler is None or len(hellos) < parallel.world_size:
            return
        identities = [Identity.from_json(hello.identity) for hello in hellos]
        try:
            for identity in identities:
                check_groups(self._scheduler.groups, identity)
        except InputError as e:
            log.warning("kvfs is off: %s", e)
            return
        windows = window_groups(self._kv_cache_config, identities[0].block_tokens)
        workers = list(zip(identities, (hello.pool for hello in hellos), strict=True))
        finder = Finder.open(self._settings, self._scheduler.store, workers)
        fetcher = _fetcher(self._settings, self._scheduler.store)
        self._scheduler.ready(identities, fetcher, finder if windows else None, windows)

    # scheduler

    @never_raises(lambda self, request, num_computed_tokens: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None or request.skip_reading_prefix_cache:
            return 0, False
        tokens = self._scheduler.matched(request, num_computed_tokens)
        return tokens, bool(tokens)

    @never_raises(lambda self, request: loaded_group_ids(self._kv_cache_config, 0, None))
    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        end, slot = (0, None) if self._scheduler is None else self._scheduler.offered(request)
        return loaded_group_ids(self._kv_cache_config, end, slot)

    @never_raises(lambda self, request, blocks, num_external_tokens: self._give_up(request))
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def _give_up(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.give_up(request)

    @never_raises(lambda self, scheduler_output: Meta())
    def build_connector_meta(self, scheduler_output: Any) -> Meta:
        return Meta() if self._scheduler is None else self._scheduler.meta(scheduler_output)

    @never_raises(lambda self, connector_output: None)
    def update_connector_output(self, connector_output: Any) -> None:
        news = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and news is not None:
            self._scheduler.heard(news)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @never_raises(lambda self, request, block_ids: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        if self._scheduler is not None:
            self._scheduler.finished(request)
        return False, None

    def reset_cache(self) -> bool:
        """vLLM drops its caches when weights were changed in place: kvfs is off from then on."""
        if self._scheduler is not None:
            log.warning("kvfs is off: the cache was reset, so the weights may be others now")
            self._scheduler.stop()
        return True

    @never_raises(lambda self: [])
    def take_events(self) -> Iterable[Any]:
        if self._scheduler is None:
            return []
        stored, self._scheduler.stored = self._scheduler.stored, []
        if not self._events:
            return []
        return [e for item in stored for e in self._event(*item)]

    def _event(self, request: Any, first: int, end: int) -> list[Any]:
        assert self._scheduler is not None
        unit = self._kv_cache_config.hash_block_size or self._vllm_config.cache_config.block_size
        size = self._scheduler.block_tokens
        hashes = request.block_hashes[: end * size // unit]
        at = first * size // unit
        if size % unit or len(hashes) * unit < end * size:
            return []
        lora = request.lora_request
        return [
            BlockStored(
                block_hashes=[maybe_convert_block_hash(h) for h in hashes[at:]],
                parent_block_hash=maybe_convert_block_hash(hashes[at - 1]) if at else None,
                token_ids=list(request.all_token_ids[first * size : end * size]),
                block_size=unit,
                lora_id=lora.adapter_id if lora else None,
                medium=_MEDIUM,
                lora_name=lora.name if lora else None,
            )
        ]

    # worker

    @never_raises(lambda self, *_, **__: None)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_loads(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Requests run when all of their layers are there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are taken when all of their layers are computed."""

    @never_raises(lambda self: None)
    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.take_saves(self._get_connector_metadata())

    @never_raises(lambda self, finished_req_ids: KVConnectorTransferResults())
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        loaded = {} if self._worker is None else self._worker.loaded()
        return KVConnectorTransferResults(
            finished_recving=set(loaded),
            failed_recving={request for request, good in loaded.items() if not good},
        )

    def flush(self, seconds: float = 10.0) -> bool:
        """Waits until the blocks of all steps so far are stored; for who measures or tests."""
        return self._worker is None or self._worker.flush(seconds)

    @never_raises(lambda self: None)
    def build_connector_worker_meta(self) -> Any:
        return None if self._worker is None else self._worker.news()

    # figures

    def went_wrong(self) -> None:
        for side in (self._worker, self._scheduler):
            if side is not None:
                side.went_wrong()

    @never_raises(lambda self: None)
    def get_kv_connector_stats(self) -> KvfsStats | None:
        if self._worker is not None:
            return self._worker.stats()
        if self._scheduler is None:
            return None
        stats, self._scheduler.stats = self._scheduler.stats, KvfsStats()
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvfsStats:
        return KvfsStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str],
        per_engine_labelvalues: Any,
    ) -> KvfsPromMetrics:  # fmt: skip
        return KvfsPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @never_raises(lambda self: None)
    def shutdown(self) -> None:
        """Stores what is waiting. May be called twice."""
        atexit.unregister(self.shutdown)
        with ExitStack() as ending:
            for part in (self._adapters, self._scheduler, self._worker):
                if part is not None:
                    ending.callback(part.close)
            self._worker = self._scheduler = self._adapters = None


def _off(what: str, why: Exception) -> None:
    """Says it; where the reason is none of ours, with the place."""
    log.warning("%s: %s", what, why, exc_info=not isinstance(why, KvfsError))


def _open(settings: Settings) -> Store:
    return Store.open(settings.store, index=settings.index or None)


def _digests(settings: Settings) -> str:
    return os.path.join(settings.index or default_root(), "digests")


def _fetcher(settings: Settings, store: Store) -> Fetcher | None:
    """A client of the fetch process, when it is there: so the first request can hit, too."""
    if settings.fetch == "inline":
        return None
    # The worker tells of hits, of all that is stored of a prefix and not only of what was loaded.
    return fetcher_of(store, settings.arena_bytes, hit=False)


def _partition(vllm_config: Any) -> Partition:
    """This worker's rank. Raises InputError for context parallelism, which spreads a block."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    parallel = vllm_config.parallel_config
    for axis in ("decode", "prefill"):
        if getattr(parallel, f"{axis}_context_parallel_size", 1) > 1:
            raise InputError(f"{axis} context parallelism is not supported")
    return Partition(
        get_tp_group().rank_in_group, parallel.tensor_parallel_size,
        get_pp_group().rank_in_group, parallel.pipeline_parallel_size,
    )  # fmt: skip


def _backends(vllm_config: Any, kv_caches: dict[str, Any]) -> str:
    """Names of the attention backends: the same shape may mean other bytes to another one."""
    layers = vllm_config.compilation_config.static_forward_context
    names = {
        layers[name].get_attn_backend().get_name()
        for name in kv_caches
        if hasattr(layers.get(name), "get_attn_backend")
    }
    return "+".join(sorted(names)) or "unknown"
