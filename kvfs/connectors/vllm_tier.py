"""kvfs as a tier of vLLM's offloading: host memory to store and back, vLLM does the rest.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 68719476736, "secondary_tiers": [{"type": "KvfsTier",
                "module_path": "kvfs.connectors.vllm_tier", "store": "/srv/kvfs"}]}}'

vLLM names a chunk by its own chain hash and the number of its KV cache group: an engine that keys
its pages itself. Each group has a namespace, in which a prefix is a chain of its chunks.

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
from concurrent.futures import wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import vllm
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvfs.connectors.background import Background
from kvfs.connectors.guard import never_raises
from kvfs.connectors.keyed_link import Link
from kvfs.connectors.settings import KeyedSettings, parse
from kvfs.connectors.vllm_tier_identity import tier_identities
from kvfs.index.place import default_root

__all__ = ["KvfsTier"]

log = logging.getLogger(__name__)
_MISS_SECONDS = 30.0
"""A chunk that could not be loaded is not looked for again for so long."""


class _Stretch(NamedTuple):
    """Chunks of one group of a job, one behind the other in their prefix."""

    group: int
    first: int | None
    """Number of the first in its prefix, None where vLLM does not say."""
    keys: list[bytes]
    chunk_ids: list[int]


class KvfsTier(SecondaryTierManager):  # type: ignore[misc]
    """See the module docstring. Settings: kvfs.connectors.settings.KeyedSettings."""

    medium = Medium.STORAGE

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str,
        backpressure_detector: Any = None, *, locality: str | None = None,
        enable_kv_events: bool = False, **settings: Any,
    ) -> None:  # fmt: skip
        """Raises InputError for settings that cannot be right, ConfigError and the like for a store
        that cannot be opened: the engine does not start."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._settings = parse(KeyedSettings, settings, "secondary_tiers")
        self.locality = None if locality is None else Locality(locality)
        self._chunks = primary_kv_view.cast("B")
        self._events: list[Any] = []
        self._with_events = enable_kv_events
        digests = Path(self._settings.index or default_root()) / "digests"
        self._identities = tier_identities(
            offloading_spec, self.block_size_bytes, self._settings, digests, vllm.__version__
        )
        with ExitStack() as undo:
            self._link = Link(self._settings)
            undo.callback(self._link.close)
            self._loading = Background("kvfs-load")
            undo.callback(self._loading.close, 0)
            self._storing = Background("kvfs-store")
            undo.pop_all()
        self._lock = threading.Lock()
        self._futures: set[Any] = set()
        self._done: list[JobResult] = []
        self._missing: dict[bytes, float] = {}
        self._storing_bytes = 0

    # look-up

    @never_raises(lambda self, key, req_context: LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        identity = self._identities.get(get_offload_group_idx(key))
        if identity is None or self._missing.get(key, 0.0) > time.monotonic():
            return LookupResult.MISS
        (found,) = self._link.have(identity, [bytes(key)])
        return LookupResult.HIT if found else LookupResult.MISS

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    # jobs

    # vLLM waits for the result of each job.

    @never_raises(lambda self, job_metadata: self._ended(job_metadata, [], 0.0))
    def submit_load(self, job_metadata: Any) -> None:
        self._submit(self._loading, self._load, job_metadata)

    def submit_store(self, job_metadata: Any) -> None:
        size = len(job_metadata.keys) * self.block_size_bytes
        with self._lock:
            room = self._storing_bytes + size <= self._settings.save_bytes
            if not room:  # the memory that waits is vLLM's, which needs it for loads
                self._done.append(JobResult(job_metadata.job_id, False))
                return
            self._storing_bytes += size
        self._submit_store(job_metadata)

    @never_raises(lambda self, job: self._ended(job, [], 0.0))
    def _submit_store(self, job: Any) -> None:
        self._submit(self._storing, self._store, job)

    def _submit(self, on: Background, work: Callable[[_Stretch], int], job: Any) -> None:
        # Now, since vLLM may change what a request knows of its chunks.
        future = on.submit(self._run, work, job, list(self._stretches(job)))
        with self._lock:
            self._futures.add(future)
        future.add_done_callback(self._forget)

    def _forget(self, future: Any) -> None:
        with self._lock:
            self._futures.discard(future)

    def _stretches(self, job: Any) -> Iterator[_Stretch]:
        """A job's chunks, group by group."""
        groups: dict[int, list[tuple[int | None, bytes, int]]] = {}
        for key, chunk_id in zip(job.keys, job.chunk_ids, strict=True):
            group = get_offload_group_idx(key)
            if group not in self._identities:
                continue
            end = job.req_context.get_offload_key_position(key)
            number = None if end is None else end // self._identities[group].block_tokens - 1
            groups.setdefault(group, []).append((number, bytes(key), int(chunk_id)))
        for group, chunks in groups.items():
            chunks.sort(key=lambda c: -1 if c[0] is None else c[0])
            at = 0
            while at < len(chunks):
                first, end = chunks[at][0], at + 1
                while first is not None and chunks[end:] and chunks[end][0] == first + end - at:
                    end += 1
                part, at = chunks[at:end], end
                yield _Stretch(group, first, [c[1] for c in part], [c[2] for c in part])

    def _run(
        self, work: Callable[[_Stretch], int], job: Any, stretches: Sequence[_Stretch]
    ) -> None:
        """Does a job, and says which of its chunks went through."""
        began = time.monotonic()
        good: list[bytes] = []
        for stretch in stretches:
            try:
                good += stretch.keys[: work(stretch)]
            except Exception as e:  # whatever it is, the engine goes on
                log.warning("%s: job %s failed: %s", self._settings.store, job.job_id, e)
        self._ended(job, good, time.monotonic() - began)

    def _ended(self, job: Any, good: list[bytes], seconds: float) -> None:
        keys = list(job.keys)
        whole = len(good) == len(keys)
        partly = tuple(good) if job.is_promotion and not whole and good else None
        result = JobResult(job.job_id, whole, partly, seconds, len(good) * self.block_size_bytes)
        with self._lock:
            self._done.append(result)
            for key in good:
                self._missing.pop(key, None)
            if job.is_promotion:
                until = time.monotonic() + _MISS_SECONDS
                self._missing.update(dict.fromkeys(set(keys) - set(good), until))
                return
            self._storing_bytes -= len(keys) * self.block_size_bytes
            if whole and self._with_events:
                self._events.append(OffloadingEvent(keys, Medium.STORAGE, False, self.locality))

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

    def _store(self, stretch: _Stretch) -> int:
        """Stores chunks; returns how many leading ones are stored."""
        size = self.block_size_bytes

        def take(pages: Sequence[int], rows: memoryview) -> None:
            for at, i in enumerate(pages):
                with self._chunk(stretch.chunk_ids[i]) as chunk:
                    rows[at * size : (at + 1) * size] = chunk

        identity = self._identities[stretch.group]
        done = self._link.save(identity, stretch.keys, take, first_page=stretch.first)
        return len(done) if all(done) else done.index(False)

    def _load(self, stretch: _Stretch) -> int:
        """Loads chunks; returns how many leading ones are there."""

        def give(i: int, row: memoryview) -> None:
            with self._chunk(stretch.chunk_ids[i]) as chunk:
                chunk[:] = row

        return self._link.load(self._identities[stretch.group], stretch.keys, give).pages

    # the end

    def went_wrong(self) -> None:
        self._link.count("errors")

    @never_raises(lambda self: None)
    def shutdown(self) -> None:
        """Stores what is waiting, for `save_seconds` at most, and lets vLLM's memory go."""
        until = time.monotonic() + self._settings.save_seconds
        ended = [
            threads.close(max(0.0, until - time.monotonic()))
            for threads in (self._storing, self._loading)
        ]
        if not all(ended):
            log.warning("%s: not all jobs ended", self._settings.store)
            return
        self._chunks.release()
        self._link.close()
