"""Segment files as they lie: by their footer, or by the trailers of their records.

For rebuild, fsck and gc, which must not believe the index. A sealed segment tells its runs in its
footer; any other is read record by record, and what does not check out there is left out: zeros,
torn or flipped records, records of another namespace, a run whose beginning is gone. What a newer
kvfs wrote is never guessed at. Nothing here writes or deletes.

Blocking; reads the shared storage. No state: every call may run on any thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import xxhash

from kvfs.backend import Backend, OpenFile, read_into
from kvfs.chain import HASH_BYTES
from kvfs.errors import FormatError
from kvfs.frames import Entry, RunEntry, SegmentEntry, decode_all
from kvfs.record import PAGE, TRAILER_BYTES, Landing, Shape, Trailer, check_payload, parse
from kvfs.scan.readahead import RecordReader
from kvfs.segment import (
    END_BYTES,
    END_MAGIC,
    FOOTER_LIMIT,
    MAGIC,
    VERSION,
    WRITER_BYTES,
    Geometry,
    Header,
    decode_end,
    segment_id,
)

# Records larger than this are not read whole where only their trailers are wanted.
_WHOLE_STRIDE = 32 << 10
_SUFFIX = ".seg"
_VERSION_AT = 8

ShapeOf = Callable[[bytes], Shape | None]
"""Namespace id -> shape of its records, None if the namespace is not known."""


# segments: which there are


def segment_paths(backend: Backend) -> Iterator[str]:
    """Yields the path of every segment file, in order."""
    for ttl_class in names(backend, "seg"):
        for day in names(backend, f"seg/{ttl_class}"):
            for ns in names(backend, f"seg/{ttl_class}/{day}"):
                at = f"seg/{ttl_class}/{day}/{ns}"
                yield from (f"{at}/{f}" for f in names(backend, at) if f.endswith(_SUFFIX))


def names(backend: Backend, path: str) -> list[str]:
    """The names in a directory; none where something else lies in its place."""
    with suppress(NotADirectoryError):
        return backend.names(path)
    return []


def id_of(path: str) -> bytes | None:
    """The 16-byte id of a segment by its file's name, or None for a name that is not ours."""
    stem, _, number = os.path.basename(path).removesuffix(_SUFFIX).rpartition("-")
    writer = stem.rpartition("-")[2]
    if len(writer) != 2 * WRITER_BYTES or not number.isdecimal():
        return None
    with suppress(ValueError, OverflowError):
        return segment_id(bytes.fromhex(writer), int(number))
    return None


# segments: their header and footer


@dataclass(frozen=True, slots=True)
class Head:
    """What a segment file says of itself as a whole."""

    path: str
    size: int
    entry: SegmentEntry
    footer: tuple[RunEntry, ...] | None
    """The runs of a sealed segment; None: it has no footer, or a damaged one."""
    footer_at: int | None
    """Offset of the footer, where an end mark names one."""
    damage: tuple[str, ...] = ()
    """What of header and footer is damaged; the rest is sound all the same."""

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.entry.stride, self.entry.extent, self.entry.first)

    @property
    def slots(self) -> int:
        """Slots that lie whole in the file, in front of its footer."""
        end = self.size if self.footer_at is None else self.footer_at
        return self.geometry.slots_within(end)


def read_head(backend: Backend, path: str, store: bytes) -> Head:
    """Reads header and footer of a segment. A damaged header is replaced by what the footer says.

    Raises OSError, and FormatError naming the path for a file that is no segment of this store,
    is of a version this code does not read, or has neither a sound header nor a sound footer.
    """
    size = backend.size(path)
    file = backend.open(path)
    try:
        page = _read(backend, file, 0, PAGE)
        header, damage = _header(page, path, store)
        wanted = id_of(path) if header is None else header.segment_id
        footer = _footer(backend, file, size, wanted)
    finally:
        backend.close(file)
    if header is None and footer.told is None:
        raise FormatError(f"{path}: {damage}, and no sound footer")
    found = [damage] if damage else []
    if footer.damaged:
        found.append("damaged footer (checksum)")
    entry, runs = footer.told or (None, None)
    entry = entry if header is None else _entry_of(header, path)
    assert entry is not None
    return Head(path, size, entry, runs, footer.at, tuple(found))


def _read(backend: Backend, file: OpenFile, offset: int, length: int) -> bytes:
    data = bytearray(max(0, length))
    return bytes(data[: read_into(backend, file, [memoryview(data)], offset)])


