"""The arena: one stretch of host shared memory that fetched blocks land in.

Layout: a control area (kvfs.fetcher.tickets), then 4096-aligned ranges handed out by `Ranges`.
The owner reserves every page at the start, so that nobody is ever killed by SIGBUS for memory that
was promised and is not there. Two kinds:

- anonymous (memfd, default): has no name, so nothing is left behind whoever is killed, and the size
  of /dev/shm (64 MB in many containers) does not matter; others get it by file descriptor;
- named, a file in a directory like /dev/shm, for those who must find it by path: it appears only
  when it is locked and whole, and one whose owner is gone is removed at the next start.

An engine that still maps the arena of a dead owner keeps it, unchanged, until it lets go.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import fcntl
import mmap
import os

from kvfs.errors import ConfigError
from kvfs.record import PAGE

PREFIX = "kvfs-"
SUFFIX = ".arena"


class Arena:
    """Mapped shared memory. `view` is all of it; `close` unmaps it and, for its owner, ends it."""

    def __init__(self, fd: int, size: int, *, writable: bool, path: str | None = None) -> None:
        self.fd = fd
        self.size = size
        self.path = path
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, prot)
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, size: int, *, directory: str | None = None, tag: str = "") -> Arena:
        """Makes and reserves an arena of `size` bytes (rounded up to 4096) that this process owns.

        directory: None for an anonymous one, else where its file goes; tag: part of the file's
        name, which tells arenas of one user apart. Raises ConfigError if there is no room.
        """
        size = -(-size // PAGE) * PAGE
        if directory is None:
            fd = os.memfd_create("kvfs-arena", os.MFD_CLOEXEC)
            where = "memory"
        else:
            sweep(directory)
            fd, where = _unnamed(directory), directory
        try:
            _reserve(fd, size, where)
            path = None if directory is None else _name(fd, directory, tag)
            arena = cls(fd, size, writable=True, path=path)
        except BaseException:
            os.close(fd)
            raise
        # Touch every page now: the first touch of fresh memory costs ten times the read into it.
        arena._map.madvise(_MADV_POPULATE_WRITE) if _populates(arena._map) else arena._touch()
        return arena

    def _touch(self) -> None:
        for at in range(0, self.size, PAGE):
            self.view[at] = 0

    @classmethod
    def attach(cls, fd: int) -> Arena:
        """Maps somebody else's arena for reading. Takes over the descriptor. Raises ConfigError."""
        try:
            return cls(fd, os.fstat(fd).st_size, writable=False)
        except (OSError, ValueError) as e:
            os.close(fd)
            raise ConfigError(f"the fetcher's arena cannot be mapped: {e}") from e

    def reader_fd(self) -> int:
        """A new descriptor of the arena that can only be mapped for reading."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        if self.path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
        # Views that callers still hold keep the mapping alive; it goes with the last of them.
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


_MADV_POPULATE_WRITE = 23  # Linux 5.14


def _populates(map_: mmap.mmap) -> bool:
    try:
        map_.madvise(_MADV_POPULATE_WRITE, 0, PAGE)
    except OSError:
        return False
    return True


def _reserve(fd: int, size: int, where: str) -> None:
    # ftruncate alone would succeed on a file system that is too small, and kill us later.
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise ConfigError(f"{where}: cannot reserve the arena: {e.strerror}") from e
        raise ConfigError(
            f"{where}: the arena needs {size} bytes and there {_room(where)}; make it smaller "
            "(--arena) or the file system larger (--shm-size in containers)"
        ) from e


def _room(where: str) -> str:
    if where == "memory":
        return "is not that much memory"
    v = os.statvfs(where)
    return f"are {v.f_bavail * v.f_frsize} free of {v.f_blocks * v.f_frsize}"


def _unnamed(directory: str) -> int:
    """A file without a name, locked: nobody sees it before it is whole."""
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise ConfigError(f"{directory}: no arena can be made here: {e.strerror}") from e
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def _name(fd: int, directory: str, tag: str) -> str:
    path = os.path.join(directory, f"{PREFIX}{os.geteuid()}-{tag or 'arena'}-{os.getpid()}{SUFFIX}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # a pid that came round again; a live owner's would be locked by this pid
    os.link(f"/proc/self/fd/{fd}", path, follow_symlinks=True)
    return path


def sweep(directory: str) -> list[str]:
    """Removes this user's arenas whose owners are gone; returns their paths.

    A live owner holds the lock of its file; the kernel frees it when the owner dies, however.
    """
    gone = []
    for name in os.listdir(directory):
        if not (name.startswith(f"{PREFIX}{os.geteuid()}-") and name.endswith(SUFFIX)):
            continue
        path = os.path.join(directory, name)
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
                gone.append(path)
            finally:
                os.close(fd)
    return gone


class Ranges:
    """Hands out contiguous, 4096-aligned ranges of [start, end); first fit, merged when freed.

    Not thread-safe. `free_bytes` is what is left in all.
    """

    def __init__(self, start: int, end: int) -> None:
        self._starts = [start]
        self._sizes = {start: end - start}
        self.free_bytes = end - start
        self.total = end - start

    def take(self, size: int) -> int | None:
        """The offset of a range of `size` bytes (rounded up to 4096), or None."""
        size = -(-size // PAGE) * PAGE
        for i, start in enumerate(self._starts):
            have = self._sizes[start]
            if have < size:
                continue
            del self._sizes[start]
            if have == size:
                del self._starts[i]
            else:
                self._starts[i] = start + size
                self._sizes[start + size] = have - size
            self.free_bytes -= size
            return start
        return None

    def give(self, start: int, size: int) -> None:
        """Takes a range back. Raises ValueError if it is not one that was handed out."""
        size = -(-size // PAGE) * PAGE
        i = bisect.bisect_left(self._starts, start)
        before = self._starts[i - 1] if i else None
        after = self._starts[i] if i < len(self._starts) else None
        if before is not None and before + self._sizes[before] > start:
            raise ValueError(f"range {start} is free already")
        if after is not None and start + size > after:
            raise ValueError(f"range {start} of {size} bytes overlaps a free one")
        self.free_bytes += size
        if after is not None and start + size == after:
            size += self._sizes.pop(after)
            del self._starts[i]
        if before is not None and before + self._sizes[before] == start:
            self._sizes[before] += size
        else:
            self._starts.insert(i, start)
            self._sizes[start] = size
