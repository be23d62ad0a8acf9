"""What a writable tree lets one do: evict, renew, change the TTL class.

Everything goes through the store's own operations. One thing is added for `rm -r`: evicting a
block takes all that follows it, so the names `rm` goes on to remove are gone already. They count
as there for a few seconds, renewed with each that is asked for, and removing them does nothing.

Blocking: publishes to the store. Thread-safe.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from dataclasses import dataclass, field

from kvfs.chain import HASH_BYTES
from kvfs.vfs.line import Line
from kvfs.vfs.node import (
    SHORT_HASH,
    BlockFile,
    Directory,
    Entry,
    Folder,
    Node,
    Stat,
    Tokens,
    folder_ino,
    gone_ino,
    parse_block,
    parse_folder,
)
from kvfs.vfs.tree import TOKENS, Tree
from kvfs.vfs.where import stale

GONE_SECONDS = 5.0


def _key(folder: Folder) -> tuple[bytes, bytes]:
    return folder.ns.nsid, folder.head


def refused(code: int) -> OSError:
    return OSError(code, os.strerror(code))


@dataclass(slots=True)
class _Departed:
    """A folder of which this mount evicted the blocks from `first` on."""

    folder: Folder
    first: int
    until: float
    removed: set[bytes] = field(default_factory=set)
    """The names that were removed since: these are gone for good."""


class Changes:
    """Changes to the store behind a tree, by node."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.store = tree.store
        self._departed: dict[tuple[bytes, bytes], _Departed] = {}
        self._lock = threading.Lock()

    # removing

    def unlink(self, directory: Directory, name: bytes) -> None:
        """Evicts a block and all that follows it. Raises OSError(ENOENT, EPERM), KvfsError."""
        if not isinstance(directory, Folder):
            raise refused(errno.EPERM)
        if name == TOKENS:
            self._removed(directory, name)
            return  # it goes with its blocks, and must not keep `rm -r` from removing them
        number = parse_block(name)
        place = None if number is None else self.tree.where.place(directory, number)
        if number is None or (place is None and not self._lingers(directory, number, name)):
            raise refused(errno.ENOENT)
        if place is not None:
            self._note(directory, number)
            self.store.remove_blocks(directory.ns, place.head, place.at)
        self._removed(directory, name)

    def rmdir(self, directory: Directory, name: bytes) -> None:
        """Removes a folder whose blocks are gone, which has happened already."""
        if parse_folder(name) is None:
            raise refused(errno.EPERM)
        entry = self.tree.lookup(directory, name)
        if entry is not None:
            raise refused(errno.ENOTEMPTY if isinstance(entry.node, Folder) else errno.EPERM)
        gone = self.gone_entry(directory, name)
        with self._lock:
            if gone is not None and isinstance(gone.node, Folder):
                self._departed.pop(_key(gone.node), None)
        if isinstance(directory, Folder):
            self._removed(directory, name)

    def _note(self, folder: Folder, first: int) -> None:
        now = time.monotonic()
        with self._lock:
            self._departed = {k: d for k, d in self._departed.items() if d.until > now}
            known = self._departed.setdefault(_key(folder), _Departed(folder, first, now))
            known.first = min(first, known.first)
            known.until = now + GONE_SECONDS
            known.removed.clear()

    def _removed(self, folder: Folder, name: bytes) -> None:
        with self._lock:
            known = self._departed.get(_key(folder))
            if known is not None:
                known.removed.add(name)

    def _lingers(self, folder: Folder, number: int, name: bytes = b"") -> bool:
        """A block of this number went when another was evicted, a moment ago; its name stays."""
        now = time.monotonic()
        with self._lock:
            known = self._departed.get(_key(folder))
            if known is None or known.until <= now or number < known.first:
                return False
            known.until = now + GONE_SECONDS
            return name not in known.removed

    def is_gone(self, folder: Folder) -> bool:
        """The folder itself went so: it still is an empty directory for a moment."""
        at: Folder | None = folder
        while at is not None:
            if self._lingers(at, at.block):
                return True
            if at.parent is not None and self._lingers(at.parent, at.block - 1):
                return True
            at = at.parent
        return False

    def gone_entry(self, directory: Directory, name: bytes) -> Entry | None:
        """What stands for a name that went so; None if it did not, or was removed since."""
        if isinstance(directory, Folder):
            number = directory.block if name == TOKENS else parse_block(name)
            if number is not None and self._lingers(directory, number, name):
                ino = gone_ino(directory.ns.nsid, directory.head, name)
                return Entry(name, BlockFile(directory, number), Stat(ino, False, 0, 0, 0))
        named = parse_folder(name)
        folder = None if named is None else self._gone_folder(directory, name, *named)
        return None if folder is None else Entry(name, folder, self.gone_stat(folder))

    def _gone_folder(
        self, directory: Directory, name: bytes, block: int, part: bytes
    ) -> Folder | None:
        parent = directory if isinstance(directory, Folder) else None
        with self._lock:
            known = [d.folder for d in self._departed.values()]
        for folder in known:
            if folder.head.startswith(part[:SHORT_HASH]) and folder.parent is parent:
                return folder if self._lingers(folder, block) else None
        if parent is None or not self._lingers(parent, block - 1, name):
            return None
        return Folder(parent.ns, part.ljust(HASH_BYTES, b"\0"), block, parent)

    def gone_stat(self, folder: Folder) -> Stat:
        return Stat(folder_ino(folder.ns.nsid, folder.head), True, 0, 0, 0)

    # renewing

    def renew(self, node: Node, ino: int) -> None:
        """Renews a block (of this inode number) and what it builds on, or a folder's whole line.

        Raises OSError(ESTALE, EPERM), KvfsError.
        """
        folder, end = self._extent(node, ino)
        heads: list[bytes] = []
        ns = folder.ns
        while True:
            heads += _heads(self._line(folder), end)
            if folder.parent is None:
                break
            folder, end = folder.parent, folder.block
        self.store.renew_runs(ns, heads, None)

    def set_class(self, node: Node, ino: int, name: bytes) -> None:
        """Moves a block's run, or all runs of a folder's line, to another TTL class.

        Raises OSError(ESTALE, EPERM), InputError for an unknown class.
        """
        folder, _ = self._extent(node, ino)
        ttl = self.store.catalog.ttl(name.decode("ascii", "replace"))
        if isinstance(node, BlockFile):
            heads = [self.tree.block(node, ino).head]
        else:
            heads = _heads(self._line(folder), None)
        self.store.renew_runs(folder.ns, heads, ttl)

    def _extent(self, node: Node, ino: int) -> tuple[Folder, int | None]:
        """The folder, and behind which block its line does not matter (None: all of it does)."""
        if isinstance(node, BlockFile):
            self.tree.block(node, ino)
            return node.folder, node.number + 1
        if isinstance(node, Tokens):
            return node.folder, None
        if isinstance(node, Folder):
            return node, None
        raise refused(errno.EPERM)

    def _line(self, folder: Folder) -> Line:
        line = self.tree.where.line(folder, fresh=True)
        if line is None:
            raise stale()
        return line


def _heads(line: Line, end: int | None) -> list[bytes]:
    """The first hashes of a line's runs that begin before block `end`."""
    pieces = (s.piece for s in line.stretches)
    return [p.head for p in pieces if end is None or p.block < end]
