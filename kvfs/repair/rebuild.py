"""REBUILD: this host's index made anew from the journals or, if they are lost, from the segments.

One write transaction: whoever has the index open goes on with the old state until the commit, and
writers wait. From the newest checkpoint and the journals behind it, old ones being removed once
a checkpoint covers them, the index becomes what it was. From the segments it holds every
block that is there, also those that were removed, with the expiry each had when it was written:
removals and renewals are told by journals only. Nothing on the shared storage is changed.

Blocking; reads the shared storage.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kvfs.catalog import namespace_files
from kvfs.config import check_alive
from kvfs.errors import BackendError, FormatError, InputError
from kvfs.follow.checkpoint import DIRECTORY, Checkpoint, all_whole, load
from kvfs.follow.follower import Follower, Progress
from kvfs.follow.history import begin_with
from kvfs.frames import ClassEntry, Entry, NamespaceEntry
from kvfs.index.apply import Applier
from kvfs.index.index import FIRST_FRAME, JournalState
from kvfs.index.wipe import wipe
from kvfs.journal import VERSION as JOURNAL_VERSION
from kvfs.journal import journal_path
from kvfs.record import Shape
from kvfs.scan.journals import JournalTail, journal_files, journal_version, read_journal
from kvfs.scan.salvage import Salvage, Survey
from kvfs.scan.segments import (
    id_of,
    names,
    segment_paths,
    segment_version,
)
from kvfs.segment import VERSION
from kvfs.store import Store

SOURCES = ("auto", "journals", "segments")


@dataclass(slots=True)
class Rebuilt:
    """What a rebuild found and made."""

    source: str
    """"journals" or "segments"."""
    entries: int = 0
    """Entries applied."""
    segments: int = 0
    runs: int = 0
    blocks: int = 0
    waiting: int = 0
    """Runs whose parent block is in no run: out of sight until it is stored."""
    newer: int = 0
    """Journals and segments of a version this code does not read yet: left alone."""
    unmentioned: list[str] = field(default_factory=list)
    """From journals: segments that no journal tells of; their blocks are not in the index."""
    skipped: list[str] = field(default_factory=list)
    """What could not be read, or not to its end, and why."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def rebuild(store: Store, *, source: str = "auto", progress: Progress | None = None) -> Rebuilt:
    """Makes the local index of an open store anew.

    source: "journals", "segments", or "auto": journals if there is one that can be read;
    progress: called with the number of entries applied since its last call.
    Raises InputError, NoStoreError, BackendError, IndexFault; then the index is as it was.
    """
    if source not in SOURCES:
        raise InputError(f"source is {source!r}; known are {', '.join(SOURCES)}")
    check_alive(store.backend, store.uuid)
    if source == "auto":
        told = _any_journal(store) or any(all_whole(store.backend, store.uuid))
        source = "journals" if told else "segments"
    work = _Rebuild(store, progress)
    result = work.from_journals() if source == "journals" else work.from_segments()
    _count_rows(store, result)
    return result


def shapes(store: Store) -> dict[bytes, Shape]:
    """Namespace id -> shape of its records, from the store's files and the index."""
    known = [i for i, _, _ in namespace_files(store.backend) if i is not None]
    out = {identity.nsid: Shape.of(identity) for identity in known}
    out.update((ns.nsid, ns.shape) for ns in store.namespaces())
    return out


def broken_checkpoints(store: Store) -> list[str]:
    """Paths of checkpoints that are not whole: cut short, damaged, or still being written."""
    whole = {c.path for c in all_whole(store.backend, store.uuid)}
    there = (f"{DIRECTORY}/{name}" for name in names(store.backend, DIRECTORY))
    return [path for path in there if path not in whole]


def _any_journal(store: Store) -> bool:
    for writer, number in journal_files(store.backend):
        tail = JournalTail("")
        try:
            for _ in read_journal(store.backend, writer, number, store.uuid, tail):
                return True
        except (OSError, FormatError):
            continue
    return False


def _count_rows(store: Store, result: Rebuilt) -> None:
    result.segments = len(store.index.segments())
    counters = store.index.counters()
    result.blocks, result.waiting = counters.get("blocks", 0), counters.get("orphans", 0)
    result.runs = sum(1 for ns in store.namespaces() for _ in store.index.all_runs(ns.number))


