"""FSCK: reads everything and says what is wrong, where, and what it costs; with repair drops it.

Verified are the rows of the index against each other, every visible record (kvfs.scan.audit), and
that index, journals, checkpoints and segment files tell the same story. A repair takes bad records,
and what follows them, out of sight on every host (CUT entries in the journal), and segments whose
files are gone (DROP); an index that contradicts itself is rebuilt. Sound data is never removed, a
file never changed, and what may only be out of reach (a segment that cannot be opened) is left
alone.

The store may be in use meanwhile: what vanished or came while it was looked at is no finding. So
before bad records and missing files are believed, the journals of the other hosts are followed.
Blocking; one thread and a helper that reads ahead.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvfs.config import check_alive
from kvfs.errors import FormatError
from kvfs.follow.checkpoint import all_whole, read_entries
from kvfs.frames import DropEntry, Entry, MoveEntry, RunEntry, SegmentEntry
from kvfs.gc.expiry import QUIET_MS, Expiry
from kvfs.index.index import FIRST_FRAME
from kvfs.index.schema import DROPPED, LIVE, Run, Segment
from kvfs.index.soundness import index_faults
from kvfs.namespace import Namespace
from kvfs.removal import cuts_for
from kvfs.repair.chains import holes, second_copies
from kvfs.repair.rebuild import broken_checkpoints, rebuild, shapes
from kvfs.scan.audit import Audit, SegmentAudit
from kvfs.scan.findings import Finding, Report
from kvfs.scan.journals import JournalTail, journal_files, journal_version, read_journal
from kvfs.scan.segments import (
    ShapeOf,
    id_of,
    scan_segment,
    segment_paths,
    segment_version,
)
from kvfs.segment import VERSION
from kvfs.store import Store

Progress = Callable[[int, int], None]
"""Called with (bytes verified so far, bytes to verify)."""

_Place = tuple[int, int]
_BATCH = 1000


@dataclass(slots=True)
class _Told:
    """What the journals tell."""

    runs: dict[bytes, set[_Place]] = field(default_factory=lambda: defaultdict(set))
    """Segment id -> (slot, blocks) of its runs."""
    segments: set[bytes] = field(default_factory=set)
    checkpoint: bool = False
    """Some of it was told by a checkpoint."""

    def note(self, entry: Entry | None) -> None:
        if isinstance(entry, SegmentEntry):
            self.segments.add(entry.segment)
        elif isinstance(entry, RunEntry):
            self.runs[entry.segment].add((entry.slot, entry.count))
        elif isinstance(entry, MoveEntry):
            self.note(entry.run)


def fsck(
    store: Store, *, repair: bool = False, force: bool = False, progress: Progress | None = None
) -> Report:
    """Checks an open store, and repairs it if told so.

    force: repair even if every segment is missing, which looks more like an absent mount.
    Raises NoStoreError, BackendError, SpaceError, IndexFault; what is wrong with the store's
    content is in the report.
    """
    check_alive(store.backend, store.uuid)
    return _Fsck(store, progress).run(repair, force)


class _Fsck:
    """One check of one store."""

    def __init__(self, store: Store, progress: Progress | None) -> None:
        self.store = store
        self.backend = store.backend
        self.progress = progress
        self.report = Report()
        self.now_ms = store.now_ms()
        self._namespaces = {ns.number: ns for ns in store.namespaces()}
        self._live: dict[bytes, Segment] = {}
        self._visible: dict[bytes, set[_Place]] = defaultdict(set)
        self._footers: dict[bytes, tuple[RunEntry, ...]] = {}
        self._unsealed: list[Segment] = []
        self._suspects: list[tuple[Segment, Audit]] = []
        self._bad: list[tuple[Run, int]] = []
        self._missing: list[Segment] = []
        self._total = self._done = 0

    def run(self, repair: bool, force: bool) -> Report:
        for fault in index_faults(self.store.index):
            self._add("index", self.store.index.path, fault)
        self.report.waiting_runs = self.store.index.counters().get("orphans", 0)
        # Segments before journals: whatever is in the index by now was in a journal before.
        self._check_segments()
        told = self._check_journals()
        self._compare(told)
        self._check_chains()
        self._check_files(told)
        if repair:
            self._repair(force)
        return self.report

    def _add(self, kind: str, path: str, detail: str, *, blocks: int = 0) -> None:
        self.report.add(Finding(kind, path, detail, blocks=blocks))

    # segments in use

    def _check_segments(self) -> None:
        segments = self.store.index.segments()
        self._live = {s.segment: s for s in segments if s.state == LIVE}
        blocks = self.store.index.counters().get("blocks", 0)
        stride = max((ns.stride for ns in self._namespaces.values()), default=0)
        self._total = blocks * stride
        for segment in self._live.values():
            ns = self._namespaces.get(segment.ns)
            if ns is None:
                self._add("index", segment.path, f"of unknown namespace number {segment.ns}")
                continue
            self._check_segment(ns, segment)
        if self._suspects:
            self.store.catch_up()
        for segment, found in self._suspects:
            self._take(segment, found)
        if self.progress is not None:
            self.progress(self._done, self._done)

    def _check_segment(self, ns: Namespace, segment: Segment) -> None:
        all_runs = self.store.index.runs_of(segment.number)
        runs = [r for r in all_runs if r.expires_ms > self.now_ms]
        self.report.segments += 1
        self.report.runs += len(runs)
        self.report.expired_runs += len(all_runs) - len(runs)
        self._visible[segment.segment].update((r.slot, r.count) for r in runs)
        audit = SegmentAudit(self.backend, self.store.uuid, ns, segment, self._read)
        found = audit.run(runs)
        self.report.records += found.records
        if found.footer is not None:
            self._footers[segment.segment] = found.footer
        elif found.unsealed:
            self._unsealed.append(segment)
        if found.bad or found.missing:
            self._suspects.append((segment, found))
        else:
            self._take(segment, found)

    def _read(self, n: int) -> None:
        self.report.bytes += n
        self._done += n
        if self.progress is not None:
            self.progress(self._done, max(self._done, self._total))

    def _take(self, segment: Segment, found: Audit) -> None:
        """Keeps what was found, unless it is gone from the index meanwhile."""
        bad = {h: b for h, b in found.bad.items() if self._still(*b)}
        if found.bad and not bad:
            return
        if found.missing:
            now = self.store.index.query(lambda a: a.segment(segment.number))
            if now is None or now.state != LIVE:
                return
            self._missing.append(segment)
            if not found.findings:
                self._add("dropped", segment.path, "the file is gone; no block of it is visible")
        for finding in found.findings:
            self.report.add(finding)
        self._bad += bad.values()

    def _still(self, run: Run, keep: int) -> bool:
        now = self.store.index.run(run.ns, run.head)
        return now is not None and (now.seg, now.slot) == (run.seg, run.slot) and now.count > keep

    # journals

    def _check_journals(self) -> _Told:
        told = _Told()
        states = {(s.writer, s.number): s for s in self.store.index.journals().values()}
        for writer, number in journal_files(self.backend):
            self.report.journals += 1
            tail = JournalTail(f"log/{writer}/{number:06d}.log")
            applied = states.get((writer, number))
            try:
                self._read_journal(writer, number, tail, told)
            except FileNotFoundError:
                continue
            except (OSError, FormatError) as e:
                newer = journal_version(self.backend, tail.path) is not None
                self._add("newer" if newer else "journal", tail.path, _reason(e, tail.path))
                continue
            if tail.unread:
                self._add("journal", tail.path, _tail_text(tail, applied and applied.offset))
            else:
                n = tail.end - (applied.offset if applied else FIRST_FRAME)
                if n > 0:  # else its writer died before it had anything to tell
                    self._add("behind", tail.path, f"{n} bytes are not applied yet")
        self._read_checkpoint(told)
        return told

    def _read_journal(self, writer: str, number: int, tail: JournalTail, told: _Told) -> None:
        # Its writer may be in the middle of a frame: what is torn now may be whole a moment later.
        for _ in range(2):
            for entry in read_journal(self.backend, writer, number, self.store.uuid, tail):
                told.note(entry)
            if not tail.unread:
                return

    def _read_checkpoint(self, told: _Told) -> None:
        """What journals told that were removed since, a checkpoint tells."""
        for path in broken_checkpoints(self.store):
            self._add("checkpoint", path, "not whole: it is passed over")
        for whole in reversed(list(all_whole(self.backend, self.store.uuid))):
            try:
                for entry in read_entries(self.backend, whole, self.store.uuid):
                    if not told.checkpoint:  # only the newest that is sound counts
                        told.note(entry)
                told.checkpoint = True
            except FileNotFoundError:
                continue
            except (OSError, FormatError) as e:
                self._add("checkpoint", whole.path, _reason(e, whole.path))

    def _compare(self, told: _Told) -> None:
        """Runs that index or footers hold and no journal tells of: another host, or a rebuild from
        the journals, would not find them."""
        if not self.report.journals and not told.checkpoint and self._live:
            self._add("journal", "log", "no journal is left: other hosts find no block")
            return
        for segment in self._live.values():
            known = told.runs.get(segment.segment, set())
            runs = self._visible.get(segment.segment, set())
            untold = [r for r in runs if r not in known and not _inside(r, known)]
            if untold:
                self._add("untold", segment.path, f"{len(untold)} visible runs are in no journal",
                          blocks=sum(n for _, n in untold))  # fmt: skip
                continue
            footer = self._footers.get(segment.segment, ())
            lost = [r for r in footer if (r.slot, r.count) not in known]
            # A checkpoint does not tell of what was trimmed or cut before it was written.
            if lost and not told.checkpoint:
                self._add("untold", segment.path, f"{len(lost)} runs of its footer are in no "
                          "journal", blocks=sum(r.count for r in lost))  # fmt: skip

    def _check_chains(self) -> None:
        """What is sound and of no use: each segment of it is told once."""
        found: Counter[int] = Counter()
        for ns in self._namespaces.values():
            for run in holes(self.store.index, ns, self.now_ms):
                found[run.seg] += run.count
        by_number = {s.number: s for s in self._live.values()}
        for number, blocks in found.items():
            if number in by_number:
                text = f"{blocks} blocks that no check reaches: the one before them is not there"
                self._add("hole", by_number[number].path, text)
        for segment in self._live.values():
            footer = self._footers.get(segment.segment, ())
            told = [r for r in footer if (r.slot, r.count) not in self._visible[segment.segment]]
            copies = second_copies(self.store.index, segment, told, self.now_ms) if told else 0
            if copies:
                text = f"{copies} blocks are in another segment as well, and shown from there"
                self._add("copy", segment.path, text)

    # files

    def _check_files(self, told: _Told) -> None:
        known = {s.segment: s for s in self.store.index.segments()}
        shape_of = shapes(self.store).get
        for path in segment_paths(self.backend):
            segment = id_of(path)
            row = None if segment is None else known.get(segment)
            if segment is None:
                self._add("strange", path, "not the name of a segment")
            elif row is None:
                if segment not in told.segments:
                    self._orphan(path, shape_of)
            elif row.path != path:
                self._add("duplicate", path, f"the same segment as {row.path}")
            elif row.state != LIVE:
                what = "is dropped" if row.state == DROPPED else "was removed, but is there again"
                self._add("dropped", path, f"the segment {what}; gc removes the file")
        expiry = Expiry(self.store, dry_run=True)
        for live in self._unsealed:
            if expiry.ended(live.segment) or live.created_ms + QUIET_MS <= self.now_ms:
                self._add("unsealed", live.path, "its writer is gone and has left no footer")

    def _orphan(self, path: str, shape_of: ShapeOf) -> None:
        try:
            scan = scan_segment(self.backend, path, self.store.uuid, shape_of)
        except FileNotFoundError:
            return
        except (OSError, FormatError) as e:
            newer = (segment_version(self.backend, path) or 0) > VERSION
            self._add("newer" if newer else "strange", path, _reason(e, path))
            return
        text = f"no journal tells of it; {scan.records} sound records"
        if scan.unsound:
            text += f", {len(scan.unsound)} that are not"
        self._add("orphan", path, f"{text} (kvctl rebuild --from segments shows them)")

    # repair

    def _repair(self, force: bool) -> None:
        report = self.report
        check_alive(self.backend, self.store.uuid)
        if report.counts["index"]:
            rebuild(self.store)
            report.rebuilt = True
        self.store.catch_up()
        gone = len(self._missing)
        if gone > 1 and gone == len(self._live) and not force:
            report.unrepaired.append(
                f"all {gone} segments are missing: is the storage below {self.store.path}/seg "
                "there? --force drops them"
            )
            return
        self._cut()
        self._drop()
        if report.counts["unreadable"]:
            report.unrepaired.append("segments that cannot be opened may only be out of reach")
        report.repaired = True

    def _cut(self) -> None:
        """Takes bad records out of sight, and all that follows them in any chain."""
        for run, keep in self._bad:
            if not self._in_place(run, keep):
                continue
            ns = self._namespaces[run.ns]
            entries, blocks = cuts_for(self.store.index, ns, run.head, keep, self.now_ms)
            self._publish(entries)
            self.report.cut_blocks += blocks

    def _in_place(self, run: Run, keep: int) -> bool:
        """The record is still visible, in the segment where it was found to be bad."""
        now = self.store.index.run(run.ns, run.head)
        if now is None or now.slot != run.slot or now.count <= keep:
            return False
        # By the segment's own id: a rebuild has given it another number.
        found = self._live.get(self.store.index.segment(now.seg).segment)
        return found is not None and found.number == run.seg

    def _drop(self) -> None:
        self._publish([DropEntry(s.segment, self.now_ms) for s in self._missing])
        self.report.dropped_segments = len(self._missing)

    def _publish(self, entries: Iterable[Entry]) -> None:
        listed = list(entries)
        for at in range(0, len(listed), _BATCH):
            self.store.writer().publish([], listed[at : at + _BATCH])


def _inside(run: _Place, told: set[_Place]) -> bool:
    """Trimming leaves a part of a run that was told."""
    slot, count = run
    return any(s <= slot and slot + count <= s + n for s, n in told)


def _reason(e: Exception, path: str) -> str:
    if isinstance(e, OSError):
        return e.strerror or str(e)
    return str(e).removeprefix(f"{path}: ")


def _tail_text(tail: JournalTail, applied: int | None) -> str:
    text = f"{tail.unread} bytes from offset {tail.end} on are no whole entry"
    if applied is not None and applied > tail.end:
        return f"{text}, though this host has applied them: other hosts may lack their blocks"
    return f"{text}: torn when its writer died, or damaged"
