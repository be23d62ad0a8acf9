"""kvfs as a tier of vLLM's offloading: host memory to store and back, vLLM does the rest.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 68719476736, "secondary_tiers": [{"type": "KvfsTier",
                "module_path": "kvfs.connectors.vllm_tier", "store": "/srv/kvfs"}]}}'

vLLM names a chunk by its own chain hash and the number of its KV cache group. Such a key is stored
as a prompt of one block whose tokens are the key: a fetch then compares it, as it would tokens.

Threads: vLLM calls from its scheduler's thread, where only the local index is asked; transfers run
on two threads of their own. A store that does not go through is a chunk that is not stored, a load
that does not is computed by vLLM; nothing is raised. vLLM tells a tier less than a connector:
docs/vllm.md says what the identity cannot hold therefore.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import vllm
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvfs.chain import TOKEN_BYTES
from kvfs.connectors.vllm_identity import tier_identity
from kvfs.connectors.vllm_settings import Settings
from kvfs.errors import KvfsError
from kvfs.fetcher.engine import Fetcher
from kvfs.fetcher.launch import Options
from kvfs.index.place import default_root
from kvfs.namespace import Namespace
from kvfs.store import Store

__all__ = ["KvfsTier"]

log = logging.getLogger(__name__)
_AT_ONCE = 32
"""Chunks that are asked of the fetch process before the first is waited for."""
_HOLD_SECONDS = 1.0
_MISS_SECONDS = 30.0
"""A chunk that could not be loaded is not looked for again for so long."""


class KvfsTier(SecondaryTierManager):  # type: ignore[misc]
    """See the module docstring. Settings: those of the connector."""

    medium = Medium.STORAGE

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str,
        backpressure_detector: Any = None, *, locality: str | None = None,
        enable_kv_events: bool = False, **settings: Any,
    ) -> None:  # fmt: skip
        """Raises InputError for settings that cannot be right, ConfigError and the like for a store
        that cannot be opened: the engine does not start."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._settings = Settings.parse(settings)
        self.locality = None if locality is None else Locality(locality)
        self._chunks = primary_kv_view.cast("B")
        self._events: list[Any] = []
        self._with_events = enable_kv_events
        digests = Path(self._settings.index or default_root()) / "digests"
        self._identify: Callable[[int], Any] = lambda key_tokens: tier_identity(
            offloading_spec, self.block_size_bytes, key_tokens, self._settings, digests,
            vllm.__version__,
        )  # fmt: skip
        self._identities: dict[int, Any] = {}
        self._identity(9)  # a key of 32 bytes and its group; also tells now what is wrong
        self.store = Store.open(self._settings.store, index=self._settings.index or None)
        self._fetcher: Fetcher | None = None
        if self._settings.fetch == "process":
            options = Options(arena_bytes=self._settings.arena_bytes)
            self._fetcher = Fetcher(
                self.store.path, self.store.uuid, options, report=self.store.report_bad
            )
            self._fetcher.ready(options.start_seconds)
        self._pool_of_loads = ThreadPoolExecutor(1, thread_name_prefix="kvfs-load")
        self._pool_of_stores = ThreadPoolExecutor(1, thread_name_prefix="kvfs-store")
        self._lock = threading.Lock()
        self._futures: set[Any] = set()
        self._done: list[JobResult] = []
        self._missing: dict[bytes, float] = {}
        self._loading = 0
        self._storing_bytes = 0
        self._idle = threading.Event()
        self._idle.set()

    # look-up

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        ns = self._known(key)
        if ns is None or self._missing.get(key, 0.0) > time.monotonic():
            return LookupResult.MISS
        try:
            found = self.store.check(ns, bytes(key)).stored_blocks
        except KvfsError as e:
            log.warning("%s: no look-up: %s", self.store.path, e)
            return LookupResult.MISS
        return LookupResult.HIT if found else LookupResult.MISS

    def _identity(self, key_tokens: int) -> Any:
        if key_tokens not in self._identities:
            self._identities[key_tokens] = self._identify(key_tokens)
        return self._identities[key_tokens]

    def _known(self, key: bytes) -> Namespace | None:
        """The namespace of keys of this length, if anything was ever stored in it."""
        identity = self._identity(len(key) // TOKEN_BYTES)
        if not self.store.catalog.known(identity):
            return None
        return self.store.catalog.get(identity, self._settings.ttl_class)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    # jobs

    def submit_load(self, job_metadata: Any) -> None:
        with self._lock:
            self._loading += 1
            self._idle.clear()
        self._submit(self._pool_of_loads, self._load, job_metadata)

    def submit_store(self, job_metadata: Any) -> None:
        size = len(job_metadata.keys) * self.block_size_bytes
        with self._lock:
            room = self._storing_bytes + size <= self._settings.save_bytes
            if not room:  # the memory that waits is vLLM's, which needs it for loads
                self._done.append(JobResult(job_metadata.job_id, False))
                return
            self._storing_bytes += size
        self._submit(self._pool_of_stores, self._store, job_metadata)

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[[Any], int], job: Any) -> None:
        future = pool.submit(self._run, work, job)
        with self._lock:
            self._futures.add(future)
        future.add_done_callback(self._forget)

    def _forget(self, future: Any) -> None:
        with self._lock:
            self._futures.discard(future)

    def _run(self, work: Callable[[Any], int], job: Any) -> None:
        """Does a job, and says how many of its leading chunks went through."""
        began, keys, good = time.monotonic(), list(job.keys), 0
        try:
            good = work(job)
        except Exception as e:  # whatever it is, the engine goes on
            log.warning("%s: job %s failed: %s", self.store.path, job.job_id, e, exc_info=True)
        self._ended(job, keys, good, time.monotonic() - began)

    def _ended(self, job: Any, keys: list[bytes], good: int, seconds: float) -> None:
        whole = good == len(keys)
        partly = tuple(keys[:good]) if job.is_promotion and not whole and good else None
        result = JobResult(job.job_id, whole, partly, seconds, good * self.block_size_bytes)
        with self._lock:
            self._done.append(result)
            if not job.is_promotion:
                self._storing_bytes -= len(keys) * self.block_size_bytes
                if whole and self._with_events:
                    self._events.append(OffloadingEvent(keys, Medium.STORAGE, False, self.locality))
                return
            until = time.monotonic() + _MISS_SECONDS
            self._missing.update(dict.fromkeys(keys[good:], until))
            self._loading -= 1
            if not self._loading:
                self._idle.set()

    def get_finished_jobs(self) -> Iterable[JobResult]:
        with self._lock:
            done, self._done = self._done, []
            if len(self._missing) > 10_000:
                now = time.monotonic()
                self._missing = {k: t for k, t in self._missing.items() if t > now}
        return done

    def take_events(self) -> Iterable[OffloadingEvent]:
        with self._lock:
            events, self._events = self._events, []
        return events

    def drain_jobs(self) -> None:
        with self._lock:
            futures = list(self._futures)
        wait(futures)

    # on the threads

    def _chunk(self, chunk_id: int) -> memoryview:
        at = int(chunk_id) * self.block_size_bytes
        return self._chunks[at : at + self.block_size_bytes]

    def _store(self, job: Any) -> int:
        self._idle.wait(_HOLD_SECONDS)
        for i, (key, chunk_id) in enumerate(zip(job.keys, job.chunk_ids, strict=True)):
            ns = self.store.create_namespace(
                self._identity(len(key) // TOKEN_BYTES), default_class=self._settings.ttl_class
            )
            with self._chunk(chunk_id) as chunk:
                result = self.store.put(ns, bytes(key), [chunk])
            if result.error is not None:
                log.warning("%s: not stored: %s", ns.name, result.error)
                return i
            self._missing.pop(key, None)
        return len(job.keys)

    def _load(self, job: Any) -> int:
        pairs = list(zip(job.keys, job.chunk_ids, strict=True))
        for first in range(0, len(pairs), _AT_ONCE):
            part = pairs[first : first + _AT_ONCE]
            good = self._load_some(part)
            if good < len(part):
                return first + good
        return len(pairs)

    def _load_some(self, part: Sequence[tuple[bytes, int]]) -> int:
        """Loads chunks; returns how many leading ones are there."""
        loads = [self._begin(key, chunk_id) for key, chunk_id in part]
        good, whole = 0, True
        for load in loads:  # all of them, since each holds what was fetched for it
            whole = next(load) and whole
            good += whole
        return good

    def _begin(self, key: bytes, chunk_id: int) -> Iterator[bool]:
        """Asks for a chunk; the next step waits for it, copies it and says whether it is there."""
        ns = self._known(key)
        hasher = None if ns is None else ns.hasher(bytes(key))
        plan = None if ns is None else self.store.check(ns, hasher)
        if ns is None or plan is None or not plan.stored_blocks:
            return iter((False,))
        if self._fetcher is None:
            with self._chunk(chunk_id) as chunk:
                got = self.store.fetch(ns, plan, hasher, chunk, blocks=1)
            return iter((got.complete,))
        ticket = self._fetcher.fetch(
            ns, plan, hasher, deadline=self._settings.fetch_seconds, blocks=1
        )

        def finish() -> Iterator[bool]:
            with ticket, self._chunk(chunk_id) as chunk:
                ticket.wait()
                there = bool(ticket.copy_into(chunk))
            if there:
                self.store.note_hit(ns, plan, hasher)
            yield there

        return finish()

    # the end

    def shutdown(self) -> None:
        """Stores what is waiting, for `flush_seconds` at most, and lets vLLM's memory go."""
        with self._lock:
            futures = list(self._futures)
        late = wait(futures, self._settings.flush_seconds).not_done
        for pool in (self._pool_of_loads, self._pool_of_stores):
            pool.shutdown(wait=not late, cancel_futures=True)
        if self._fetcher is not None:
            self._fetcher.close()
        if late:
            log.warning("%s: %d jobs did not end", self.store.path, len(late))
            return
        self._chunks.release()
        try:
            self.store.close()
        except KvfsError as e:
            log.warning("%s: %s", self.store.path, e)
