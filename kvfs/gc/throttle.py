"""A token bucket: so that what works in the background is a hum on the storage and not a spike.

`take` waits until the bucket has what it is asked for. The rate may be changed at any time by any
thread, also while somebody waits. A Bucket is meant for one taker at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_BURST_SECONDS = 0.1
_NAP_SECONDS = 0.2


class Bucket:
    """Fills with `rate` units a second, up to a tenth of a second's worth."""

    def __init__(
        self, rate: float | None = None, *, clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        """rate: units a second, None: as many as asked for."""
        self.rate = rate
        self.taken = 0
        """All units that were taken."""
        self._clock = clock
        self._sleep = sleep
        self._level = 0.0
        self._at = clock()

    def take(self, units: int) -> None:
        """Waits until `units` may be used, in whatever time that takes at the rate of then.

        More than the bucket holds may be taken: it is in debt then, and the next one waits.
        """
        self.taken += units
        while (rate := self.rate) is not None:
            now = self._clock()
            self._level = min(rate * _BURST_SECONDS, self._level + rate * (now - self._at))
            self._at = now
            if self._level > 0 or units == 0:
                self._level -= units
                return
            # In naps, so that a rate that is raised counts at once.
            self._sleep(min(_NAP_SECONDS, max(1e-3, -self._level / max(rate, 1e-9))))
