"""The way to a store of an engine that keys its pages itself, and the rules for loads and stores.

Such engines (SGLang, LMCache, the offloading of vLLM) ask from threads of their own: one looks
pages up, one loads, one stores. Look-ups read the local index alone. A load has a deadline; when
the storage did not answer one, nothing is found for a moment, so that requests do not wait for it
one after the other. A store copies pages to memory of its own, bounded, and waits for the disk on
another thread: the engine's memory may change as soon as the engine is told that the store failed.
Stores wait for a gap between loads, and are dropped if there is none.

Thread-safe. Raises KvfsError only where it says so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from kvfs.connectors.background import Background, within
from kvfs.connectors.fetching import fetcher_of
from kvfs.connectors.settings import KeyedSettings
from kvfs.errors import KvfsError
from kvfs.fetcher.ticket import of_storage
from kvfs.follow.following import Following
from kvfs.keys import Key
from kvfs.layout import Identity
from kvfs.namespace import Namespace
from kvfs.store import Store

log = logging.getLogger(__name__)
_HOLD_SECONDS = 1.0
"""How long a store waits for loads to end."""
_REST_SECONDS = 5.0
"""Nothing is looked for so long after the storage has not answered a load in time."""
_AT_ONCE_BYTES = 256 << 20
"""Loads are asked for in parts of this size, so that the first is copied while others come."""

Give = Callable[[int, memoryview], None]
"""Takes a page's number among those asked for, and its bytes."""
Take = Callable[[Sequence[int], memoryview], None]
"""Copies pages, by their numbers among those handed over, one after the other into a buffer."""


class Loaded(NamedTuple):
    """What a load brought."""

    pages: int
    """Leading pages that were handed over."""
    lasting: bool
    """The page behind them is bad or not stored: one may go on with the next. Else the storage did
    not answer, or nothing could be asked for."""


@dataclass(slots=True)
class Transferred:
    """What went one way since it was asked for last."""

    pages: list[int]
    bytes_per_second: list[float]


