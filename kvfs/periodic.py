"""A thread that takes one turn after another until it is stopped.

Whoever works in the background does it so: a fault in one turn, or in saying how long to pause, is
logged, and the next turn tries again. The thread is a daemon: what it has done stands when the
process ends. It belongs to one process and does not survive a fork.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

from kvfs.errors import KvfsError

FAULT_SECONDS = 1.0
"""So much longer is the pause behind a turn that failed."""


class Periodic(ABC):
    """Does what a subclass says in `turn`, with a `pause` between turns. A context manager."""

    def __init__(self, name: str, what: str, log: logging.Logger) -> None:
        """name: of the thread; what: is done, for the log."""
        self._what = what
        self._log = log
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def turn(self) -> object:
        """One turn, on the caller's thread. Raises KvfsError, OSError."""

    @abstractmethod
    def pause(self) -> float:
        """Seconds until the next turn."""

    def start(self) -> Self:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ends the thread, behind the turn at hand."""
        self._stopped.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._guarded(self.turn)
            self._guarded(lambda: self._stopped.wait(self.pause()))

    def _guarded(self, work: Callable[[], object]) -> None:
        """Does it. A fault is logged, and waited for a while."""
        try:
            work()
        except (KvfsError, OSError) as e:
            self._log.warning("%s: %s", self._what, e)
            self._stopped.wait(FAULT_SECONDS)
        except Exception:  # a bug must not end the work for good
            self._log.exception("%s", self._what)
            self._stopped.wait(FAULT_SECONDS)
