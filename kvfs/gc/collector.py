"""GC: takes what has expired out of sight and, after a grace, off the disk; makes room.

A pass, under the lease (one collector at a time):

1. files of segments that were dropped longer than the grace ago are removed; a day's directory in
   which nothing else lies goes as a whole (kvfs.gc.directories)
2. mark: segments that may go (kvfs.gc.expiry)
3. sweep: each is looked at again in the very transaction that drops it, so that what a put renewed
   in between stays; the DROP entry tells the other hosts. Its file goes in a later pass: a fetch
   that is under way reads on
4. where limits are exceeded the longest unused runs are evicted, and segments that are little used
   are copied forward and dropped (kvfs.gc.reclaim)
5. segments that no journal tells of go when their own time to live, and a day, is over
6. empty directories of past days go, what killed processes left on its way to its name
   (kvfs.gc.strays), and index rows of files that are gone
7. a checkpoint is written if there is much to read without one, and journals go that nobody needs
8. what came of it is put on record (kvfs.gc.passes)

Copies and removals keep to the rates in the store's limits, which are read again and again
meanwhile. A crash after any step leaves what the next pass finds and finishes. Nothing is concluded
from what is not there: an absent mount has no segments, but then the marker is absent as well. A
file of a version that this code does not read is never touched.

Blocking; one Collector belongs to one thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from kvfs.config import check_alive
from kvfs.errors import EXIT_OK, BackendError, ConfigError, FormatError, KvfsError, SpaceError
from kvfs.frames import DropEntry, Entry
from kvfs.gc.directories import is_past, remove_empty_days, whole
from kvfs.gc.expiry import DAY_MS, Doomed, Expiry, Marked
from kvfs.gc.folding import Folded, fold
from kvfs.gc.lease import SECONDS, Lease
from kvfs.gc.pace import Pace
from kvfs.gc.passes import note
from kvfs.gc.reclaim import Reclaim, Reclaimed
from kvfs.gc.strays import old_strays
from kvfs.index.apply import Applier
from kvfs.index.schema import DROPPED, GONE, Segment
from kvfs.index.wipe import forget, forget_cuts, mark_gone
from kvfs.record import PAGE
from kvfs.scan.segments import id_of, read_head, segment_paths, segment_version
from kvfs.segment import VERSION
from kvfs.store import Store
from kvfs.writer import Writer

# More than this share of a store of some size in one pass is more likely a wrong clock.
MAX_SHARE = 0.5
MIN_SEGMENTS = 64
CLOCK_MS = DAY_MS
_BATCH = 16

OnPhase = Callable[[str], None]
"""Called with "marked" between mark and sweep, "dropped" behind the sweep: for tests."""


@dataclass(frozen=True, slots=True)
class Removed:
    """A file that was removed, and why: "dropped", "orphan" or "unfinished"."""

    path: str
    bytes: int
    reason: str


@dataclass(slots=True)
class GcResult:
    """What a pass did, or with dry_run would do."""

    dry_run: bool
    live: int = 0
    """Segments in use before the pass."""
    dropped: list[Doomed] = field(default_factory=list)
    removed: list[Removed] = field(default_factory=list)
    spared: list[str] = field(default_factory=list)
    """Marked, but renewed before they were dropped."""
    being_written: int = 0
    """Could go, but a writer may still write them."""
    in_grace: int = 0
    """Dropped segments whose files wait for the grace to end."""
    newer: int = 0
    """Segments of a version this code does not read yet."""
    refused: str | None = None
    """Why nothing was dropped, if a guard stepped in (`force` overrides it)."""
    reclaimed: Reclaimed = field(default_factory=Reclaimed)
    """What was evicted and copied forward."""
    folded: Folded = field(default_factory=Folded)
    """What became of journals and checkpoints."""
    problems: list[str] = field(default_factory=list)
    """What could not be read or removed; it is tried again in the next pass."""

    @property
    def freed_bytes(self) -> int:
        """Bytes of the files that were removed."""
        return sum(r.bytes for r in self.removed)

    @property
    def dropped_bytes(self) -> int:
        """Bytes that the next pass frees."""
        return sum(d.bytes for d in self.dropped)

    @property
    def exit_code(self) -> int:
        return EXIT_OK if self.refused is None else ConfigError.exit_code

    def to_json(self) -> dict[str, Any]:
        return {
            "dry_run": self.dry_run, "live": self.live,
            "dropped": [d.to_json() for d in self.dropped], "dropped_bytes": self.dropped_bytes,
            "removed": [
                {"path": r.path, "bytes": r.bytes, "reason": r.reason} for r in self.removed
            ],
            "freed_bytes": self.freed_bytes, "spared": self.spared,
            "being_written": self.being_written, "in_grace": self.in_grace, "newer": self.newer,
            "refused": self.refused, **self.reclaimed.to_json(), **asdict(self.folded),
            "problems": self.problems,
        }  # fmt: skip


class Collector:
    """Collects one store."""

    def __init__(
        self, store: Store, *, dry_run: bool = False, force: bool = False,
        max_share: float = MAX_SHARE, min_segments: int = MIN_SEGMENTS,
        on_phase: OnPhase = lambda phase: None, sleep: Callable[[float], None] = time.sleep,
        copy_rate: float | None = None, remove_rate: float | None = None,
        copier: Writer | None = None, stop: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """dry_run: changes nothing; force: overrides the guards; max_share, min_segments: a pass
        that would drop more than this share is refused, in a store of more segments than that;
        copy_rate, remove_rate: bytes and files a second, in place of those in the store's limits;
        copier: a writer for copies alone, default: one for the time of a pass; stop: asked again
        and again, true ends the pass early (Ended), with everything done that was begun.
        """
        self.store = store
        self.backend = store.backend
        self.dry_run = dry_run
        self.force = force
        self.max_share = max_share
        self.min_segments = min_segments
        self.on_phase = on_phase
        self.sleep = sleep
        self._lease: Lease | None = None
        self._result = GcResult(dry_run)
        self._pace = Pace(self.backend, copy_rate, remove_rate, stop)
        self._copier = copier

    def _writer(self) -> Writer:
        """A writer for copies alone: what is cold lies apart from what is put."""
        if self._copier is None:
            store = self.store
            self._copier = Writer(self.backend, store.index, store.config, store.clock)
        return self._copier

    def run(self, *, wait: bool = False) -> GcResult:
        """One pass. wait: stays for the grace and removes the files of what it dropped as well.

        Raises BusyError if another collector runs (Ended, which is one, if it was told to end),
        NoStoreError, BackendError, SpaceError, IndexFault.
        """
        self._result = GcResult(self.dry_run)
        began_ms = self.store.now_ms()
        check_alive(self.backend, self.store.uuid)
        if self.dry_run:
            self._pass()
            return self._result
        with Lease.acquire(self.backend, self.store.now_ms) as self._lease:
            try:
                self._pass()
                if wait and self._result.in_grace:
                    grace = self.store.config.grace_seconds
                    self._lease.prolong(grace + SECONDS)
                    self.sleep(grace)
                    self._remove_dropped()
            finally:
                self._note(began_ms)
        return self._result

    def _note(self, began_ms: int) -> None:
        """Puts what was done on record, unless another one works by now."""
        with contextlib.suppress(KvfsError):
            self._still_ours()
            note(self.backend, self._result, began_ms, self.store.now_ms())

    def _pass(self) -> None:
        result = self._result
        followed = self.store.catch_up()
        result.problems += followed.problems
        self._remove_dropped()
        expiry = Expiry(self.store, dry_run=self.dry_run)
        marked = expiry.mark()
        result.live, result.being_written = marked.live, marked.being_written
        result.refused = None if self.force else self._guard(marked, expiry.now_ms)
        self.on_phase("marked")
        if result.refused is not None:
            return
        self._sweep(expiry, marked)
        self.on_phase("dropped")
        given = self._copier
        try:
            self._reclaim(expiry)
        finally:
            if given is None and self._copier is not None:
                self._copier.close()
                self._copier = None
        self._pace.go_on()
        # A journal that this code cannot read may tell of them.
        self._orphans(expiry.now_ms, complete=not followed.problems)
        if not self.dry_run:
            result.problems += remove_empty_days(self.backend, expiry.now_ms)
            self._remove_strays(expiry.now_ms)
            self._tidy_index(expiry)
            result.folded = fold(self.store, expiry.now_ms, result.problems)

    def _reclaim(self, expiry: Expiry) -> None:
        result, pace = self._result, self._pace
        work = Reclaim(
            self.store, self._writer, expiry, pace.limits(), pace.copies, self._step,
            dry_run=self.dry_run,
        )  # fmt: skip
        try:
            result.reclaimed = work.run()
        except (SpaceError, BackendError) as e:
            result.problems.append(str(e))
        result.problems += result.reclaimed.moved.problems
        result.in_grace += 0 if self.dry_run else len(result.reclaimed.cleaned)

    def _guard(self, marked: Marked, now_ms: int) -> str | None:
        if marked.newest_ms > now_ms + CLOCK_MS:
            days = (marked.newest_ms - now_ms) / DAY_MS
            return f"the clock is {days:.1f} days behind the newest entry of the store"
        if marked.live <= self.min_segments:
            return None
        share = len(marked.doomed) / marked.live
        if share <= self.max_share:
            return None
        return (
            f"{len(marked.doomed)} of {marked.live} segments would go at once, more than "
            f"{self.max_share:.0%}: is the clock right? --force drops them"
        )

    def _step(self) -> None:
        """Before anything is changed: the store is still there, the lease still ours and nobody
        wants it to end."""
        self._still_ours()
        self._pace.go_on()
        self._pace.refresh()

    def _still_ours(self) -> None:
        check_alive(self.backend, self.store.uuid)
        if self._lease is not None:
            self._lease.check()

    # dropped segments: their files

    def _remove_dropped(self) -> None:
        grace_ms = int(self.store.config.grace_seconds * 1000)
        dropped = [s for s in self.store.index.segments() if s.state == DROPPED]
        due = [s for s in dropped if s.dropped_ms + grace_ms <= self.store.now_ms()]
        self._result.in_grace = len(dropped) - len(due)
        due = self._remove_whole(due)
        for at in range(0, len(due), _BATCH):
            self._step()
            batch = due[at : at + _BATCH]
            gone = [s for s in batch if self._remove(s.path, "dropped")]
            if not self.dry_run:
                self.store.index.write(lambda a, gone=gone: _note_gone(a, gone))  # type: ignore[misc]

    def _remove_whole(self, due: list[Segment]) -> list[Segment]:
        """Directories of past days in which nothing else lies go by one call each; returns the
        segments that are left to remove one by one."""
        if self.dry_run:
            return due
        left = {s.number: s for s in due}
        for directory, segments in whole(self.backend, due, self.store.now_ms()).items():
            self._step()
            try:
                there = self._remove_directory(directory, segments)
            except OSError as e:
                self._result.problems.append(f"{directory}: {e.strerror or e}")
                continue
            self._result.removed += there
            for at in range(0, len(segments), _BATCH):
                gone = segments[at : at + _BATCH]
                self.store.index.write(lambda a, gone=gone: _note_gone(a, gone))  # type: ignore[misc]
            for s in segments:
                del left[s.number]
        return list(left.values())

    def _remove_directory(self, directory: str, segments: list[Segment]) -> list[Removed]:
        """Removes a directory; returns which files of these segments were there."""
        there = []
        for s in segments:
            with contextlib.suppress(FileNotFoundError):
                there.append(Removed(s.path, self.backend.size(s.path), "dropped"))
            self.store.reader().forget(s.path)
        self.backend.remove_tree(directory, self._pace.removals.take)
        return there

    def _remove(self, path: str, reason: str) -> bool:
        """Removes a file; one that is gone already is fine. Says whether it is gone now."""
        try:
            size = self.backend.size(path)
            if not self.dry_run:
                self._pace.removals.take(1)
                self.store.reader().forget(path)
                self.backend.unlink(path)
        except FileNotFoundError:
            return True
        except OSError as e:
            self._result.problems.append(f"{path}: {e.strerror or e}")
            return False
        self._result.removed.append(Removed(path, size, reason))
        return True

    # segments in use

    def _sweep(self, expiry: Expiry, marked: Marked) -> None:
        for at in range(0, len(marked.doomed), _BATCH):
            batch = marked.doomed[at : at + _BATCH]
            if self.dry_run:
                self._result.dropped += batch
                continue
            self._step()
            self._drop(expiry, batch)

    def _drop(self, expiry: Expiry, batch: list[Doomed]) -> None:
        now_ms = self.store.now_ms()

        def decide(applier: Applier) -> list[Entry]:
            waiting = expiry.waited_for(applier)
            still = [d for d in batch if expiry.still(applier, d, waiting)]
            return [DropEntry(d.segment, now_ms) for d in still]

        entries = self.store.writer().publish_checked(decide)
        dropped = {e.segment for e in entries if isinstance(e, DropEntry)}
        for doomed in batch:
            if doomed.segment in dropped:
                self._result.dropped.append(doomed)
                self._result.in_grace += 1
            else:
                self._result.spared.append(doomed.path)

    # segments that no journal tells of

    def _orphans(self, now_ms: int, *, complete: bool) -> None:
        known = {s.segment: s for s in self.store.index.segments()}
        for path in segment_paths(self.backend):
            segment = id_of(path)
            if segment is None:
                continue
            if segment not in known:
                self._orphan(path, now_ms, complete)
            elif known[segment].state == GONE and known[segment].path == path:
                self._remove(path, "dropped")  # an earlier removal did not last

    def _orphan(self, path: str, now_ms: int, complete: bool) -> None:
        try:
            head = read_head(self.backend, path, self.store.uuid)
        except FileNotFoundError:
            return
        except OSError as e:
            self._result.problems.append(f"{path}: {e.strerror or e}")
            return
        except FormatError as e:
            if (segment_version(self.backend, path) or 0) > VERSION:
                self._result.newer += 1
            elif complete and self._unfinished(path, now_ms):
                self._remove(path, "unfinished")
            else:
                self._result.problems.append(str(e))
            return
        over = head.entry.created_ms + head.entry.ttl_seconds * 1000 + DAY_MS
        if complete and over <= now_ms:
            self._remove(path, "orphan")

    def _unfinished(self, path: str, now_ms: int) -> bool:
        """A file whose writer died before its header was written, some days ago."""
        try:
            return self.backend.size(path) < PAGE and is_past(path.split("/")[2], now_ms)
        except OSError:
            return False

    # what is left over

    def _remove_strays(self, now_ms: int) -> None:
        try:
            for path in old_strays(self.store, now_ms):
                self._remove(path, "unfinished")
        except OSError as e:
            self._result.problems.append(f"{self.backend.root}: {e.strerror or e}")

    def _tidy_index(self, expiry: Expiry) -> None:
        """Rows of segments that are gone for a day, and cuts of segments that never come in."""

        def tidy(applier: Applier) -> None:
            forget(applier, old)
            forget_cuts(applier, expiry.ended)

        index = self.store.index
        old = [
            s
            for s in index.segments()
            if s.state == GONE and s.dropped_ms + DAY_MS <= expiry.now_ms
        ]
        cuts: bool = index.query(_any_cuts)
        if old or cuts:
            index.write(tidy)


def _note_gone(applier: Applier, gone: list[Segment]) -> None:
    for segment in gone:
        mark_gone(applier, segment)


def _any_cuts(applier: Applier) -> bool:
    return applier.meta_int("cuts") > 0
