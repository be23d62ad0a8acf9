"""Work beside an engine's own threads, which never keeps the engine's process from ending.

Python waits at its exit for the threads of concurrent.futures, so storage that hangs would keep an
engine that was told to end. The threads here are daemons: what they wait for is left behind.

`Background` is thread-safe; `close` must not be called on its own threads. Does no I/O itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
LEAVE_SECONDS = 30.0
"""How long an engine that ends waits for a store to be left, at most."""


class Background:
    """Runs what is submitted, in order, on one thread or several."""

    def __init__(self, name: str, threads: int = 1) -> None:
        """name: of the threads. Raises RuntimeError if the system gives no thread."""
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._closed = False
        self._busy = 0
        self._change = threading.Condition()  # reentrant: a callback of a future may submit
        self._threads: list[threading.Thread] = []
        try:
            for _ in range(threads):
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError:
            self.close(0)
            raise

    def submit(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Calls work(*args) behind what was submitted before. Raises RuntimeError once closed."""
        future: Future[T] = Future()
        with self._change:
            if self._closed:
                raise RuntimeError("closed: nothing is taken any more")
            self._jobs.append((future, lambda: work(*args)))
            self._change.notify()
        return future

    def close(self, seconds: float, *, drop: bool = False) -> bool:
        """Waits so long for what was submitted to end, and cancels what has not begun by then.

        drop: cancel that at once. Says whether all has ended; a thread that has not is left to
        itself. May be called again.
        """
        with self._change:
            self._closed = True
            if drop:
                self._drop()
            self._change.notify_all()
            ended = self._change.wait_for(lambda: not self._jobs and not self._busy, seconds)
            self._drop()
        if ended:
            for thread in self._threads:
                thread.join()
        return ended

    def _drop(self) -> None:
        jobs = [*self._jobs]
        self._jobs.clear()
        for future, _ in jobs:
            future.cancel()

    def _run(self) -> None:
        while self._turn():
            pass

    def _turn(self) -> bool:
        """One job; False when there will be none any more. Its arguments are let go of at the end:
        a thread that waits must hold no memory of the last one's."""
        with self._change:
            self._change.wait_for(lambda: self._jobs or self._closed)
            if not self._jobs:
                return False
            future, work = self._jobs.popleft()
            self._busy += 1
        try:
            if future.set_running_or_notify_cancel():
                try:
                    result = work()
                except BaseException as e:
                    future.set_exception(e)
                else:
                    future.set_result(result)
        finally:
            with self._change:
                self._busy -= 1
                self._change.notify_all()
        return True


def within(work: Callable[[], object], seconds: float = LEAVE_SECONDS) -> bool:
    """Does something that may hang; says whether it has ended after so many seconds.

    Raises what `work` raises, if it does so in time. Without a thread for it, it is done here.
    """
    try:
        background = Background("kvfs-end")
    except RuntimeError:
        work()
        return True
    done = background.submit(work)
    if not background.close(seconds):
        return False
    done.result()
    return True
