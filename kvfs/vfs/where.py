"""Where the blocks of the tree are stored, as the local index has it now.

Main lines come from a cache; a block's own run is looked up again each time, so what was evicted
or expired is not there any more, at once. Reads the local index only. Thread-safe.
"""

from __future__ import annotations

import errno
import os
import time

from kvfs.index.schema import Segment
from kvfs.namespace import Namespace
from kvfs.store import Store
from kvfs.vfs.file import Place
from kvfs.vfs.line import Line, Lines, Piece, Stretch, get
from kvfs.vfs.node import BlockFile, Folder

_TTL_SECONDS = 1.0


def stale() -> OSError:
    """What stands for a node that is gone: the kernel looks its name up again."""
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE))


class Where:
    """Finds lines, runs and blocks of one store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.lines = Lines(store.index)
        self._ttl_ms: dict[int, int] = {}
        self._ttl_read = -_TTL_SECONDS

    def line(self, folder: Folder, *, fresh: bool = False) -> Line | None:
        """A folder's main line (see Lines.get); None if the folder is gone."""
        if not self.reachable(folder):
            return None
        now = self.store.now_ms()
        return self.lines.get(folder.ns.number, folder.head, folder.block, now, fresh=fresh)

    def with_forks(self, folder: Folder) -> tuple[Line, list[tuple[int, list[Piece]]]]:
        """A folder's main line now and the forks off it. Raises OSError(ESTALE)."""
        found = None
        if self.reachable(folder):
            now = self.store.now_ms()
            found = self.lines.with_forks(folder.ns.number, folder.head, folder.block, now)
        if found is None:
            raise stale()
        return found

    def reachable(self, folder: Folder) -> bool:
        """What a folder forks off from is there: an expired prefix hides all that follows it."""
        now = self.store.now_ms()
        while (parent := folder.parent) is not None:
            line = self.lines.get(parent.ns.number, parent.head, parent.block, now)
            if line is None or not line.first < folder.block <= line.end:
                return False
            folder = parent
        return True

    def piece(self, folder: Folder) -> Piece:
        """The index row of a folder's first run. Raises OSError(ESTALE), IndexFault."""
        with self.store.index.env().read() as txn:
            piece = get(txn, folder.ns.number, folder.head)
        if piece is None or piece.expires_ms <= self.store.now_ms() or not self.reachable(folder):
            raise stale()
        return piece

    def place(self, folder: Folder, number: int) -> Place | None:
        """Where a block of a folder's main line is stored; None if there is none."""
        for fresh in (False, True):
            line = self.line(folder, fresh=fresh)
            found = None if line is None else line.find(number)
            if found is not None:
                place = self._still(folder.ns, *found)
                if place is not None:
                    return place
        return None

    def present(self, node: BlockFile) -> Place:
        """The same for a node. Raises OSError(ESTALE)."""
        place = self.place(node.folder, node.number)
        if place is None:
            raise stale()
        return place

    def _still(self, ns: Namespace, stretch: Stretch, i: int) -> Place | None:
        """The place of a run's i-th block if the run is where it was; its lease is read anew."""
        old = stretch.piece
        with self.store.index.env().read() as txn:
            now = get(txn, ns.number, old.head)
        if now is None or (now.seg, now.slot) != (old.seg, old.slot) or i >= now.blocks:
            return None
        if now.expires_ms <= self.store.now_ms():
            return None
        return _place(Stretch(now, stretch.hashes), i, self.store.index.segment(now.seg))

    def places(self, line: Line, first: int, end: int) -> list[Place]:
        """The places of the blocks first..end-1 of the chain, as a line has them."""
        out = []
        for number in range(first, min(end, line.end)):
            found = line.find(number)
            if found is not None:
                stretch, i = found
                out.append(_place(stretch, i, self.store.index.segment(stretch.piece.seg)))
        return out

    def used_ms(self, lease: Piece | Place) -> int:
        """When a run was last stored or renewed: its expiry less what its class gives."""
        if time.monotonic() - self._ttl_read > _TTL_SECONDS or lease.class_id not in self._ttl_ms:
            classes, names = self.store.classes(), self.store.index.class_names()
            self._ttl_ms = {n: classes[name] * 1000 for n, name in names.items()}
            self._ttl_read = time.monotonic()
        renewed = lease.expires_ms - self._ttl_ms.get(lease.class_id, 0)
        return max(lease.written_ms, min(renewed, self.store.now_ms()))


def _place(stretch: Stretch, i: int, segment: Segment) -> Place:
    p = stretch.piece
    return Place(
        p.block + i, stretch.hash(i), stretch.parent(i), segment, p.slot + i,
        p.written_ms, p.expires_ms, p.class_id, p.head, i,
    )  # fmt: skip