def _header(page: bytes, path: str, store: bytes) -> tuple[Header | None, str]:
    """The header, or None and what is wrong with it. Raises FormatError if it is not for us."""
    try:
        header = Header.decode(page, path)
    except FormatError as e:
        version = version_of(page)
        if version is not None and version != VERSION:
            raise _version_error(path, "segment", version, VERSION) from None
        return None, str(e).removeprefix(f"{path}: ")
    except UnicodeDecodeError:
        return None, "damaged segment header (class name)"
    if header.store != store:
        raise FormatError(f"{path}: a segment of another store ({header.store.hex()})")
    return header, ""


def version_of(page: bytes) -> int | None:
    """The format version a segment's first page states; None if there is none to believe.

    A flipped bit in the version of a segment of ours is damage, not another version: with the
    right version in its place the checksum fits.
    """
    if len(page) < PAGE or page[:_VERSION_AT] != MAGIC:
        return None
    stated = int.from_bytes(page[_VERSION_AT : _VERSION_AT + 4], "little")
    ours = page[:_VERSION_AT] + VERSION.to_bytes(4, "little") + page[_VERSION_AT + 4 : PAGE]
    if xxhash.xxh3_64_intdigest(ours[:-8]) == int.from_bytes(ours[-8:], "little"):
        return VERSION
    return stated


def segment_version(backend: Backend, path: str) -> int | None:
    """As `version_of`, of a file; None if it cannot be read."""
    with suppress(OSError):
        file = backend.open(path)
        try:
            return version_of(_read(backend, file, 0, PAGE))
        finally:
            backend.close(file)
    return None


def _version_error(path: str, what: str, version: int, ours: int) -> FormatError:
    if version > ours:
        return FormatError(
            f"{path}: {what} version {version}, newer than this kvfs reads ({ours}); left alone"
        )
    return FormatError(
        f"{path}: {what} version {version}, older than this kvfs still reads ({ours}); "
        "read it with the kvfs that wrote it"
    )


