"""The genuine client library, where there is one: to compare our rings with its own.

    library = Library(os.environ["KVFS_HF3FS_LIB"])
    library.read(mount, fd, offset, length)

It is used as any C program would; nothing of it is used by kvfs itself. Blocking; not thread-safe.
"""

from __future__ import annotations

import ctypes as c
import os
import time
from typing import Any

_PATH = 256


class _Iov(c.Structure):
    _fields_ = [
        ("base", c.c_void_p), ("handle", c.c_void_p), ("id", c.c_char * 16),
        ("mount", c.c_char * _PATH), ("size", c.c_size_t), ("block", c.c_size_t),
        ("numa", c.c_int),
    ]  # fmt: skip


class _Ior(c.Structure):
    _fields_ = [
        ("iov", _Iov), ("handle", c.c_void_p), ("mount", c.c_char * _PATH),
        ("for_read", c.c_bool), ("depth", c.c_int), ("priority", c.c_int),
        ("timeout", c.c_int), ("flags", c.c_uint64),
    ]  # fmt: skip


class _Cqe(c.Structure):
    _fields_ = [
        ("index", c.c_int32), ("reserved", c.c_int32), ("result", c.c_int64),
        ("userdata", c.c_void_p),
    ]  # fmt: skip


class _Timespec(c.Structure):
    _fields_ = [("seconds", c.c_long), ("nanoseconds", c.c_long)]


class Library:
    """libhf3fs_api_shared.so. Raises OSError if it cannot be loaded."""

    def __init__(self, path: str) -> None:
        self._lib = lib = c.CDLL(path)
        assert (c.sizeof(_Iov), c.sizeof(_Ior), c.sizeof(_Cqe)) == (312, 600, 24)
        lib.hf3fs_ior_size.restype = c.c_size_t
        lib.hf3fs_prep_io.argtypes = [
            c.c_void_p, c.c_void_p, c.c_bool, c.c_void_p, c.c_int, c.c_size_t, c.c_uint64,
            c.c_void_p,
        ]  # fmt: skip
        lib.hf3fs_iovcreate.argtypes = [c.c_void_p, c.c_char_p, c.c_size_t, c.c_size_t, c.c_int]
        lib.hf3fs_iorcreate4.argtypes = [
            c.c_void_p, c.c_char_p, c.c_int, c.c_bool, c.c_int, c.c_int, c.c_int, c.c_uint64,
        ]  # fmt: skip
        lib.hf3fs_reg_fd.argtypes = [c.c_int, c.c_uint64]

    def ring_size(self, entries: int) -> int:
        return int(self._lib.hf3fs_ior_size(entries))

    def transfer(self, mount: str, fd: int, offset: int, data: bytes | int) -> bytes | int:
        """Reads (data: a length) or writes through a ring and memory of the library's own.

        Returns the bytes read or the number written. Raises OSError.
        """
        length = data if isinstance(data, int) else len(data)
        iov, ior = _Iov(), _Ior()
        self._check(self._lib.hf3fs_iovcreate(c.byref(iov), mount.encode(), length, 0, -1))
        try:
            self._ring(ior, mount, isinstance(data, int))
            try:
                if not isinstance(data, int):
                    c.memmove(iov.base, data, length)
                done = self._one(ior, iov, fd, offset, length)
                return c.string_at(iov.base, done) if isinstance(data, int) else done
            finally:
                self._lib.hf3fs_iordestroy(c.byref(ior))
        finally:
            self._lib.hf3fs_iovdestroy(c.byref(iov))

    def _ring(self, ior: Any, mount: str, read: bool) -> None:
        code = self._lib.hf3fs_iorcreate4(c.byref(ior), mount.encode(), 8, read, 0, 0, -1, 0)
        self._check(code)

    def _one(self, ior: Any, iov: Any, fd: int, offset: int, length: int) -> int:
        code = self._lib.hf3fs_reg_fd(fd, 0)
        if code > 0:
            raise OSError(code, os.strerror(code))
        try:
            self._check(self._lib.hf3fs_prep_io(
                c.byref(ior), c.byref(iov), ior.for_read, iov.base, fd, offset, length, None
            ))  # fmt: skip
            self._check(self._lib.hf3fs_submit_ios(c.byref(ior)))
            cqe, until = _Cqe(), _Timespec(int(time.time()) + 30, 0)
            n = self._lib.hf3fs_wait_for_ios(c.byref(ior), c.byref(cqe), 1, 1, c.byref(until))
            self._check(n)
            if n != 1:
                raise TimeoutError("no completion")
            self._check(cqe.result)
            return int(cqe.result)
        finally:
            self._lib.hf3fs_dereg_fd(fd)

    @staticmethod
    def _check(code: int) -> None:
        if code < 0:
            raise OSError(-code, os.strerror(-code))
