"""PUT, the part that writes: records into segments, then entries into the journal and the index.

Publish order of a run, and what a crash leaves behind:

1. its records are written into a segment          -> bytes nobody refers to; gone with the segment
2. they are made durable, if the policy says so
3. its entry is appended to the journal            -> followers and the next open apply it
4. (durable too, if the policy says so)
5. it is applied to the local index, together with the journal's offset, in one transaction

An I/O error poisons the segment: what was written whole is kept, the segment is sealed there, and
the next run begins another. A journal that failed is abandoned for a new one in the same way.

Thread-safe. Writes of different puts run in parallel; steps 2 to 5 of all that wait are done
together by one of them (group commit), unless the policy is "always".
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvfs.backend import Backend, OpenFile, WriteCut, write_all
from kvfs.backend.base import Buffer
from kvfs.chain import HASH_BYTES
from kvfs.errors import BackendError, KvfsError, SpaceError
from kvfs.frames import Entry, RunEntry, SealEntry, SegmentEntry, encode
from kvfs.index import Index, OutOfStep, apply_journal
from kvfs.index.apply import Applier
from kvfs.index.guard import boot_id
from kvfs.index.index import add_counters
from kvfs.journal import ROLL_BYTES, JournalWriter
from kvfs.namespace import Namespace
from kvfs.record import PAGE, RunBlocks, encode_metas
from kvfs.segment import (
    WRITER_BYTES,
    Geometry,
    Header,
    encode_end,
    segment_id,
    segment_path,
)

DURABILITY = ("none", "batch", "always")
# Records are hashed and written a few at a time, so that the write finds them in cache.
WRITE_BYTES = 4 << 20
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(slots=True)
class Settings:
    """What the writer needs of a store's configuration."""

    store: bytes
    extent: int
    segment_bytes: int
    durability: str
    clock: Callable[[], float] = time.time

    def now_ms(self) -> int:
        return int(self.clock() * 1000)


