"""Journals into the index: what other writers made visible, and what a killed one left unapplied.

The entries of all journals are merged by their time, so that a rebuilt index tells the same story
as one that followed along. Each batch is one transaction together with the offsets it reached: a
follower that is killed goes on where it was, and applying something twice changes nothing.

Blocking; reads the shared storage. Several processes of a host may do it at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvfs.backend import Backend
from kvfs.errors import FormatError
from kvfs.frames import (
    ClassEntry,
    CutEntry,
    DropEntry,
    Entry,
    MoveEntry,
    NamespaceEntry,
    RenewEntry,
    RunEntry,
    SealEntry,
    SegmentEntry,
)
from kvfs.index import Index, apply_journal
from kvfs.index.apply import Applier
from kvfs.index.index import FIRST_FRAME, LAST, JournalState
from kvfs.journal import JournalReader
from kvfs.segment import WRITER_BYTES

BATCH = 2000
_READ = 1 << 20
_READ_LIMIT = 128 << 20  # above the largest frame

Progress = Callable[[int], None]
"""Called with the number of entries applied since the last call."""


@dataclass(slots=True)
class Followed:
    """What one turn of following did."""

    entries: int = 0
    journals: int = 0
    problems: list[str] = field(default_factory=list)
    """Journals that could not be read to their end, and why."""
    missing: list[JournalState] = field(default_factory=list)
    """Journals that were removed before this index had read them to their end."""
    progressed: set[str] = field(default_factory=set)
    """Writers that had something new."""


@dataclass(slots=True)
class _Step:
    """An entry and its place."""

    writer: str
    writer_id: bytes
    number: int
    start: int
    end: int
    entry: Entry | None
    created_ms: int
    """When its journal was begun."""


class Follower:
    """Applies the journals of a store to one index."""

    def __init__(self, backend: Backend, index: Index, store: bytes) -> None:
        self.backend = backend
        self.index = index
        self.store = store

    def catch_up(
        self, writers: Sequence[str] | None = None, progress: Progress | None = None,
        most: int = 0,
    ) -> Followed:  # fmt: skip
        """Applies all that the journals hold now and the index has not.

        writers: names of those to look at, None: all; most: stop after about so many entries.
        Raises IndexFault; what is wrong with a journal is reported in the result and does not stop
        the others.
        """
        result = Followed()
        steps = self._steps(self.index.journals(), writers, result)
        for batch in _batches(steps, BATCH):
            self.index.write(lambda a, batch=batch: _apply(a, batch))  # type: ignore[misc]
            result.entries += len(batch)
            result.progressed |= {step.writer for step in batch}
            if progress is not None:
                progress(len(batch))
            if most and result.entries >= most:
                break
        return result

    def replay(
        self, applier: Applier, progress: Progress | None = None,
        since: Sequence[JournalState] = (),
    ) -> Followed:  # fmt: skip
        """Applies all journals from their beginning within the caller's transaction.

        since: how far some are applied in it already.
        """
        result = Followed()
        states = {(s.writer_id, s.number): s for s in since}
        for batch in _batches(self._steps(states, None, result), BATCH):
            _apply(applier, batch)
            result.entries += len(batch)
            if progress is not None:
                progress(len(batch))
        return result

    def _steps(
        self, states: dict[tuple[bytes, int], JournalState], writers: Sequence[str] | None,
        result: Followed,
    ) -> Iterator[_Step]:  # fmt: skip
        """The new entries of all journals, merged by time."""
        last: dict[bytes, JournalState] = {}
        for (writer_id, number), state in states.items():
            if writer_id not in last or number > last[writer_id].number:
                last[writer_id] = state
        streams = []
        for writer in self.backend.names("log") if writers is None else writers:
            known = writer_id_of(writer)
            if known is None:
                continue
            reached = last.get(known)
            if reached is None or reached.ended != LAST:
                result.journals += 1
                streams.append(self._writer(writer, known, reached, result))
        merged = heapq.merge(*(_timed(s, i) for i, s in enumerate(streams)))
        return (step for _, _, _, step in merged)

    def _writer(
        self, writer: str, writer_id: bytes, state: JournalState | None, result: Followed
    ) -> Iterator[_Step]:
        """One writer's new entries, over all its journals."""
        number = 0 if state is None else state.number
        offset = FIRST_FRAME if state is None else max(state.offset, FIRST_FRAME)
        while True:
            reader = JournalReader(self.backend, writer, number, self.store)
            try:
                for step in self._journal(reader, writer, writer_id, offset):
                    yield step
                    offset = step.end
                if not self._goes_on(writer, number + 1, offset):
                    return
            except FileNotFoundError:
                if state is not None and not state.ended:  # else it is only not there yet
                    result.missing.append(state)
                return
            except (OSError, FormatError) as e:
                result.problems.append(f"{reader.path}: {e}")
                return
            number, offset, state = number + 1, FIRST_FRAME, None

    def _goes_on(self, writer: str, number: int, offset: int) -> bool:
        """Says whether there is a next journal, and the one before was read to its end."""
        following = JournalReader(self.backend, writer, number, self.store)
        try:
            following.read(0, 0)
        except FileNotFoundError:
            return False
        # On a shared file system the next file may show before the last bytes of this one do.
        return following.header is not None and following.header.before <= offset

    def _journal(
        self, reader: JournalReader, writer: str, writer_id: bytes, offset: int
    ) -> Iterator[_Step]:
        limit = _READ
        while True:
            data = reader.read(offset, limit)
            before = offset
            for entry, end in reader.decode(data, offset):
                header = reader.header
                assert header is not None  # entries were decoded
                yield _Step(writer, writer_id, header.number, offset, end, entry, header.created_ms)
                offset = end
            if len(data) < limit:
                return
            if offset == before:  # a frame larger than what was read, or a damaged one
                if limit >= _READ_LIMIT:
                    return
                limit *= 4


