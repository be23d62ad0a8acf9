"""The handlers a writable mount has besides: rm evicts, touch renews, setfattr changes the class.

Thin, as kvfs.mount.operations is; what is done, and why removed names linger, is in
kvfs.vfs.change. What would write data or make a name is refused with EPERM: blocks come in
through `put` alone.
"""

from __future__ import annotations

import errno
import stat
from typing import Any

import pyfuse3

from kvfs.mount.operations import Owner, ReadOnly
from kvfs.vfs import Stat, Tree, xattr
from kvfs.vfs.change import GONE_SECONDS, Changes
from kvfs.vfs.listing import Listing
from kvfs.vfs.node import Directory, Folder, Node


class Writable(ReadOnly):
    """The handlers of a mount with -o rw."""

    directory_mode = stat.S_IFDIR | 0o755
    file_mode = stat.S_IFREG | 0o644

    def __init__(self, tree: Tree, owner: Owner) -> None:
        super().__init__(tree, owner)
        self._changes = Changes(tree)

    # removing

    async def unlink(self, parent_inode: int, name: bytes, ctx: Any) -> None:
        await self._storage(self._changes.unlink, self._directory(parent_inode), name)

    async def rmdir(self, parent_inode: int, name: bytes, ctx: Any) -> None:
        self._changes.rmdir(self._directory(parent_inode), name)

    def _absent(self, directory: Directory, name: bytes) -> Any:
        entry = self._changes.gone_entry(directory, name)
        if entry is None:
            raise pyfuse3.FUSEError(errno.ENOENT)
        attr = self._handed_out(entry)
        attr.entry_timeout = attr.attr_timeout = GONE_SECONDS / 2
        return attr

    def _stat(self, node: Node) -> Stat:
        try:
            return super()._stat(node)
        except OSError as e:
            if e.errno != errno.ESTALE or not self._is_gone(node):
                raise
        assert isinstance(node, Folder)
        return self._changes.gone_stat(node)

    def _listing(self, directory: Directory) -> Listing:
        try:
            return super()._listing(directory)
        except OSError as e:
            if e.errno != errno.ESTALE or not self._is_gone(directory):
                raise
        return Listing([])

    def _is_gone(self, node: Node) -> bool:
        return isinstance(node, Folder) and self._changes.is_gone(node)

    # renewing

    async def setattr(self, inode: int, attr: Any, fields: Any, fh: int | None, ctx: Any) -> Any:
        if fields.update_size or fields.update_mode or fields.update_uid or fields.update_gid:
            raise pyfuse3.FUSEError(errno.EPERM)
        node = self._node(inode)
        if fields.update_atime or fields.update_mtime:
            await self._storage(self._changes.renew, node, inode)
        return self._attributes(node, self.tree.stat(node))

    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: Any) -> None:
        node = self._node(inode)
        self._require_class(node, name)
        await self._storage(self._changes.set_class, node, inode, value)

    async def removexattr(self, inode: int, name: bytes, ctx: Any) -> None:
        node = self._node(inode)
        self._require_class(node, name)
        raise pyfuse3.FUSEError(errno.EPERM)  # every block has a class

    def _require_class(self, node: Node, name: bytes) -> None:
        if not name.startswith(xattr.PREFIX):
            raise pyfuse3.FUSEError(errno.EOPNOTSUPP)
        if name != xattr.TTL_CLASS:
            raise pyfuse3.FUSEError(errno.EPERM)

    # what would make or change data

    async def mknod(self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: Any) -> Any:
        raise pyfuse3.FUSEError(errno.EPERM)

    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: Any) -> Any:
        raise pyfuse3.FUSEError(errno.EPERM)

    async def symlink(self, parent_inode: int, name: bytes, target: bytes, ctx: Any) -> Any:
        raise pyfuse3.FUSEError(errno.EPERM)

    async def link(self, inode: int, new_parent_inode: int, new_name: bytes, ctx: Any) -> Any:
        raise pyfuse3.FUSEError(errno.EPERM)

    async def rename(
        self, parent_inode_old: int, name_old: bytes, parent_inode_new: int, name_new: bytes,
        flags: int, ctx: Any,
    ) -> None:  # fmt: skip
        raise pyfuse3.FUSEError(errno.EPERM)

    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: Any
    ) -> Any:  # fmt: skip
        raise pyfuse3.FUSEError(errno.EPERM)
