"""What the page cache holds of a peer's files, and what they take."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)


def files_below(path: Path) -> Iterator[Path]:
    for top, _, names in os.walk(path):
        for name in names:
            file = Path(top, name)
            if file.is_file():
                yield file


def sync(path: Path) -> None:
    """Waits until everything of the file system is on its device. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        if _LIBC.syncfs(fd):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(fd)


def drop(path: Path) -> None:
    """Takes all files below out of the page cache; their inodes and names stay in memory."""
    sync(path)
    for file in files_below(path):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def resident(pid: int | None = None) -> int:
    """Bytes of memory that a process has now; None: this one."""
    with open(f"/proc/{pid or 'self'}/statm", encoding="ascii") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
