"""The threads of a mount that use its store: none of them may find it closed.

Whoever waits for one may give up; the thread stays in the storage then, for as long as that hangs,
and goes on to use the index when it does not any more. So the mount asks at its end whether one is
left, and leaves the index open if there is.

`run` belongs to the mount's trio loop, `end` to what comes behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import trio

T = TypeVar("T")


class Threads:
    """Counts the threads that are at work."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._busy = 0
        self._over = False

    async def run(self, work: Callable[..., T], *args: Any, limiter: trio.CapacityLimiter) -> T:
        """What work(*args) returns, from a thread, which is left alone if the caller gives up.

        limiter: how many there may be. Raises what the work does, RuntimeError if there is no
        thread to be had.
        """
        return await trio.to_thread.run_sync(
            self._do, work, args, abandon_on_cancel=True, limiter=limiter
        )

    def end(self, seconds: float) -> bool:
        """Begins no work any more; returns whether what is under way ended within the time."""
        with self._changed:
            self._over = True
            return self._changed.wait_for(lambda: not self._busy, seconds)

    def _do(self, work: Callable[..., T], args: tuple[Any, ...]) -> T:
        with self._changed:
            if self._over:
                raise RuntimeError("the mount has ended")
            self._busy += 1
        try:
            return work(*args)
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()
