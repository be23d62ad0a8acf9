"""The housekeeper: one pass of collection after another, in a thread (`kvctl serve` runs one).

Any host may run one, all may: the lease lets one work at a time, and who passed last goes on. The
others see by its record (kvfs.gc.passes) that it is at work, and one of them takes over once that
has not moved for half as long again as passes are apart. That is measured by each host's own
monotonic clock: what their wall clocks say does not matter.

A pass that fails is logged and tried again. The thread uses only the store's own calls; `stop` ends
the pass at hand early, within a step of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import threading
import time
from typing import Any

from kvfs.errors import BusyError, KvfsError
from kvfs.gc.collector import Collector, GcResult
from kvfs.gc.passes import Passed
from kvfs.store import Store
from kvfs.writer import Writer

log = logging.getLogger(__name__)
INTERVAL_SECONDS = 60.0
PATIENCE = 1.5
"""Times the interval, and up to this more by chance: then another host's turn is taken."""
_LOOKS = 4
"""At the record of others, in an interval."""


class Housekeeper:
    """Keeps house in one store, until `stop`. A context manager."""

    def __init__(self, store: Store, interval: float = INTERVAL_SECONDS, **options: Any) -> None:
        """interval: seconds between the end of a pass and the next; options: as for Collector."""
        self.store = store
        self.interval = interval
        self.passes = 0
        self.busy = 0
        """Passes that found another housekeeper at work."""
        self.last: GcResult | None = None
        self._options = options
        self._copier = Writer(store.backend, store.index, store.config, store.clock)
        self._told: set[str] = set()
        """What the log has of the last pass."""
        self._seen: Passed | None = None
        self._since = time.monotonic()
        """When `_seen` was new."""
        self._patience = PATIENCE * (1 + random.random())
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvfs-housekeeper", daemon=True)

    def start(self) -> Housekeeper:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ends the pass at hand, the thread, and the writer of the copies."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        self._copier.close()

    def __enter__(self) -> Housekeeper:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _run(self) -> None:
        wait = self.interval
        while not self._stopped.wait(wait):
            if self.due_in() <= 0:
                try:
                    self.turn()
                except (KvfsError, OSError) as e:
                    self._tell({str(e)})
                    self._since = time.monotonic()
                except Exception:  # a bug must not leave the store without a housekeeper for good
                    log.exception("housekeeping in %s", self.store.path)
                    self._since = time.monotonic()
            wait = min(self.interval, max(self.due_in(), self.interval / _LOOKS))

    def due_in(self) -> float:
        """Seconds until this host should pass, as far as is known now; 0 or less: at once."""
        with contextlib.suppress(OSError):
            seen = Passed.load(self.store.backend)
            if seen != self._seen:
                self._seen, self._since = seen, time.monotonic()
        patience = 1.0 if self._seen is None or _mine(self._seen) else self._patience
        return self._since + patience * self.interval - time.monotonic()

    def turn(self) -> GcResult | None:
        """One pass, on the caller's thread; None if another housekeeper is at work, or `stop` has
        ended it.

        Raises NoStoreError, BackendError, SpaceError, IndexFault.
        """
        stop = self._stopped.is_set
        try:
            work = Collector(self.store, copier=self._copier, stop=stop, **self._options)
            result = work.run()
        except BusyError:
            self.busy += not stop()
            return None
        self.passes += 1
        refused = [] if result.refused is None else [f"refused: {result.refused}"]
        self._tell({*refused, *result.problems})
        self.last = result
        return result

    def _tell(self, problems: set[str]) -> None:
        """Logs what is wrong now and was not at the last pass."""
        for problem in sorted(problems - self._told):
            log.warning("housekeeping in %s: %s", self.store.path, problem)
        self._told = problems


def _mine(passed: Passed) -> bool:
    return (passed.host, passed.pid) == (socket.gethostname(), os.getpid())
