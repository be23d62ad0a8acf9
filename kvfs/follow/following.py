"""A thread that follows the other writers' journals, so that what they stored is a hit here.

Writers that had news are asked again after `interval` (200 ms by default), idle ones less and less
often, and all of them together no more than a fixed number of times a second, however many writers
came and went. A turn applies a bounded number of entries, so that checks of this host never wait
long behind it. What a removed journal held is taken from the newest checkpoint. An index that was
deleted meanwhile is begun anew.

The thread only uses the store's public methods; a fault in one turn is logged and the next turn
tries again.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvfs.follow.follower import Followed, Follower, writer_id_of
from kvfs.follow.history import adopt, note_followed, tidy
from kvfs.index.index import LAST
from kvfs.periodic import Periodic

if TYPE_CHECKING:
    from kvfs.store import Store

log = logging.getLogger(__name__)
INTERVAL_SECONDS = 0.2
IDLE_SECONDS = 0.5
"""The longest pause between two looks at a journal, while there are few."""
POLLS_PER_SECOND = 1000
"""Looks at journals, all writers together."""
TURN_ENTRIES = 20_000
ALL_SECONDS = 10.0
"""Between turns that look at every writer, so that the index can note that it has read them all."""
TIDY_SECONDS = 3600.0
_LISTING_SHARE = 0.05  # of the time goes into listing writers, at most


@dataclass(slots=True)
class _Pace:
    """When a writer is looked at next."""

    due: float
    pause: float


class Following(Periodic):
    """Follows the journals of one store in a thread of its own, until `stop`."""

    def __init__(self, store: Store, interval: float = INTERVAL_SECONDS) -> None:
        """interval: seconds between looks at a writer that has news."""
        super().__init__("kvfs-follow", f"following {store.path}", log)
        self.store = store
        self.interval = interval
        self.turns = 0
        self.entries = 0
        self._problems: dict[str, str] = {}
        self._paces: dict[str, _Pace] = {}
        self._over: set[str] = set()
        """Writers that ended and were read to the end."""
        self._list_due = self._all_due = self._tidy_due = 0.0

    def turn(self) -> Followed:
        """One turn, on the caller's thread: looks at the writers that are due.

        Raises KvfsError, OSError.
        """
        store, now, begun = self.store, time.monotonic(), self.store.now_ms()
        if store.index.revive() or not self.turns:
            self._paces.clear()
            self._over.clear()
            self._list_due = 0.0
            adopt(store.backend, store.index, store.uuid, begun)
        everyone = now >= self._all_due
        if now >= self._list_due or everyone:
            self._list(now)
        due = [writer for writer, pace in self._paces.items() if everyone or pace.due <= now]
        follower = Follower(store.backend, store.index, store.uuid, begun)
        result = follower.catch_up(due, most=TURN_ENTRIES)
        self._note_problems(due, result)
        self._missing(result, begun)
        self._set_paces(due, result, now)
        if everyone and result.complete:
            self._note_all(now, begun)
            store.close_idle()
        self.turns += 1
        self.entries += result.entries
        return result

    @property
    def problems(self) -> list[str]:
        """What keeps journals from being read on, as of the last look at each."""
        return list(self._problems.values())

    def _note_problems(self, due: list[str], result: Followed) -> None:
        for writer in due:
            self._problems.pop(writer, None)
        for problem in result.problems:
            self._problems[problem.split("/")[1]] = problem
        for s in result.missing:
            self._problems[s.writer] = f"log/{s.writer}: {s.number} was removed before it was read"

    def _missing(self, result: Followed, begun: int) -> None:
        """Begins with the newest checkpoint if journals are gone that were not read whole."""
        store = self.store
        if result.missing and adopt(
            store.backend, store.index, store.uuid, begun, missing=result.missing
        ):
            self._over.clear()
            self._list_due = 0.0

    def _note_all(self, now: float, begun: int) -> None:
        self._all_due = now + ALL_SECONDS
        note_followed(self.store.index, begun)
        if now >= self._tidy_due:
            self._tidy_due = now + TIDY_SECONDS
            tidy(self.store.backend, self.store.index, self.store.uuid, begun)

    def _list(self, now: float) -> None:
        """Learns of new writers, and lets go of those that ended."""
        started = time.monotonic()
        names = self.store.backend.names("log")
        new = {
            name: writer_id
            for name in names
            if name not in self._paces
            and name not in self._over
            and (writer_id := writer_id_of(name)) is not None
        }
        known = self.store.index.last_journals(new.values())
        for writer, writer_id in new.items():
            state = known.get(writer_id)
            if state is not None and state.ended == LAST:
                self._over.add(writer)
            else:
                self._paces[writer] = _Pace(now, self.interval)
        there = set(names)
        self._over &= there
        for writer in self._paces.keys() - there:
            del self._paces[writer]
            self._problems.pop(writer, None)
        took = time.monotonic() - started
        self._list_due = now + max(self.interval, took / _LISTING_SHARE)

    def _set_paces(self, due: list[str], result: Followed, now: float) -> None:
        longest = max(IDLE_SECONDS, len(self._paces) / POLLS_PER_SECOND)
        if result.cut_off:
            return  # all of them are still due
        for writer in due:
            pace = self._paces[writer]
            if writer in result.ended:
                del self._paces[writer]
                self._over.add(writer)
                continue
            if writer in result.progressed:
                pace.pause = self.interval
            else:
                pace.pause = min(pace.pause * 1.5, longest)
            pace.due = now + pace.pause

    def pause(self) -> float:
        """Seconds until the next look, at least a tenth of the interval."""
        now = time.monotonic()
        first = min((p.due for p in self._paces.values()), default=now + self.interval)
        return min(max(first - now, self.interval / 10), self.interval)
