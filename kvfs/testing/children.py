"""Work in forked children, for tests of several processes: no interpreter has to start.

A child runs one function and ends without the parent's cleaning up. One that hangs says where and
ends by itself. To be called from the main thread.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

HANGS = 99


def _hangs(*_: Any) -> None:
    traceback.print_stack()
    os._exit(HANGS)


def start(work: Callable[[], Any], seconds: int = 60) -> int:
    """Forks a child that runs `work`; returns its process id.

    It exits with 0, with 1 if work raised (the traceback is printed), or with HANGS.
    """
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGALRM, _hangs)
        signal.alarm(seconds)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def wait(pid: int) -> int:
    """The exit status of a child; negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run(work: Callable[[], Any], seconds: int = 60) -> int:
    """Runs work in a child; returns its exit status as `wait` does."""
    return wait(start(work, seconds))


def run_all(works: Sequence[Callable[[], Any]], seconds: int = 60) -> list[int]:
    """Runs all in children at the same time: none begins before all are there."""
    reader, writer = os.pipe()

    def work(own: Callable[[], Any]) -> None:
        os.close(writer)
        os.read(reader, 1)  # until the parent closes its end
        own()

    pids = [start(lambda own=own: work(own), seconds) for own in works]  # type: ignore[misc]
    os.close(writer)
    os.close(reader)
    return [wait(pid) for pid in pids]
