"""Which segments may be dropped: read from the index, nothing is changed here.

A segment may go when nothing in it is of use any more (all its visible runs have expired, or all
its blocks were removed, or it has none and its own time is over) and nothing can come in: a run
published into a dropped segment would be lost to a caller who was told "stored".
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kvfs.errors import FormatError
from kvfs.frames import RunEntry
from kvfs.index.apply import Applier
from kvfs.index.index import LAST
from kvfs.index.schema import CUTS, LIVE, PLACE, RUN, U32, WAITING, Segment, scan
from kvfs.scan.segments import read_head, scan_segment
from kvfs.segment import WRITER_BYTES
from kvfs.store import Store

DAY_MS = 86_400_000
# No writer puts a run into a segment of an earlier day, and a run that it began to write before
# midnight is in its place long before this.
QUIET_MS = DAY_MS + 3_600_000
# An expired run is left a little longer: a renewal by another host may still be on its way.
SETTLE_MS = 60_000
_SETTLE_SHARE = 8


@dataclass(frozen=True, slots=True)
class Doomed:
    """A segment that may be dropped, and why: "expired", "removed" or "empty"."""

    number: int
    segment: bytes
    path: str
    ttl_class: str
    reason: str
    runs: int
    blocks: int
    """Visible ones, all of them expired."""
    bytes: int
    """Size of its file; 0 if that is gone already."""

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["number"]
        return {**fields, "segment": self.segment.hex()}


@dataclass(slots=True)
class Marked:
    """What a look at all segments in use found."""

    live: int = 0
    doomed: list[Doomed] = field(default_factory=list)
    being_written: int = 0
    """Segments that could go but that a writer may still write."""
    newest_ms: int = 0
    """When the latest segment was made. Runs may tell of a later time: see kvfs.put."""


class Expiry:
    """Decides over the segments of one store at one time."""

    def __init__(self, store: Store, *, dry_run: bool = False) -> None:
        """dry_run: leaves this process's own segments open."""
        self.store = store
        self.dry_run = dry_run
        self.now_ms = store.now_ms()
        self._class_names = store.index.class_names()
        self._shapes = {ns.nsid: ns.shape for ns in store.namespaces()}
        journals = store.index.journals().values()
        self._ended = {j.writer_id for j in journals if j.ended == LAST}

    def ended(self, segment: bytes) -> bool:
        """The writer of a segment has said that it writes no more."""
        return segment[:WRITER_BYTES] in self._ended

    def mark(self) -> Marked:
        """Looks at every segment in use."""
        marked = Marked()
        waiting = self.store.index.query(self.waited_for)
        for segment in self.store.index.segments():
            if segment.state != LIVE:
                continue
            marked.live += 1
            marked.newest_ms = max(marked.newest_ms, segment.created_ms)
            doomed = self._judge(segment, marked, waiting)
            if doomed is None:
                continue
            if self.quiet(segment):
                marked.doomed.append(doomed)
            else:
                marked.being_written += 1
        return marked

    def waited_for(self, applier: Applier) -> set[int]:
        """Segments with runs that are out of sight only until the run before them comes in."""
        found = set()
        for key, value in scan(applier.txn, WAITING):
            if RUN.unpack_from(value)[5] > self.now_ms:
                found.add(PLACE.unpack_from(key, len(key) - PLACE.size)[0])
        return found

    def still(self, applier: Applier, doomed: Doomed, waiting: set[int]) -> bool:
        """Whether what was marked may go as the index is now, within a transaction."""
        segment = applier.segment(doomed.number)
        if segment is None or segment.state != LIVE or segment.number in waiting:
            return False
        return all(r.expires_ms <= self.limit(segment) for r in applier.runs_of(segment.number))

    def limit(self, segment: Segment) -> int:
        """What expired by this time may go."""
        return self.now_ms - min(SETTLE_MS, segment.ttl_seconds * 1000 // _SETTLE_SHARE)

    def _judge(self, segment: Segment, marked: Marked, waiting: set[int]) -> Doomed | None:
        runs = self.store.index.runs_of(segment.number)
        limit = self.limit(segment)
        if segment.number in waiting or any(r.expires_ms > limit for r in runs):
            return None
        reason = "expired" if runs else self._why_empty(segment, limit)
        if reason is None:
            return None
        name = self._class_names.get(segment.class_id, "")
        blocks = sum(r.count for r in runs)
        return Doomed(
            segment.number, segment.segment, segment.path, name, reason, len(runs), blocks,
            self.size(segment.path),
        )  # fmt: skip

    def _why_empty(self, segment: Segment, limit: int) -> str | None:
        """Why a segment without a visible run may go, None if it must stay.

        What is hidden on this host only (a failed read may be this host's own fault) is no reason
        to take it from the others before its time.
        """
        if segment.created_ms + segment.ttl_seconds * 1000 <= limit:
            return "empty"
        cuts = self.store.index.query(lambda a: _cuts_of(a, segment.segment))
        if not cuts:
            return None
        runs = self.published(segment)
        if runs and all(_cut_whole(run, cuts) or run.expires_ms <= limit for run in runs):
            return "removed"
        return None

    def published(self, segment: Segment) -> list[RunEntry]:
        """The runs that a segment was written with, as its file tells, if it can be read."""
        try:
            return self.told_by(segment.path)
        except (OSError, FormatError):
            return []

    def told_by(self, path: str) -> list[RunEntry]:
        """The same by the path of a segment; raises OSError, FormatError if it cannot be read."""
        scan = scan_segment(
            self.store.backend, path, self.store.uuid, self._shapes.get, payloads=False
        )
        return scan.runs

    def quiet(self, segment: Segment) -> bool:
        """No run can come into the segment any more."""
        if self.ended(segment.segment) or segment.created_ms + QUIET_MS <= self.now_ms:
            return True
        writer = self.store.writer()
        if writer.id == segment.segment[:WRITER_BYTES]:
            if self.dry_run:
                return True
            writer.retire({segment.segment})
        try:
            head = read_head(self.store.backend, segment.path, self.store.uuid)
        except FileNotFoundError:
            return True
        except (OSError, FormatError):
            return False
        return head.footer_at is not None

    def size(self, path: str) -> int:
        """Bytes of a file, 0 if it is gone or cannot be looked at."""
        try:
            return self.store.backend.size(path)
        except OSError:
            return 0


def _cuts_of(applier: Applier, segment: bytes) -> list[tuple[int, int]]:
    """(slot, count) of every cut in a segment."""
    rows = scan(applier.txn, CUTS + segment)
    return [(int.from_bytes(key[-4:], "big"), U32.unpack(value)[0]) for key, value in rows]


def _cut_whole(run: RunEntry, cuts: list[tuple[int, int]]) -> bool:
    # A cut takes what follows it in the run as well, so the first block decides.
    return any(slot <= run.slot < slot + count for slot, count in cuts)
