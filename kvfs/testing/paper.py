"""Hosts on paper: real indexes and the real putter, but journals that are Python lists.

So thousands of interleavings fit into seconds, and each entry can reach each host at any time. What
they store has no bytes. Nothing here is for stores that anybody needs.

    hosts = [PaperHost(number, directory) for number in range(3)]
    hosts[0].put((1, 2, 3))
    hosts[1].follow(hosts[0], 2)              # reads two more entries of its journal
    assert hosts[1].check((1, 2, 3)) == 3
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvfs.catalog import TtlClass
from kvfs.chain_entries import KeepEntry
from kvfs.frames import (
    DropEntry,
    Entry,
    MoveEntry,
    NamespaceEntry,
    RunEntry,
    SegmentEntry,
    Source,
)
from kvfs.gc.merging import chains
from kvfs.gc.restating import restated, unheard
from kvfs.index import Index
from kvfs.index.schema import LIVE
from kvfs.namespace import Namespace
from kvfs.put import Putter
from kvfs.removal import heard_ms, removals_for, removals_for_all
from kvfs.segment_writer import Written
from kvfs.testing.blocks import small_identity
from kvfs.under_way import UnderWay

IDENTITY = small_identity(block_tokens=1, row_bytes=16)
TTL = TtlClass("short", 100)
Prompt = tuple[int, ...]


class Paper:
    """What the putter needs of a writer: segments without bytes, a journal that is a list."""

    durable = False

    def __init__(self, host: PaperHost) -> None:
        self.host = host
        self.room = 1000
        self._slot = 0
        self.number = 0
        self.under_way = UnderWay()

    def now_ms(self) -> int:
        return self.host.now

    def segment_id(self, number: int | None = None) -> bytes:
        number = self.number if number is None else number
        return bytes([self.host.number]) * 12 + number.to_bytes(4, "little")

    def begin_segment(self, room: int) -> None:
        """The next segment takes `room` blocks."""
        self.number, self._slot, self.room = self.number + 1, 0, room
        entry = SegmentEntry(
            self.segment_id(), IDENTITY.nsid, 4096, 1 << 20, 4096, self.host.now,
            TTL.seconds, TTL.name, f"seg/{self.host.number}-{self.number}",
        )  # fmt: skip
        self.host.publish([entry])

    def write_run(self, ns: Any, run: Any, rows: list[Any], *_: Any) -> Written:
        if self._slot >= self.room:
            self.begin_segment(1000)
        count = min(len(rows), self.room - self._slot)
        header = SimpleNamespace(segment_id=self.segment_id())
        written = Written(SimpleNamespace(header=header), self._slot, count, None)  # type: ignore[arg-type]
        self._slot += count + self.host.number % 2
        return written

    def publish(self, runs: list[tuple[Written, RunEntry]], others: Any, counters: Any) -> None:
        self.host.publish([*(entry for _, entry in runs), *others])


class PaperHost:
    """An index, a journal, and how far it has read the journals of the others."""

    def __init__(self, number: int, root: Path) -> None:
        self.number = number
        self.index = Index(str(root / f"host{number}"), b"S" * 16)
        self.reset()

    def reset(self) -> None:
        def wipe(txn: Any) -> None:
            with txn.cursor() as cursor:
                keys = [bytes(key) for key in cursor.iternext(values=False)]
            for key in keys:
                txn.delete(key)

        self.index.env().write(wipe)
        self.index._segments.clear()
        self.now = 1000
        self.journal: list[Entry] = []
        self.read: dict[int, int] = {}
        self.publish([NamespaceEntry(IDENTITY.nsid, json.dumps(IDENTITY.to_json()))])
        self.ns = Namespace(IDENTITY, self.index.namespaces()[IDENTITY.nsid][0], "short")
        self.writer = Paper(self)
        self.writer.begin_segment(1000)

    def publish(self, entries: list[Entry]) -> None:
        self.journal += entries
        self.apply(entries)

    def apply(self, entries: list[Entry]) -> None:
        def work(applier: Any) -> None:
            for entry in entries:
                applier.apply(entry)

        self.index.write(work)

    def check(self, prompt: Prompt) -> int:
        return self.index.check(self.ns.number, self.ns.hasher(list(prompt)), self.now).blocks

    def put(self, prompt: Prompt) -> None:
        putter = Putter(self.index, self.writer, {1: TTL.seconds})  # type: ignore[arg-type]
        views = [memoryview(bytes(16))] * len(prompt)
        result = putter.put(self.ns, self.ns.hasher(list(prompt)), views, 0, TTL)
        assert result.error is None and result.complete

    def cut(self, prompt: Prompt, at: int) -> None:
        hasher = self.ns.hasher(list(prompt))
        for match in self.index.check(self.ns.number, hasher, self.now).runs:
            if match.block <= at < match.block + match.shared:
                head = hasher.digest(match.block + 1)
                entries, _ = removals_for(self.index, self.ns, head, at - match.block, self.now)
                self.publish(entries)

    def remove_all(self, now_ms: int) -> None:
        """Removes all of the namespace, as of some time."""
        for entries, _ in removals_for_all(self.index, self.ns, now_ms):
            self.publish(entries)

    def runs_of(self, prompt: Prompt) -> list[tuple[int, int, bytes]]:
        """Of each run that shows a part of a prompt: its first block, how many, its path heads."""
        hasher = self.ns.hasher(list(prompt))
        out, heads = [], b""
        for match in self.index.check(self.ns.number, hasher, self.now).runs:
            out.append((match.block, match.shared, heads))
            heads += hasher.digest(match.block + 1)
        return out

    def keep(self, prompt: Prompt, expires_ms: int, *, force: bool = False) -> int:
        """Renews what is stored of a prompt, as a hit does; returns how many blocks."""
        hasher, n = self.ns.hasher(list(prompt)), 0
        when_ms = heard_ms(self.index, self.now)
        entries: list[Entry] = []
        for block, count, heads in self.runs_of(prompt):
            n = block + count
            hashes = hasher.hashes(n, first=block)
            entries.append(KeepEntry(
                IDENTITY.nsid, expires_ms, when_ms, block, "", force, heads, hashes
            ))  # fmt: skip
        self.publish(entries)
        return n

    def clean(self, segment: bytes, told: list[RunEntry], gap: int) -> None:
        """Moves what shows of a segment into a new one and drops it, as kvfs.gc.cleaner does."""

        def decide(applier: Any) -> list[Entry]:
            number = applier.segment_number(segment)
            row = None if number is None else applier.segment(number)
            if row is None or row.state != LIVE or unheard(applier, row, told, self.now):
                return []
            runs = [r for r in applier.runs_of(row.number) if r.expires_ms > self.now]
            entries: list[Entry] = []
            for chain in chains(runs, lambda _: 100_000, 1 << 40):
                # With a gap each run stays one of its own, as where a segment ends.
                for part in [[r] for r in chain] if gap else [chain]:
                    hashes = b"".join(r.hashes for r in part)
                    sources = tuple(Source(segment, r.slot, r.count) for r in part)
                    written, expires = part[0].written_ms, max(r.expires_ms for r in part)
                    run = RunEntry(
                        IDENTITY.nsid, self.writer.segment_id(), self.writer._slot,
                        part[0].block, written, expires, part[0].parent, b"", hashes,
                    )  # fmt: skip
                    self.writer._slot += run.count + gap
                    entries.append(MoveEntry(self.now, sources, run))
            moved = {(r.ns, r.head): r.count for r in runs}
            entries += restated(applier, row, told, moved, self.now)
            return [*entries, DropEntry(segment, self.now)]

        self.writer.begin_segment(1000)
        self.publish(self.index.query(decide))
        self.writer.begin_segment(1000)

    def follow(self, other: PaperHost, count: int) -> None:
        at = self.read.get(other.number, 0)
        entries = other.journal[at : at + count]
        self.read[other.number] = at + len(entries)
        self.apply(entries)


def settle(hosts: list[PaperHost]) -> None:
    """Every host reads every journal to its end."""
    for host, other in itertools.permutations(hosts, 2):
        host.follow(other, 1 << 30)


def runs_in(hosts: list[PaperHost], segment: bytes) -> list[RunEntry]:
    """What all journals tell of the runs of a segment."""
    told = (getattr(entry, "run", entry) for host in hosts for entry in host.journal)
    return [run for run in told if isinstance(run, RunEntry) and run.segment == segment]
