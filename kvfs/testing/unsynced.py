"""What a machine that goes down takes with it: writes that were not synced.

For FaultyBackend (kvfs.testing.faults), which tells of every write before it happens; `crash` puts
back what was there, page by page. Thread-safe, one process only.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field

from kvfs.backend import Backend, read_into, write_all

PAGE = 4096


@dataclass(slots=True)
class _Before:
    """A file as of its last sync: what its unsynced pages held, and how long it was."""

    size: int
    new: bool
    pages: dict[int, bytes] = field(default_factory=dict)


class Unsynced:
    """What unsynced writes replaced, of all files of a backend."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self._files: dict[str, _Before] = {}
        self._lock = threading.Lock()

    def created(self, path: str) -> None:
        with self._lock:
            self._files[path] = _Before(0, True)

    def about_to_write(self, path: str, offset: int, size: int) -> None:
        with self._lock:
            before = self._files.get(path)
            if before is None:
                before = self._files[path] = _Before(self._inner.size(path), False)
            for page in range(offset // PAGE, -(-(offset + size) // PAGE)):
                if page not in before.pages:
                    before.pages[page] = self._read(path, page) if not before.new else b""

    def _read(self, path: str, page: int) -> bytes:
        data = bytearray(PAGE)
        file = self._inner.open(path)
        try:
            return bytes(data[: read_into(self._inner, file, [memoryview(data)], page * PAGE)])
        finally:
            self._inner.close(file)

    def synced(self, path: str) -> None:
        with self._lock:
            self._files.pop(path, None)

    def removed(self, directory: str) -> None:
        with self._lock:
            for path in [p for p in self._files if p.startswith(f"{directory}/")]:
                del self._files[path]

    def crash(self, survive: float, rng: random.Random) -> None:
        with self._lock:
            files, self._files = self._files, {}
        for path, before in sorted(files.items()):
            lost = [p for p in sorted(before.pages) if rng.random() >= survive]
            kept = before.pages.keys() - set(lost)
            if before.new and not kept:
                self._inner.unlink(path)
            else:
                self._take_back(path, before, lost, kept)

    def _take_back(self, path: str, before: _Before, lost: list[int], kept: set[int]) -> None:
        """Rewrites the file: its backend has no way to open one for writing, only to make one."""
        now = self._whole(path)
        size = max([before.size, *(min((p + 1) * PAGE, len(now)) for p in kept)])
        after = bytearray(now[:size].ljust(size, b"\0"))
        for page in lost:
            old = before.pages[page].ljust(PAGE, b"\0")
            after[page * PAGE : (page + 1) * PAGE] = old[: max(0, size - page * PAGE)]
        self._inner.unlink(path)
        file = self._inner.create(path)
        try:
            write_all(self._inner, file, [after], 0)
        finally:
            self._inner.close(file)

    def _whole(self, path: str) -> bytes:
        return self._inner.load(path, self._inner.size(path))
