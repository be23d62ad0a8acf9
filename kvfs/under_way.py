"""The puts of one process that are under way: none stores what another is storing just now.

Requests that share a prefix end at the same moment and put it at the same moment. The first to come
claims the first block that is missing; who comes to the same block waits until that put is through,
looks again, and stores what is still missing: nothing, or what follows the shared part, or all of
it if the other failed. A put holds one claim and waits for nobody while it holds it.

There are MOST puts at a time; one more is refused, and its caller drops it. Thread-safe; belongs to
a writer, of which a forked child has its own.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from kvfs.errors import BusyError

MOST = 256
"""Puts at once: each holds its caller's blocks in memory."""
WAIT_SECONDS = 30.0
"""Who has waited for so long for others stores the blocks itself: their storage may hang."""

_Key = tuple[bytes, bytes]  # (namespace id, hash of the first missing block)


class UnderWay:
    """See the module docstring."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._claims: set[_Key] = set()
        self._through: OrderedDict[_Key, int] = OrderedDict()  # at which turn, the last ones
        self._puts = 0
        self.turn = 0
        """How many puts are through: to be noted before something is looked up."""

    @contextmanager
    def put(self) -> Iterator[None]:
        """A put is under way within the block. Raises BusyError if there are too many."""
        with self._change:
            if self._puts >= MOST:
                raise BusyError(f"{self._puts} puts are under way")
            self._puts += 1
        try:
            yield
        finally:
            with self._change:
                self._puts -= 1

    def claim(self, key: _Key, turn: int, until: float) -> bool:
        """Claims a block, as it was missing at `turn`; False: look again, it may be there now.

        Waits for a put that has claimed it, but not longer than `until` (monotonic clock); then it
        is the caller's all the same. End a claim with `release`.
        """
        with self._change:
            if key in self._claims and time.monotonic() < until:
                self._change.wait_for(
                    lambda: key not in self._claims, max(0.0, until - time.monotonic())
                )
                return False
            if self._through.get(key, 0) > turn:
                return False
            self._claims.add(key)
            return True

    def release(self, key: _Key) -> None:
        """The put is through: its blocks are visible, or will not be."""
        with self._change:
            self._claims.discard(key)
            self.turn += 1
            self._through[key] = self.turn
            while len(self._through) > MOST:
                self._through.popitem(last=False)
            self._change.notify_all()
