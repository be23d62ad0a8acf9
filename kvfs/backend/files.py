"""A few open files kept for reading. One that gave an error, or is not read any more, is not kept:
a removed file takes its room for as long as somebody has it open.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from kvfs import forking
from kvfs.backend.base import Backend, OpenFile

OPEN_FILES = 64
IDLE_SECONDS = 10.0


class FileCache:
    """Open files by path, least recently used closed first. Thread-safe; users share a file."""

    def __init__(self, backend: Backend, limit: int = OPEN_FILES) -> None:
        self.backend = backend
        self.limit = limit
        self._files: OrderedDict[str, OpenFile] = OrderedDict()
        self._in_use: dict[int, int] = {}
        self._used: dict[str, float] = {}
        self._lock = threading.Lock()
        forking.register(self)

    def after_fork(self) -> None:
        """The child opens files of its own, and does not keep the parent's from being gone."""
        files = list(self._files.values())
        self._lock = threading.Lock()
        self._files, self._used, self._in_use = OrderedDict(), {}, {}
        for file in files:
            with contextlib.suppress(OSError):
                self.backend.close(file)

    @contextmanager
    def use(self, path: str) -> Iterator[OpenFile]:
        """The open file of a path; it stays open within the block. Raises OSError."""
        file = self._take(path)
        try:
            yield file
        except OSError:
            self.forget(path)
            raise
        finally:
            self._done(file)

    def _take(self, path: str) -> OpenFile:
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                self._hold(path, file)
                return file
        file = self.backend.open(path)  # may block: not under the lock
        with self._lock:
            other = self._files.get(path)
            if other is not None:
                self.backend.close(file)
                file = other
            self._hold(path, file)
            while len(self._files) > self.limit:
                self._drop(next(iter(self._files)))
        self.close_idle()
        return file

    def _hold(self, path: str, file: OpenFile) -> None:
        self._files[path] = file
        self._files.move_to_end(path)
        self._used[path] = time.monotonic()
        self._in_use[file.fd] = self._in_use.get(file.fd, 0) + 1

    def _drop(self, path: str) -> None:
        file = self._files.pop(path, None)
        if file is not None:
            del self._used[path]
            self._close_unless_used(file)

    def close_idle(self, seconds: float = IDLE_SECONDS) -> None:
        """Closes what was last asked for so long ago. Call it now and then where nobody reads."""
        before = time.monotonic() - seconds
        with self._lock:
            while self._files and self._used[path := next(iter(self._files))] < before:
                self._drop(path)

    def _done(self, file: OpenFile) -> None:
        with self._lock:
            self._in_use[file.fd] -= 1
            if not self._in_use[file.fd]:
                del self._in_use[file.fd]
                if self._files.get(file.path) is not file:
                    self._close_unless_used(file)

    def _close_unless_used(self, file: OpenFile) -> None:
        if file.fd not in self._in_use:
            with contextlib.suppress(OSError):
                self.backend.close(file)

    def forget(self, path: str) -> None:
        """Closes a file that is gone or gave an error, as soon as nobody reads it."""
        with self._lock:
            self._drop(path)

    def close(self) -> None:
        for path in list(self._files):
            self.forget(path)
