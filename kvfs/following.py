"""A thread that follows the other writers' journals, so that what they stored is a hit here.

Writers that had news are asked again after `interval` (200 ms by default), idle ones less and less
often, and all of them together no more than a fixed number of times a second, however many writers
came and went. A turn applies a bounded number of entries, so that checks of this host never wait
long behind it. What a removed journal held is taken from the newest checkpoint.

The thread only uses the store's public methods; a fault in one turn is logged and the next turn
tries again.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvfs.errors import KvfsError
from kvfs.follow import Followed, Follower, writer_id_of
from kvfs.history import adopt
from kvfs.index.index import LAST

if TYPE_CHECKING:
    from kvfs.store import Store

log = logging.getLogger(__name__)
INTERVAL_SECONDS = 0.2
IDLE_SECONDS = 0.5
"""The longest pause between two looks at a journal, while there are few."""
POLLS_PER_SECOND = 1000
"""Looks at journals, all writers together."""
TURN_ENTRIES = 20_000


@dataclass(slots=True)
class _Pace:
    """When a writer is looked at next."""

    due: float
    pause: float


class Following:
    """Follows the journals of one store in a thread of its own, until `stop`."""

    def __init__(self, store: Store, interval: float = INTERVAL_SECONDS) -> None:
        """interval: seconds between looks at a writer that has news."""
        self.store = store
        self.interval = interval
        self.turns = 0
        self.entries = 0
        self.problems: list[str] = []
        """Of the last turn."""
        self._paces: dict[str, _Pace] = {}
        self._listed = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvfs-follow", daemon=True)

    def start(self) -> Following:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ends the thread; what it has applied stays."""
        self._stopped.set()
        self._thread.join()

    def __enter__(self) -> Following:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self.turn()
            except (KvfsError, OSError) as e:
                log.warning("following %s: %s", self.store.path, e)
                self._stopped.wait(1.0)
            self._stopped.wait(self._until_due())

    def turn(self) -> Followed:
        """One turn, on the caller's thread: looks at the writers that are due."""
        if not self.turns:
            adopt(self.store.backend, self.store.index, self.store.uuid)
        now = time.monotonic()
        if now - self._listed >= self.interval:
            self._list(now)
        due = [writer for writer, pace in self._paces.items() if pace.due <= now]
        follower = Follower(self.store.backend, self.store.index, self.store.uuid)
        result = follower.catch_up(due, most=TURN_ENTRIES)
        if result.missing:
            self.store.catch_up()  # which starts from a checkpoint where journals are gone
        self.store.close_idle()
        self._set_paces(due, result, now)
        self.turns += 1
        self.entries += result.entries
        self.problems = result.problems
        return result

    def _list(self, now: float) -> None:
        """Learns of new writers, and lets go of those that ended."""
        self._listed = now
        ended = {k[0] for k, s in self.store.index.journals().items() if s.ended == LAST}
        names = self.store.backend.names("log")
        for writer in names:
            if writer_id_of(writer) in ended:
                self._paces.pop(writer, None)
            elif writer not in self._paces and writer_id_of(writer) is not None:
                self._paces[writer] = _Pace(now, self.interval)
        for writer in self._paces.keys() - set(names):
            del self._paces[writer]

    def _set_paces(self, due: list[str], result: Followed, now: float) -> None:
        longest = max(IDLE_SECONDS, len(self._paces) / POLLS_PER_SECOND)
        for writer in due:
            pace = self._paces[writer]
            news = writer in result.progressed
            pace.pause = self.interval if news else min(pace.pause * 1.5, longest)
            pace.due = now if news else now + pace.pause

    def _until_due(self) -> float:
        """Seconds until the next look, at least a tenth of the interval."""
        now = time.monotonic()
        first = min((p.due for p in self._paces.values()), default=now + self.interval)
        return min(max(first - now, self.interval / 10), self.interval)
