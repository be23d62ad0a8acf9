"""The worker's half of the vLLM connector: blocks into the KV cache and out of it.

Loads run on one thread, by the swap-in of kvfs.gpu, while the requests they are for are parked and
others are computed; saves are copied to host memory within the step and stored on another thread. A
save never makes a load wait: while loads are under way puts are held back, and what does not fit
into the memory for saves is not stored. Nothing raises into the engine: a load that did not bring
every block verified is a failed one, and vLLM computes the tokens.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from kvfs.chain import PrefixHasher
from kvfs.connectors.background import within
from kvfs.connectors.guard import never_raises
from kvfs.connectors.vllm_identity import variant
from kvfs.connectors.vllm_layout import NULL_BLOCK, Layout
from kvfs.connectors.vllm_memory import SaveMemory
from kvfs.connectors.vllm_meta import KvfsStats, Load, Meta, Save, Tables, WorkerNews
from kvfs.connectors.vllm_settings import Settings
from kvfs.connectors.vllm_slots import Keeper
from kvfs.errors import KvfsError
from kvfs.fetcher.engine import Fetcher
from kvfs.gpu.host_memory import Landed
from kvfs.gpu.paged import HOLE
from kvfs.gpu.streams import Event
from kvfs.layout import Identity
from kvfs.namespace import Namespace
from kvfs.plan import Plan
from kvfs.store import Store

log = logging.getLogger(__name__)
_Taken = tuple[Save, Any, Sequence[Any]]
"""What is to be stored, the bytes of its rows (None: they could not be had), and its windows."""
_HOLD_SECONDS = 1.0
"""Puts are held back so long at most, however many loads there are."""


class WorkerSide:
    """See the module docstring. Its public methods are for vLLM's thread."""

    def __init__(
        self, settings: Settings, store: Store, identity: Identity, layout: Layout,
        fetcher: Fetcher | None, keeper: Keeper | None = None,
    ) -> None:  # fmt: skip
        """fetcher: None to read in this process; keeper: of windows that vLLM could replay, None
        where it replays them. What is given is closed by `close`, and by nobody if this raises:
        OSError without memory, RuntimeError without threads, what torch raises."""
        self.settings = settings
        self.store = store
        self.identity = identity
        self.layout = layout
        self.keeper = keeper
        self._fetcher = fetcher
        self._lock = threading.Lock()
        self._stats = KvfsStats()
        self._news = WorkerNews()
        self._loaded: dict[str, bool] = {}
        self._loads: queue.SimpleQueue[tuple[Load, Event | None] | None] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[_Taken | str | None] = queue.SimpleQueue()
        self._loading = 0
        self._stored = threading.Condition(self._lock)
        self._idle = threading.Event()
        self._idle.set()
        self._off: set[str] = set()
        """Requests of which a block is missing in the store: what follows cannot be stored."""
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run_loads, name="kvfs-load", daemon=True),
            threading.Thread(target=self._run_saves, name="kvfs-save", daemon=True),
        ]
        with ExitStack() as undo:
            self._memory = SaveMemory(settings.save_bytes)
            undo.callback(self._memory.close)
            self._swapper = layout.swapper()
            undo.callback(self._swapper.close)
            undo.callback(self._loads.put, None)
            for thread in self._threads:
                thread.start()
            undo.pop_all()

    # a step

    def start_loads(self, meta: Meta) -> None:
        after = self._fence() if meta.loads else None
        for load in meta.loads:
            with self._lock:
                self._loading += 1
                self._idle.clear()
            self._loads.put((load, after))

    def _fence(self) -> Event | None:
        """Behind what vLLM computes, in a stream of its thread: the blocks' former owners."""
        try:
            return self._swapper.device.fence()
        except Exception as e:  # the loads fail as well, and that is told to vLLM
            log.warning("before loads: %s", e, exc_info=True)
            return None

    def take_saves(self, meta: Meta) -> None:
        """Copies the blocks of a step to host memory; what there is no room for is dropped."""
        for save in meta.saves:
            if save.anew:
                self._off.discard(save.request)
            if save.request not in self._off:
                self._take(save)
        for request in meta.finished:
            self._saves.put(request)

    @never_raises(lambda self, save: self._off.add(save.request))
    def _take(self, save: Save) -> None:
        blocks = len(save.tables[0]) // len(self.layout.slots(0, 0))
        own = blocks * self.layout.row_bytes
        each = 0 if self.keeper is None else self.keeper.row_bytes
        wanted = save.windows if self.keeper is not None else ()
        with self._lock:
            memory = self._memory.take(own + len(wanted) * each)
            if memory is None:
                self._stats.count("saves_dropped_blocks", blocks)
        if memory is None:
            self._off.add(save.request)
            return
        try:
            windows = memory[own:].split(each) if wanted else ()
            self.layout.gather(save.tables, memory[:own])
            for window, into in zip(wanted, windows, strict=True):
                assert self.keeper is not None
                self.keeper.gather(window.tables, into)
        except Exception as e:
            self._failed(save, e)
            self._saves.put((save, None, ()))
            return
        self._saves.put((save, memory[:own], windows))

    def loaded(self) -> dict[str, bool]:
        """Requests whose load ended since the last call, and whether all of it came."""
        with self._lock:
            loaded, self._loaded = self._loaded, {}
        return loaded

    def news(self) -> WorkerNews | None:
        with self._lock:
            news, self._news = self._news, WorkerNews()
        return news if news.stored or news.failed else None

    def stats(self) -> KvfsStats | None:
        with self._lock:
            stats, self._stats = self._stats, KvfsStats()
        return None if stats.is_empty() else stats

    def went_wrong(self) -> None:
        self._count("errors")

    def _count(self, name: str, n: float = 1) -> None:
        with self._lock:
            self._stats.count(name, n)

    def _namespace(self, salt: str, adapter: str) -> Namespace:
        return self.store.create_namespace(
            variant(self.identity, salt, adapter), default_class=self.settings.ttl_class
        )

    # loading

    def _run_loads(self) -> None:
        while (begun := self._loads.get()) is not None:
            load, after = begun
            began = time.monotonic()
            try:
                good = self._load(load, after)
            except Exception as e:  # whatever it is, the tokens are computed
                log.warning("%s: load failed: %s", load.request, e, exc_info=True)
                good = False
            self._count("loads")
            self._count("load_seconds", time.monotonic() - began)
            with self._lock:
                self._loaded[load.request] = good
                if not good:
                    self._stats.count("loads_failed")
                    self._news.failed.add(load.request)
                self._loading -= 1
                if not self._loading:
                    self._idle.set()

    def _load(self, load: Load, after: Event | None) -> bool:
        if not load.plans:
            return False  # the scheduler had to give it up
        ns = self._namespace(load.salt, load.adapter)
        plan = load.plans.get(ns.nsid)
        first, end = self._blocks(load)
        if plan is None:
            return False
        hasher = ns.hasher(load.tokens)
        if load.window is not None and not self._load_window(load, load.window, hasher, after):
            return False
        ticket = self._ticket(ns, plan, hasher, first, end)
        swap = self._swapper.load(ticket, self._tables(load, first, end), after)
        good = swap.finish()
        if good < end - first:
            log.info("%s: block %d: %s", ns.name, first + good, swap.reason)
            return False
        if self._fetcher is not None:
            self.store.note_hit(ns, plan, hasher)
        self._count("load_bytes", (end - first) * self.layout.row_bytes)
        return True

    def _load_window(
        self, load: Load, tables: Tables, hasher: PrefixHasher, after: Event | None
    ) -> bool:
        why = "this worker keeps no slots"
        if self.keeper is not None:
            why = self.keeper.load(hasher, load.end, tables, after)
        if why:
            log.info("%s: %s", load.request, why)
            return False
        self._count("slots_loaded")
        return True

    def _blocks(self, load: Load) -> tuple[int, int]:
        """The kvfs blocks of which anything is loaded."""
        n = [len(self.layout.slots(g, 0)) for g in range(len(self.layout.groups))]
        end = len(load.tables[0]) // n[0]
        starts = [
            next((i for i, b in enumerate(table) if b != NULL_BLOCK), len(table)) // n[g]
            for g, table in enumerate(load.tables)
        ]
        return min(starts), end

    def _ticket(self, ns: Namespace, plan: Plan, hasher: PrefixHasher, first: int, end: int) -> Any:
        """Blocks first..end-1 on their way, or read in this process."""
        if self._fetcher is not None:
            return self._fetcher.fetch(
                ns, plan, hasher, deadline=self.settings.fetch_seconds, first=first,
                blocks=end - first,
            )  # fmt: skip
        into = torch.empty(end * ns.row_bytes, dtype=torch.uint8).numpy()
        got = self.store.fetch(ns, plan, hasher, into, blocks=end)
        if not got.complete:
            log.info("%s: block %d: %s", ns.name, got.blocks, got.reason)
        rows = into[first * ns.row_bytes :]
        return Landed(rows, ns.row_bytes, ns.row_bytes, max(0, got.blocks - first), first=first)

    def _tables(self, load: Load, first: int, end: int) -> list[list[int]]:
        """For each group, the vLLM blocks of blocks first..end-1; holes where none is wanted."""
        out = []
        for group, table in enumerate(load.tables):
            wanted = range(
                self.layout.slots(group, first).start, self.layout.slots(group, end).start
            )
            given = (table[i] if i < len(table) else NULL_BLOCK for i in wanted)
            out.append([HOLE if block == NULL_BLOCK else block for block in given])
        return out

    # saving

    def _run_saves(self) -> None:
        hashers: dict[str, PrefixHasher] = {}
        while (job := self._saves.get()) is not None:
            if isinstance(job, str):  # a request that ended, and all of its saves before it
                hashers.pop(job, None)
                self._off.discard(job)
                if self.keeper is not None:
                    self.keeper.forget(job)
                continue
            save, rows, windows = job
            self._idle.wait(0 if self._closed else _HOLD_SECONDS)
            try:
                if rows is not None:
                    self._put(hashers, save, rows, windows)
            except Exception as e:
                self._failed(save, e)
            with self._stored:
                self._memory.give_back()
                self._stored.notify_all()

    def _put(
        self, hashers: dict[str, PrefixHasher], save: Save, rows: Any, windows: Sequence[Any]
    ) -> None:
        ns = self._namespace(save.salt, save.adapter)
        hasher = hashers.get(save.request)
        if save.anew or hasher is None:
            hasher = hashers[save.request] = ns.hasher()
        hasher.extend(save.tokens)
        result = self.store.put(ns, hasher, rows.numpy(), first_block=save.first)
        self._count("stored_blocks", result.stored)
        self._count("stored_bytes", result.bytes)
        if result.error is not None:
            return self._failed(save, result.error)
        with self._lock:
            own = self._news.stored.setdefault(save.request, {})
            first = own.get(self.identity.nsid, (save.first, 0))[0]
            own[self.identity.nsid] = first, hasher.n_blocks
        for window, row in zip(save.windows, windows, strict=False):
            if self.keeper is not None and self.keeper.keep(save.request, hasher, window, row):
                self._count("slots_stored")

    def _failed(self, save: Save, error: Exception) -> None:
        log.warning("%s: not stored: %s", self.identity.name, error)
        self._count("saves_failed")
        self._off.add(save.request)

    def flush(self, seconds: float) -> bool:
        """Waits until what was taken is stored, or could not be; says whether that is so."""
        with self._stored:
            return self._stored.wait_for(lambda: not self._memory.used, seconds)

    # the end

    def close(self) -> None:
        """Stores what is waiting, for `flush_seconds` at most, and leaves the store."""
        if self._closed:
            return
        self._closed = True
        self._loads.put(None)
        self._saves.put(None)
        until = time.monotonic() + self.settings.flush_seconds
        for thread in self._threads:
            thread.join(max(0.1, until - time.monotonic()))
        if self._fetcher is not None:
            self._fetcher.close()
        if not self._threads[0].is_alive():
            self._swapper.close()
        if not any(thread.is_alive() for thread in self._threads):
            if self.keeper is not None:
                self.keeper.close()
            self._memory.close()
            try:
                if not within(self.store.close):
                    log.warning("%s: it does not answer, and is left as it is", self.store.path)
            except KvfsError as e:
                log.warning("%s: %s", self.store.path, e)
