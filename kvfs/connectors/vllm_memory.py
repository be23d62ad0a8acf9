"""Host memory for blocks on their way to the store: a fixed amount, used again and again.

New memory costs more than the copy into it, since the kernel fills each page with zeros at its
first use; and what a GPU copies to quickly has to be pinned, which takes long. Pages that are never
used cost nothing. What is taken is given back in the same order.

Not thread-safe: its owner has a lock.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from kvfs.gpu.host_memory import HostBuffer


class SaveMemory:
    """See the module docstring."""

    def __init__(self, size: int) -> None:
        """size: bytes at most."""
        self._buffer = HostBuffer(size)
        self._bytes = self._buffer.tensor()
        self._taken: deque[tuple[int, int]] = deque()

    @property
    def used(self) -> bool:
        return bool(self._taken)

    def take(self, size: int) -> Any | None:
        """`size` bytes in a row as a uint8 tensor; None if there is no room for them now."""
        start = self._place(size)
        if start is None:
            return None
        self._taken.append((start, start + size))
        return self._bytes[start : start + size]

    def _place(self, size: int) -> int | None:
        whole = len(self._bytes)
        if not self._taken:
            return 0 if size <= whole else None  # from the start: there the pages are in use
        first, last = self._taken[0][0], self._taken[-1][1]
        if last <= first:  # it has begun anew, and ends before what was taken first
            return last if last + size <= first else None
        if last + size <= whole:
            return last
        return 0 if size <= first else None

    def give_back(self) -> None:
        """What was taken first, of what is still taken, is not used any more."""
        self._taken.popleft()

    def close(self) -> None:
        """When nothing is copied into it any more."""
        self._buffer.close()
