"""The housekeeper: one pass of collection after another, in a thread (`kvctl serve` runs one).

Any host may run one, all may: the lease lets one work at a time, and the next takes over from one
that died. A pass that fails is logged and tried again; the thread uses only the store's own calls.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from kvfs.errors import BusyError, KvfsError
from kvfs.gc.collector import Collector, GcResult
from kvfs.store import Store
from kvfs.writer import Writer

log = logging.getLogger(__name__)
INTERVAL_SECONDS = 60.0


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
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvfs-housekeeper", daemon=True)

    def start(self) -> Housekeeper:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ends the thread behind the pass at hand, and the writer of the copies."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        self._copier.close()

    def __enter__(self) -> Housekeeper:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._stopped.wait(self.interval):
            try:
                self.turn()
            except (KvfsError, OSError) as e:
                log.warning("housekeeping in %s: %s", self.store.path, e)

    def turn(self) -> GcResult | None:
        """One pass, on the caller's thread; None if another housekeeper is at work.

        Raises NoStoreError, BackendError, SpaceError, IndexFault.
        """
        try:
            result = Collector(self.store, copier=self._copier, **self._options).run()
        except BusyError:
            self.busy += 1
            return None
        self.passes += 1
        if result.refused is not None:
            log.warning("housekeeping in %s: refused: %s", self.store.path, result.refused)
        for problem in result.problems:
            log.warning("housekeeping in %s: %s", self.store.path, problem)
        self.last = result
        return result