def _entry_of(header: Header, path: str) -> SegmentEntry:
    g = header.geometry
    return SegmentEntry(
        header.segment_id, header.nsid, g.stride, g.extent, g.first, header.created_ms,
        header.ttl_seconds, header.ttl_class, path,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Footer:
    """What the end of a segment file tells."""

    told: tuple[SegmentEntry, tuple[RunEntry, ...]] | None = None
    """Its entries, if they are sound."""
    at: int | None = None
    """Its offset, where an end mark names one."""
    damaged: bool = False
    """There is one, but it is not sound."""


def _footer(backend: Backend, file: OpenFile, size: int, wanted: bytes | None) -> _Footer:
    tail = _read(backend, file, size - END_BYTES, END_BYTES) if size > PAGE else b""
    end = decode_end(tail)
    if end is None or end.offset + end.length + END_BYTES != size:
        return _Footer(damaged=_was_end_mark(tail, size))
    data = _read(backend, file, end.offset, min(end.length, FOOTER_LIMIT))
    if xxhash.xxh3_64_intdigest(data) != end.checksum or wanted is None:
        return _Footer(None, end.offset, True)
    try:
        frames = list(decode_all(memoryview(data), int.from_bytes(wanted[:8], "little"), 0))
    except FormatError:
        return _Footer(None, end.offset, True)
    whole = bool(frames) and frames[-1][1] == len(data)
    told = _told(frames, wanted, end.slots) if whole else None
    return _Footer(told, end.offset, told is None)


def _was_end_mark(tail: bytes, size: int) -> bool:
    """Two of three signs of an end mark are there: damaged, unlike what a killed writer leaves."""
    if len(tail) != END_BYTES:
        return False
    version = int.from_bytes(tail[8:12], "little")
    offset, length = (int.from_bytes(tail[at : at + 8], "little") for at in (16, 24))
    signs = (tail[:8] == END_MAGIC, version == VERSION, offset + length + END_BYTES == size)
    return sum(signs) >= 2


def _told(
    frames: list[tuple[Entry | None, int]], wanted: bytes, slots: int
) -> tuple[SegmentEntry, tuple[RunEntry, ...]] | None:
    first, *rest = (entry for entry, _ in frames)
    if not isinstance(first, SegmentEntry) or first.segment != wanted:
        return None
    runs = tuple(e for e in rest if isinstance(e, RunEntry))
    if any((run.segment, run.nsid) != (wanted, first.nsid) for run in runs):
        return None
    used = max((run.slot + run.count for run in runs), default=0)
    return (first, runs) if used == slots else None


# segments: their runs


@dataclass(slots=True)
class Scan:
    """The runs of one segment, and what was found wrong on the way."""

    head: Head
    runs: list[RunEntry] = field(default_factory=list)
    records: int = 0
    """Sound records in `runs`."""
    unsound: list[tuple[int, str]] = field(default_factory=list)
    """(slot, reason) of each record that was left out; empty slots are not counted."""


def scan_segment(
    backend: Backend, path: str, store: bytes, shape_of: ShapeOf, *, payloads: bool = True
) -> Scan:
    """Reads a segment's runs: from its footer, or from its trailers where it was never sealed.

    payloads: by trailers a record counts only if its payload's checksum is right as well, which
    reads all of it. Raises OSError, and FormatError as `read_head` and for unknown namespaces.
    """
    head = read_head(backend, path, store)
    scan = Scan(head)
    if head.footer is not None:
        scan.runs = list(head.footer)
        scan.records = sum(r.count for r in scan.runs)
        return scan
    shape = shape_of(head.entry.nsid)
    if shape is None:
        raise FormatError(f"{path}: of an unknown namespace ({head.entry.nsid.hex()})")
    if shape.stride != head.entry.stride:
        raise FormatError(
            f"{path}: records of {head.entry.stride} bytes; its namespace's have {shape.stride}"
        )
    collector = _RunCollector(head.entry, shape, scan)
    for slot, trailer in _trailers(backend, head, shape, payloads):
        collector.add(slot, trailer)
    collector.finish()
    return scan


def _trailers(
    backend: Backend, head: Head, shape: Shape, payloads: bool
) -> Iterator[tuple[int, Trailer | str]]:
    """Yields (slot, trailer or why there is none to believe) for every whole slot."""
    if not payloads and shape.stride > _WHOLE_STRIDE:
        yield from _metas_only(backend, head, shape)
        return
    with RecordReader(backend, head.path, head.geometry) as reader:
        for slot, data in reader.pieces(0, head.slots):
            at = Landing.whole(shape, data)
            for i in range(len(data) // shape.stride):
                trailer = parse(at.meta(i))
                if payloads and isinstance(trailer, Trailer):
                    trailer = check_payload(shape, at.payload(i), trailer) or trailer
                yield slot + i, trailer


def _metas_only(backend: Backend, head: Head, shape: Shape) -> Iterator[tuple[int, Trailer | str]]:
    size = shape.tokens_bytes + TRAILER_BYTES
    file = backend.open(head.path)
    try:
        for slot in range(head.slots):
            meta = _read(backend, file, head.geometry.offset(slot) + shape.meta_at, size)
            yield slot, parse(memoryview(meta)) if len(meta) == size else "short read"
    finally:
        backend.close(file)


class _RunCollector:
    """Puts records together into the runs they were written in."""

    def __init__(self, entry: SegmentEntry, shape: Shape, scan: Scan) -> None:
        self.entry = entry
        self.shape = shape
        self.scan = scan
        self._first: Trailer | None = None
        self._slot = 0
        self._hashes = bytearray()

    def add(self, slot: int, record: Trailer | str) -> None:
        if isinstance(record, str):
            self.finish()
            if record != "no record":
                self.scan.unsound.append((slot, record))
            return
        why = self._misfit(record)
        if why is None and record.run_index == 0:
            self.finish()
            self._first, self._slot = record, slot
        elif why is None and not self._continues(slot, record):
            why = "the beginning of its run is missing"
        if why is None:
            self._hashes += record.hash
        else:
            self.finish()
            self.scan.unsound.append((slot, why))

    def _misfit(self, record: Trailer) -> str | None:
        if record.nsid != self.entry.nsid:
            return "foreign namespace"
        return None if record.payload == self.shape.payload else "payload length"

    def _continues(self, slot: int, record: Trailer) -> bool:
        first, n = self._first, len(self._hashes) // HASH_BYTES
        return (
            first is not None
            and slot == self._slot + n
            and record.run_index == n
            and record.block == first.block + n
            and record.parent == self._hashes[-HASH_BYTES:]
            and (record.written_ms, record.run_count) == (first.written_ms, first.run_count)
        )

    def finish(self) -> None:
        """Ends the run at hand: its leading sound records are kept."""
        first, self._first = self._first, None
        if first is None:
            return
        expires = first.written_ms + self.entry.ttl_seconds * 1000
        hashes, self._hashes = bytes(self._hashes), bytearray()
        self.scan.records += len(hashes) // HASH_BYTES
        run = RunEntry(
            self.entry.nsid, self.entry.segment, self._slot, first.block, first.written_ms,
            expires, first.parent, b"", hashes,
        )  # fmt: skip
        self.scan.runs.append(run)
