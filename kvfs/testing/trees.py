"""A small store with one namespace, and its tree, for tests in process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvfs.frames import Entry as JournalEntry
from kvfs.frames import RunEntry, SegmentEntry
from kvfs.index.apply import Applier
from kvfs.namespace import Namespace
from kvfs.segment import Geometry
from kvfs.store import Store
from kvfs.testing.chains import Clock, grow, identity
from kvfs.vfs import Entry, Tree
from kvfs.vfs.node import Directory, Folder, NamespaceDir

_PHANTOM = b"phantom-segment."


@dataclass
class Garden:
    """A store, its one namespace, and what the tree shows of it."""

    store: Store
    ns: Namespace
    tree: Tree
    clock: Clock

    @property
    def space(self) -> NamespaceDir:
        return NamespaceDir(self.ns)

    def put(self, *blocks: int, ttl_class: str | None = None) -> None:
        grow(self.store, self.ns, blocks, ttl_class=ttl_class)

    def names(self, directory: Directory) -> list[str]:
        return [e.name.decode() for e in self.tree.listing(directory).entries()]

    def folders(self, directory: Directory) -> list[Folder]:
        entries = self.tree.listing(directory).entries()
        return [e.node for e in entries if isinstance(e.node, Folder)]

    def entry(self, directory: Directory, name: str) -> Entry:
        found = self.tree.lookup(directory, name.encode())
        assert found is not None, name
        return found


@contextlib.contextmanager
def garden(store_dir: Path, index_dir: Path) -> Iterator[Garden]:
    """Blocks of 4 tokens and 64 bytes; classes agent (100 s) and chatbot (1,000 s)."""
    clock = Clock()
    with Store.init(
        store_dir, index=str(index_dir), clock=clock, durability="none", extent=4096,
        classes={"agent": 100, "chatbot": 1000},
    ) as store:  # fmt: skip
        ns = store.create_namespace(identity())
        yield Garden(store, ns, Tree(store), clock)


def phantom_runs(
    store: Store, ns: Namespace, runs: list[tuple[int, bytes, bytes]], *,
    heads: bytes = b"", ttl_seconds: int = 3600,
) -> None:  # fmt: skip
    """Puts runs into the index alone, whose records do not exist: for listings of any shape.

    runs: (number of the first block, parent hash, hashes of the blocks); heads: first hashes of
    runs that lead to those whose parent is not the first block of a run.
    """
    now = store.now_ms()
    geometry = Geometry.fit(ns.stride, 4 << 20)
    slot = 0
    entries: list[JournalEntry] = [
        SegmentEntry(
            _PHANTOM, ns.nsid, ns.stride, geometry.extent, geometry.first, now, ttl_seconds,
            "chatbot", "seg/phantom.seg",
        )
    ]  # fmt: skip
    for block, parent, hashes in runs:
        expires = now + ttl_seconds * 1000
        entries.append(
            RunEntry(ns.nsid, _PHANTOM, slot, block, now + slot, expires, parent, heads, hashes)
        )
        slot += len(hashes) // 16

    def apply(applier: Applier) -> None:
        for entry in entries:
            applier.apply(entry)

    store.index.write(apply)
