"""Work that goes on in the background, whatever goes wrong in it."""

from __future__ import annotations

import logging
import threading
from math import inf, nan

import pytest

from kvfs import periodic
from kvfs.errors import BackendError

LOG = logging.getLogger("kvfs.test")
SECONDS = 60


class Work(periodic.Periodic):
    """One fault after another, in turns and in pauses; `done` when all of them were."""

    def __init__(self) -> None:
        super().__init__("test-work", "working", LOG)
        self.faults: list[BaseException] = [BackendError("away"), OSError("gone"), KeyError("bug")]
        self.pauses = [nan, inf, -1.0, 0.0]
        self.done = threading.Event()

    def turn(self) -> None:
        if self.faults:
            raise self.faults.pop()
        if not self.pauses:
            self.done.set()

    def pause(self) -> float:
        return self.pauses.pop(0) if self.pauses else 0.001


@pytest.mark.expect_logs("WARNING: working: away", "WARNING: working: gone", "ERROR: working$")
def test_no_fault_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(periodic, "FAULT_SECONDS", 0.0)
    with Work() as work:
        assert work.done.wait(SECONDS)