class _Rebuild:
    """One rebuild of one store's index."""

    def __init__(self, store: Store, progress: Progress | None) -> None:
        self.store = store
        self.backend = store.backend
        self.progress = progress
        self._catalog: list[Entry] = [
            ClassEntry(name, seconds, 0) for name, seconds in store.config.classes.items()
        ]
        self._skipped: list[str] = []
        for identity, text, path in namespace_files(self.backend):
            if identity is None:
                self._skipped.append(f"{path}: not the identity of that name")
            else:
                self._catalog.append(NamespaceEntry(identity.nsid, text))

    def _begin(self, applier: Applier, *, journals: bool) -> None:
        wipe(applier, journals=journals)
        for entry in self._catalog:
            applier.apply(entry)

    def from_journals(self) -> Rebuilt:
        # Journals may have been removed that a checkpoint covers: even of which it does not tell,
        # since its marks are those of journals that were there when it was written.
        passed: list[str] = []
        try:
            whole = list(all_whole(self.backend, self.store.uuid))
            now_ms = self.store.now_ms()
            result = begin_with(self.backend, whole, now_ms, self._replay, passed)
        except (OSError, FormatError) as e:
            raise BackendError(f"{self.store.path}: {e}") from e
        result.skipped += passed
        result.skipped += self._skipped
        result.skipped += (f"{path}: not whole" for path in broken_checkpoints(self.store))
        self._look_at_journals(result)
        self._look_for_unmentioned(result)
        return result

    def _replay(self, start: Checkpoint | None) -> Rebuilt:
        """The index from a checkpoint, or none, and the journals behind it."""
        follower = Follower(self.backend, self.store.index, self.store.uuid)
        since = [] if start is None else [
            JournalState(m.writer_id, m.number, m.writer, m.offset, m.ended) for m in start.marks
        ]  # fmt: skip

        def work(applier: Applier) -> Rebuilt:
            self._begin(applier, journals=True)
            if start is not None:
                load(self.backend, applier, start, self.store.uuid)
            followed = follower.replay(applier, self.progress, since)
            return Rebuilt("journals", followed.entries, skipped=list(followed.problems))

        return self.store.index.write(work)

    def _look_at_journals(self, result: Rebuilt) -> None:
        """Says which journals were not read, or not to their end: what they tell is lost here."""
        states = {(s.writer, s.number): s for s in self.store.index.journals().values()}
        for writer, number in journal_files(self.backend):
            path, state = journal_path(writer, number), states.get((writer, number))
            if (journal_version(self.backend, path) or 0) > JOURNAL_VERSION:
                result.newer += 1
                continue
            try:
                size = self.backend.size(path)
            except FileNotFoundError:
                continue
            except OSError as e:
                result.skipped.append(f"{path}: {e.strerror or e}")
                continue
            if state is None:
                # A header alone is a writer's that published nothing.
                if size > FIRST_FRAME and not any(s.startswith(path) for s in result.skipped):
                    result.skipped.append(f"{path}: not reached: a journal before it is missing")
            elif size > state.offset and not state.ended:
                result.skipped.append(
                    f"{path}: {size - state.offset} bytes from offset {state.offset} on are no "
                    "whole entry"
                )

    def _look_for_unmentioned(self, result: Rebuilt) -> None:
        known = {segment.segment for segment in self.store.index.segments()}
        for path in segment_paths(self.backend):
            if id_of(path) in known:
                continue
            if (segment_version(self.backend, path) or 0) > VERSION:
                result.newer += 1
            else:
                result.unmentioned.append(path)

    def from_segments(self) -> Rebuilt:
        known = shapes(self.store)
        salvage = Salvage(self.backend, self.store.uuid, known.get)
        survey = salvage.survey()

        def work(applier: Applier) -> int:
            # The journals, if there are any, stay applied as far as they were: a rebuild from the
            # segments is for what they lack, and what they tell from now on is followed as ever.
            self._begin(applier, journals=False)
            return self._apply_all(applier, salvage, survey)

        entries = self.store.index.write(work)
        skipped = [*self._skipped, *survey.skipped]
        if survey.records_left_out:
            skipped.append(f"{survey.records_left_out} records that do not check out")
        return Rebuilt("segments", entries, newer=survey.newer, skipped=skipped)

    def _apply_all(self, applier: Applier, salvage: Salvage, survey: Survey) -> int:
        n = 0
        for n, entry in enumerate(salvage.entries(survey), 1):
            applier.apply(entry)
            if self.progress is not None and n % 1000 == 0:
                self.progress(1000)
        if self.progress is not None and n % 1000:
            self.progress(n % 1000)
        return n
