"""The door to kvfs in LMCache: an L2 adapter, by module path, for LMCache's multi-process server.

    --l2-adapter '{"type": "plugin", "module_path": "kvfs.connectors.lmcache",
                   "class_name": "KvfsL2", "adapter_params": {"store": "/srv/kvfs"}}'

LMCache asks from two threads of its own and is told through event descriptors. Look-ups read the
local index alone, at once. Loads and stores run on threads of ours, within their deadlines. What
storage does never raises here: an object is loaded or it is not, a task stored or it failed.
Nothing has to be locked: what is dropped from a store stays readable for its grace.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from kvfs.connectors.background import Background
from kvfs.connectors.guard import never_raises
from kvfs.connectors.keyed_link import Link
from kvfs.connectors.lmcache_identity import Identities, Layout, grouped
from kvfs.connectors.lmcache_settings import Settings
from kvfs.errors import KvfsError
from kvfs.index.place import default_root
from kvfs.layout import Identity

log = logging.getLogger(__name__)
_LOADERS = 2
"""Threads that load; each waits for the fetch process most of its time."""


class Outcomes:
    """Results of tasks by their numbers, each taken once, and the descriptor that tells of them."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._next = 0
        self._done: dict[int, Any] = {}

    def begin(self) -> int:
        with self._lock:
            self._next += 1
            return self._next

    def end(self, task: int, result: Any) -> None:
        with self._lock:
            self._done[task] = result
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def take(self, task: int) -> Any:
        with self._lock:
            return self._done.pop(task, None)

    def take_all(self) -> dict[int, Any]:
        with self._lock:
            done, self._done = self._done, {}
        return done

    def close(self) -> None:
        with self._lock:
            fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class KvfsL2(L2AdapterInterface):  # type: ignore[misc]  # LMCache's own types are not looked at
    """LMCache's L2 adapter over a kvfs store."""

    def __init__(self, params: dict[str, Any], l1_memory_desc: Any = None) -> None:
        """params: see kvfs.connectors.lmcache_settings. Raises KvfsError for settings that are
        wrong and for a store that cannot be opened: the server does not start."""
        super().__init__()
        self._settings, models = Settings.parse(params)
        settings = self._settings
        with ExitStack() as undo:
            self._link = Link(settings)
            undo.callback(self._link.close)
            self._storing = Background("kvfs-l2-store")
            undo.callback(self._storing.close, 0)
            self._loading = Background("kvfs-l2-load", _LOADERS)
            undo.pop_all()
        cache = Path(settings.index or default_root()) / "digests"
        self._identities = Identities(settings, models, _version(), cache)
        self._stores, self._lookups, self._loads = Outcomes(), Outcomes(), Outcomes()
        self._said: set[str] = set()

    def get_store_event_fd(self) -> int:
        return self._stores.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.fd

    def get_load_event_fd(self) -> int:
        return self._loads.fd

    # stores

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._begin(self._storing, self._stores, L2StoreResult(False, 0), self._store,
                           keys, objects)  # fmt: skip

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        return self._stores.take_all()

    def _store(self, keys: list[Any], objects: list[Any]) -> Any:
        stored: list[int] = []
        for row in grouped(keys):
            identity = self._identities.of(keys[row[0]], _layout(objects[row[0]]))
            same = [i for i in row if objects[i].get_size() == identity.row_bytes]
            done = self._link.save(identity, [keys[i].chunk_hash for i in same],
                                   _taker(identity, [objects[i] for i in same]))  # fmt: skip
            stored += [i for i, ok in zip(same, done, strict=True) if ok]
        sizes = [objects[i].get_size() for i in stored]
        if stored:
            self._notify_keys_stored([keys[i] for i in stored], sizes)
        return L2StoreResult(len(stored) == len(keys), sum(sizes))

    # look-ups

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Any) -> int:
        task = self._lookups.begin()
        self._run(self._lookups, task, Bitmap(len(keys)), self._lookup, keys, group_layout_descs)
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Nothing was locked."""

    def _lookup(self, keys: list[Any], descs: Any) -> Any:
        found = Bitmap(len(keys))
        for row in grouped(keys):
            desc = descs.get(keys[row[0]].object_group_id)
            if desc is None:
                continue
            identity = self._identities.of(keys[row[0]], Layout.of(desc.shapes, desc.dtypes))
            have = self._link.have(identity, [keys[i].chunk_hash for i in row])
            for i, there in zip(row, have, strict=True):
                if there:
                    found.set(i)
        return found

    # loads

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._begin(self._loading, self._loads, Bitmap(len(keys)), self._load, keys,
                           objects)  # fmt: skip

    def query_load_result(self, task_id: int) -> Any:
        return self._loads.take(task_id)

    def _load(self, keys: list[Any], objects: list[Any]) -> Any:
        loaded = Bitmap(len(keys))
        done: list[int] = []
        for row in grouped(keys):
            identity = self._identities.of(keys[row[0]], _layout(objects[row[0]]))
            same = [i for i in row if objects[i].get_size() == identity.row_bytes]
            done += self._load_row(identity, keys, objects, same)
        for i in done:
            loaded.set(i)
        if done:
            self._notify_keys_accessed([keys[i] for i in done])
        return loaded

    def _load_row(
        self, identity: Identity, keys: list[Any], objects: list[Any], row: list[int]
    ) -> list[int]:
        """Loads objects of one identity; behind one that is bad it goes on with the next, since a
        sliding window needs the last chunks and not the first. Not where the storage does not
        answer: each of the others would wait as long."""
        done: list[int] = []
        while row:

            def give(i: int, data: memoryview, row: list[int] = row) -> None:
                _bytes(objects[row[i]])[:] = data

            good, lasting = self._link.load(identity, [keys[i].chunk_hash for i in row], give)
            done += row[:good]
            if not lasting:
                break
            row = row[good + 1 :]
        return done

    # whatever goes wrong

    def _begin(
        self, on: Background, outcomes: Outcomes, failed: Any, work: Callable[..., Any],
        *args: Any,
    ) -> int:  # fmt: skip
        """A task on a thread of ours. One that is dropped at the end, or not taken any more, has
        failed: LMCache waits for each."""
        task = outcomes.begin()
        try:
            future = on.submit(self._run, outcomes, task, failed, work, *args)
        except RuntimeError:  # it was closed
            outcomes.end(task, failed)
            return task

        def dropped(future: Future[None]) -> None:
            if future.cancelled():
                outcomes.end(task, failed)

        future.add_done_callback(dropped)
        return task

    def _run(
        self, outcomes: Outcomes, task: int, failed: Any, work: Callable[..., Any], *args: Any
    ) -> None:
        """Does a task and says how it ended; `failed` where it raised."""
        result = failed
        try:
            result = work(*args)
        except KvfsError as e:
            self._say(str(e))
        except Exception:
            log.exception("a task of LMCache's failed")
        outcomes.end(task, result)

    def _say(self, what: str) -> None:
        """Once each: the same is wrong with every request."""
        if what not in self._said:
            self._said.add(what)
            log.warning("nothing is cached: %s", what)

    # about the adapter

    @never_raises(lambda self: {"is_healthy": True})
    def report_status(self) -> dict[str, Any]:
        counters = dict(self._link.counters)
        return {"is_healthy": True, "store": str(self._link.store.path), **counters}

    def went_wrong(self) -> None:
        self._link.count("errors")

    @never_raises(lambda self: None)
    def close(self) -> None:
        """Stores and loads what is waiting, for `save_seconds` at most."""
        until = time.monotonic() + self._settings.save_seconds
        ended = [
            threads.close(max(0.0, until - time.monotonic()))
            for threads in (self._storing, self._loading)
        ]
        if all(ended):
            self._link.close()
        else:
            log.warning("%s: a task did not end", self._link.store.path)
        for outcomes in (self._stores, self._lookups, self._loads):
            outcomes.close()


def _version() -> str:
    try:
        return version("lmcache")
    except PackageNotFoundError:
        return "unknown"


def _layout(obj: Any) -> Layout:
    return Layout.of(obj.get_shapes(), obj.get_dtypes())


def _bytes(obj: Any) -> memoryview:
    return memoryview(obj.byte_array).cast("B")


def _taker(identity: Identity, objects: Sequence[Any]) -> Callable[..., None]:
    def take(pages: Sequence[int], rows: memoryview) -> None:
        size = identity.row_bytes
        for at, i in enumerate(pages):
            rows[at * size : (at + 1) * size] = _bytes(objects[i])

    return take
