"""Writers that never lived: journals as a fleet of them would have left, for tests of followers.

    fleet = Fleet(store, ns)
    writer = fleet.writer()                   # a name and an id of its own
    writer.publish(fleet.run(writer, 8))      # a run of 8 random blocks in a made-up segment
    writer.end()                              # sealed: its writer is gone

The entries are sound, the segments they tell of do not exist: such blocks are found by check and
cannot be fetched. Nothing here is for stores that anybody needs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvfs.backend import Backend
from kvfs.frames import Entry, RunEntry, SealEntry, SegmentEntry
from kvfs.geometry import Geometry
from kvfs.journal import Header, JournalWriter
from kvfs.namespace import Namespace
from kvfs.segment import WRITER_BYTES, segment_id, segment_path
from kvfs.store import Store

TTL_SECONDS = 30 * 86_400


@dataclass
class MadeUp:
    """A writer of journals; `publish`, `roll` and `end` write to the store at once."""

    backend: Backend
    name: str
    id: bytes
    store: bytes
    now_ms: int
    number: int = 0
    before: int = 0
    slot: int = 0
    segment: bytes = b""
    journal: JournalWriter | None = field(default=None, repr=False)

    def publish(self, *entries: Entry) -> int:
        """Appends entries; returns the offset behind them."""
        if self.journal is None:
            header = Header(self.id, self.number, self.before, self.store, self.now_ms)
            self.journal = JournalWriter(self.backend, self.name, header)
        self.journal.append(entries)
        return self.journal.end

    def roll(self, *, sealed: bool = True) -> None:
        """Goes on in another journal; not sealed: as after an error of the storage."""
        if sealed:
            self.publish(SealEntry(self.now_ms, False))
        self.before = self._close()
        self.number += 1

    def end(self) -> None:
        """Seals the journal for good."""
        self.publish(SealEntry(self.now_ms, True))
        self._close()

    def kill(self) -> None:
        """Leaves the journal as it is."""
        self._close()

    def _close(self) -> int:
        journal, self.journal = self.journal, None
        if journal is None:
            return 0
        journal.close()
        return journal.end


class Fleet:
    """Writers of one namespace of a store."""

    def __init__(self, store: Store, ns: Namespace, backend: Backend | None = None) -> None:
        """backend: the storage they write to, if not the store's."""
        self.store = store
        self.ns = ns
        self.backend = backend or store.backend
        self._geometry = Geometry.fit(ns.stride, store.config.extent)

    def writer(self) -> MadeUp:
        writer_id = os.urandom(WRITER_BYTES)
        name = f"madeup-{writer_id.hex()}"
        return MadeUp(self.backend, name, writer_id, self.store.uuid, self.store.now_ms())

    def run(
        self, writer: MadeUp, blocks: int, *, parent: bytes | None = None, block: int = 0,
        heads: bytes = b"",
    ) -> Iterator[Entry]:  # fmt: skip
        """The entries of a run of random blocks: `writer.publish(*fleet.run(writer, 8))`."""
        if not writer.segment:
            yield self._segment(writer)
        now = writer.now_ms
        expires = now + TTL_SECONDS * 1000
        slot, writer.slot = writer.slot, writer.slot + blocks
        yield RunEntry(
            self.ns.nsid, writer.segment, slot, block, now, expires,
            self.ns.root if parent is None else parent, heads, os.urandom(16 * blocks),
        )  # fmt: skip

    def _segment(self, writer: MadeUp) -> SegmentEntry:
        writer.segment = segment_id(writer.id, 0)
        path = segment_path("chatbot", "20270101", self.ns.name, writer.name, 0)
        g = self._geometry
        return SegmentEntry(
            writer.segment, self.ns.nsid, self.ns.stride, g.extent, g.first, writer.now_ms,
            TTL_SECONDS, "chatbot", path,
        )  # fmt: skip
