"""Which node each inode number stands for, as long as the kernel holds on to it.

A number cannot be turned back into a node, so the map keeps what was handed out, with the kernel's
lookup counts. Directories stay until they are forgotten: somebody may stand in one. Of files only
so many are kept; one that falls out is ESTALE, upon which the kernel looks its name up again.

One thread. A forget of what is not known is no error: it may have fallen out.
"""

from __future__ import annotations

from collections import OrderedDict

from kvfs.vfs.node import ROOT_INO, Directory, File, Folder, NamespaceDir, Node, Root

# A file's entry takes about 250 bytes here and four times that in the kernel.
FILES = 1 << 18


class Inodes:
    """Inode number -> node."""

    def __init__(self, root: Root, files: int = FILES) -> None:
        self._limit = files
        self._directories: dict[int, tuple[Directory, int]] = {ROOT_INO: (root, 1)}
        self._files: OrderedDict[int, tuple[File, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._directories) + len(self._files)

    def get(self, ino: int) -> Node | None:
        found = self._directories.get(ino) or self._files.get(ino)
        return None if found is None else found[0]

    def hand_out(self, ino: int, node: Node) -> None:
        """Notes that the kernel was given this number once more."""
        if ino == ROOT_INO:
            return
        if isinstance(node, Root | NamespaceDir | Folder):
            self._directories[ino] = (node, self._directories.get(ino, (node, 0))[1] + 1)
            return
        self._files[ino] = (node, self._files.pop(ino, (node, 0))[1] + 1)
        if len(self._files) > self._limit:
            self._files.popitem(last=False)

    def forget(self, ino: int, count: int) -> None:
        """Takes back `count` of the times the number was given."""
        if ino in self._files:
            node, held = self._files[ino]
            if held > count:
                self._files[ino] = (node, held - count)
            else:
                del self._files[ino]
        elif ino in self._directories and ino != ROOT_INO:
            directory, held = self._directories[ino]
            if held > count:
                self._directories[ino] = (directory, held - count)
            else:
                del self._directories[ino]
