"""What of a store on 3FS goes through its mount: small files, lengths, directories.

By system calls, past what this host's kernel remembers where that matters: it believes lengths and
pages for 30 s. No state but the directory's path; thread-safe.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets

from kvfs.backend import usrbio_layout as layout
from kvfs.backend.base import OpenFile, Pace, at_once
from kvfs.backend.posix import PosixBackend, size_of_file
from kvfs.filesystems import mount_of

_LOAD_BYTES = 1 << 16
_NO_SUCH_IOCTL = frozenset({errno.ENOTTY, errno.EINVAL, errno.ENOSYS})


class ThreefsMount:
    """See the module docstring; the methods are those of kvfs.backend.base.Backend."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root)
        self._posix = PosixBackend(root)

    def truncate(self, file: OpenFile, size: int) -> None:
        self._posix.truncate(file, size)

    def size(self, path: str) -> int:
        file = self._posix.open(path)
        try:
            return self.length(file)
        finally:
            self._posix.close(file)

    def length(self, file: OpenFile) -> int:
        """As the servers know it, not as this host remembers it."""
        with contextlib.suppress(OSError):
            fcntl.ioctl(file.fd, layout.IOCTL_FORCE_SYNC, bytes(4))
        return size_of_file(os.fstat(file.fd), file.path)

    def load(self, path: str, limit: int) -> bytes:
        flags = os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC
        fd = os.open(os.path.join(self.root, path), flags)
        data = bytearray()
        try:
            with mmap.mmap(-1, _LOAD_BYTES) as page, memoryview(page) as view:
                while len(data) <= limit:
                    n = os.preadv(fd, [view], len(data))
                    data += view[:n]
                    if n < _LOAD_BYTES:
                        break
        finally:
            os.close(fd)
        if len(data) > limit:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
        return bytes(data)

    def names(self, path: str) -> list[str]:
        return [n for n in self._posix.names(path) if path or n != layout.VIRTUAL]

    def unlink(self, path: str) -> None:
        self._posix.unlink(path)

    def remove_empty(self, path: str) -> bool:
        return self._posix.remove_empty(path)

    def remove_tree(self, path: str, pace: Pace = at_once) -> None:
        """One call, whatever is in it: the servers remove the rest behind it."""
        pace(1)
        above, name = os.path.split(os.path.join(self.root, path))
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                inode = os.fstat(fd).st_ino
                argument = layout.REMOVAL.pack(inode, os.fsencode(name), True)
                fcntl.ioctl(fd, layout.IOCTL_REMOVE, argument)
            except OSError as e:
                if e.errno not in _NO_SUCH_IOCTL:
                    raise
                self._remove_by_link(path)
            finally:
                os.close(fd)

    def _remove_by_link(self, path: str) -> None:
        """As older daemons want it: by the path on the daemon's own mount."""
        link = os.path.join(mount_of(self.root)[0], layout.REMOVE, secrets.token_hex(8))
        os.symlink(os.path.realpath(os.path.join(self.root, path)), link)

    def replace(self, path: str, data: bytes) -> None:
        self._posix.replace(path, data)

    def put_new(self, path: str, data: bytes) -> bool:
        return self._posix.put_new(path, data)

    def free_bytes(self) -> tuple[int, int]:
        return self._posix.free_bytes()
