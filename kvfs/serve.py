"""What runs on every host that uses a store: `kvctl serve`, or a few lines in another process.

Follows the other writers' journals, so that what they stored is a hit here, and whatever else is
given to run beside it: a housekeeper (kvfs.gc.housekeeping), this host's slots for the others
(kvfs.peers). Threads do the work; `Service.run` waits for the signal to end. Nothing here answers
checks: a router does that in its own process, on the same index.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from kvfs.errors import BackendError
from kvfs.follow.following import INTERVAL_SECONDS, Following
from kvfs.follow.lag import lags
from kvfs.gc.lease import holder
from kvfs.gc.passes import Passed
from kvfs.store import Store
from kvfs.systemd import notify


class Service:
    """The background work of one host for one open store. A context manager."""

    def __init__(
        self, store: Store, *, interval: float = INTERVAL_SECONDS,
        beside: Sequence[AbstractContextManager[object]] = (),
    ) -> None:  # fmt: skip
        """interval: seconds between looks at a writer that has news; beside: entered and left with
        the service."""
        self.store = store
        self._beside = beside
        self._entered = ExitStack()
        self.following = Following(store, interval)
        self._ended = threading.Event()

    def __enter__(self) -> Service:
        with ExitStack() as entered:
            entered.enter_context(self.following)
            for work in self._beside:
                entered.enter_context(work)
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._entered.close()

    def end(self) -> None:
        """Lets `run` return."""
        self._ended.set()

    def run(self) -> None:
        """Serves until SIGTERM, SIGINT or `end`. Call it on the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._ended.set())
        with self:
            notify("READY=1")
            self._ended.wait()
            notify("STOPPING=1")


def status(store: Store) -> dict[str, Any]:
    """Where this host is: the index, and how far it is behind each writer; and who keeps house.

    Raises BackendError, IndexFault.
    """
    followed = lags(store.backend, store.index, store.uuid, store.now_ms())
    counters = store.index.counters()
    total = sum(lag.total for lag in followed)
    unread = sum(lag.bytes for lag in followed)
    return {
        "store": store.path, "uuid": store.uuid.hex(), "blocks": counters.get("blocks", 0),
        "writers": [lag.to_json() for lag in followed],
        "followed": 1 - unread / total if total else 1.0,
        "behind_records": sum(lag.records for lag in followed),
        "behind_seconds": max((lag.seconds for lag in followed), default=0.0),
        "problems": [f"{lag.writer}: {lag.problem}" for lag in followed if lag.problem],
        "housekeeping": housekeeping(store),
    }  # fmt: skip


def housekeeping(store: Store) -> dict[str, Any]:
    """Who collects now, if anybody does, and the last pass that is on record, of any host.

    Raises BackendError.
    """
    try:
        working, passed = holder(store.backend), Passed.load(store.backend)
    except OSError as e:
        raise BackendError(f"{store.path}: {e.strerror or e}") from e
    now = None if working is None else {"host": working.host, "pid": working.pid}
    if passed is None:
        return {"working": now, "passed": None}
    age = max(0.0, (store.now_ms() - passed.ended_ms) / 1000)
    return {"working": now, "passed": {**passed.to_json(), "age_seconds": age}}