@dataclass(slots=True)
class OpenSegment:
    """A segment this process is writing."""

    header: Header
    path: str
    file: OpenFile
    slots: int = 0
    """Slots handed out."""
    busy: int = 0
    """Runs that are being written or published; it is sealed only when there are none."""
    published: bool = False
    """Its SEGMENT entry is in the journal."""
    poisoned: bool = False
    sealed: bool = False
    entries: list[RunEntry] = field(default_factory=list)

    def entry(self) -> SegmentEntry:
        h = self.header
        g = h.geometry
        return SegmentEntry(
            h.segment_id, h.nsid, g.stride, g.extent, g.first, h.created_ms, h.ttl_seconds,
            h.ttl_class, self.path,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Written:
    """What of a run is in a segment: blocks from the run's start, and why not more."""

    segment: OpenSegment
    slot: int
    blocks: int
    error: KvfsError | None


@dataclass(slots=True)
class _Commit:
    """What one caller wants published; it may go together with others'."""

    runs: list[tuple[Written, RunEntry]]
    others: list[Entry]
    counters: dict[str, int]
    done: bool = False
    error: KvfsError | None = None


def writer_name(writer_id: bytes) -> str:
    """Host, boot and random id: no two processes ever have the same, whatever their clocks say."""
    host = re.sub(r"[^A-Za-z0-9.]", "-", socket.gethostname())[:40] or "host"
    return f"{host}-{boot_id()[:8]}-{writer_id.hex()}"


class Writer:
    """One process's writer on a store. Files are made when first needed."""

    def __init__(self, backend: Backend, index: Index, settings: Settings) -> None:
        self.backend = backend
        self.index = index
        self.settings = settings
        self.id = secrets.token_bytes(WRITER_BYTES)
        self.name = writer_name(self.id)
        self.pid = os.getpid()
        self.full = False
        """The last store failed for want of space."""
        self._lock = threading.Lock()
        self._segments: dict[tuple[bytes, str], OpenSegment] = {}
        self._next_segment = 0
        self._journal: JournalWriter | None = None
        self._next_journal = 0
        self._queue: list[_Commit] = []
        self._committing = threading.Lock()

    # 1: records into segments

    def write_run(
        self, ns: Namespace, run: RunBlocks, payloads: list[memoryview],
        ttl_class: str, ttl_seconds: int, now_ms: int,
    ) -> Written:  # fmt: skip
        """Writes as many of the blocks as one segment takes. Raises SpaceError, BackendError.

        If some whole records were written before an error they are kept, and the error returned.
        The segment stays open until the result is handed to `publish`, which must be called.
        """
        if self.full:
            self._refuse_while_full(len(payloads) * ns.stride)
        segment, slot, count = self._reserve(ns, len(payloads), ttl_class, ttl_seconds)
        try:
            self._write_records(ns, segment, slot, run, payloads[:count], now_ms)
        except WriteCut as e:
            segment.poisoned = True
            error, done = self._failed(e), e.written // ns.stride
            if not done:
                self._release(segment)
                raise error from e
            return Written(segment, slot, done, error)
        except BaseException:
            segment.poisoned = True
            self._release(segment)
            raise
        return Written(segment, slot, count, None)

    def _refuse_while_full(self, need: int) -> None:
        try:
            free, _ = self.backend.free_bytes()
        except OSError as e:
            raise self._failed(e) from e
        if free < need + PAGE:
            raise SpaceError(
                f"{self.backend.root}: {free} bytes free, {need} needed; stores are refused "
                "until there is room (kvctl gc)"
            )
        self.full = False

    def _failed(self, e: OSError) -> KvfsError:
        text = f"{self.backend.root}: {e.strerror or e}"
        if e.filename:
            text = f"{self.backend.root}/{e.filename}: {e.strerror}"
        if e.errno in _FULL:
            self.full = True
            return SpaceError(f"{text}; stores are refused until there is room (kvctl gc)")
        return BackendError(text)

    def _reserve(
        self, ns: Namespace, blocks: int, ttl_class: str, ttl_seconds: int
    ) -> tuple[OpenSegment, int, int]:
        key = ns.nsid, ttl_class
        with self._lock:
            segment = self._segments.get(key)
            if segment is not None and self._worn(segment, ttl_seconds):
                self._retire(key)
                segment = None
            if segment is None:
                try:
                    segment = self._create(ns, ttl_class, ttl_seconds)
                except OSError as e:
                    raise self._failed(e) from e
                self._segments[key] = segment
            limit = max(1, segment.header.geometry.slots_within(self.settings.segment_bytes))
            count = min(blocks, limit - segment.slots)
            slot = segment.slots
            segment.slots += count
            segment.busy += 1
            return segment, slot, count

    def _worn(self, segment: OpenSegment, ttl_seconds: int) -> bool:
        h = segment.header
        limit = max(1, h.geometry.slots_within(self.settings.segment_bytes))
        return (
            segment.poisoned
            or segment.slots >= limit
            or h.ttl_seconds != ttl_seconds
            or _day(h.created_ms) != _day(self.settings.now_ms())
        )

    def _create(self, ns: Namespace, ttl_class: str, ttl_seconds: int) -> OpenSegment:
        number, self._next_segment = self._next_segment, self._next_segment + 1
        now = self.settings.now_ms()
        path = segment_path(ttl_class, _day(now), ns.name, self.name, number)
        header = Header(
            segment_id(self.id, number), ns.nsid, ns.identity.fingerprint,
            Geometry.fit(ns.stride, self.settings.extent), ns.row_bytes, now,
            ttl_class, ttl_seconds, self.settings.store,
        )  # fmt: skip
        file = self.backend.create(path)
        try:
            write_all(self.backend, file, [header.encode()], 0)
        except OSError:
            self.backend.close(file)
            with contextlib.suppress(OSError):
                self.backend.unlink(path)
            raise
        return OpenSegment(header, path, file)

    def _write_records(
        self, ns: Namespace, segment: OpenSegment, slot: int, run: RunBlocks,
        payloads: list[memoryview], now_ms: int,
    ) -> None:  # fmt: skip
        """Raises WriteCut whose `written` counts bytes of records, from the run's start on."""
        metas = encode_metas(ns.shape, run, now_ms, payloads)
        geometry, at, done = segment.header.geometry, 0, 0
        batch = max(1, WRITE_BYTES // geometry.stride)
        for offset, count in geometry.pieces(slot, len(payloads)):
            for first in range(0, count, batch):
                n = min(batch, count - first)
                buffers: list[Buffer] = []
                for payload in payloads[at : at + n]:
                    buffers += (payload, next(metas))
                try:
                    write_all(self.backend, segment.file, buffers, offset + first * geometry.stride)
                except WriteCut as e:
                    e.written += done
                    raise
                at, done = at + n, done + n * geometry.stride

    def _release(self, segment: OpenSegment) -> None:
        """One run less under way; a segment that takes no more runs is sealed after the last."""
        with self._lock:
            segment.busy -= 1
            key = segment.header.nsid, segment.header.ttl_class
            if segment.poisoned and self._segments.get(key) is segment:
                self._retire(key)
            elif not segment.busy and self._segments.get(key) is not segment:
                self._seal(segment)

    def _retire(self, key: tuple[bytes, str]) -> None:
        segment = self._segments.pop(key)
        if not segment.busy:
            self._seal(segment)

    def _seal(self, segment: OpenSegment) -> None:
        """Writes the footer, on a best effort: a segment without one is read by its trailers."""
        if segment.sealed:
            return
        segment.sealed = True
        with contextlib.suppress(OSError):
            if segment.published:
                self._write_footer(segment)
            else:
                self.backend.unlink(segment.path)
        with contextlib.suppress(OSError):
            self.backend.close(segment.file)

    def _write_footer(self, segment: OpenSegment) -> None:
        g = segment.header.geometry
        used = max((e.slot + e.count for e in segment.entries), default=0)
        end = g.offset(used - 1) + g.stride if used else g.first
        offset = -(-end // PAGE) * PAGE
        # A poisoned segment may hold torn records behind the last good one.
        if segment.poisoned:
            self.backend.truncate(segment.file, offset)
        seed = int.from_bytes(segment.header.segment_id[:8], "little")
        frames, at = bytearray(), 0
        entries: list[Entry] = [segment.entry(), *segment.entries]
        for entry in entries:
            frames += encode(entry, seed, at)
            at = len(frames)
        footer = bytes(frames)
        tail = encode_end(footer, used, offset)
        write_all(self.backend, segment.file, [footer, tail], offset)
        if self.settings.durability != "none":
            self.backend.sync(segment.file)

    # 2 to 5: publish

    def publish(
        self, runs: list[tuple[Written, RunEntry]], others: Iterable[Entry] = (),
        counters: dict[str, int] | None = None,
    ) -> None:  # fmt: skip
        """Publishes runs that are written, and other entries; returns when they are visible.

        With durability "batch" or "always" also when they are durable. Raises BackendError,
        SpaceError or IndexFault; then they are not visible through this call, and may be written
        again.
        """
        commit = _Commit(runs, list(others), counters or {})
        try:
            self._commit(commit)
        finally:
            for written, _ in runs:
                self._release(written.segment)
        if commit.error is not None:
            raise commit.error

    def _commit(self, commit: _Commit) -> None:
        with self._lock:
            self._queue.append(commit)
        with self._committing:
            if commit.done:
                return
            with self._lock:
                alone = self.settings.durability == "always"
                group = [commit] if alone else self._queue
                self._queue = [c for c in self._queue if c is not commit] if alone else []
            try:
                self._publish_group(group)
            except KvfsError as e:
                for c in group:
                    c.error = e
            finally:
                for c in group:
                    c.done = True

    def _publish_group(self, group: list[_Commit]) -> None:
        durable = self.settings.durability != "none"
        segments = {w.segment.path: w.segment for c in group for w, _ in c.runs}
        fresh = [s for s in segments.values() if not s.published]
        entries: list[Entry] = [s.entry() for s in fresh]
        for c in group:
            entries += (entry for _, entry in c.runs)
            entries += c.others
        try:
            if durable:
                for segment in segments.values():
                    self.backend.sync(segment.file)
            journal, start, ends = self._append(entries, durable)
        except OSError as e:
            # What the kernel could not write back may be lost for good: no more into these.
            for segment in segments.values():
                segment.poisoned = True
            raise self._failed(e) from e
        for segment in fresh:
            segment.published = True
        counters: dict[str, int] = {}
        for c in group:
            for written, entry in c.runs:
                written.segment.entries.append(entry)
            for name, n in c.counters.items():
                counters[name] = counters.get(name, 0) + n
        self._apply(journal, start, list(zip(entries, ends, strict=True)), counters)

    def _append(self, entries: list[Entry], durable: bool) -> tuple[JournalWriter, int, list[int]]:
        """Appends to the journal; a journal that failed is abandoned and a new one tried once."""
        for attempt in (0, 1):
            journal = self._current_journal()
            try:
                start, ends = journal.append(entries)
                if durable:
                    journal.sync()
                return journal, start, ends
            except OSError:
                # Readers stop at the torn frame; what they got of these entries before it is
                # written whole, and applying it twice changes nothing.
                self._journal = None
                with contextlib.suppress(OSError):
                    journal.close()
                if attempt:
                    raise
        raise AssertionError("unreachable")

    def _current_journal(self) -> JournalWriter:
        if self._journal is not None and self._journal.end > ROLL_BYTES:
            self._end_journal(last=False)
        if self._journal is None:
            number, self._next_journal = self._next_journal, self._next_journal + 1
            self._journal = JournalWriter(
                self.backend, self.name, self.id, number, self.settings.store,
                self.settings.now_ms(),
            )  # fmt: skip
        return self._journal

    def _apply(
        self, journal: JournalWriter, start: int, entries: list[tuple[Entry | None, int]],
        counters: dict[str, int],
    ) -> None:  # fmt: skip
        def apply(applier: Applier) -> None:
            apply_journal(applier, self.id, journal.number, self.name, start, entries)
            add_counters(applier, counters)

        try:
            self.index.write(apply)
        except OutOfStep:
            # Another process of this host read part of our journal, or the index was made anew.
            from kvfs.follow import Follower

            Follower(self.backend, self.index, self.settings.store).catch_up(self.name)
            self.index.count(counters)

    def _end_journal(self, *, last: bool) -> None:
        journal, self._journal = self._journal, None
        if journal is None:
            return
        with contextlib.suppress(OSError, KvfsError):
            seal: list[Entry] = [SealEntry(self.settings.now_ms(), last)]
            start, ends = journal.append(seal)
            if self.settings.durability != "none":
                journal.sync()
            self._apply(journal, start, [(seal[0], ends[0])], {})
        with contextlib.suppress(OSError):
            journal.close()

    def close(self) -> None:
        """Seals all segments and the journal. Raises nothing: what was published stands."""
        if self.pid != os.getpid():
            return  # inherited through fork: the files are the parent's
        with self._lock:
            for key in list(self._segments):
                self._retire(key)
        with self._committing:
            self._end_journal(last=True)


def run_entry(
    ns: Namespace, written: Written, run: RunBlocks, heads: bytes, now_ms: int, expires_ms: int
) -> RunEntry:
    """The journal entry of the blocks of a run that were written."""
    return RunEntry(
        ns.nsid, written.segment.header.segment_id, written.slot, run.block, now_ms, expires_ms,
        run.parent, heads, run.hashes[: written.blocks * HASH_BYTES],
    )  # fmt: skip


def _day(ms: int) -> str:
    return time.strftime("%Y%m%d", time.gmtime(ms / 1000))
