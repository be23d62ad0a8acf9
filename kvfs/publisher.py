"""What was written becomes visible: steps two to five of a put (see kvfs.writer).

Group commit: entries of all callers that wait are made durable, appended to the journal and applied
to the index together by one of them, unless the store's policy is "always". Thread-safe.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvfs.backend import Backend
from kvfs.config import StoreConfig, check_alive
from kvfs.errors import IndexFault, KvfsError
from kvfs.follow.follower import Follower
from kvfs.frames import Entry, MoveEntry, RunEntry, SealEntry
from kvfs.index import Index, OutOfStep, apply_journal
from kvfs.index.apply import Applier
from kvfs.index.index import add_counters
from kvfs.journal import (
    HEADER_BYTES,
    IDLE_SECONDS,
    ROLL_BYTES,
    Header,
    JournalWriter,
    journal_path,
)
from kvfs.segment_writer import OpenSegment, Written


@dataclass(slots=True)
class _Commit:
    """What one caller wants published; it may go together with others'."""

    runs: list[tuple[Written, RunEntry]]
    others: list[Entry]
    counters: dict[str, int]
    done: bool = False
    error: KvfsError | None = None


class Publisher:
    """One process's journal, and the way of its entries into the local index."""

    def __init__(
        self, backend: Backend, index: Index, config: StoreConfig, name: str, writer_id: bytes,
        now_ms: Callable[[], int], failed: Callable[[OSError], KvfsError],
    ) -> None:  # fmt: skip
        """failed: turns an I/O error into what the caller of a put gets to see."""
        self.backend = backend
        self.index = index
        self.config = config
        self.name = name
        self.id = writer_id
        self.now_ms = now_ms
        self.failed = failed
        self._lock = threading.Lock()
        self._queue: list[_Commit] = []
        self._committing = threading.Lock()
        self._journal: JournalWriter | None = None
        self._next = 0
        self._before = 0  # end of the journal before
        self._used = _now()

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
        self._commit(commit)
        if commit.error is not None:
            raise commit.error

    def publish_checked(
        self, decide: Callable[[Applier], list[Entry]], written: Sequence[Written] = ()
    ) -> list[Entry]:
        """Publishes what `decide` returns, decided and applied in one index transaction.

        Nothing that this host makes visible can come between the decision and its effect. Other
        writers of the host wait, for as long as an append to the journal takes. written: what the
        entries refer to; it is made durable first, as in `publish`. Returns the entries, those of
        new segments included; raises as `publish`.
        """
        segments = {w.segment.path: w.segment for w in written}
        fresh: list[Entry] = [s.entry() for s in segments.values() if not s.published]

        def work(applier: Applier) -> list[Entry]:
            decided = decide(applier)
            return [*fresh, *decided] if any(_runs(decided)) else decided

        with self._committing:
            try:
                if self.config.durability != "none":
                    for segment in segments.values():
                        self.backend.sync(segment.file)
                self._current_journal()  # a full one is ended by a transaction of its own
                entries = self._publish_in_step(work)
            except OSError as e:
                for segment in segments.values():
                    segment.poisoned = True
                raise self.failed(e) from e
        self._note_published(segments.values(), entries)
        return entries

    def _publish_in_step(self, decide: Callable[[Applier], list[Entry]]) -> list[Entry]:
        try:
            return self._publish_checked(decide)
        except OutOfStep:
            self._follow_own()
        try:
            return self._publish_checked(decide)
        except OutOfStep as e:
            raise IndexFault(f"{self.index.path}: {e}") from e

    @staticmethod
    def _note_published(segments: Iterable[OpenSegment], entries: list[Entry]) -> None:
        """What the footers of the segments will say."""
        runs = list(_runs(entries))
        for segment in segments if runs else ():
            segment.published = True
            id_ = segment.header.segment_id
            segment.entries += (run for run in runs if run.segment == id_)

    def _publish_checked(self, decide: Callable[[Applier], list[Entry]]) -> list[Entry]:
        appended: list[tuple[JournalWriter, int, list[tuple[Entry | None, int]]]] = []

        def work(applier: Applier) -> list[Entry]:
            if not appended:
                journal = self._current_journal()
                apply_journal(applier, self.id, journal.number, self.name, journal.end, [])
                entries = decide(applier)
                if not entries:
                    return []
                # Applied before they are in the journal too: should the map have to grow, it does
                # so now, and they are decided anew.
                for entry in entries:
                    applier.apply(entry)
                journal, start, ends = self._append(entries, self.config.durability != "none")
                appended.append((journal, start, list(zip(entries, ends, strict=True))))
            journal, start, placed = appended[0]
            apply_journal(applier, self.id, journal.number, self.name, start, placed)
            return [entry for entry, _ in placed if entry is not None]

        return self.index.write(work)

    def _commit(self, commit: _Commit) -> None:
        with self._lock:
            self._queue.append(commit)
        with self._committing:
            if commit.done:
                return
            with self._lock:
                alone = self.config.durability == "always"
                group = [commit] if alone else self._queue
                self._queue = [c for c in self._queue if c is not commit] if alone else []
            try:
                self._publish_group(group)
            except KvfsError as e:
                for c in group:
                    c.error = e
            except BaseException as e:
                for c in group:  # the others must not take it for done
                    c.error = KvfsError(f"not published: {e!r}")
                raise
            finally:
                for c in group:
                    c.done = True

    def _publish_group(self, group: list[_Commit]) -> None:
        durable = self.config.durability != "none"
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
            raise self.failed(e) from e
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
            start = journal.end
            try:
                _, ends = journal.append(entries)
                if durable:
                    journal.sync()
                return journal, start, ends
            except OSError:
                self._abandon(journal, start)
                if attempt:
                    raise
        raise AssertionError("unreachable")

    def _abandon(self, journal: JournalWriter, end: int) -> None:
        """Leaves a journal that failed, cut off behind what was published in it.

        Where it cannot be cut, readers take what there is up to the first torn frame: entries that
        are published again elsewhere, which changes nothing, or that never were, whose blocks a
        fetch will then miss.
        """
        self._journal = None
        if end == HEADER_BYTES:
            self._take_back(journal)
        else:
            self._before = end
            with contextlib.suppress(OSError):
                self.backend.truncate(journal.file, end)
        with contextlib.suppress(OSError):
            journal.close()

    def _take_back(self, journal: JournalWriter) -> None:
        """Removes a journal in which nothing was published, and gives its number to the next.

        It was never made durable: should the machine go down it may be gone, and behind a missing
        number nobody reads on. Where it cannot be removed it becomes an empty one, durable if
        possible, behind which readers go on.
        """
        try:
            self.backend.unlink(journal.path)
        except OSError:
            self._before = HEADER_BYTES
            with contextlib.suppress(OSError):
                journal.sync()
        else:
            self._next = journal.number

    def _current_journal(self) -> JournalWriter:
        idle = _now() - self._used > IDLE_SECONDS
        if self._journal is not None and (idle or self._journal.end > ROLL_BYTES):
            self._end_journal(last=False)
        if self._journal is None:
            check_alive(self.backend, self.config.uuid)  # the mount may have gone since
            self._journal = self._make_journal()
            self._next += 1  # only now: readers stop at a number that is missing
        self._used = _now()
        return self._journal

    def _make_journal(self) -> JournalWriter:
        header = Header(self.id, self._next, self._before, self.config.uuid, self.now_ms())
        try:
            return JournalWriter(self.backend, self.name, header)
        except FileExistsError:
            # Left by a try that failed in its header and could not be taken back: readers do not
            # go beyond such a file, and nothing was ever published in it.
            self.backend.unlink(journal_path(self.name, self._next))
            return JournalWriter(self.backend, self.name, header)

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
            self._follow_own()
            self.index.count(counters)

    def _follow_own(self) -> None:
        """Another process of this host read part of our journal, or the index was made anew."""
        try:
            Follower(self.backend, self.index, self.config.uuid).catch_up([self.name])
        except OSError as e:
            raise self.failed(e) from e

    def _end_journal(self, *, last: bool) -> None:
        journal, self._journal = self._journal, None
        if journal is None:
            return
        self._before = journal.end  # should the seal be lost, readers go on all the same
        with contextlib.suppress(OSError, KvfsError):
            seal: list[Entry] = [SealEntry(self.now_ms(), last)]
            start, ends = journal.append(seal)
            if self.config.durability != "none":
                journal.sync()
            self._before = journal.end
            self._apply(journal, start, [(seal[0], ends[0])], {})
        with contextlib.suppress(OSError):
            journal.close()

    def close(self) -> None:
        """Ends the journal. Raises nothing: what was published stands."""
        with self._committing:
            self._end_journal(last=True)


def _runs(entries: Iterable[Entry]) -> Iterator[RunEntry]:
    """The runs that entries place."""
    for entry in entries:
        if isinstance(entry, MoveEntry):
            yield entry.run
        elif isinstance(entry, RunEntry):
            yield entry


def _now() -> float:
    """Seconds since the machine was started, also those it was suspended: a journal that others
    take for left alone must not be gone on with."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
