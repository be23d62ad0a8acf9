"""The backend for any POSIX directory: local disk, NFS, a FUSE mount, 3FS's mount for small things.

Uses only what shared file systems keep their word on: exclusive create, reads and writes at an
offset, rename of a small file, unlink. No locks, no O_APPEND, no mmap, no xattrs, no stat to serve.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Sequence

from kvfs.backend.base import (
    Buffer,
    Memory,
    OpenFile,
    Pace,
    at_once,
    first_bytes,
    read_into,
    without_first,
    write_all,
)
from kvfs.filesystems import LOCAL_DISKS, filesystem_type

# One call moves at most 0x7ffff000 bytes on Linux; read_into and write_all loop over the rest.
_FILE_MODE = 0o600
_DIR_MODE = 0o700
_LOAD_BYTES = 1 << 16
# A large read that begins anywhere looks random to Linux: it fetches just that, in single pages,
# and nothing ahead. After two or three small ones it reads ahead, in large folios (116 MB that are
# not in the page cache, by reads of 8 MiB: 61 ms without, 34 ms with; 42 ms as one call).
_SMALL_READS = 3
_SMALL_BYTES = 128 << 10
_LARGE_BYTES = 512 << 10


class PosixBackend:
    """A store's directory reached by ordinary system calls."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root)
        self._local_disk = filesystem_type(self.root) in LOCAL_DISKS
        self._statx: Callable[[int], bool] | None = None
        self._read_to: dict[int, int] = {}
        """Descriptor -> where the last read of it ended, on a local disk."""

    def _at(self, path: str) -> str:
        return os.path.join(self.root, path)

    def create(self, path: str) -> OpenFile:
        full = self._at(path)
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        try:
            return OpenFile(os.open(full, flags, _FILE_MODE), path)
        except FileNotFoundError:
            self._make_parents(path)
        return OpenFile(os.open(full, flags, _FILE_MODE), path)

    def _make_parents(self, path: str) -> None:
        # Never above the store: when its mount is away the store's own directory is missing or
        # empty, and making it would put the data on the disk below the mount point.
        if not os.path.isdir(self.root):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.root)
        os.makedirs(os.path.dirname(self._at(path)), _DIR_MODE, exist_ok=True)

    def open(self, path: str) -> OpenFile:
        return OpenFile(os.open(self._at(path), os.O_RDONLY | os.O_CLOEXEC), path)

    def close(self, file: OpenFile) -> None:
        self._read_to.pop(file.fd, None)
        os.close(file.fd)

    def readv(self, file: OpenFile, buffers: Sequence[memoryview], offset: int) -> int:
        if self._local_disk:
            return self._read_local(file.fd, buffers, offset, 0)
        n = os.preadv(file.fd, buffers, offset)
        if n or not self._asks_again(file):
            return n
        return os.preadv(file.fd, buffers, offset)

    def _read_local(
        self, fd: int, buffers: Sequence[memoryview], offset: int, flags: int
    ) -> int:  # fmt: skip
        """A read that begins small unless it goes on where the last one ended."""
        done, left = 0, list(buffers)
        if self._read_to.get(fd) != offset and sum(map(len, buffers)) >= _LARGE_BYTES:
            for _ in range(_SMALL_READS):
                head = first_bytes(left, _SMALL_BYTES)
                try:
                    n = os.preadv(fd, head, offset + done, flags)
                except OSError:
                    if not done:
                        raise
                    return done
                done += n
                if n < _SMALL_BYTES:
                    return done
                left = without_first(left, n)
        try:
            done += os.preadv(fd, left, offset + done, flags)
        except OSError:
            if not done:
                raise
        self._read_to[fd] = offset + done
        return done

    def _asks_again(self, file: OpenFile) -> bool:
        """Has the file's length fetched from where it is kept: on a shared file system reads end
        at the length that this host remembers for a second or more. Says whether it could."""
        if self._statx is None:
            self._statx = _statx()
        return self._statx(file.fd)

    def readv_cached(self, file: OpenFile, buffers: Sequence[memoryview], offset: int) -> int:
        try:
            return self._read_local(file.fd, buffers, offset, os.RWF_NOWAIT)
        except OSError:  # EAGAIN: not in memory; EOPNOTSUPP: this file system cannot tell
            return 0

    def writev(self, file: OpenFile, buffers: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(file.fd, buffers, offset)

    def reserve(self, file: OpenFile, size: int) -> None:
        # Where the file system cannot, the C library writes into every block instead.
        if self._local_disk:
            os.posix_fallocate(file.fd, 0, size)

    def write_behind(self, file: OpenFile, offset: int, length: int) -> None:
        # Dirty pages are not dropped by this: their writing begins, and they stay in memory.
        os.posix_fadvise(file.fd, offset, length, os.POSIX_FADV_DONTNEED)

    def sync(self, file: OpenFile) -> None:
        os.fdatasync(file.fd)

    def truncate(self, file: OpenFile, size: int) -> None:
        os.ftruncate(file.fd, size)

    def size(self, path: str) -> int:
        return size_of_file(os.stat(self._at(path)), path)

    def names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(self._at(path)))
        except FileNotFoundError:
            return []

    def unlink(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._at(path))

    def remove_empty(self, path: str) -> bool:
        try:
            os.rmdir(self._at(path))
        except OSError as e:
            if e.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                return False
            raise
        return True

    def remove_tree(self, path: str, pace: Pace = at_once) -> None:
        with contextlib.suppress(FileNotFoundError):
            walk = os.fwalk(self._at(path), topdown=False, onerror=_unless_gone)
            for _, inner, files, fd in walk:
                for name in files:
                    pace(1)
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=fd)
                for name in inner:
                    _remove_directory(name, fd)
        _remove_directory(self._at(path), None)

    def load(self, path: str, limit: int) -> bytes:
        file = self.open(path)
        data = bytearray()
        try:
            while len(data) <= limit:
                chunk = bytearray(min(_LOAD_BYTES, limit + 1 - len(data)))
                n = read_into(self, file, [memoryview(chunk)], len(data))
                data += chunk[:n]
                if n < len(chunk):
                    return bytes(data)
        finally:
            self.close(file)
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)

    def replace(self, path: str, data: bytes) -> None:
        temporary = self._write_beside(path, data)
        os.replace(self._at(temporary), self._at(path))

    def put_new(self, path: str, data: bytes) -> bool:
        # A hard link makes the finished file appear in one step and refuses to replace another.
        temporary = self._write_beside(path, data)
        try:
            os.link(self._at(temporary), self._at(path))
        except FileExistsError:
            return False
        finally:
            self.unlink(temporary)
        return True

    def _write_beside(self, path: str, data: bytes) -> str:
        temporary = f"{path}.{secrets.token_hex(6)}.new"
        file = self.create(temporary)
        try:
            write_all(self, file, [data], 0)
            self.sync(file)
        except OSError:
            self.unlink(temporary)
            raise
        finally:
            self.close(file)
        return temporary

    def free_bytes(self) -> tuple[int, int]:
        v = os.statvfs(self.root)
        return v.f_bavail * v.f_frsize, v.f_blocks * v.f_frsize

    def probe(self) -> None:
        os.statvfs(self.root)

    def chunk_bytes(self) -> int | None:
        return None

    def memory_directory(self) -> str | None:
        return None

    def lend(self, memory: Memory) -> None:
        """Reads land anywhere."""

    def release(self) -> None:
        """There is nothing to give back."""


def size_of_file(st: os.stat_result, path: str) -> int:
    """Raises IsADirectoryError for a directory."""
    if stat.S_ISDIR(st.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    return st.st_size


def _unless_gone(error: OSError) -> None:
    if error.errno != errno.ENOENT:
        raise error


def _remove_directory(path: str, above: int | None) -> None:
    with contextlib.suppress(FileNotFoundError):
        try:
            os.rmdir(path, dir_fd=above)
        except NotADirectoryError:  # a symbolic link to one
            os.unlink(path, dir_fd=above)


def _statx() -> Callable[[int], bool]:
    """A call of statx(2) that asks the server: Python has none."""
    import ctypes

    empty_path, force_sync, size = 0x1000, 0x2000, 0x200
    call = getattr(ctypes.CDLL(None), "statx", None)
    if call is None:
        return lambda fd: False
    answer = ctypes.create_string_buffer(256)  # nobody reads it: threads may share it
    return lambda fd: call(fd, b"", empty_path | force_sync, size, answer) == 0
