"""The threads that read and verify. They block on the storage, so that nobody else has to.

Their number is fixed: storage that hangs ties up these threads and no more; requests behind them
end at their deadlines, and the threads go on when the storage does.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from kvfs.backend import Backend, OpenFile, ReadCut, read_into
from kvfs.backend.files import IDLE_SECONDS, FileCache
from kvfs.config import check_alive
from kvfs.errors import KvfsError
from kvfs.fetch import describe, lasting
from kvfs.fetcher.core import Core
from kvfs.fetcher.stretches import Stretch
from kvfs.record import Landing, sound

log = logging.getLogger(__name__)
# Read so much at a time that the checksum finds it in the second-level cache: reading and checking
# 116 MB takes 1.2 times the read alone with pieces of 1 MiB, 1.5 times with one piece.
STEP_BYTES = 1 << 20
_Read = Callable[[OpenFile, Sequence[memoryview], int], int]
_End = tuple[str, bool]  # (why a stretch ends early, whether for good)


class Workers:
    """A fixed number of threads that serve a Core."""

    def __init__(
        self, core: Core, backend: Backend, store: bytes, threads: int, *, one_by_one: bool = False
    ) -> None:
        """store: its uuid. one_by_one: reads that go to the device are made by one thread at a
        time."""
        self.core = core
        self.backend = backend
        self.store = store
        self.files = FileCache(backend)
        self._device: AbstractContextManager[object] = (
            threading.Lock() if one_by_one else nullcontext()
        )
        self._busy: dict[int, float] = {}
        self._threads = [
            threading.Thread(target=self._run, name=f"kvfs-fetch-{i}", daemon=True)
            for i in range(threads)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, seconds: float) -> bool:
        """Waits so long for the threads to end; says whether all did."""
        self.core.stop()
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        self.files.close()
        return True

    def stalled_seconds(self) -> float:
        """How long all threads have been waiting for the storage; 0 if one is free."""
        began = list(self._busy.values())
        if len(began) < len(self._threads):
            return 0.0
        return time.monotonic() - max(began)

    def _run(self) -> None:
        while not self.core.stopping:
            try:
                stretch = self.core.take(IDLE_SECONDS)
                if stretch is not None:
                    self._serve(stretch)
                else:  # a file that was removed would take its room for as long as it is open
                    self.files.close_idle(IDLE_SECONDS)
            except Exception:  # a bug must not cost a thread
                log.exception("a reader goes on")

    def _serve(self, stretch: Stretch) -> None:
        me = threading.get_ident()
        self._busy[me] = time.monotonic()
        try:
            reason, last = self._load(stretch)
        except Exception:  # nor a request more than its time: it ends as a miss
            log.exception("reading %s", stretch.path)
            reason, last = "internal error", False
        del self._busy[me]
        self.core.finished(stretch, reason, last)

    def _load(self, stretch: Stretch) -> tuple[str | None, bool]:
        """Reads and checks a stretch. Returns why it ends early or None, and if that is for good.

        What is in the page cache is read by all threads at once. What is not is read, on a local
        disk, by one thread at a time: several buffered readers of one file disturb each other's
        readahead (cold, 116 MB: 43 ms by one thread, 53 ms by two in turns).
        """
        try:
            landing = stretch.landing(self.core.arena)
            with self.files.use(stretch.path) as file:
                ended = self._steps(stretch, landing, file, self.backend.readv_cached, cached=True)
                if ended is None and stretch.loaded < stretch.count:
                    with self._device:
                        ended = self._steps(stretch, landing, file, self._read)
        except OSError as e:
            ended = self._failed(e)
        return ended or (None, False)

    def _read(self, file: OpenFile, buffers: Sequence[memoryview], offset: int) -> int:
        return read_into(self.backend, file, buffers, offset)

    def _steps(
        self, stretch: Stretch, landing: Landing, file: OpenFile, read: _Read, *,
        cached: bool = False,
    ) -> _End | None:  # fmt: skip
        """Goes on reading and checking while `read` gives whole steps. Returns a bad end."""
        stride, records = stretch.ns.stride, landing.payloads
        step = max(1, STEP_BYTES // stride) if stretch.checked else stretch.count
        while stretch.loaded < stretch.count:
            if not stretch.refs and self.core.give_up(stretch):
                return "cancelled", False
            first = stretch.loaded
            view = records[first * stride : min(first + step, stretch.count) * stride]
            try:
                got = read(file, [view], stretch.place + first * stride)
            except ReadCut as e:
                self.files.forget(stretch.path)
                return _check(stretch, landing, first + e.read // stride) or self._failed(e)
            if cached and got < len(view):
                return None
            bad = _check(stretch, landing, first + got // stride)
            if bad is None and got < len(view):
                self.files.forget(stretch.path)
                bad = "short read", True
            if bad is not None:
                return bad
        return None

    def _failed(self, e: OSError) -> _End:
        """What an I/O error means. A store whose mount is away looks like all its segments gone."""
        if e.errno in (errno.ENOENT, errno.ENOTDIR):
            try:
                check_alive(self.backend, self.store)
            except KvfsError:
                return "backend down", False
        return describe(e), lasting(e)


def _check(stretch: Stretch, landing: Landing, end: int) -> _End | None:
    """Checks the records up to `end` and counts the sound ones as loaded."""
    if not stretch.checked:
        stretch.loaded = end
        return None
    stretch.loaded, reason = sound(landing, stretch.loaded, end)
    return None if reason is None else (reason, True)
