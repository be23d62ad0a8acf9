"""Which slot pools this user has on this host, and removing those that are of no use any more.

A pool outlives the processes that used it, so a namespace that went out of use (new weights, a new
layout) would hold its memory until the host is started anew. It is removed once nobody has it open
and all its slots have expired. Looks at files of this user alone, takes their locks for a moment.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvfs.errors import BusyError, ConfigError
from kvfs.state.poolfile import DIRECTORY, PREFIX, SUFFIX, Header, flocked, ofd_lock, this_boot
from kvfs.state.table import SlotTable


def boot_ms() -> int:
    """Milliseconds since the host was started, sleep included: what a pool's times are in."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


@dataclass(frozen=True, slots=True)
class Found:
    """A pool file. slots is 0 for one that is not whole, or of another version or boot."""

    path: str
    namespace: str
    nsid: bytes
    slots: int
    live: int
    """Slots that hold something and have not expired."""
    slot_bytes: int
    file_bytes: int
    in_use: bool
    """Somebody has it open."""

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path, "namespace": self.namespace, "nsid": self.nsid.hex(),
            "slots": self.slots, "live": self.live, "slot_bytes": self.slot_bytes,
            "bytes": self.file_bytes, "in_use": self.in_use,
        }  # fmt: skip


def pools(directory: str = DIRECTORY, clock: Callable[[], int] = boot_ms) -> list[Found]:
    """The slot pools of this user in a directory, by name. Raises ConfigError."""
    found = []
    for path in _paths(directory):
        with _opened(path) as fd:
            if fd is not None:
                found.append(_look(path, fd, clock()))
    return found


def sweep(
    directory: str = DIRECTORY, *, live: bool = False, clock: Callable[[], int] = boot_ms
) -> list[Found]:
    """Removes the pools that nobody has open and that hold nothing of use; returns what they were.

    live: also those that hold slots which have not expired. Raises ConfigError.
    """
    gone = []
    for path in _paths(directory):
        with _opened(path) as fd:
            if fd is None:
                continue
            found = _look(path, fd, clock())
            if not found.in_use and (live or not found.live):
                os.unlink(path)
                gone.append(found)
    return gone


def _paths(directory: str) -> list[str]:
    try:
        names = os.listdir(directory)
    except OSError as e:
        raise ConfigError(f"{directory}: {e.strerror}") from e
    mine = f"{PREFIX}{os.geteuid()}-"
    return sorted(
        os.path.join(directory, n) for n in names if n.startswith(mine) and n.endswith(SUFFIX)
    )


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int | None]:
    """A descriptor with the file's lock; None if it is gone, another user's, or being changed."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        yield None
        return
    try:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(flocked(fd, 0, path))
                stat = os.fstat(fd)
                usable = stat.st_nlink > 0 and stat.st_uid == os.geteuid()
            except BusyError:
                usable = False
            yield fd if usable else None
    finally:
        os.close(fd)


def _look(path: str, fd: int, now_ms: int) -> Found:
    name = os.path.basename(path).removesuffix(SUFFIX).partition("-")[2].partition("-")[2]
    size = os.fstat(fd).st_size
    in_use = not ofd_lock(fd, fcntl.F_WRLCK)
    header = Header.decode(os.pread(fd, 4096, 0))
    if header is None or header.boot != this_boot() or size != header.geometry.file_bytes:
        return Found(path, name, b"", 0, 0, 0, size, in_use)
    with contextlib.closing(mmap.mmap(fd, size, mmap.MAP_SHARED)) as memory:
        table = SlotTable(memory, header)
        held = (slot for slot in range(table.slots) if table.sequence(slot))
        live = sum(table.expires_ms(slot) > now_ms for slot in held)
        table.close()
    g = header.geometry
    return Found(path, name, header.nsid, g.slots, live, g.slot_bytes, size, in_use)
