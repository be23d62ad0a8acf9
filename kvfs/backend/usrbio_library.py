"""Rings by 3FS's own client library, for those who have it and say so (kvfs.backend.threefs).

    library = load("/usr/lib/libhf3fs_api_shared.so")
    ring = LibraryRing(library, mount, kind, memories.get, alive, limit)

It keeps the rules that the library itself does not: memory is checked by us, a wait has an end
after which we ask whether the daemon lives, and the link of a ring is removed by its true name (the
library makes it with binary flags and removes it with decimal ones, so that it would stay). The
library holds the files that I/O goes to by their descriptors, in a table of its own: `register`
before, `deregister` before the descriptor is closed.

Rings must be made in the thread that opened `iovs` (kvfs.backend.usrbio_session does). Loading
takes 16 bytes of address space for each file that the hard limit of open files allows. A forked
child inherits a descriptor of `iovs` from the library, so that the daemon sees the end of a process
only when its children have ended too. Blocking calls let other threads run.
"""

from __future__ import annotations

import ctypes as c
import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from uuid import UUID

from kvfs.backend import usrbio_layout as layout
from kvfs.backend.usrbio_ring import BaseRing, Io, Results
from kvfs.errors import ConfigError

_PATH = 256
_PATIENCE = 1e9
"""Seconds: what a time that is further away than this counts as."""
_ERROR_PAUSE = 0.01
"""Seconds until a library that reported an error is asked again."""


class Iov(c.Structure):
    """Registered memory, as the library is told of it."""

    _fields_ = [
        ("base", c.c_void_p), ("handle", c.c_void_p), ("id", c.c_ubyte * 16),
        ("mount", c.c_char * _PATH), ("size", c.c_size_t), ("block", c.c_size_t),
        ("numa", c.c_int),
    ]  # fmt: skip


class _Ior(c.Structure):
    _fields_ = [
        ("iov", Iov), ("handle", c.c_void_p), ("mount", c.c_char * _PATH),
        ("for_read", c.c_bool), ("depth", c.c_int), ("priority", c.c_int),
        ("timeout", c.c_int), ("flags", c.c_uint64),
    ]  # fmt: skip


class _Cqe(c.Structure):
    _fields_ = [
        ("index", c.c_int32), ("reserved", c.c_int32), ("result", c.c_int64),
        ("serial", c.c_uint64),
    ]  # fmt: skip


class _Timespec(c.Structure):
    _fields_ = [("seconds", c.c_long), ("nanoseconds", c.c_long)]


_ARGUMENTS: dict[str, list[Any]] = {
    "hf3fs_iovwrap": [
        c.c_void_p, c.c_void_p, c.c_char_p, c.c_char_p, c.c_size_t, c.c_size_t, c.c_int,
    ],
    "hf3fs_ior_size": [c.c_int],
    "hf3fs_iorcreate4": [
        c.c_void_p, c.c_char_p, c.c_int, c.c_bool, c.c_int, c.c_int, c.c_int, c.c_uint64,
    ],
    "hf3fs_iordestroy": [c.c_void_p],
    "hf3fs_reg_fd": [c.c_int, c.c_uint64],
    "hf3fs_dereg_fd": [c.c_int],
    "hf3fs_prep_io": [
        c.c_void_p, c.c_void_p, c.c_bool, c.c_void_p, c.c_int, c.c_size_t, c.c_uint64, c.c_void_p,
    ],
    "hf3fs_submit_ios": [c.c_void_p],
    "hf3fs_wait_for_ios": [c.c_void_p, c.c_void_p, c.c_int, c.c_int, c.c_void_p],
}  # fmt: skip


class Library:
    """The library's calls that kvfs makes. Thread-safe."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError: it cannot be loaded, or lacks one of them."""
        try:
            self._lib = lib = c.CDLL(path)
            for name, arguments in _ARGUMENTS.items():
                getattr(lib, name).argtypes = arguments
        except (OSError, AttributeError) as e:
            raise ConfigError(f"the 3FS client library {path}: {e}") from e
        lib.hf3fs_ior_size.restype = c.c_size_t
        for name in ("hf3fs_iordestroy", "hf3fs_dereg_fd"):
            getattr(lib, name).restype = None
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lib, f"hf3fs_{name}")

    def wrap(self, base: int, key: bytes, mount: str, size: int) -> Iov:
        """Tells of memory that is linked in `iovs` already."""
        iov = Iov()
        _check(self.iovwrap(c.byref(iov), base, key, os.fsencode(mount), size, 0, -1))
        return iov

    def register(self, fd: int) -> int:
        """Makes an open file one that I/O may go to; returns what an Io names it by."""
        with self._lock:
            code = self.reg_fd(fd, 0)
            if code == errno.EINVAL:
                # The number was a file's on a mount that died: there it could not be taken back.
                self.dereg_fd(fd)
                code = self.reg_fd(fd, 0)
        if code > 0:
            raise OSError(code, os.strerror(code))
        return fd

    def deregister(self, fd: int) -> None:
        self.dereg_fd(fd)


