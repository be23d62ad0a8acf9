"""Records into segments: the first step of a put.

A segment takes runs until it is full, its day is over or a write failed, or others are wanted more:
each takes a descriptor and room that it has not used yet. It is sealed once no run in it is being
written or waits to be published; one that failed is cut behind its last published record.
Thread-safe: slots are handed out under a lock, the writes themselves run in parallel.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from kvfs.backend import Backend, OpenFile, WriteCut, write_all
from kvfs.backend.base import Buffer
from kvfs.config import StoreConfig, check_alive
from kvfs.errors import KvfsError
from kvfs.frames import Entry, RunEntry, SegmentEntry, encode
from kvfs.geometry import Geometry
from kvfs.namespace import Namespace
from kvfs.record import PAGE, RunBlocks, encode_metas
from kvfs.segment import Header, encode_end, segment_id, segment_path

# Records are hashed and written a few at a time: the write finds what was just hashed in the
# second-level cache, so that hashing costs a tenth of the write. To hash ahead in a thread costs
# more on a host that has other work: the two wait for each other.
WRITE_BYTES = 1 << 20
RESERVE_BYTES = 64 << 20
"""The most room a segment takes before it needs it; a writer that is killed leaves so much."""
MOST_OPEN = 256
"""Segments that stay open for their next run; for one more the longest unused one is sealed. A
quarter of the descriptors that a process has where nobody says otherwise (1,024)."""
IDLE_SECONDS = 3600.0
"""A segment that got no run for so long is sealed when another one gets one."""


@dataclass(slots=True)
class OpenSegment:
    """A segment this process is writing."""

    header: Header
    path: str
    file: OpenFile
    slots: int = 0
    """Slots handed out."""
    reserved: int = 1 << 20
    """Bytes of the file that have room."""
    busy: int = 0
    """Runs that are being written or published; it is sealed only when there are none."""
    published: bool = False
    """Its SEGMENT entry is in the journal."""
    poisoned: bool = False
    sealed: bool = False
    used: float = field(default_factory=time.monotonic)
    """When it last got a run."""
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


class SegmentWriter:
    """The segments one process has open for writing, one for each namespace and TTL class."""

    def __init__(
        self, backend: Backend, config: StoreConfig, name: str, writer_id: bytes,
        now_ms: Callable[[], int], failed: Callable[[OSError], KvfsError],
    ) -> None:  # fmt: skip
        """failed: turns an I/O error into what the caller of a put gets to see."""
        self.backend = backend
        self.config = config
        self.name = name
        self.id = writer_id
        self.now_ms = now_ms
        self.failed = failed
        self._lock = threading.Lock()
        self._open: dict[tuple[bytes, str], OpenSegment] = {}  # the longest unused one first
        self._next = 0

    def write_run(
        self, ns: Namespace, run: RunBlocks, payloads: list[memoryview],
        ttl_class: str, ttl_seconds: int, now_ms: int,
    ) -> Written:  # fmt: skip
        """Writes as many of the blocks as one segment takes. Raises SpaceError, BackendError.

        If some whole records were written before an error they are kept, and the error returned.
        The segment stays open until `release` is called with it, once the run is published.
        """
        segment, slot, count = self._reserve(ns, len(payloads), ttl_class, ttl_seconds)
        try:
            self._write_records(ns, segment, slot, run, payloads[:count], now_ms)
        except WriteCut as e:
            segment.poisoned = True
            error, done = self.failed(e), e.written // ns.stride
            if not done:
                self.release(segment)
                raise error from e
            return Written(segment, slot, done, error)
        except BaseException:
            segment.poisoned = True
            self.release(segment)
            raise
        return Written(segment, slot, count, None)

    def _reserve(
        self, ns: Namespace, blocks: int, ttl_class: str, ttl_seconds: int
    ) -> tuple[OpenSegment, int, int]:
        key = ns.nsid, ttl_class
        with self._lock:
            segment = self._open.get(key)
            if segment is not None and self._worn(segment, ttl_seconds):
                self._retire(key)
                segment = None
            self._retire_unused(key)
            if segment is None:
                try:
                    segment = self._create(ns, ttl_class, ttl_seconds)
                except OSError as e:
                    raise self.failed(e) from e
            self._open.pop(key, None)
            self._open[key] = segment
            slot = self._next_slot(segment)
            count = min(blocks, self._limit(segment) - slot)
            segment.slots = slot + count
            segment.busy += 1
            segment.used = time.monotonic()
            return segment, slot, count

    def _retire_unused(self, wanted: tuple[bytes, str]) -> None:
        """Makes room for a segment in use. One at most: to seal it is a write to wait for."""
        unused = (s for k, s in self._open.items() if k != wanted and not s.busy)
        segment = next(unused, None)
        if segment is not None and (
            len(self._open) + (wanted not in self._open) > MOST_OPEN
            or time.monotonic() - segment.used > IDLE_SECONDS
            or self._past(segment)
        ):
            self._retire((segment.header.nsid, segment.header.ttl_class))

    def _next_slot(self, segment: OpenSegment) -> int:
        """Where the next run begins: in an extent that nobody else writes or reads, if need be."""
        geometry = segment.header.geometry
        return geometry.next_extent(segment.slots) if self.config.own_extents else segment.slots

    def _limit(self, segment: OpenSegment) -> int:
        return max(1, segment.header.geometry.slots_within(self.config.segment_bytes))

    def _worn(self, segment: OpenSegment, ttl_seconds: int) -> bool:
        h = segment.header
        return (
            segment.poisoned
            or self._next_slot(segment) >= self._limit(segment)
            or h.ttl_seconds != ttl_seconds
            or self._past(segment)
        )

    def _past(self, segment: OpenSegment) -> bool:
        return _day(segment.header.created_ms) != _day(self.now_ms())

    def _create(self, ns: Namespace, ttl_class: str, ttl_seconds: int) -> OpenSegment:
        check_alive(self.backend, self.config.uuid)  # the mount may have gone since
        number, self._next = self._next, self._next + 1
        now = self.now_ms()
        path = segment_path(ttl_class, _day(now), ns.name, self.name, number)
        geometry = Geometry.fit(ns.stride, self.config.extent)
        if self.config.own_extents:  # the header too, which is read while the first run is written
            geometry = Geometry.fit(ns.stride, self.config.extent, geometry.extent)
        header = Header(
            segment_id(self.id, number), ns.nsid, ns.identity.fingerprint,
            geometry, ns.row_bytes, now,
            ttl_class, ttl_seconds, self.config.uuid,
        )  # fmt: skip
        file = self.backend.create(path)
        try:
            write_all(self.backend, file, [header.encode()], 0)
        except OSError:
            with contextlib.suppress(OSError):
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
        geometry = segment.header.geometry
        self._reserve_room(segment, geometry.offset(slot + len(payloads) - 1) + geometry.stride)
        metas = encode_metas(ns.shape, run, now_ms, payloads)
        # Where runs have extents of their own each is written by one call.
        most = 0 if self.config.own_extents else WRITE_BYTES
        at = done = 0
        for offset, n in geometry.pieces(slot, len(payloads), most):
            buffers: list[Buffer] = []
            for payload, tail in zip(payloads[at : at + n], islice(metas, n), strict=True):
                buffers += (payload, tail)
            try:
                write_all(self.backend, segment.file, buffers, offset)
            except WriteCut as e:
                e.written += done
                raise
            if self.config.durability != "none":
                with contextlib.suppress(OSError):  # a hint: what is wrong, the sync will say
                    self.backend.write_behind(segment.file, offset, n * geometry.stride)
            at, done = at + n, done + n * geometry.stride

    def _reserve_room(self, segment: OpenSegment, end: int) -> None:
        """Takes room up to `end`, and more the more the segment has: writing into room that is
        there costs two thirds of growing the file (116 MB: 17 ms beside 25)."""
        if end <= segment.reserved:
            return
        size = max(end, min(segment.reserved * 2, segment.reserved + RESERVE_BYTES))
        with contextlib.suppress(OSError):  # no room for it all: as much as fits is written
            self.backend.reserve(segment.file, min(size, self.config.segment_bytes))
        segment.reserved = size

    def release(self, segment: OpenSegment) -> None:
        """One run less under way; a segment that takes no more runs is sealed after the last."""
        with self._lock:
            segment.busy -= 1
            key = segment.header.nsid, segment.header.ttl_class
            if segment.poisoned and self._open.get(key) is segment:
                self._retire(key)
            elif not segment.busy and self._open.get(key) is not segment:
                self._seal(segment)

    def _retire(self, key: tuple[bytes, str]) -> None:
        segment = self._open.pop(key)
        if not segment.busy:
            self._seal(segment)

    def retire(self, segments: set[bytes]) -> None:
        """Takes no more runs into the segments with these ids; the idle ones are sealed now."""
        with self._lock:
            for key, segment in list(self._open.items()):
                if segment.header.segment_id in segments:
                    self._retire(key)

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
        unit = g.extent if self.config.own_extents else PAGE
        offset = -(-end // unit) * unit
        # Room that was not needed, and torn records of a write that failed.
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
        if self.config.durability != "none":
            self.backend.sync(segment.file)

    def close(self) -> None:
        """Seals all segments."""
        with self._lock:
            for key in list(self._open):
                self._retire(key)


def _day(ms: int) -> str:
    return time.strftime("%Y%m%d", time.gmtime(ms / 1000))