class Link:
    """One engine process's way to a store. Close it."""

    def __init__(
        self, settings: KeyedSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """clock: seconds, which tell for how long the storage is let be. Raises KvfsError if the
        store cannot be opened, RuntimeError if there are no threads; nothing is open then."""
        self.settings = settings
        self._clock = clock
        with ExitStack() as undo:
            self.store = Store.open(settings.store, index=settings.index or None)
            undo.callback(self.store.close)
            self._writer = Background("kvfs-store")
            undo.callback(self._writer.close, 0)
            self._following = Following(self.store).start()
            undo.callback(self._following.stop)
            self._fetcher = None
            if settings.fetch == "process":
                self._fetcher = fetcher_of(self.store, settings.arena_bytes)
            undo.pop_all()
        self._lock = threading.Lock()
        self._loading = 0
        self._idle = threading.Event()
        self._idle.set()
        self._saving_bytes = 0
        self._rest_until = 0.0
        self.counters: Counter[str] = Counter()
        self._loaded, self._saved = Transferred([], []), Transferred([], [])

    def count(self, name: str, n: int = 1) -> None:
        with self._lock:
            self.counters[name] += n

    def transferred(self) -> tuple[Transferred, Transferred]:
        """What was loaded and what was stored since this was called last."""
        with self._lock:
            out = self._loaded, self._saved
            self._loaded, self._saved = Transferred([], []), Transferred([], [])
        return out

    def _moved(self, into: Transferred, pages: int, size: int, seconds: float) -> None:
        with self._lock:
            into.pages.append(pages)
            into.bytes_per_second.append(size / max(seconds, 1e-6))
            del into.pages[:-1000], into.bytes_per_second[:-1000]

    # look-up

    def _known(self, identity: Identity) -> Namespace | None:
        """The namespace, if anything was ever stored in it."""
        if not self.store.catalog.known(identity):
            return None
        return self.store.catalog.get(identity, self.settings.ttl_class)

    def have(self, identity: Identity, keys: Sequence[Key]) -> list[bool]:
        """For each page whether it is stored."""
        ns = self._known(identity)
        if ns is None or self._resting():
            return [False] * len(keys)
        return self.store.have_keys(ns, keys)

    def leading(self, identity: Identity, keys: Sequence[Key]) -> int:
        """How many leading pages are stored."""
        ns = self._known(identity)
        if ns is None or self._resting():
            return 0
        return self.store.check_keys(ns, keys).stored_blocks

    # loads

    def load(self, identity: Identity, keys: Sequence[Key], give: Give) -> Loaded:
        """Hands the leading pages that are stored and verify to `give`; none while the storage is
        let be."""
        ns = self._known(identity)
        if ns is None or self._resting():
            return Loaded(0, ns is None)
        began, good, lasting = time.monotonic(), 0, False
        step = max(1, min(_AT_ONCE_BYTES, self.settings.arena_bytes // 4) // ns.stride)
        with self._loads():
            while good < len(keys):
                part = keys[good : good + step]
                here, lasting = self._load(ns, part, lambda i, row, at=good: give(at + i, row))  # type: ignore[misc]
                good += here
                if here < len(part):
                    break
        self._moved(self._loaded, good, good * ns.row_bytes, time.monotonic() - began)
        self.count("loaded_pages", good)
        self.count("pages_not_loaded", len(keys) - good)
        return Loaded(good, lasting)

    @contextmanager
    def _loads(self) -> Iterator[None]:
        with self._lock:
            self._loading += 1
            self._idle.clear()
        try:
            yield
        finally:
            with self._lock:
                self._loading -= 1
                if not self._loading:
                    self._idle.set()

    def _load(self, ns: Namespace, keys: Sequence[Key], give: Give) -> Loaded:
        chain = ns.keys(keys)
        plan = self.store.check(ns, chain)
        wanted = plan.stored_blocks
        if not wanted:
            return Loaded(0, True)
        if self._fetcher is None:
            got = self.store.fetch(ns, plan, chain, blocks=wanted)
            for i in range(got.blocks):
                give(i, got.data[i * ns.row_bytes : (i + 1) * ns.row_bytes])
            return self._judged(got.blocks, got.reason or "", got.lasting)
        seconds = self.settings.fetch_seconds
        with self._fetcher.fetch(ns, plan, chain, deadline=seconds, blocks=wanted) as ticket:
            good = ticket.wait()
            for i in range(good):
                give(i, ticket.payload(i))
            if good and not ticket.held:
                return Loaded(0, False)
            return self._judged(good, ticket.reason, ticket.lasting)

    def _judged(self, good: int, reason: str, lasting: bool) -> Loaded:
        """A load that ended so. If the storage did not answer it is let be for a moment."""
        if reason:
            self.count("loads_short")
            if not lasting and of_storage(reason):
                self._rest_until = self._clock() + _REST_SECONDS
        return Loaded(good, lasting or not reason)

    def _resting(self) -> bool:
        return self._clock() < self._rest_until

    # stores

    def save(
        self, identity: Identity, keys: Sequence[Key], take: Take, *, parent: Key | None = None,
        first_page: int | None = None,
    ) -> list[bool]:  # fmt: skip
        """Stores pages; says for each whether it is stored.

        parent: key of the page before the first, if it is known, and first_page the number of the
        first page in its sequence.
        """
        out = self.have(identity, keys)
        if all(out):
            self._renew(identity, keys)
            return out
        most = max(1, self.settings.save_bytes // 2 // identity.row_bytes)
        for first, end in _missing(out, most):
            before = keys[first - 1] if first else parent
            number = None if first_page is None else first_page + first
            done = self._save(identity, keys, take, range(first, end), before, number)
            out[first:end] = [done] * (end - first)
            if not done:
                break  # the rest would be dropped as well, each after a wait
        return out

    def _renew(self, identity: Identity, keys: Sequence[Key]) -> None:
        ns = self._known(identity)
        if ns is not None:
            chain = ns.keys(keys)
            self.store.note_hit(ns, self.store.check(ns, chain), chain)

    def _save(
        self, identity: Identity, keys: Sequence[Key], take: Take, pages: range,
        parent: Key | None, number: int | None,
    ) -> bool:  # fmt: skip
        """Stores consecutive pages; says whether all of them are."""
        size, began = len(pages) * identity.row_bytes, time.monotonic()
        if not self._idle.wait(_HOLD_SECONDS) or not self._reserve(size):
            self.count("pages_dropped", len(pages))
            return False
        try:
            rows = memoryview(bytearray(size))
            take(pages, rows)
            some = [keys[i] for i in pages]
            future = self._writer.submit(self._put, identity, some, parent, number, rows)
        except BaseException:
            self._release(size)
            raise
        future.add_done_callback(lambda _: self._release(size))
        if not self._stored(future, len(pages)):
            return False
        self._moved(self._saved, len(pages), size, time.monotonic() - began)
        return True

    def _reserve(self, size: int) -> bool:
        """Room for pages on their way; a single page may be larger than all of it."""
        with self._lock:
            if self._saving_bytes and self._saving_bytes + size > self.settings.save_bytes:
                return False
            self._saving_bytes += size
            return True

    def _release(self, size: int) -> None:
        with self._lock:
            self._saving_bytes -= size

    def _stored(self, future: Future[str], pages: int) -> bool:
        try:
            error = future.result(self.settings.save_seconds)
        except Late:
            error = f"not within {self.settings.save_seconds:g} s"
        self.count("pages_failed" if error else "stored_pages", pages)
        if error:
            log.warning("%s: not stored: %s", self.store.path, error)
        return not error

    def _put(
        self, identity: Identity, keys: list[Key], parent: Key | None, number: int | None,
        rows: memoryview,
    ) -> str:  # fmt: skip
        """On the writing thread. Returns why not all of it is stored, "" if it is."""
        try:
            ns = self.store.create_namespace(identity, default_class=self.settings.ttl_class)
            result = self.store.put_keys(ns, keys, parent, rows, first_block=number)
        except KvfsError as e:
            return str(e)
        return "" if result.complete else str(result.error)

    # the end

    def close(self) -> None:
        """Waits for stores under way, as long as one may take, and lets the store go. What hangs
        is left behind: it does not keep the process from ending."""
        ended = self._writer.close(self.settings.save_seconds)
        if self._fetcher is not None:
            self._fetcher.close()
        if not ended:
            log.warning("%s: a store did not end", self.store.path)
        leave = self._leave if ended else self._following.stop
        try:
            if not within(leave):
                log.warning("%s: it does not answer, and is left as it is", self.store.path)
        except KvfsError as e:
            log.warning("%s: %s", self.store.path, e)

    def _leave(self) -> None:
        self._following.stop()
        self.store.close()


def _missing(there: Sequence[bool], most: int) -> Iterator[tuple[int, int]]:
    """Yields the stretches (first, end) of what is not there, of at most so many."""
    at, n = 0, len(there)
    while at < n:
        if there[at]:
            at += 1
            continue
        end = at + 1
        while end < min(n, at + most) and not there[end]:
            end += 1
        yield at, end
        at = end
