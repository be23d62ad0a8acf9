"""The threads that read, and those that check what was read. They block, so nobody else has to.

A reader has one read under way and nothing else to do: what it has read it hands to a checker,
which verifies it and tells the core, while the reader is with the next read already. So checksums
cost the time of another processor and not that of the read (116 MB from the page cache: 1.05 times
the read alone; 1.22 times where one thread does both in small steps).

Readers are as many as there should be reads under way: storage that hangs ties up these and no
more; requests behind them end at their deadlines, and all goes on when the storage does. A read
that has not ended after LOST_SECONDS may never end, as when a client daemon has lost it: its
stretch is given up, its memory kept from others for as long as it lasts, and another reader takes
its reader's place. There are never more than MOST_LOST of those.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from kvfs.backend import Backend, OpenFile, ReadCut, read_into
from kvfs.backend.files import IDLE_SECONDS, FileCache
from kvfs.config import check_alive
from kvfs.errors import KvfsError
from kvfs.fetch import describe, lasting
from kvfs.fetcher.core import Core
from kvfs.fetcher.stretches import Stretch
from kvfs.record import sound

log = logging.getLogger(__name__)
LOST_SECONDS = 90.0
"""Longer than any backend tries before it reports an error itself (3FS: 75 s)."""
MOST_LOST = 32
_LOOK_SECONDS = 1.0
_TURN_SECONDS = 1.0
"""A reader waits so long for its turn at the device."""
_End = tuple[str, bool]  # (why a stretch ends early, whether for good)
_Done = tuple[Stretch, int, _End | None]  # (what was read, whole records of it, why not more)


@dataclass(slots=True, eq=False)
class _Reader:
    """A thread that reads. since: when its read began, 0 while it waits for one."""

    thread: threading.Thread | None = None
    stretch: Stretch | None = None
    since: float = 0.0
    lost: bool = False


class Workers:
    """The readers and checkers that serve a Core."""

    def __init__(
        self, core: Core, backend: Backend, store: bytes, threads: int, *,
        one_by_one: bool = False, lost_seconds: float = LOST_SECONDS,
    ) -> None:  # fmt: skip
        """store: its uuid; threads: readers, with half as many checkers. one_by_one: reads that go
        to the device are made by one thread at a time."""
        self.core = core
        self.backend = backend
        self.store = store
        self.threads = threads
        self.lost_seconds = lost_seconds
        self.files = FileCache(backend)
        self._one_by_one = one_by_one and threads > 1
        self._device = threading.Lock()
        self._read: SimpleQueue[_Done | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._readers: list[_Reader] = []
        self._checkers = [
            threading.Thread(target=self._check_all, name=f"kvfs-check-{i}", daemon=True)
            for i in range((threads + 1) // 2)
        ]
        self._looked = self._closed_idle = time.monotonic()

    def start(self) -> None:
        with self._lock:
            for _ in range(self.threads):
                self._add_reader()
        for thread in self._checkers:
            thread.start()

    def _add_reader(self) -> None:
        reader = _Reader()
        name = f"kvfs-fetch-{len(self._readers)}"
        reader.thread = threading.Thread(
            target=self._read_all, args=(reader,), name=name, daemon=True
        )
        reader.thread.start()  # it may fail: one that does not run must not count as free
        self._readers.append(reader)

    def stop(self, seconds: float) -> bool:
        """Waits so long for the threads to end; says whether all did."""
        self.core.stop()
        for _ in self._checkers:
            self._read.put(None)
        with self._lock:
            threads = [r.thread for r in self._readers if r.thread is not None]
        until = time.monotonic() + seconds
        for thread in (*threads, *self._checkers):
            with suppress(RuntimeError):  # it was never started
                thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in (*threads, *self._checkers)):
            return False
        self.files.close()
        return True

    def stalled_seconds(self) -> float:
        """How long all readers have been waiting for the storage; 0 if one is free."""
        began = [reader.since for reader in list(self._readers) if not reader.lost]
        return time.monotonic() - max(began) if began and all(began) else 0.0

    # reading

    def _read_all(self, me: _Reader) -> None:
        while not (self.core.stopping or me.lost):
            try:
                stretch = self.core.take(IDLE_SECONDS)
                if stretch is not None:
                    # In this order: a stretch with an old time would be taken for lost.
                    me.since, me.stretch = time.monotonic(), stretch
                    records, end = self._load(stretch)
                    me.stretch, me.since = None, 0.0
                    self._read.put((stretch, records, end))
                if stretch is None or time.monotonic() - self._closed_idle > IDLE_SECONDS:
                    # A file that was removed takes its room for as long as it is open.
                    self._closed_idle = time.monotonic()
                    self.files.close_idle(IDLE_SECONDS)
            except Exception:  # a bug must not cost a thread
                log.exception("a reader goes on")
        with self._lock:
            self._readers.remove(me)

    def _load(self, stretch: Stretch) -> tuple[int, _End | None]:
        """Reads a stretch. Returns how many whole records came, and why not all."""
        try:
            if not stretch.refs and self.core.give_up(stretch):
                return 0, ("cancelled", False)
            view = stretch.memory(self.core.arena)
            with self.files.use(stretch.path) as file:
                got = self._fill(file, view, stretch.place)
        except ReadCut as e:
            return e.read // stretch.stride, self._failed(e)
        except OSError as e:
            return 0, self._failed(e)
        except Exception:  # nor a request more than its time: it ends as a miss
            log.exception("reading %s", stretch.path)
            return 0, ("internal error", False)
        if got == len(view):
            return stretch.count, None
        self.files.forget(stretch.path)
        return got // stretch.stride, ("short read", True)

    def _fill(self, file: OpenFile, view: memoryview, at: int) -> int:
        """Fills a view from a file; returns the bytes read. Raises OSError.

        What is in the page cache is read by all threads at once. What is not is read, on a local
        disk, by one thread at a time: several buffered readers of one file disturb each other's
        readahead (cold, 116 MB: 43 ms by one thread, 53 ms by two in turns).
        """
        if not self._one_by_one:
            return read_into(self.backend, file, [view], at)
        got = self.backend.readv_cached(file, [view], at)
        if got < len(view):
            ours = self._device.acquire(timeout=_TURN_SECONDS)  # not behind a read that hangs
            try:
                got += read_into(self.backend, file, [view[got:]], at + got)
            except ReadCut as e:
                e.read += got
                raise
            finally:
                if ours:
                    self._device.release()
        return got

    def _failed(self, e: OSError) -> _End:
        """What an I/O error means. A store whose mount is away looks like all its segments gone."""
        if e.errno in (errno.ENOENT, errno.ENOTDIR):
            try:
                check_alive(self.backend, self.store)
            except KvfsError:
                return "backend down", False
        return describe(e), lasting(e)

    # checking

    def _check_all(self) -> None:
        while True:
            try:
                if not self._check_one():
                    return
            except Exception:  # a bug must not cost a thread
                log.exception("a checker goes on")

    def _check_one(self) -> bool:
        """Checks what was read next; returns False at the end."""
        try:
            done = self._read.get(timeout=_LOOK_SECONDS)
        except Empty:
            if self.core.stopping:
                return False
            self._look_after_readers()
            return True
        if done is None:
            return False
        self._finish(*done)
        if time.monotonic() - self._looked > _LOOK_SECONDS:
            self._look_after_readers()
        return True

    def _finish(self, stretch: Stretch, records: int, end: _End | None) -> None:
        """Checks what was read of a stretch and hands it to those who wait."""
        loaded = records
        try:
            if stretch.checked:
                landing = stretch.landing(self.core.arena)
                loaded, reason = sound(landing, 0, records)
                if reason is not None:
                    end = reason, True
        except Exception:  # a bug must not cost a thread, nor let through what is not checked
            log.exception("checking %s", stretch.path)
            loaded, end = 0, ("internal error", False)
        self.core.finished(stretch, loaded, *(end or (None, False)))

    # reads that do not end

    def _look_after_readers(self) -> None:
        """Gives up reads that have not ended for too long, and has others go on in their place."""
        now = self._looked = time.monotonic()
        with self._lock:
            for reader in list(self._readers):
                stretch, since = reader.stretch, reader.since
                if reader.lost or stretch is None or not since:
                    continue
                if now - since < self.lost_seconds:
                    continue
                if sum(r.lost for r in self._readers) >= MOST_LOST:
                    break
                self._add_reader()  # first: with no reader at all the storage would count as down
                reader.lost = True
                log.warning("%s: a read has not ended for %.0f s", stretch.path, now - since)
                self.core.lose(stretch)
