"""The scheduler's half of the vLLM connector: how much is stored, what to load, what to store.

A look-up asks this host's index, never the shared storage. What it finds is fetched into shared
memory while the request waits in vLLM's queue, and only what has come and is verified is offered
to vLLM: blocks that are damaged or late are computed, as if they had never been stored. Nothing
here blocks or raises into the engine.

Threads: vLLM calls from one thread; another one talks to the fetch process and looks for slots, a
third follows the store's other writers. No two of them share a request's hasher.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from kvfs.chain import PrefixHasher, as_u32
from kvfs.connectors.background import Background, within
from kvfs.connectors.guard import never_raises
from kvfs.connectors.vllm_identity import variant
from kvfs.connectors.vllm_layout import NULL_BLOCK, Group
from kvfs.connectors.vllm_meta import KvfsStats, Load, Meta, Save, Window, WorkerNews
from kvfs.connectors.vllm_request import Fetch, Known, cacheable, progress
from kvfs.connectors.vllm_settings import Settings
from kvfs.connectors.vllm_slots import Finder
from kvfs.connectors.vllm_window import longest, window_tables
from kvfs.errors import InputError, KvfsError
from kvfs.fetcher.engine import Fetcher
from kvfs.fetcher.ticket import Ticket
from kvfs.follow.following import Following
from kvfs.layout import Identity
from kvfs.namespace import Namespace
from kvfs.store import Store

log = logging.getLogger(__name__)
_LOADS_A_REQUEST = 2
"""Loads of one request that are tried, before all of it is computed."""


class SchedulerSide:
    """See the module docstring. `ready` hands over the workers' identities."""

    def __init__(
        self, settings: Settings, store: Store, groups: Sequence[Group], *, loads: bool,
        saves: bool, adapters: Any,
    ) -> None:  # fmt: skip
        """loads, saves: the roles vLLM gave; adapters: name and digest of an adapter request, or
        None while it is not known (kvfs.connectors.vllm_adapters). Raises RuntimeError without
        threads."""
        self.settings = settings
        self.store = store
        self.groups = groups
        self.loads = loads
        self.saves = saves
        self.stats = KvfsStats()
        self.stored: list[tuple[Any, int, int]] = []
        """(request, first block, end) of what was stored since the last look."""
        self._adapters = adapters
        self._identities: list[Identity] = []
        self._requests: dict[str, Known] = {}
        self._finished: list[str] = []
        self._pending: list[Load] = []
        self._refused: set[str] = set()
        """Requests that are not cached, and were counted."""
        with ExitStack() as undo:
            self._asking = Background("kvfs-ask")
            undo.callback(self._asking.close, 0)
            self._following = Following(store).start()
            undo.pop_all()
        self._fetcher: Fetcher | None = None
        self._finder: Finder | None = None
        self._windows: Sequence[Group] = ()

    def ready(
        self, identities: Sequence[Identity], fetcher: Fetcher | None,
        finder: Finder | None = None, windows: Sequence[Group] = (),
    ) -> None:  # fmt: skip
        """identities: of all workers; fetcher: None if the workers read themselves; finder: of
        slots of the windows of some groups, None if vLLM replays them."""
        self._identities = list(identities)
        self._fetcher = fetcher
        self._finder = finder
        self._windows = windows

    @property
    def block_tokens(self) -> int:
        return self._identities[0].block_tokens

    # look-up

    def matched(self, request: Any, computed: int) -> int | None:
        """Tokens behind the first `computed` that can be loaded; None: ask again."""
        r = self._known(request)
        if r is None:
            return 0
        r.slot = None
        if not self.loads or r.loads >= _LOADS_A_REQUEST:
            return 0
        return self._matched(r, computed)

    def _matched(self, r: Known, computed: int) -> int | None:
        size, tokens = self.block_tokens, int(r.request.num_tokens)
        if r.fetch is None:
            stored = self._look_up(r)
            most = min(stored, max(0, tokens - 1) // size)
            r.start = computed
            first = computed // size
            if most <= first or most * size <= computed:
                self._count_lookup(r, 0)
                return 0
            if self._fetcher is None:
                return self._offer(r, computed, most)
            r.fetch = self._begin(self._fetcher, r, first, most)
            self._window(r, most * size)  # looked for beside the fetch
        elif r.start != computed:  # vLLM's own cache has changed meanwhile
            r.release()
            return self._matched(r, computed)
        good = r.fetch.good()
        return None if good is None else self._offer(r, computed, good)

    def _offer(self, r: Known, computed: int, good: int) -> int | None:
        """Tokens behind the first `computed` of so many blocks that are there, and with them the
        window before their end if there is a slot; None while that is not known."""
        end = good * self.block_tokens
        hit = max(0, end - computed)
        window = self._window(r, end) if hit else False
        if window is None:
            return None
        if r.fetch is not None and good < r.fetch.end and not r.counted:
            self._short(r, r.fetch, good)
        r.end, r.slot = end, end if window else None
        self._count_lookup(r, hit)
        if not hit:
            r.release()
        return hit

    def _window(self, r: Known, end: int) -> bool | None:
        """Whether there is a slot at `end`; None while that is not known."""
        if self._finder is None or r.slotless:
            return False
        if r.search is None or r.search.end != end:
            r.search = self._finder.search(self._asking, [h for _, h in self._own(r)], end)
        return r.search.there()

    def offered(self, request: Any) -> tuple[int, int | None]:
        """Tokens up to which the last load of a request goes, and the anchor of its slot."""
        r = self._requests.get(request.request_id)
        return (0, None) if r is None else (r.end, r.slot)

    def _short(self, r: Known, fetch: Fetch, good: int) -> None:
        """Less came than is stored: it is stored again. (What is gone the fetcher reports.)"""
        self.stats.count("fetches_short")
        r.saved = min(r.saved, good)
        for ticket in fetch.landed():
            log.info("%s: %s", ticket.ns.name, ticket.reason)

    def _count_lookup(self, r: Known, hit: int) -> None:
        if r.counted:
            return
        r.counted = True
        self.stats.count("requests")
        self.stats.count("hit_tokens", hit)
        self.stats.count("miss_tokens", max(0, r.request.num_tokens - r.start - hit))

    def _known(self, request: Any) -> Known | None:
        """The request's record; None if it is not cached at all."""
        r = self._requests.get(request.request_id)
        if r is None and self._identities:
            adapter = self._adapters(request.lora_request)
            if not cacheable(request) or adapter is None:
                if request.request_id not in self._refused:  # vLLM asks again and again
                    self._refused.add(request.request_id)
                    self.stats.count("requests_not_cacheable")
                return None
            r = Known(request, request.cache_salt or "", adapter)
            self._requests[request.request_id] = r
        return r

    def _look_up(self, r: Known) -> int:
        """Blocks that are stored for every worker. Fills in the plans."""
        if not r.hashers:
            r.hashers = [(ns, ns.hasher()) for ns in self._namespaces(r)]
        if len(r.hashers) < len(self._identities):
            return 0
        ids = r.request.all_token_ids
        fresh = as_u32(list(ids[r.hashed :]))
        r.hashed = len(ids)
        r.plans = {}
        for ns, hasher in r.hashers:
            hasher.extend(fresh)
            r.plans[ns.nsid] = self.store.check(ns, hasher)
        stored = min(p.stored_blocks for p in r.plans.values())
        r.saved = stored
        return stored

    def _namespaces(self, r: Known) -> list[Namespace]:
        """The namespaces that exist; a worker makes those that do not, when it first stores."""
        found = []
        for identity in self._identities:
            own = variant(identity, r.salt, r.adapter)
            if self.store.catalog.known(own):
                found.append(self.store.catalog.get(own, self.settings.ttl_class))
        return found if len(found) == len(self._identities) else []

    @staticmethod
    def _own(r: Known) -> list[tuple[Namespace, PrefixHasher]]:
        """Hashers of a request's tokens for somebody else: a hasher belongs to one thread, and
        r's are extended while others are still in use."""
        return [(ns, ns.hasher(hasher.buffer)) for ns, hasher in r.hashers]

    def _begin(self, fetcher: Fetcher, r: Known, first: int, end: int) -> Fetch:
        seconds, plans, hashers = self.settings.fetch_seconds, r.plans, self._own(r)

        def ask() -> list[Ticket]:
            return [
                fetcher.fetch(
                    ns,
                    plans[ns.nsid],
                    hasher,
                    deadline=seconds,
                    first=first,
                    blocks=end - first,
                )  # fmt: skip
                for ns, hasher in hashers
            ]

        return Fetch(first, end, time.monotonic() + seconds, self._asking.submit(ask))

    # what the worker has to do

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], external: int) -> None:
        """vLLM has made room for `external` tokens that are to be loaded, and waits for them."""
        if not external:
            return
        r = self._requests.get(request.request_id)
        if r is None:
            return self.give_up(request)
        end = r.start + external
        r.loads += 1
        own = tuple(self._needed(tables, g, r.start, end) for g in self.groups)
        # All that the plans are of: a hit renews the whole of what is stored.
        stored = max(plan.stored_tokens for plan in r.plans.values())
        tokens = bytes(as_u32(list(request.all_token_ids[:stored])))
        window = window_tables(tables, self._windows, end) if r.slot == end else None
        self._pending.append(
            Load(request.request_id, r.start, end, r.salt, r.adapter, r.plans, tokens, own, window)
        )

    def give_up(self, request: Any) -> None:
        """A load that vLLM waits for and that cannot be: the worker tells it that it failed."""
        self._pending.append(Load(request.request_id, 0, 0, "", "", {}, b"", ()))

    def _needed(
        self, tables: Sequence[Sequence[int]], group: Group, start: int, end: int
    ) -> list[int]:
        """A group's block table of whole kvfs blocks, null where nothing is to be loaded."""
        needed, own = group.needed(end), start // group.block_tokens
        table = tables[group.index]
        whole = -(-end // self.block_tokens) * self.block_tokens // group.block_tokens
        return [table[i] if i >= own and i in needed else NULL_BLOCK for i in range(whole)]

    def meta(self, output: Any) -> Meta:
        """What the worker does in a step: vLLM's SchedulerOutput."""
        meta = Meta(self._pending, [], self._finished)
        self._pending, self._finished = [], []
        self._running(output, meta.saves)
        return meta

    @never_raises(lambda self, output, saves: None)  # loads go to the worker all the same
    def _running(self, output: Any, saves: list[Save]) -> None:
        """What runs in this step needs no fetch any more; `saves`: what is to be stored of it."""
        for request, done in progress(output):
            r = self._requests.get(request)
            if r is None:
                continue
            r.release()
            save = self._save(output, r, done) if self.saves and r.saving else None
            if save is not None:
                saves.append(save)

    @never_raises(lambda self, output, r, done: self._not_saved(r))
    def _save(self, output: Any, r: Known, done: int) -> Save | None:
        request = r.request.request_id
        # Tokens behind the known ones are drafts, or not sampled yet: their blocks come later.
        known = min(done + output.num_scheduled_tokens[request], r.request.num_tokens)
        size = self.block_tokens
        end = known // size
        if end <= r.saved:
            return None
        given = output.kv_connector_block_state.get_block_ids(request)
        tables = self._tables(given, r.saved, end)
        if tables is None:
            # A window has passed over blocks that are not stored: nothing behind them can be.
            r.saving = False
            return None
        if r.saved * size < r.told:
            r.told = 0  # back to before what the worker knows
        tokens = bytes(as_u32(list(r.request.all_token_ids[r.told : end * size])))
        windows = tuple(self._kept(r, given, r.saved * size, end * size))
        save = Save(request, r.saved, r.told == 0, r.salt, r.adapter, tokens, tables, windows)
        r.told, r.saved = end * size, end
        return save

    @staticmethod
    def _not_saved(r: Known) -> None:
        """The worker does not know what it would have been told: nothing more of the request."""
        r.saving = False

    def _kept(
        self, r: Known, tables: Sequence[Sequence[int]], first: int, end: int
    ) -> Iterable[Window]:
        """The windows to keep at boundaries behind `first`, up to `end`: at the last one of a
        prompt that leaves a token to compute, and behind it."""
        if self._finder is None:
            return
        size, prompt = self.block_tokens, int(r.request.num_prompt_tokens)
        last = max(0, prompt - 1) // size * size
        # A window that was replayed is not quite what would have been computed.
        replayed = r.request.replay_start
        exact = replayed + 2 * longest(self._windows) if replayed else 0
        for at in sorted({last, end}):
            if max(first, last - 1, exact - 1) < at <= end:
                found = window_tables(tables, self._windows, at)
                if found:
                    yield Window(at, at <= prompt, found)

    def _tables(
        self, tables: Sequence[Sequence[int]] | None, first: int, end: int
    ) -> tuple[list[int], ...] | None:
        """The vLLM blocks of kvfs blocks first..end-1; None if one of them is not there."""
        out = []
        for group in self.groups:
            n = self.block_tokens // group.block_tokens
            table = list((tables or {group.index: ()})[group.index][first * n : end * n])
            if len(table) != (end - first) * n or NULL_BLOCK in table:
                return None
            out.append(table)
        return tuple(out)

    # news

    def heard(self, news: WorkerNews) -> None:
        for request in news.failed:
            r = self._requests.get(request)
            if r is not None:
                r.release()
                r.slotless = True
        for request, spans in news.stored.items():
            r = self._requests.get(request)
            new = None if r is None else r.all_have(spans, len(self._identities))
            if r is not None and new is not None:
                self.stored.append((r.request, *new))

    def finished(self, request: Any) -> None:
        self._refused.discard(request.request_id)
        r = self._requests.pop(request.request_id, None)
        if r is None:
            return
        r.release()
        self._finished.append(request.request_id)

    def stop(self) -> None:
        """Neither loads nor stores from now on: what the weights are is not known any more."""
        self.loads = self.saves = False

    def went_wrong(self) -> None:
        self.stats.count("errors")

    def close(self) -> None:
        """Leaves the store. What hangs is left behind."""
        for r in self._requests.values():
            r.release()
        self._requests.clear()
        ended = self._asking.close(self.settings.flush_seconds, drop=True)
        if self._fetcher is not None:
            self._fetcher.close()
        try:
            if not ended or not within(self._leave):
                log.warning("%s: it does not answer, and is left as it is", self.store.path)
        except KvfsError as e:
            log.warning("%s: %s", self.store.path, e)

    def _leave(self) -> None:
        if self._finder is not None:
            self._finder.close()
        self._following.stop()
        self.store.close()


def check_groups(groups: Sequence[Group], identity: Identity) -> None:
    """Raises InputError if scheduler and worker do not speak of the same blocks."""
    if any(identity.block_tokens % g.block_tokens for g in groups):
        raise InputError(f"blocks of {identity.block_tokens} tokens do not hold whole vLLM blocks")
