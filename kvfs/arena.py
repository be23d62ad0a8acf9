"""The arena: one stretch of host shared memory that fetched blocks land in.

Layout: a control area (kvfs.fetcher.control), then 4096-aligned ranges handed out by `Ranges`.
The owner reserves every page at the start, so that nobody is ever killed by SIGBUS for memory that
was promised and is not there. Two kinds:

- anonymous (memfd, default): has no name, so nothing is left behind whoever is killed, and the size
  of /dev/shm (64 MB in many containers) does not matter; others get it by file descriptor;
- named, a file in a directory like /dev/shm, for those who must find it by path: it appears only
  when it is locked and whole, and one whose owner is gone is removed at the next start.

An engine that still maps the arena of a dead owner keeps it, unchanged, until it lets go.
Not thread-safe, but `view` may be used from any thread.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import fcntl
import mmap
import os
import secrets

from kvfs.errors import ConfigError
from kvfs.record import PAGE

PREFIX = "kvfs-"
SUFFIX = ".arena"
_MADV_POPULATE_WRITE = 23  # Linux 5.14
# Nobody may change its size, not even by mistake: touching what is cut off is SIGBUS.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Arena:
    """Mapped shared memory. `view` is all of it; `close` unmaps it and, for its owner, ends it."""

    def __init__(self, fd: int, size: int, *, writable: bool, path: str | None = None) -> None:
        """For `create` and `attach`. path: of a named arena, for its owner."""
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, prot)
        self.fd = fd
        self.size = size
        self.path = path
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, size: int, *, directory: str | None = None, tag: str = "") -> Arena:
        """Makes and reserves an arena of `size` bytes (rounded up to 4096) that this process owns.

        directory: None for an anonymous one, else where its file goes; arenas there whose owners
        are gone are removed first. tag: part of the file's name, for people. Raises ConfigError if
        there is no room, naming what is needed and what there is.
        """
        size = -(-size // PAGE) * PAGE
        if directory is not None:
            sweep(directory)
        _require_memory(size)
        fd = _anonymous() if directory is None else _unnamed(directory)
        arena = None
        try:
            _reserve(fd, size, directory)
            arena = cls(fd, size, writable=True)
            arena._populate()
            if directory is None:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            else:
                arena.path = _name(fd, directory, tag)
        except BaseException:
            os.close(fd) if arena is None else arena.close()
            raise
        return arena

    def _populate(self) -> None:
        """Touches every page: the first touch of fresh memory costs ten times the read into it."""
        try:
            self._map.madvise(_MADV_POPULATE_WRITE)
        except OSError as e:
            if e.errno != errno.EINVAL:  # not an older kernel
                raise ConfigError(f"the arena's {self.size} bytes cannot be used: {e}") from e
            for at in range(0, self.size, PAGE):
                self.view[at] = 0

    @classmethod
    def attach(cls, fd: int) -> Arena:
        """Maps somebody else's arena for reading; closes the descriptor. Raises ConfigError."""
        try:
            arena = cls(fd, os.fstat(fd).st_size, writable=False)
        except (OSError, ValueError) as e:
            raise ConfigError(f"the fetcher's arena cannot be mapped: {e}") from e
        finally:
            os.close(fd)
        arena.fd = -1
        return arena

    def reader_fd(self) -> int:
        """A new descriptor of the arena that can only be mapped for reading."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def unname(self) -> None:
        """Takes the name of a named one away: who has it mapped keeps it, nobody else finds it."""
        path, self.path = self.path, None
        if path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def close(self) -> None:
        """May be called twice. Views that callers hold keep the memory until they are gone."""
        self.unname()
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


# making one


def _anonymous() -> int:
    return os.memfd_create("kvfs-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _unnamed(directory: str) -> int:
    """A file without a name, locked: nobody sees it before it is whole."""
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise ConfigError(f"{directory}: no arena can be made here: {e.strerror}") from e
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def _reserve(fd: int, size: int, directory: str | None) -> None:
    # ftruncate alone would succeed on a file system that is too small, and kill us later.
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG) or directory is None:
            where = directory or "memory"
            raise ConfigError(f"{where}: cannot reserve {size} bytes: {e.strerror}") from e
        v = os.statvfs(directory)
        raise ConfigError(
            f"{directory}: the arena needs {size} bytes and there are {v.f_bavail * v.f_frsize} "
            f"free of {v.f_blocks * v.f_frsize}; make it smaller (--arena) or the file system "
            "larger (--shm-size in containers)"
        ) from e


def _require_memory(size: int) -> None:
    """Refuses what would otherwise end with the kernel killing some process for its memory."""
    have, what = available_memory()
    if size > have:
        raise ConfigError(f"the arena needs {size} bytes and {what} {have}; make it smaller")


def available_memory() -> tuple[int, str]:
    """(bytes this process could get at most, the text before the figure)."""
    limits = [(1 << 62, "there are")]
    with contextlib.suppress(OSError, ValueError, StopIteration), open("/proc/meminfo") as f:
        line = next(line for line in f if line.startswith("MemAvailable:"))
        limits.append((int(line.split()[1]) << 10, "the available memory is"))
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.max") as f:
        limits.append((int(f.read()), "the limit of the control group is"))
    return min(limits)


# named ones


def _name(fd: int, directory: str, tag: str) -> str:
    # Random and not the pid: containers that share the directory have the same pids.
    name = f"{PREFIX}{os.geteuid()}-{tag or 'arena'}-{secrets.token_hex(4)}{SUFFIX}"
    path = os.path.join(directory, name)
    # A directory makes it linkat(2), which follows /proc's link to the file; link(2) does not. What
    # directory does not matter, since the path is absolute.
    os.link(f"/proc/self/fd/{fd}", os.path.abspath(path), src_dir_fd=fd, follow_symlinks=True)
    return path


def sweep(directory: str) -> list[str]:
    """Removes this user's arenas whose owners are gone; returns their paths. Raises ConfigError.

    A live owner holds the lock of its file; the kernel frees it when the owner dies, however.
    """
    try:
        names = os.listdir(directory)
    except OSError as e:
        raise ConfigError(f"{directory}: no arena can be made here: {e.strerror}") from e
    ours = [n for n in names if n.startswith(f"{PREFIX}{os.geteuid()}-") and n.endswith(SUFFIX)]
    return [p for p in (os.path.join(directory, n) for n in ours) if _remove_orphan(p)]


def _remove_orphan(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except OSError:  # it has an owner, or somebody else removes it
        return False
    finally:
        os.close(fd)
    return True


class Ranges:
    """Hands out contiguous, 4096-aligned ranges of [start, end); first fit, merged when freed.

    Not thread-safe. `free_bytes` is what is left in all.
    """

    def __init__(self, start: int, end: int) -> None:
        """start: a multiple of 4096."""
        self._starts = [start]
        self._free = {start: end - start}
        self._taken: dict[int, int] = {}
        self.free_bytes = end - start
        self.total = end - start

    def take(self, size: int) -> int | None:
        """The offset of a range of `size` bytes (rounded up to 4096), or None."""
        size = max(1, -(-size // PAGE)) * PAGE
        for i, start in enumerate(self._starts):
            have = self._free[start]
            if have < size:
                continue
            del self._free[start]
            if have == size:
                del self._starts[i]
            else:
                self._starts[i] = start + size
                self._free[start + size] = have - size
            self.free_bytes -= size
            self._taken[start] = size
            return start
        return None

    def give(self, start: int) -> None:
        """Takes back a range. Raises ValueError if none that begins there is handed out."""
        size = self._taken.pop(start, 0)
        if not size:
            raise ValueError(f"no range begins at {start}")
        self.free_bytes += size
        i = bisect.bisect_left(self._starts, start)
        if i < len(self._starts) and self._starts[i] == start + size:
            size += self._free.pop(self._starts.pop(i))
        if i and self._starts[i - 1] + self._free[self._starts[i - 1]] == start:
            self._free[self._starts[i - 1]] += size
        else:
            self._starts.insert(i, start)
            self._free[start] = size
