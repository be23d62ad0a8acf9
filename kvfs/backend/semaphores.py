"""POSIX semaphores in shared memory: to be posted to another process, and waited for with an end.

The standard library's own cannot be shared with a program that is not Python. A wait lets other
threads run; a process that is killed in it leaves nothing behind. Thread-safe.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import time
import weakref
from functools import cache
from typing import Any

from kvfs.errors import ConfigError

_MONOTONIC = 1  # CLOCK_MONOTONIC
_PREFIX = "sem."


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sem_open.restype = ctypes.c_void_p
    libc.sem_open.argtypes = [ctypes.c_char_p, ctypes.c_int]
    for name in ("sem_post", "sem_close"):
        getattr(libc, name).argtypes = [ctypes.c_void_p]
    # By the monotonic clock: a clock that is set must neither end a wait nor prolong it.
    libc.sem_clockwait.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec)]
    return libc


@cache
def fence() -> Any:
    """A function that keeps the stores before it before those after it, as others see them.

    None on x86-64, which never reorders stores. Raises ConfigError where there is no way to do it.
    """
    if platform.machine() in ("x86_64", "AMD64"):
        return None
    try:
        function = ctypes.CDLL("libatomic.so.1").atomic_thread_fence
    except (OSError, AttributeError) as e:
        raise ConfigError(f"libatomic.so.1 is needed for 3FS on this processor: {e}") from e
    return lambda: function(5)


class Semaphore:
    """One semaphore, by its address in this process."""

    def __init__(self, address: int) -> None:
        libc = _libc()
        self._at = ctypes.c_void_p(address)
        self._post = libc.sem_post
        self._wait = libc.sem_clockwait

    @classmethod
    def open(cls, path: str) -> Semaphore:
        """A named one, by the path of its file below /dev/shm. Raises OSError."""
        name = os.path.basename(path).removeprefix(_PREFIX)
        address = _libc().sem_open(f"/{name}".encode(), 0)
        if not address:
            code = ctypes.get_errno() or errno.ENOENT
            raise OSError(code, os.strerror(code), path)
        semaphore = cls(address)
        # Not by a method: a thread that still posts would take the process down.
        weakref.finalize(semaphore, _libc().sem_close, address)
        return semaphore

    def post(self) -> None:
        self._post(self._at)

    def wait(self, seconds: float) -> bool:
        """Takes one; False if there is none for so long. A signal may end it early, as True."""
        end = time.monotonic() + seconds
        until = _Timespec(int(end), int(end % 1 * 1e9))
        if not self._wait(self._at, _MONOTONIC, ctypes.byref(until)):
            return True
        return ctypes.get_errno() == errno.EINTR
