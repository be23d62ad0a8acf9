"""FUSE requests into questions to the tree, and its answers into what pyfuse3 wants. No more.

Runs in the mount's own process, all handlers in one trio loop. They ask the local index inline;
what may take long (a whole listing) or may stall (the store) runs in a thread, with a deadline for
the latter. No handler holds anything across an await but the lock of its open file.

What the kernel caches, and why it is never wrong: an inode number stands for a content for ever,
so pages and sizes under it stay true for any time. What may be out of date for a moment is a
*name*: a block that another process evicted can still be seen with `stat` for NAME_SECONDS, since
a tool that lists 100,000 files and then looks at each needs the names so long. Opening it is
answered ESTALE, at which the kernel looks the name up anew. Nothing is ever invalidated from here:
a notification that meets a request on the same inode blocks for ever.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import pyfuse3
import trio

from kvfs.errors import DeadlineError
from kvfs.mount.guard import GuardedOperations
from kvfs.mount.threads import Threads
from kvfs.vfs import Entry, Stat, Tree, xattr
from kvfs.vfs.file import Content
from kvfs.vfs.inodes import Inodes
from kvfs.vfs.listing import Listing
from kvfs.vfs.node import (
    NAME_MAX,
    ROOT_INO,
    Directory,
    Folder,
    NamespaceDir,
    Node,
    Root,
    Tokens,
    directory_ino,
)

T = TypeVar("T")

NAME_SECONDS = 10.0
# Children come and go, and `tokens` grows with its line: these are asked for again soon.
CHANGING_SECONDS = 1.0
STORAGE_SECONDS = 30.0
STORAGE_THREADS = 8
_BLOCK_BYTES = 128 << 10  # st_blksize: what one buffered read request asks for
_FIRST_COOKIE = 3  # 1 and 2 mean something to NFS

# What the mount says of itself, on its root.
_OWN = (b"user.kvfs.requests", b"user.kvfs.inodes", b"user.kvfs.pid")


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose the files are and who may do what with them."""

    uid: int
    gid: int
    umask: int = 0


class _OpenDirectory:
    def __init__(self, node: Directory) -> None:
        self.node = node
        self.listing = Listing([])


class _OpenFile:
    def __init__(self, ino: int, content: Content) -> None:
        self.ino = ino
        self.content = content
        self.lock = trio.Lock()  # of many readers one waits for the storage in a thread


@dataclass(slots=True)
class _Held:
    """What is said of a file that is open, whatever becomes of its names. count: how often."""

    node: Node
    stat: Stat
    count: int = 0


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """Bounds all the waiting for the storage in the block. Raises DeadlineError."""
    try:
        with trio.fail_after(STORAGE_SECONDS):
            yield
    except trio.TooSlowError:
        raise DeadlineError(f"the storage did not answer within {STORAGE_SECONDS:.0f} s") from None


