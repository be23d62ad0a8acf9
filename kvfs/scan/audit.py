"""Every visible record of one segment, compared with the index and with its own checksums.

What fetch would find is found, and what it does not look at: padding, the gaps between extents,
header and footer. Reads the visible stretches in large pieces, the next while one is verified; a
piece that cannot be read is read again record by record. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from kvfs.backend import Backend, OpenFile, read_into
from kvfs.errors import FormatError
from kvfs.fetch import describe
from kvfs.frames import RunEntry
from kvfs.index.schema import Run, Segment
from kvfs.namespace import Namespace
from kvfs.record import Landing, Shape, Trailer, check_payload, parse
from kvfs.scan.findings import Finding
from kvfs.scan.readahead import RecordReader
from kvfs.scan.segments import Head, read_head, segment_version
from kvfs.segment import VERSION, Geometry

OnRead = Callable[[int], None]
"""Called with the number of bytes verified since the last call."""


@dataclass(slots=True)
class Audit:
    """What was found in one segment."""

    findings: list[Finding] = field(default_factory=list)
    records: int = 0
    bad: dict[bytes, tuple[Run, int]] = field(default_factory=dict)
    """Head of a run -> the run, and its first bad block counted from its start."""
    missing: bool = False
    """The file is gone."""
    footer: tuple[RunEntry, ...] | None = None
    unsealed: bool = False
    """It has no footer, not even a damaged one."""


class SegmentAudit:
    """Looks at one segment of one namespace."""

    def __init__(
        self, backend: Backend, store: bytes, ns: Namespace, segment: Segment, on_read: OnRead
    ) -> None:
        self.backend = backend
        self.store = store
        self.ns = ns
        self.segment = segment
        self.on_read = on_read
        self.found = Audit()

    def run(self, runs: list[Run]) -> Audit:
        """Verifies the records of these runs (of this segment, by slot). Raises nothing for what
        it finds."""
        try:
            head = self._head()
            if runs:
                with RecordReader(self.backend, self.segment.path, self.segment.geometry) as r:
                    self._records(r, runs)
            if head is not None:
                self._gaps(head)
        except FileNotFoundError:
            self.found.missing = True
            if runs:
                self._all_bad("missing", "the file is gone", runs)
        except OSError as e:
            self._all_bad("unreadable", describe(e), runs)
        return self.found

    def _add(self, kind: str, detail: str, run: Run | None = None, i: int = 0, **more: int) -> None:
        if run is not None:
            more |= {"slot": run.slot + i, "block": run.block + i}
        finding = Finding(kind, self.segment.path, detail, namespace=self.ns.name, **more)
        self.found.findings.append(finding)

    def _all_bad(self, kind: str, detail: str, runs: list[Run]) -> None:
        self._add(kind, detail, blocks=sum(r.count for r in runs))
        if kind == "missing":
            self.found.bad.update((run.head, (run, 0)) for run in runs)

    # header, footer, gaps

    def _head(self) -> Head | None:
        path = self.segment.path
        try:
            head = read_head(self.backend, path, self.store)
        except FormatError as e:
            newer = (segment_version(self.backend, path) or 0) > VERSION
            self._add("newer" if newer else "header", str(e).removeprefix(f"{path}: "))
            return None
        for damage in head.damage:
            self._add("footer" if "footer" in damage else "header", damage)
        self.found.footer = head.footer
        self.found.unsealed = head.footer is None and not head.damage
        return head

    def _gaps(self, head: Head) -> None:
        """The bytes between the last slot of an extent and the next extent are never written."""
        geometry = self.segment.geometry
        end = head.size if head.footer_at is None else head.footer_at
        file = self.backend.open(self.segment.path)
        try:
            for offset, length in _gap_places(geometry, end):
                where = self._first_nonzero(file, offset, length)
                if where is not None:
                    self._add("gap", "bytes between extents are not zero", offset=where)
        finally:
            self.backend.close(file)

    def _first_nonzero(self, file: OpenFile, offset: int, length: int) -> int | None:
        data = bytearray(length)
        with suppress(OSError):
            read_into(self.backend, file, [memoryview(data)], offset)
        return _nonzero(bytes(data), offset)

    # records

    def _records(self, reader: RecordReader, runs: list[Run]) -> None:
        for stretch in _stretches(runs):
            slot = stretch[0].slot
            end = stretch[-1].slot + stretch[-1].count
            owners = _owners(stretch)
            slot = self._stretch(reader, slot, end, owners)
            if slot < end:
                self._rest(reader, slot, end, owners)

    def _stretch(
        self, reader: RecordReader, slot: int, end: int, owners: Iterator[tuple[Run, int]]
    ) -> int:
        """Verifies slots up to `end`; returns the first that could not be read."""
        with suppress(OSError):
            for _, data in reader.pieces(slot, end - slot):
                slot += self._piece(data, owners)
        return slot

    def _rest(
        self, reader: RecordReader, slot: int, end: int, owners: Iterator[tuple[Run, int]]
    ) -> None:
        """Behind a failed read, or the end of the file: record by record."""
        while slot < end:
            try:
                data = next((d for _, d in reader.pieces(slot, 1)), None)
                if data is not None:
                    self._piece(data, owners)
                else:
                    self._bad("short", "the file ends in front of it", *next(owners))
            except OSError as e:
                self._bad("record", describe(e), *next(owners))
            slot += 1

    def _piece(self, data: memoryview, owners: Iterator[tuple[Run, int]]) -> int:
        shape = self.ns.shape
        at = Landing.whole(shape, data)
        n = len(data) // shape.stride
        for i in range(n):
            run, index = next(owners)
            self._record(at, i, run, index)
        self.found.records += n
        self.on_read(len(data))
        return n

    def _record(self, at: Landing, i: int, run: Run, index: int) -> None:
        shape = at.shape
        trailer = parse(at.meta(i))
        why = trailer if isinstance(trailer, str) else misfit(trailer, shape, run, index)
        if why is None and isinstance(trailer, Trailer):
            why = check_payload(shape, at.payload(i), trailer)
        if why is not None:
            self._bad("record", why, run, index)
        pad = at.payloads[i * shape.stride + shape.payload : i * shape.stride + shape.meta_at]
        start = self.segment.geometry.offset(run.slot + index) + shape.payload
        where = _nonzero(pad.tobytes(), start)
        if where is not None:
            self._add("padding", "bytes that belong to nothing are not zero", run, index,
                      offset=where)  # fmt: skip

    def _bad(self, kind: str, why: str, run: Run, i: int) -> None:
        offset = self.segment.geometry.offset(run.slot + i)
        self._add(kind, why, run, i, offset=offset, blocks=1)
        if run.head not in self.found.bad:
            self.found.bad[run.head] = (run, i)


def misfit(trailer: Trailer, shape: Shape, run: Run, i: int) -> str | None:
    """What of a sound record is not what the index says is there."""
    if trailer.nsid != shape.nsid:
        return "foreign namespace"
    if trailer.payload != shape.payload:
        return "payload length"
    if trailer.hash != run.hash(i):
        return "another block: its chain hash is not the index's"
    if trailer.parent != (run.hash(i - 1) if i else run.parent):
        return "another parent than in the index"
    return None if trailer.block == run.block + i else "another block number than in the index"


def _nonzero(data: bytes, offset: int) -> int | None:
    """The offset of the first byte that is not zero; `data` is what stands at `offset`."""
    if data == bytes(len(data)):  # ten times as fast as the search
        return None
    return offset + len(data) - len(data.lstrip(b"\0"))


def _stretches(runs: list[Run]) -> Iterator[list[Run]]:
    """Runs that follow each other without a free slot are read as one."""
    stretch: list[Run] = []
    for run in runs:
        if stretch and run.slot != stretch[-1].slot + stretch[-1].count:
            yield stretch
            stretch = []
        stretch.append(run)
    if stretch:
        yield stretch


def _owners(runs: list[Run]) -> Iterator[tuple[Run, int]]:
    for run in runs:
        for i in range(run.count):
            yield run, i


def _gap_places(geometry: Geometry, end: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of the gap at the end of each extent, up to the file's end."""
    extent = 0
    while True:
        slots = geometry.in_first if extent == 0 else geometry.in_extent
        first = geometry.first if extent == 0 else extent * geometry.extent
        offset = first + slots * geometry.stride
        length = min((extent + 1) * geometry.extent, end) - offset
        if offset >= end:
            return
        if length > 0:
            yield offset, length
        extent += 1