@cache
def load(path: str) -> Library:
    """The library at a path, loaded once. Raises ConfigError."""
    return Library(path)


def _check(code: int) -> None:
    if code < 0:
        raise OSError(-code, os.strerror(-code))


class LibraryRing(BaseRing):
    """A ring that the library made. See kvfs.backend.usrbio_ring for what it promises."""

    def __init__(
        self, library: Library, mount: str, memory: Callable[[bytes], Iov],
        alive: Callable[[], bool], limit: Callable[[bytes], int], *, read: bool, entries: int,
        depth: int, flags: int,
    ) -> None:  # fmt: skip
        """memory: what the library knows of a memory, by its id. The rest is as for BaseRing, and
        as for kvfs.backend.usrbio_layout.ring_name. Raises OSError."""
        super().__init__(alive, limit)
        self._library = library
        self._memory = memory
        self._ior = _Ior()
        self._entries = entries
        self._read = read
        path = os.fsencode(mount)
        _check(library.iorcreate4(c.byref(self._ior), path, entries, read, depth, 0, -1, flags))
        key = UUID(bytes=bytes(self._ior.iov.id))
        self.link = layout.ring_name(key, read=read, depth=depth, flags=flags)
        """Its name in `iovs`, which stays when the ring is closed: for the session to remove."""
        self._waiting: set[int] = set()
        self._full = False
        self._refused: list[tuple[int, int]] = []
        self._cqes = (_Cqe * entries)()
        self._taken = 0

    @property
    def in_flight(self) -> int:
        return len(self._waiting)

    @property
    def room(self) -> int:
        return 0 if self._full else self._entries - self.in_flight

    def _send(self, ios: Sequence[Io], first: int) -> int:
        prep, ring, sent = self._library.prep_io, c.byref(self._ior), 0
        for key, at, file, offset, length in ios[first : first + self._entries - self.in_flight]:
            iov, serial = self._memory(key), self.serial
            code = prep(
                ring, c.byref(iov), self._read, iov.base + at, file, offset, length, serial
            )  # fmt: skip
            self._full = code == -errno.EAGAIN
            if self._full:
                break  # behind one that hangs
            if code < 0:
                self._refused.append((serial, code))
            else:
                self._waiting.add(serial)
            self.serial += 1
            sent += 1
        if sent:
            _check(self._library.submit_ios(ring))
        return sent

    def _take(self, least: int, seconds: float) -> int:
        """Has the library put completions behind those taken already; returns how many."""
        room = len(self._cqes) - self._taken
        if not room:
            return 0
        end = time.time() + min(seconds, _PATIENCE)
        until = _Timespec(int(end), int(end % 1 * 1e9))
        at = c.byref(self._cqes, self._taken * c.sizeof(_Cqe))
        ring = c.byref(self._ior)
        n = self._library.wait_for_ios(ring, at, room, min(least, room), c.byref(until))
        if n < 0:
            # What is under way may happen all the same: its time or the daemon's end decides.
            time.sleep(min(seconds, _ERROR_PAUSE))
            return 0
        self._taken += n
        return int(n)

    def _wait(self, seconds: float) -> bool:
        return self._take(1, seconds) > 0

    def _reap(self, base: int, results: Results) -> int:
        mine = 0
        while self._refused:
            mine += self._told(*self._refused.pop(), base, results)
        while self._taken or self._take(0, 0.0):
            taken, self._taken = self._taken, 0
            for cqe in self._cqes[:taken]:
                if cqe.serial in self._waiting:
                    self._waiting.discard(cqe.serial)
                    mine += self._told(cqe.serial, cqe.result, base, results)
                else:
                    self.foreign += 1
        return mine

    def close(self) -> None:
        # Whoever made the link knows the name that the daemon keeps it by; the library does not.
        self._library.iordestroy(c.byref(self._ior))
