"""The daemon: what the mount of the stand-in does, request by request.

Faults are set by links in `3fs-virt/set-conf`, as the true daemon's settings are:
`ln -s 20 MOUNT/3fs-virt/set-conf/standin.delay_ms`. The knobs are those of
kvfs.testing.threefs.rings.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import struct
import threading
import time
from collections.abc import Callable

from kvfs.backend import usrbio_layout as layout
from kvfs.testing.threefs.fusewire import (
    DIRECT_IO,
    OPENED,
    Connection,
    Errno,
    Request,
    entry,
    virtual,
)  # fmt: skip
from kvfs.testing.threefs.nodes import (
    DIRECTORIES,
    IOVS,
    MODES,
    RMRF,
    ROOT,
    SET_CONF,
    VIRT,
    Links,
    Nodes,
    look_up_virtual,
)  # fmt: skip
from kvfs.testing.threefs.rings import Rings, Shared

_MODE, _SIZE, _UID, _GID, _ATIME, _MTIME = 1, 8, 2, 4, 16, 32
_ATIME_NOW, _MTIME_NOW = 128, 256
_SETATTR = struct.Struct("<2I6Q8I")
_NEVER = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_DIRECT | os.O_APPEND
_FIRST_VIRTUAL = 1 << 62
_STATFS_BLOCK = 2 << 20
_GONE = (1 << 64) - (100 << 30)


def _names(data: bytes) -> list[str]:
    return [part.decode() for part in data.split(b"\0")]


class Daemon:
    """One mount. `run` blocks until SIGTERM."""

    def __init__(
        self, backing: str, point: str, *, chunk: int = 1 << 20, names: float = 30.0,
        seconds: float = 30.0, workers: int = 4,
    ) -> None:  # fmt: skip
        self.backing = os.path.realpath(backing)
        self.point = os.path.abspath(point)
        self.nodes = Nodes(self.backing, names, seconds, chunk)
        self.rings = Rings(self.nodes.file, workers)
        self.links = Links(self.rings.names)
        self._listings: dict[int, tuple[list[tuple[str, int, int]], int | None]] = {}
        self._next = 1
        self._lock = threading.Lock()
        self.connection = Connection("hf3fs.stage", layout.FILE_SYSTEM, self.point)
        self._ioctls: dict[int, Callable[[Request, bytes], bytes]] = {
            0: lambda r, d: b"stage".ljust(32, b"\0"),
            1: lambda r, d: struct.pack("<I", len(self.point)),
            2: lambda r, d: struct.pack("<I", 0x8F3F5FFF),
            3: lambda r, d: struct.pack("<I", 1),
            11: self._force_sync, 12: self._hard_link, 15: self._remove,
        }  # fmt: skip

    def run(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: self.connection.stop())
        try:
            self.connection.run(
                self._handlers(), self.nodes.forget, lambda: print("mounted", flush=True)
            )
        finally:
            self.rings.close()
        print("totals", self.rings.totals, flush=True)

    def _handlers(self) -> dict[int, Callable[[Request, bytes], bytes]]:
        return {
            1: self.lookup, 3: self.getattr, 4: self.setattr, 5: self.readlink, 6: self.symlink,
            9: self.mkdir, 10: self.unlink, 11: self.rmdir, 12: self.rename, 13: self.link,
            14: self.open, 15: self.read, 16: self.write, 17: self.statfs, 18: self.release,
            20: self.fsync, 21: self.setxattr, 22: self.getxattr, 23: self.listxattr,
            25: self.flush, 27: self.opendir, 28: self.readdir, 29: self.releasedir,
            35: self.create, 39: self.ioctl, 45: self.rename2,
        }  # fmt: skip

    def _real(self, inode: int) -> int:
        """A descriptor of a directory in which entries may be made. Raises Errno."""
        if inode in MODES:
            raise Errno(errno.EPERM)
        return self.nodes[inode].fd

    # names and attributes

    def lookup(self, r: Request, data: bytes) -> bytes:
        name = _names(data)[0]
        if r.node == ROOT and name == layout.VIRTUAL:
            return entry(VIRT, virtual(VIRT, stat.S_IFDIR | MODES[VIRT]), self.nodes.seconds)
        if r.node in MODES:
            return look_up_virtual(r.node, name, self.links)
        return self.nodes.look_up(r.node, name)

    def _virtual(self, inode: int) -> bool:
        """One of our own. Numbers of files may be as large: they are the backing directory's."""
        return inode >= _FIRST_VIRTUAL and self.nodes.get(inode) is None

    def _attributes(self, inode: int) -> bytes:
        if inode in MODES:
            return virtual(inode, stat.S_IFDIR | MODES[inode])
        if self._virtual(inode):
            return self.links.attributes(inode)
        return self.nodes.attributes(inode)

    def getattr(self, r: Request, data: bytes) -> bytes:
        seconds = self.nodes.seconds
        valid = struct.pack("<Q2I", int(seconds), int(seconds % 1 * 1e9), 0)
        return valid + self._attributes(r.node)

    def setattr(self, r: Request, data: bytes) -> bytes:
        self._real(r.node)
        fields = _SETATTR.unpack_from(data)
        valid, size, mode, uid, gid = (fields[i] for i in (0, 3, 11, 13, 14))
        node = self.nodes[r.node]
        if valid & _MODE:
            os.chmod(node.path, mode & 0o7777)
        if valid & (_UID | _GID):
            os.chown(node.path, uid if valid & _UID else -1, gid if valid & _GID else -1)
        if valid & _SIZE:
            os.ftruncate(node.data_fd(), size)
        if valid & (_ATIME | _MTIME):
            self._set_times(node.path, valid, fields)
        return self.getattr(r, b"")

    @staticmethod
    def _set_times(path: str, valid: int, fields: tuple[int, ...]) -> None:
        st, now = os.stat(path), time.time_ns()
        atime, mtime = fields[5] * 10**9 + fields[8], fields[6] * 10**9 + fields[9]
        atime = now if valid & _ATIME_NOW else atime if valid & _ATIME else st.st_atime_ns
        mtime = now if valid & _MTIME_NOW else mtime if valid & _MTIME else st.st_mtime_ns
        os.utime(path, ns=(atime, mtime))

    def readlink(self, r: Request, data: bytes) -> bytes:
        if self._virtual(r.node):
            return self.links.target(r.node)[0].encode()
        return os.readlink("", dir_fd=self.nodes[r.node].fd).encode()

    def statfs(self, r: Request, data: bytes) -> bytes:
        v, block = os.statvfs(self.backing), _STATFS_BLOCK
        room = (n * v.f_frsize // block for n in (v.f_blocks, v.f_bfree, v.f_bavail))
        return struct.pack("<5Q4I24x", *room, 0, 0, block, 255, block, 0)

    def getxattr(self, r: Request, data: bytes) -> bytes:
        raise Errno(errno.ENODATA)

    def listxattr(self, r: Request, data: bytes) -> bytes:
        return b"" if struct.unpack_from("<I", data)[0] else struct.pack("<2I", 0, 0)

    def setxattr(self, r: Request, data: bytes) -> bytes:
        raise Errno(errno.ENOTSUP)

    # entries made and removed

    def symlink(self, r: Request, data: bytes) -> bytes:
        name, target = _names(data)[:2]
        if r.node == IOVS:
            shared = Shared(os.path.normpath(target), name, r.pid, r.uid)
            self.rings.add(shared)
            return self.links.add(shared)
        if r.node == RMRF:
            self._remove_tree(target)
            return entry(_GONE - 7, virtual(_GONE - 7, stat.S_IFLNK | 0o777, len(target)), 0)
        if r.node == SET_CONF:
            self.rings.knobs[name.removeprefix("standin.")] = float(target)
            return entry(_GONE - 8, virtual(_GONE - 8, stat.S_IFLNK | 0o777, len(target)), 0)
        os.symlink(target, name, dir_fd=self._real(r.node))
        return self.nodes.look_up(r.node, name)

    def _remove_tree(self, target: str) -> None:
        path = os.path.normpath(target)
        if not path.startswith(f"{self.point}/"):
            raise Errno(errno.EINVAL)
        self._remove_all(os.path.join(self.backing, os.path.relpath(path, self.point)))

    def _remove_all(self, path: str) -> None:
        """One removal for whoever asked. What is open in it is as gone as what was unlinked."""
        self.rings.totals["removals"] += 1
        for _, _, files, fd in os.fwalk(path):
            for name in files:
                st = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if st.st_nlink == 1:
                    self.nodes.unlinked(st.st_ino)
        shutil.rmtree(path)

    def mkdir(self, r: Request, data: bytes) -> bytes:
        (mode,), name = struct.unpack_from("<I", data), _names(data[8:])[0]
        fd = self._real(r.node)
        os.mkdir(name, mode & 0o7777, dir_fd=fd)
        os.chown(name, r.uid, r.gid, dir_fd=fd)
        return self.nodes.look_up(r.node, name)

    def unlink(self, r: Request, data: bytes) -> bytes:
        name = _names(data)[0]
        if r.node == IOVS:
            self.rings.remove(self.links.take(name))
            return b""
        fd = self._real(r.node)
        st = os.stat(name, dir_fd=fd, follow_symlinks=False)
        os.unlink(name, dir_fd=fd)
        self.rings.totals["removals"] += 1
        if st.st_nlink == 1:
            self.nodes.unlinked(st.st_ino)
        return b""

    def rmdir(self, r: Request, data: bytes) -> bytes:
        os.rmdir(_names(data)[0], dir_fd=self._real(r.node))
        return b""

    def _rename(self, r: Request, parent: int, data: bytes) -> bytes:
        old, new = _names(data)[:2]
        source = self._real(r.node)
        if parent == RMRF:
            self._remove_all(os.path.join(os.readlink(f"/proc/self/fd/{source}"), old))
            return b""
        os.rename(old, new, src_dir_fd=source, dst_dir_fd=self._real(parent))
        return b""

    def rename(self, r: Request, data: bytes) -> bytes:
        return self._rename(r, struct.unpack_from("<Q", data)[0], data[8:])

    def rename2(self, r: Request, data: bytes) -> bytes:
        parent, flags, _ = struct.unpack_from("<Q2I", data)
        if flags:
            raise Errno(errno.ENOSYS)
        return self._rename(r, parent, data[16:])

    def _link_to(self, inode: int, parent: int, name: str) -> None:
        path, fd = self.nodes[inode].path, self._real(parent)
        os.link(path, name, dst_dir_fd=fd, follow_symlinks=True)

    def link(self, r: Request, data: bytes) -> bytes:
        name = _names(data[8:])[0]
        self._link_to(struct.unpack_from("<Q", data)[0], r.node, name)
        return self.nodes.look_up(r.node, name)

    # open files

    @staticmethod
    def _opened(fd: int, flags: int) -> bytes:
        return OPENED.pack(fd, DIRECT_IO if flags & os.O_DIRECT else 0, 0)

    def open(self, r: Request, data: bytes) -> bytes:
        flags = struct.unpack_from("<I", data)[0]
        fd = os.open(self.nodes[r.node].path, flags & ~_NEVER | os.O_CLOEXEC)
        return self._opened(fd, flags)

    def create(self, r: Request, data: bytes) -> bytes:
        flags, mode = struct.unpack_from("<2I", data)
        name, directory = _names(data[16:])[0], self._real(r.node)
        how = flags & ~(os.O_DIRECT | os.O_APPEND) | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(name, how, mode & 0o7777, dir_fd=directory)
        os.fchown(fd, r.uid, r.gid)
        return self.nodes.look_up(r.node, name) + self._opened(fd, flags)

    def read(self, r: Request, data: bytes) -> bytes:
        fd, offset, size = struct.unpack_from("<2QI", data)
        return os.pread(fd, size, offset)

    def write(self, r: Request, data: bytes) -> bytes:
        fd, offset, size = struct.unpack_from("<2QI", data)
        return struct.pack("<2I", os.pwrite(fd, data[40 : 40 + size], offset), 0)

    def flush(self, r: Request, data: bytes) -> bytes:
        self.connection.forget_inode(r.node)
        return b""

    def fsync(self, r: Request, data: bytes) -> bytes:
        # What is written is in the backing files: only a machine that goes down could lose it.
        self.connection.forget_inode(r.node)
        return b""

    def release(self, r: Request, data: bytes) -> bytes:
        os.close(struct.unpack_from("<Q", data)[0])
        return b""

    # directories

    def opendir(self, r: Request, data: bytes) -> bytes:
        with self._lock:
            handle, self._next = self._next, self._next + 1
        self._listings[handle] = self._list(r), r.pid if r.node == IOVS else None
        return OPENED.pack(handle, 0, 0)

    def _list(self, r: Request) -> list[tuple[str, int, int]]:
        directory = stat.S_IFDIR >> 12
        if r.node == VIRT:
            return [(name, inode, directory) for name, (inode, _) in DIRECTORIES.items()]
        if r.node == IOVS:
            return self.links.listed(r.uid)
        if r.node in MODES:
            return []
        with os.scandir(self.nodes[r.node].path) as found:
            out = [(e.name, e.inode(), directory if e.is_dir() else 8) for e in found]
        return out + ([(layout.VIRTUAL, VIRT, directory)] if r.node == ROOT else [])

    def readdir(self, r: Request, data: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<2QI", data)
        entries, out = self._listings[handle][0], bytearray()
        for i in range(offset, len(entries)):
            name, inode, kind = entries[i]
            raw = name.encode()
            record = struct.pack("<2Q2I", inode, i + 1, len(raw), kind) + raw
            record += b"\0" * (-len(record) % 8)
            if len(out) + len(record) > size:
                break
            out += record
        return bytes(out)

    def releasedir(self, r: Request, data: bytes) -> bytes:
        """Whoever made memory and rings in the thread that opened `iovs` is taken for dead."""
        _, pid = self._listings.pop(struct.unpack_from("<Q", data)[0])
        for name in self.links.made_by(pid) if pid is not None else ():
            self.rings.remove(self.links.take(name))
        return b""

    # ioctls

    def ioctl(self, r: Request, data: bytes) -> bytes:
        _, _, command, _, size, _ = struct.unpack_from("<Q2IQ2I", data)
        if (command >> 8) & 0xFF != ord("h") or command & 0xFF not in self._ioctls:
            raise Errno(errno.EINVAL)
        out = self._ioctls[command & 0xFF](r, data[32 : 32 + size])
        return struct.pack("<4I", 0, 0, 0, 0) + out

    def _force_sync(self, r: Request, data: bytes) -> bytes:
        self.connection.forget_inode(r.node)
        return b""

    def _hard_link(self, r: Request, data: bytes) -> bytes:
        self._link_to(r.node, struct.unpack_from("<Q", data)[0], _names(data[8:])[0])
        return b""

    def _remove(self, r: Request, data: bytes) -> bytes:
        if self.rings.knobs["old"]:
            raise Errno(errno.ENOTTY)
        parent, raw, recursive = layout.REMOVAL.unpack(data)
        if parent != r.node:
            raise Errno(errno.EINVAL)
        name = _names(raw)[0]
        path = os.path.join(os.readlink(self.nodes[r.node].path), name)
        if os.path.isdir(path) and not os.path.islink(path):
            self._remove_all(path) if recursive else os.rmdir(path)
        else:
            os.unlink(path)
        self.connection.forget_entry(r.node, name)
        return b""