class ReadOnly(GuardedOperations):
    """The handlers of a mount that changes nothing."""

    directory_mode = stat.S_IFDIR | 0o555
    file_mode = stat.S_IFREG | 0o444

    def __init__(self, tree: Tree, owner: Owner) -> None:
        super().__init__()
        self.requests = Counter()
        self.tree = tree
        self._owner = owner
        self._inodes = Inodes(tree.root)
        self._files: dict[int, _OpenFile] = {}
        self._directories: dict[int, _OpenDirectory] = {}
        self._handles = 0
        self._held: dict[int, _Held] = {}
        self.threads = Threads()
        self._limiter = trio.CapacityLimiter(STORAGE_THREADS)

    # helpers

    def _node(self, ino: int) -> Node:
        if ino in self._held:
            return self._held[ino].node
        node = self._inodes.get(ino)
        if node is None:
            raise pyfuse3.FUSEError(errno.ESTALE)
        return node

    def _directory(self, ino: int) -> Directory:
        node = self._node(ino)
        if not isinstance(node, Root | NamespaceDir | Folder):
            raise pyfuse3.FUSEError(errno.ENOTDIR)
        return node

    def _attributes(self, node: Node, found: Stat) -> Any:
        attr = pyfuse3.EntryAttributes()
        attr.st_ino = found.ino
        changing = found.directory or isinstance(node, Tokens)
        attr.attr_timeout = CHANGING_SECONDS if changing else NAME_SECONDS
        attr.entry_timeout = CHANGING_SECONDS if isinstance(node, Tokens) else NAME_SECONDS
        mode = self.directory_mode if found.directory else self.file_mode
        attr.st_mode = mode & ~self._owner.umask
        attr.st_nlink = 1
        attr.st_uid, attr.st_gid = self._owner.uid, self._owner.gid
        attr.st_size, attr.st_blocks = found.size, -(-found.size // 512)
        attr.st_blksize = _BLOCK_BYTES
        attr.st_mtime_ns = attr.st_ctime_ns = attr.st_birthtime_ns = found.written_ms * 1_000_000
        attr.st_atime_ns = found.used_ms * 1_000_000
        return attr

    def _handed_out(self, entry: Entry) -> Any:
        self._inodes.hand_out(entry.stat.ino, entry.node)
        return self._attributes(entry.node, entry.stat)

    async def _storage(self, work: Callable[..., T], *args: Any) -> T:
        """Runs what reads the store in a thread; gives up waiting for it in the end."""
        with _patience():
            return await self.threads.run(work, *args, limiter=self._limiter)

    def _handle(self) -> int:
        self._handles += 1
        return self._handles

    # what a writable mount answers otherwise

    def _absent(self, directory: Directory, name: bytes) -> Any:
        raise pyfuse3.FUSEError(errno.ENOENT)

    def _stat(self, node: Node) -> Stat:
        return self.tree.stat(node)

    def _listing(self, directory: Directory) -> Listing:
        return self.tree.listing(directory)

    # names and attributes

    async def lookup(self, parent_inode: int, name: bytes, ctx: Any = None) -> Any:
        if len(name) > NAME_MAX:
            raise pyfuse3.FUSEError(errno.ENAMETOOLONG)
        directory = self._directory(parent_inode)
        entry = await self._look(directory, name)
        return self._absent(directory, name) if entry is None else self._handed_out(entry)

    async def _look(self, directory: Directory, name: bytes) -> Entry | None:
        if name in (b".", b".."):  # an NFS server's way to find a directory again
            node = directory if name == b"." else _parent(directory)
            return Entry(name, node, self.tree.stat(node))
        if self.tree.is_quick(directory):
            return self.tree.lookup(directory, name)
        return await trio.to_thread.run_sync(self.tree.lookup, directory, name)

    def forget(self, inode_list: list[tuple[int, int]]) -> None:
        self.requests["forget"] += len(inode_list)
        for ino, count in inode_list:
            self._inodes.forget(ino, count)

    async def getattr(self, inode: int, ctx: Any = None) -> Any:
        node = self._node(inode)
        held = self._held.get(inode)
        found = self._stat(node) if held is None else held.stat
        if found.ino != inode:
            raise pyfuse3.FUSEError(errno.ESTALE)
        return self._attributes(node, found)

    async def statfs(self, ctx: Any) -> Any:
        free, total = await self._storage(self.tree.store.backend.free_bytes)
        blocks = self.tree.store.index.counters().get("blocks", 0)
        out = pyfuse3.StatvfsData()
        out.f_bsize = out.f_frsize = 4096
        out.f_blocks, out.f_bfree, out.f_bavail = total // 4096, free // 4096, free // 4096
        out.f_files, out.f_ffree, out.f_favail = blocks, 0, 0
        out.f_namemax = NAME_MAX
        return out

    # files

    async def open(self, inode: int, flags: int, ctx: Any) -> Any:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise pyfuse3.FUSEError(errno.EPERM)
        node = self._node(inode)
        if isinstance(node, Root | NamespaceDir | Folder):
            raise pyfuse3.FUSEError(errno.EISDIR)
        found = self.tree.stat(node)
        if found.ino != inode:  # else fstat would say so of what is open
            raise pyfuse3.FUSEError(errno.ESTALE)
        handle, content = self._handle(), self.tree.open(node, inode)
        self._files[handle] = _OpenFile(inode, content)
        self._held.setdefault(inode, _Held(node, found)).count += 1
        return pyfuse3.FileInfo(fh=handle, keep_cache=True)

    async def read(self, fh: int, off: int, size: int) -> bytes | memoryview:
        file = self._files[fh]
        if file.content.ready:
            return file.content.read(off, size)
        with _patience():  # of who waits for others that read the same file, too
            async with file.lock:
                if file.content.ready:
                    return file.content.read(off, size)
                return await self.threads.run(file.content.read, off, size, limiter=self._limiter)

    async def flush(self, fh: int) -> None:
        raise pyfuse3.FUSEError(errno.ENOSYS)  # once; then the kernel asks no more

    async def release(self, fh: int) -> None:
        file = self._files.pop(fh)
        file.content.close()
        held = self._held[file.ino]
        held.count -= 1
        if not held.count:
            del self._held[file.ino]

    # directories

    async def opendir(self, inode: int, ctx: Any) -> int:
        node = self._directory(inode)
        self._stat(node)  # ESTALE if it is gone: then its name is looked up again
        handle = self._handle()
        self._directories[handle] = _OpenDirectory(node)
        return handle

    async def readdir(self, fh: int, start_id: int, token: Any) -> None:
        opened = self._directories[fh]
        if start_id == 0:  # the first call, and after rewinddir()
            opened.listing = await trio.to_thread.run_sync(self._listing, opened.node)
        at = max(0, start_id - _FIRST_COOKIE + 1)
        for name, node in ((b".", opened.node), (b"..", _parent(opened.node)))[at:]:
            attr = self._attributes(node, Stat(directory_ino(node), True, 0, 0, 0))
            if not pyfuse3.readdir_reply(token, name, attr, at + _FIRST_COOKIE):
                return
            at += 1  # the kernel counts no lookup for these two
        for entry in opened.listing.entries(at - 2):
            attr = self._attributes(entry.node, entry.stat)
            if not pyfuse3.readdir_reply(token, entry.name, attr, at + _FIRST_COOKIE):
                return
            self._inodes.hand_out(entry.stat.ino, entry.node)
            at += 1

    async def releasedir(self, fh: int) -> None:
        del self._directories[fh]

    # extended attributes

    async def getxattr(self, inode: int, name: bytes, ctx: Any) -> bytes:
        if not name.startswith(xattr.PREFIX):
            raise pyfuse3.FUSEError(errno.ENODATA)
        if inode == ROOT_INO and name in _OWN:
            return self._own_attribute(name).encode()
        node = self._node(inode)
        if name == xattr.CHECKSUM:
            found = await self._storage(xattr.value, self.tree, node, name, inode)
        else:
            found = xattr.value(self.tree, node, name, inode)
        if found is None:
            raise pyfuse3.FUSEError(errno.ENODATA)
        return found

    def _own_attribute(self, name: bytes) -> str:
        if name == b"user.kvfs.pid":
            return str(os.getpid())
        if name == b"user.kvfs.inodes":
            return str(len(self._inodes))
        return " ".join(f"{op}={n}" for op, n in sorted(self.requests.items()))

    async def listxattr(self, inode: int, ctx: Any) -> list[bytes]:
        own = list(_OWN) if inode == ROOT_INO else []
        return xattr.names(self._node(inode)) + own


def _parent(directory: Directory) -> Directory:
    """What `..` is. The root's is itself: the kernel puts the real one in its place."""
    if isinstance(directory, Folder):
        return directory.parent or NamespaceDir(directory.ns)
    return Tree.root
