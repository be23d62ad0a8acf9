"""All that the segments of a store tell, as journal entries in the order they were written.

For an index whose journals are lost. Two passes: `survey` reads the head of every segment and, of
those never sealed, every record; `entries` then yields SEGMENT and RUN entries merged by time,
holding only the runs of segments that overlap in time. Removals, renewals and class changes live
in journals only: what was removed comes back, and every run has its first expiry.

Blocking; reads the shared storage, writes nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kvfs.backend import Backend
from kvfs.chain import HASH_BYTES
from kvfs.errors import FormatError
from kvfs.frames import Entry, RunEntry, shortened
from kvfs.scan.segments import Scan, ShapeOf, scan_segment, segment_paths, segment_version
from kvfs.segment import VERSION


@dataclass(slots=True)
class Survey:
    """What the first pass found."""

    found: list[tuple[int, str]] = field(default_factory=list)
    """(time made in ms, path) of each readable segment, by time."""
    unsealed: dict[str, Scan] = field(default_factory=dict)
    """What was read of segments without a footer, by path."""
    records_left_out: int = 0
    """Records of unsealed segments that are torn, damaged or foreign."""
    newer: int = 0
    """Segments of a version this code does not read yet."""
    skipped: list[str] = field(default_factory=list)
    """Why segments were left out, newer ones included."""


class Salvage:
    """Reads the segments of one store. `survey` comes first."""

    def __init__(self, backend: Backend, store: bytes, shape_of: ShapeOf) -> None:
        self.backend = backend
        self.store = store
        self.shape_of = shape_of

    def survey(self) -> Survey:
        """Reads what there is. A segment that cannot be used is noted and left alone."""
        survey = Survey()
        seen: dict[bytes, str] = {}
        for path in segment_paths(self.backend):
            scan = self._scan(path, survey)
            if scan is None:
                continue
            entry = scan.head.entry
            if entry.segment in seen:
                survey.skipped.append(f"{path}: the same segment as {seen[entry.segment]}")
                continue
            seen[entry.segment] = path
            survey.found.append((entry.created_ms, path))
            if scan.head.footer is None:
                survey.unsealed[path] = scan
                survey.records_left_out += len(scan.unsound)
        survey.found.sort()
        return survey

    def _scan(self, path: str, survey: Survey) -> Scan | None:
        try:
            return scan_segment(self.backend, path, self.store, self.shape_of)
        except OSError as e:
            survey.skipped.append(f"{path}: {e.strerror or e}")
        except FormatError as e:
            survey.skipped.append(str(e))
            survey.newer += (segment_version(self.backend, path) or 0) > VERSION
        return None

    def entries(self, survey: Survey) -> Iterator[Entry]:
        """Yields the entries of all segments of a survey, each run after those it follows."""
        linker = _Linker(survey)
        waiting: list[tuple[int, int, int, RunEntry]] = []
        serial = 0
        for created, path in survey.found:
            while waiting and waiting[0][0] < created:
                yield linker.link(heapq.heappop(waiting)[3])
            scan = survey.unsealed.get(path) or self._scan(path, survey)
            if scan is None:
                continue
            yield replace(scan.head.entry, path=path)
            for run in scan.runs:
                # A run may be a few ms older than the segment that was made for it. A run and its
                # parent may fall into one millisecond: the parent has the lower block number.
                serial += 1
                key = max(run.written_ms, created)
                heapq.heappush(waiting, (key, run.block, serial, run))
        while waiting:
            yield linker.link(heapq.heappop(waiting)[3])


class _Linker:
    """Gives the runs that trailers tell of the path heads which only journals and footers hold.

    With them the index finds where a run belongs that begins in the middle of another one.
    """

    def __init__(self, survey: Survey) -> None:
        runs = (run for scan in survey.unsealed.values() for run in scan.runs)
        self._wanted = {run.parent for run in runs if run.block}
        self._heads: dict[bytes, bytes] = {}

    def link(self, run: RunEntry) -> RunEntry:
        """Returns the run with its path heads; call in the order of `Salvage.entries`."""
        if not run.heads and run.block:
            run = replace(run, heads=self._heads.get(run.parent, b""))
        if self._wanted:
            path = shortened(run.heads + run.hashes[:HASH_BYTES])
            for at in range(0, len(run.hashes), HASH_BYTES):
                if run.hashes[at : at + HASH_BYTES] in self._wanted:
                    self._heads[run.hashes[at : at + HASH_BYTES]] = path
        return run
