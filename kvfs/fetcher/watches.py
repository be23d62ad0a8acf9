"""What the server waits for beside its sockets: deadlines of tickets and deaths of clients.

One trio task each, however many there are to watch. To be used from the server's thread only.
"""

from __future__ import annotations

import heapq
import itertools
import os
import select
import time
from collections.abc import Callable

import trio

from kvfs.fetcher.core import Ticket

_SWEEP = 1024


class Deadlines:
    """Calls `expire` for each ticket whose time comes before it has ended."""

    def __init__(self, expire: Callable[[Ticket], None]) -> None:
        self._expire = expire
        self._heap: list[tuple[float, int, Ticket]] = []
        self._order = itertools.count()
        self._earlier = trio.Event()
        self._sweep_at = _SWEEP

    def add(self, deadline: float, ticket: Ticket) -> None:
        """deadline: seconds on the monotonic clock."""
        heapq.heappush(self._heap, (deadline, next(self._order), ticket))
        if self._heap[0][2] is ticket:
            self._earlier.set()
        if len(self._heap) > self._sweep_at:
            self._heap = [entry for entry in self._heap if not entry[2].ended]
            heapq.heapify(self._heap)
            self._sweep_at = 2 * len(self._heap) + _SWEEP

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            self._earlier = trio.Event()
            seconds = self._heap[0][0] - time.monotonic() if self._heap else float("inf")
            with trio.move_on_after(max(0.0, seconds)):
                await self._earlier.wait()
            now = time.monotonic()
            while self._heap and (self._heap[0][0] <= now or self._heap[0][2].ended):
                self._expire(heapq.heappop(self._heap)[2])


class Deaths:
    """Cancels a scope when a process ends: a socket alone does not tell, for a child that the
    process forked may hold it open."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._scopes: dict[int, trio.CancelScope] = {}

    def watch(self, pid: int, scope: trio.CancelScope) -> int:
        """Returns a handle for `forget`. pid 0, of a process in another pid namespace: no watch."""
        if not pid:
            return -1
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            return -1
        self._scopes[handle] = scope
        self._poll.register(handle, select.EPOLLIN)
        return handle

    def forget(self, handle: int) -> None:
        if self._scopes.pop(handle, None) is not None:
            os.close(handle)

    async def run(self) -> None:
        """Runs until cancelled."""
        try:
            while True:
                await trio.lowlevel.wait_readable(self._poll.fileno())
                for handle, _ in self._poll.poll(0):
                    self._poll.modify(handle, 0)
                    self._scopes[handle].cancel()
        finally:
            self._poll.close()
