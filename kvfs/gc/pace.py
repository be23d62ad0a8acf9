"""How fast a housekeeper may go, and for how long: the rates in the store's limits, read again
while it works, and whether it is to end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from kvfs.backend import Backend
from kvfs.errors import BusyError, KvfsError
from kvfs.gc.throttle import Bucket
from kvfs.limits import Limits

_REFRESH_SECONDS = 2.0


class Ended(BusyError):
    """The pass was told to end. What it had done stands, the next one goes on from there."""


class Pace:
    """Two buckets, of copied bytes and of removed files. Belongs to one thread."""

    def __init__(
        self, backend: Backend, copy_rate: float | None = None, remove_rate: float | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """copy_rate, remove_rate: in place of those in the limits; stop: it is to end, which also
        who waits for a bucket is told (Ended)."""
        self.copies = Bucket(copy_rate, sleep=self._sleep)
        self.removals = Bucket(remove_rate, sleep=self._sleep)
        self._stop = stop
        self._backend = backend
        self._fixed = copy_rate, remove_rate
        self._limits = Limits()
        self._looked: float | None = None

    def go_on(self) -> None:
        """Raises Ended if it is to end."""
        if self._stop():
            raise Ended("the pass was told to end")

    def _sleep(self, seconds: float) -> None:
        self.go_on()
        time.sleep(seconds)

    def limits(self) -> Limits:
        """The store's limits as they are now. Raises FormatError, BackendError."""
        self._limits = Limits.load(self._backend)
        self._looked = time.monotonic()
        self.copies.rate = self._fixed[0] or self._limits.copy_rate
        self.removals.rate = self._fixed[1] or self._limits.remove_rate
        return self._limits

    def refresh(self) -> None:
        """Takes over changed rates, if it is time to look. Raises nothing."""
        if self._looked is None or time.monotonic() - self._looked > _REFRESH_SECONDS:
            with contextlib.suppress(KvfsError):
                self.limits()
