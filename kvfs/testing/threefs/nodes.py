"""The files of the backing directory that the kernel knows, and the directory that exists only in
the daemon: `3fs-virt`. Thread-safe.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from dataclasses import dataclass, field

from kvfs.backend import usrbio_layout as layout
from kvfs.testing.threefs.fusewire import Errno, attributes, entry, virtual
from kvfs.testing.threefs.rings import Shared

ROOT = 1
VIRT = (1 << 64) - 2
RMRF = (1 << 64) - 3
IOVS = 0xFFFFFFFF80000000
GET_CONF = 0xFFFFFFFF00000000
SET_CONF = 0xFFFFFFFE80000000
DIRECTORIES = {
    "iovs": (IOVS, 0o777), "rm-rf": (RMRF, 0o777),
    "get-conf": (GET_CONF, 0o555), "set-conf": (SET_CONF, 0o777),
}  # fmt: skip
MODES = {VIRT: 0o555, **dict(DIRECTORIES.values())}
LINK_SECONDS = 5.0
_FIRST_IOV = IOVS - 65535


@dataclass(slots=True)
class Node:
    """A file or directory the kernel holds."""

    fd: int
    """Opened with O_PATH."""
    lookups: int = 0
    written: int = -1
    """A descriptor for data, opened when first needed."""
    gone: float | None = None
    """When its last name was removed."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def path(self) -> str:
        return f"/proc/self/fd/{self.fd}"

    def data_fd(self) -> int:
        with self.lock:
            if self.written < 0:
                self.written = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            return self.written


class Nodes:
    """The backing directory by inode number."""

    def __init__(self, backing: str, names: float, seconds: float, chunk: int) -> None:
        """names, seconds: how long the kernel may believe names, and attributes."""
        self.names = names
        self.seconds = seconds
        self.chunk = chunk
        self._lock = threading.RLock()
        self._nodes = {ROOT: Node(os.open(backing, os.O_PATH | os.O_DIRECTORY))}

    def __getitem__(self, inode: int) -> Node:
        """Raises KeyError."""
        return self._nodes[inode]

    def get(self, inode: int) -> Node | None:
        return self._nodes.get(inode)

    def file(self, inode: int) -> tuple[int, float | None] | None:
        """For the rings: (descriptor, when it was removed or None), or None."""
        node = self._nodes.get(inode)
        return None if node is None else (node.data_fd(), node.gone)

    def look_up(self, parent: int, name: str) -> bytes:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._nodes[parent].fd)
        st = os.fstat(fd)
        with self._lock:
            node = self._nodes.get(st.st_ino)
            if node is None:
                node = self._nodes[st.st_ino] = Node(fd)
            else:
                os.close(fd)
            node.lookups += 1
        seconds = min(self.names, LINK_SECONDS) if stat.S_ISLNK(st.st_mode) else self.names
        return entry(st.st_ino, attributes(st, st.st_ino, self.chunk), seconds, self.seconds)

    def attributes(self, inode: int) -> bytes:
        return attributes(os.fstat(self._nodes[inode].fd), inode, self.chunk)

    def forget(self, inode: int, lookups: int) -> None:
        with self._lock:
            node = self._nodes.get(inode)
            if node is None or inode == ROOT:
                return
            node.lookups -= lookups
            if node.lookups <= 0:
                del self._nodes[inode]
                os.close(node.fd)
                if node.written >= 0:
                    os.close(node.written)

    def unlinked(self, inode: int) -> None:
        node = self._nodes.get(inode)
        if node is not None:
            node.gone = time.time()


class Links:
    """The content of `iovs`: semaphores, memory and rings, each a symbolic link."""

    def __init__(self, semaphores: list[str]) -> None:
        names = "submit-ios.ph", "submit-ios", "submit-ios.pl"
        self._fixed = {
            name: (IOVS - 1 - i, f"{layout.SHM}/sem.{semaphores[i]}")
            for i, name in enumerate(names)
        }
        self._shared: dict[str, tuple[int, Shared]] = {}
        self._next = _FIRST_IOV

    def add(self, shared: Shared) -> bytes:
        self._shared[shared.name] = self._next, shared
        self._next -= 1
        return self.look_up(shared.name)

    def take(self, name: str) -> Shared:
        """Removes one. Raises KeyError."""
        return self._shared.pop(name)[1]

    def made_by(self, pid: int) -> list[str]:
        return [name for name, (_, shared) in list(self._shared.items()) if shared.pid == pid]

    def _find(self, name: str) -> tuple[int, str, int]:
        """(inode, target, owner). Raises KeyError."""
        if name in self._fixed:
            return *self._fixed[name], 0
        inode, shared = self._shared[name]
        return inode, shared.path, shared.uid

    def look_up(self, name: str) -> bytes:
        inode, target, uid = self._find(name)
        return entry(inode, _link(inode, target, uid), LINK_SECONDS)

    def attributes(self, inode: int) -> bytes:
        return _link(inode, *self.target(inode))

    def target(self, inode: int) -> tuple[str, int]:
        """(target, owner). Raises KeyError."""
        for name in (*self._fixed, *self._shared):
            found, target, uid = self._find(name)
            if found == inode:
                return target, uid
        raise KeyError(inode)

    def listed(self, uid: int) -> list[tuple[str, int, int]]:
        """(name, inode, kind) as a directory lists them for this user."""
        own = [(n, i, stat.S_IFLNK >> 12) for n, (i, s) in self._shared.items() if s.uid == uid]
        return [(n, i, stat.S_IFLNK >> 12) for n, (i, _) in self._fixed.items()] + own


def _link(inode: int, target: str, uid: int) -> bytes:
    return virtual(inode, stat.S_IFLNK | 0o400, len(target), uid)


def look_up_virtual(parent: int, name: str, links: Links) -> bytes:
    """An entry of a virtual directory. Raises KeyError, Errno."""
    if parent == VIRT:
        inode, mode = DIRECTORIES[name]
        return entry(inode, virtual(inode, stat.S_IFDIR | mode), LINK_SECONDS)
    if parent == IOVS:
        return links.look_up(name)
    raise Errno(errno.ENOENT)
