"""What an engine process holds: fetches that never wait for a fetcher and never raise for one.

    fetcher = Fetcher.of(store)
    with fetcher.fetch(ns, plan, tokens, deadline=0.5) as ticket:
        ticket.wait()                       # 0 blocks and a reason, if there is no fetcher
        ...

A thread of its own connects, starts a fetcher where there is none, and does so again when it is
gone; until then every fetch is a miss. It also passes on what blocks turned out to be bad. What was
used of a prefix is told when its ticket is released, so that it is renewed as by Store.fetch. Safe
to use from several threads; a forked child needs a Fetcher of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from kvfs.errors import BackendError, BusyError, KvfsError
from kvfs.fetcher import launch
from kvfs.fetcher.client import FetchClient
from kvfs.fetcher.launch import Options
from kvfs.fetcher.ticket import GONE, Outcome, Ticket
from kvfs.namespace import Namespace
from kvfs.plan import Plan

log = logging.getLogger(__name__)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 10.0
_REPORTS = 1024
Report = Callable[[Namespace, Plan, Any, int], object]


class Reporting(Protocol):
    """What a Fetcher needs of kvfs.store.Store."""

    path: str

    @property
    def uuid(self) -> bytes: ...
    def report_bad(self, ns: Namespace, plan: Plan, tokens: Any, block: int) -> bool: ...
    def note_hit(
        self, ns: Namespace, plan: Plan, tokens: Any, blocks: int | None = None
    ) -> None: ...
    def note_miss(self, reason: str) -> None: ...


class Fetcher:
    """See the module docstring. Close it, or use it as a context manager."""

    def __init__(
        self, path: str, store: bytes, options: Options | None = None, *,
        report: Report | None = None, hit: Report | None = None,
        miss: Callable[[str], object] | None = None,
    ) -> None:  # fmt: skip
        """path, store: of the store, and its uuid; options: of a fetcher that has to be started;
        report: as Store.report_bad, called from this object's thread; hit, miss: as
        Store.note_hit and note_miss, called by whoever releases a ticket."""
        self.path = path
        self.store = store
        self.options = options or Options()
        self.problem = ""
        """Why there is no fetcher, for people; "" if there is one or nobody knows yet."""
        self._report = report
        self._hit = hit
        self._miss = miss
        self._reports: deque[tuple[Namespace, Plan, Any, int]] = deque(maxlen=_REPORTS)
        self._client: FetchClient | None = None
        self._closed = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvfs-fetcher", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, store: Reporting, options: Options | None = None, *, hit: bool = True) -> Fetcher:
        """One that tells the store what it finds bad, why it misses, and, unless `hit` is False,
        what it hits."""
        return cls(
            store.path, store.uuid, options, report=store.report_bad,
            hit=store.note_hit if hit else None, miss=store.note_miss,
        )  # fmt: skip

    def fetch(
        self, ns: Namespace, plan: Plan, tokens: Any, *, deadline: float, first: int = 0,
        blocks: int | None = None, priority: int = 0,
    ) -> Ticket:  # fmt: skip
        """As FetchClient.fetch; without a fetcher, with a busy one, or with storage that is down,
        a ticket of no blocks that says so. Raises InputError for arguments that do not fit."""
        client = self._usable()
        if client is None:
            return self._no_ticket(ns, first, GONE)
        hasher = ns.as_hasher(tokens)
        try:
            ticket = client.fetch(
                ns, plan, hasher, deadline=deadline, first=first, blocks=blocks, priority=priority
            )
        except BusyError as e:
            return self._no_ticket(ns, first, f"busy: {e}")
        except BackendError as e:
            return self._no_ticket(ns, first, str(e))
        ticket.when_over = lambda outcome: self._over(ns, plan, hasher, outcome)
        return ticket

    def _no_ticket(self, ns: Namespace, first: int, reason: str) -> Ticket:
        self._missed(reason)
        return Ticket.missed(ns, first, reason)

    def _over(self, ns: Namespace, plan: Plan, hasher: Any, outcome: Outcome) -> None:
        """A ticket was released: tells what came of it."""
        if outcome.lasting and self._report is not None:
            with self._change:
                self._reports.append((ns, plan, hasher, outcome.end))
                self._change.notify_all()
        if outcome.end > outcome.first and self._hit is not None:
            self._pass_on(self._hit, ns, plan, hasher, outcome.end)
        self._missed(outcome.reason)

    def _missed(self, reason: str) -> None:
        if self._miss is not None and reason not in ("", "cancelled"):
            self._pass_on(self._miss, reason)

    def _usable(self) -> FetchClient | None:
        client = self._client
        if client is not None and client.gone():
            with self._change:
                if self._client is client:
                    self._client = None  # its tickets keep what they have
                    self._change.notify_all()
            return None
        return client

    def ready(self, timeout: float = 0.0) -> bool:
        """Waits up to `timeout` seconds for a fetcher; says whether there is one."""
        with self._change:
            self._change.wait_for(lambda: self._client is not None or self._closed, timeout)
        return self._usable() is not None

    # the thread

    def _run(self) -> None:
        pause, not_before = _FIRST_PAUSE, 0.0
        while not self._closed:
            while self._reports and self._report is not None:
                self._pass_on(self._report, *self._reports.popleft())
            if self._client is None and time.monotonic() >= not_before:
                pause = _FIRST_PAUSE if self._connect() else min(2 * pause, _LONGEST_PAUSE)
                not_before = time.monotonic() + pause
                continue
            with self._change:
                if not self._closed and not self._reports:
                    missing = self._client is None
                    self._change.wait(max(0.0, not_before - time.monotonic()) if missing else None)

    @staticmethod
    def _pass_on(report: Callable[..., object], *what: Any) -> None:
        try:
            report(*what)
        except Exception:  # of the caller's function; the next one may go well
            log.exception("telling what came of a fetch")

    def _connect(self) -> bool:
        try:
            client = launch.connect(self.path, self.store, self.options)
        except (KvfsError, OSError) as e:
            if str(e) != self.problem:
                log.warning("no fetcher: %s", e)
            self.problem = str(e)
            return False
        with self._change:
            self.problem = ""
            if self._closed:
                client.close()
            else:
                self._client = client
            self._change.notify_all()
        return True

    def close(self) -> None:
        """Drops all tickets and the connection; the fetcher goes on, for others."""
        with self._change:
            self._closed = True
            client, self._client = self._client, None
            self._change.notify_all()
        if client is not None:
            client.close()

    def __enter__(self) -> Fetcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