def _timed(
    steps: Iterator[_Step], stream: int
) -> Iterator[tuple[tuple[int, int], int, int, _Step]]:
    """Adds a sort key that never falls within a stream, whatever the writer's clock did."""
    latest = (0, 0)
    for i, step in enumerate(steps):
        latest = max(latest, (_time(step), _rank(step.entry)))
        yield latest, stream, i, step


def entry_ms(entry: Entry | None) -> int | None:
    """When what an entry tells happened, or None if it does not say."""
    if isinstance(entry, RunEntry):
        return entry.written_ms
    if isinstance(entry, SegmentEntry):
        return entry.created_ms
    if entry is None or isinstance(entry, NamespaceEntry | ClassEntry):
        return None
    return entry.when_ms


def _time(step: _Step) -> int:
    ms = entry_ms(step.entry)
    # A name is not before its journal, and before what others made of it.
    return step.created_ms if ms is None else ms


def _rank(entry: Entry | None) -> int:
    """What is renewed or removed in the millisecond it was made in comes first."""
    return int(isinstance(entry, RenewEntry | CutEntry | DropEntry | SealEntry | MoveEntry))


def _batches(steps: Iterator[_Step], size: int) -> Iterator[list[_Step]]:
    batch: list[_Step] = []
    for step in steps:
        batch.append(step)
        if len(batch) >= size:
            yield batch
            batch = []
    if batch:
        yield batch


def _apply(applier: Applier, batch: list[_Step]) -> Any:
    """Applies a batch; consecutive entries of one journal go in together."""
    at = 0
    while at < len(batch):
        first, end = batch[at], at + 1
        while (
            end < len(batch)
            and batch[end].writer_id == first.writer_id
            and batch[end].number == first.number
        ):
            end += 1
        apply_journal(
            applier, first.writer_id, first.number, first.writer,
            first.start, [(s.entry, s.end) for s in batch[at:end]],
        )  # fmt: skip
        at = end


def writer_id_of(writer: str) -> bytes | None:
    """The 12-byte id at the end of a writer's name, or None if it is not one."""
    try:
        writer_id = bytes.fromhex(writer.rsplit("-", 1)[-1])
    except ValueError:
        return None
    return writer_id if len(writer_id) == WRITER_BYTES else None
