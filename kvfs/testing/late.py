"""A shared file system that shows what other hosts did late, for tests of followers.

    faults = FaultyBackend(PosixBackend(path))
    late = Late(faults, polls=3, seed=7)

What a look finds (a file's length, whether it exists, the names in a directory) is what the next
few looks at the same path find too, as with attribute and name caches: so a new journal may show
before the last bytes of the one before it. Bytes are never wrong, only not there yet.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from typing import Any

from kvfs.testing.faults import Call, FaultyBackend


class Late:
    """Rules for the reads, opens and listings of one host. Thread-safe as the backend is."""

    def __init__(
        self, faults: FaultyBackend, *, polls: int, seed: int = 0, paths: str = "log*"
    ) -> None:
        """polls: looks that an old answer stands for, at most."""
        self._inner = faults.inner
        self._polls = polls
        self._rng = random.Random(seed)
        self._known: dict[tuple[str, str], tuple[Any, int]] = {}
        for op in ("open", "readv", "size", "names"):
            faults.on(op, paths, do=getattr(self, f"_{op}"), times=None)

    def now(self) -> None:
        """Shows everything as it is, once."""
        self._known.clear()

    def _seen(self, kind: str, path: str, look: Callable[[], Any]) -> Any:
        value, left = self._known.get((kind, path), (None, 0))
        if left == 0:
            value, left = look(), self._rng.randrange(self._polls + 1) + 1
        self._known[kind, path] = value, left - 1
        return value

    def _length(self, path: str) -> int | None:
        try:
            return self._inner.size(path)
        except FileNotFoundError:
            return None

    def _visible(self, call: Call) -> int:
        length: int | None = self._seen("size", call.path, lambda: self._length(call.path))
        if length is None:
            raise call.error(errno.ENOENT)
        return length

    def _open(self, call: Call) -> Any:
        self._visible(call)
        return call.proceed()

    def _size(self, call: Call) -> int:
        return self._visible(call)

    def _readv(self, call: Call) -> Any:
        known = self._known.get(("size", call.path), (0, 0))[0] or 0
        room = known - call.offset
        return call.proceed(min(room, call.size)) if room > 0 else 0

    def _names(self, call: Call) -> Any:
        return self._seen("names", call.path, lambda: self._inner.names(call.path))
