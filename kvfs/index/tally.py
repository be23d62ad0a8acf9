"""Counters that all processes of a host share, in a small file beside the index.

Beside it, because a transaction for a counter would change the index, and the last process to leave
a changed index waits for the disk twice: `kvctl check`, which only counts what it found, would take
half as long again.

The file holds one JSON object and is changed under a lock that the kernel releases with its holder.
It is never synced: a crash of the machine may take counts. A file that cannot be read is empty.
"""

from __future__ import annotations

import fcntl
import json
import os
from typing import Any

NAME = "counters.json"
_LIMIT = 1 << 20


class Tally:
    """The counters in one index directory. Thread-safe, and safe after fork: nothing stays open."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, NAME)

    def add(self, deltas: dict[str, int]) -> None:
        """Adds to counters, which begin at 0. Raises OSError."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            counters = _parse(os.pread(fd, _LIMIT, 0))
            for name, n in deltas.items():
                counters[name] = counters.get(name, 0) + n
            data = json.dumps(counters).encode()
            # One write over the old object, which is never longer: a process that is killed
            # leaves either.
            os.pwrite(fd, data, 0)
            os.ftruncate(fd, len(data))
        finally:
            # Closing is not enough: a child forked meanwhile has the lock as well.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def read(self) -> dict[str, int]:
        """All counters as they are now."""
        try:
            with open(self._path, "rb") as f:
                fcntl.flock(f, fcntl.LOCK_SH)
                try:
                    return _parse(f.read(_LIMIT))
                finally:
                    fcntl.flock(f, fcntl.LOCK_UN)
        except FileNotFoundError:
            return {}


def _parse(data: bytes) -> dict[str, int]:
    try:
        value: Any = json.loads(data)
    except ValueError:
        return {}
    if not isinstance(value, dict):
        return {}
    return {name: n for name, n in value.items() if type(n) is int}
