"""Journals into the index: what other writers made visible, and what a killed one left unapplied.

The entries of all journals are merged by their time, so that a rebuilt index tells the same story
as one that followed along. Each batch is one transaction together with the offsets it reached: a
follower that is killed goes on where it was, and applying something twice changes nothing.

A journal may tell of what another one brought in: a run is renewed that a third host stored. What
was read of some journals and refers to something unknown here therefore waits until all of them
have been read, and a namespace that no journal has told of yet is taken from its file.

Blocking; reads the shared storage. Several processes of a host may do it at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvfs.backend import Backend
from kvfs.catalog import learn_namespaces
from kvfs.chain_entries import KeepEntry, RemoveEntry
from kvfs.errors import FormatError
from kvfs.follow.torn import Torn, note
from kvfs.frames import (
    HEAD,
    MAX_BODY,
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
from kvfs.index.index import ENDED, FIRST_FRAME, LAST, JournalState
from kvfs.journal import JournalReader
from kvfs.segment import WRITER_BYTES

BATCH, BATCH_BYTES = 2000, 8 << 20
_ENTRY_BYTES = 4096  # what counts as one entry where there is a limit on entries
_READ, _READ_LEAST = 1 << 20, 1 << 16
_LATE_MS = 600_000
"""No file system shows a journal so much later than the next one."""
FOLLOWED = "followed_ms"
"""In `meta`: when the index had last read all journals (kvfs.follow.history)."""
_READ_TOGETHER = 256 << 20
"""Bytes of journals in memory, roughly, however many are read at once."""

Progress = Callable[[int], None]
"""Called with the number of entries applied since the last call."""


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


@dataclass(slots=True)
class Followed:
    """What one turn of following did."""

    entries: int = 0
    bytes: int = 0
    """Of those entries."""
    journals: int = 0
    problems: list[str] = field(default_factory=list)
    """Journals that could not be read to their end, and why."""
    unreachable: int = 0
    """How many of those may be readable another time: the storage failed, not the journal."""
    cut_off: bool = False
    """There may be more: the turn ended because it had applied enough."""
    torn: list[Torn] = field(default_factory=list)
    """Journals with bytes that make no sense yet, or never will."""
    missing: list[JournalState] = field(default_factory=list)
    """Journals that were removed before this index had read them to their end."""
    progressed: set[str] = field(default_factory=set)
    """Writers that had something new."""
    ended: set[str] = field(default_factory=set)
    """Writers that were read to their very end just now."""

    @property
    def complete(self) -> bool:
        """Everything that can be read was read."""
        return not (self.cut_off or self.unreachable or self.missing)

    def note(self, applied: list[_Step]) -> None:
        """Counts what was applied."""
        self.entries += len(applied)
        for step in applied:
            self.bytes += step.end - step.start
            self.progressed.add(step.writer)
            if isinstance(step.entry, SealEntry) and step.entry.last:
                self.ended.add(step.writer)


class Follower:
    """Applies the journals of a store to one index."""

    def __init__(
        self, backend: Backend, index: Index, store: bytes, now_ms: int | None = None
    ) -> None:
        """now_ms: what cannot be read is noted with this time, and told of if it stays so."""
        self.backend = backend
        self.index = index
        self.store = store
        self.now_ms = now_ms

    def catch_up(
        self, writers: Sequence[str] | None = None, progress: Progress | None = None,
        most: int = 0,
    ) -> Followed:  # fmt: skip
        """Applies all that the journals hold now and the index has not.

        writers: names of those to look at, None: all; most: stop after about so many entries,
        fewer if they are large.
        Raises IndexFault, and OSError if `log` cannot be listed; what is wrong with a journal is
        reported in the result and does not stop the others.
        """
        result = Followed()
        everyone = self.backend.names("log") if writers is None else writers
        ids = {name: i for name in everyone if (i := writer_id_of(name)) is not None}
        steps = self._steps(self.index.last_journals(ids.values()), ids, result)
        held: set[str] = set()
        for batch in _batches(steps):
            if self._ahead(batch) and writers is not None:
                return self._all_together(result, progress, most)
            batch = self._without_strangers(batch, held, result)
            self.index.write(lambda a, batch=batch: _apply(a, batch))  # type: ignore[misc]
            result.note(batch)
            if progress is not None:
                progress(len(batch))
            if most and result.entries + result.bytes // _ENTRY_BYTES >= most:
                result.cut_off = True
                break
        if self.now_ms is not None and not result.cut_off:
            looked_at = None if writers is None else set(ids.values())
            result.problems += note(self.index, result.torn, looked_at, self.now_ms)
        return result

    def _all_together(self, so_far: Followed, progress: Progress | None, most: int) -> Followed:
        """Goes on with all writers: what one of them tells is of something another one made."""
        result = self.catch_up(progress=progress, most=most)
        result.entries += so_far.entries
        result.bytes += so_far.bytes
        result.progressed |= so_far.progressed
        result.ended |= so_far.ended
        return result

    def _ahead(self, batch: list[_Step]) -> bool:
        """Says whether a batch renews runs that are unknown here."""
        renewed = {(e.nsid, e.head) for s in batch if isinstance(e := s.entry, RenewEntry)}

        def look(applier: Applier) -> bool:
            return all(
                (number := applier.namespace(nsid)) is not None and applier.holding(number, head)[0]
                for nsid, head in renewed
            )

        return bool(renewed) and not self.index.query(look)

    def _without_strangers(
        self, batch: list[_Step], held: set[str], result: Followed
    ) -> list[_Step]:
        """A batch without what follows, in its journal, a segment of an unknown namespace.

        A namespace is learned from its file, which is made before anything else of it and never
        changes; where even that does not show yet, the writers in `held` are read on another time.
        """
        strange = self._strange(batch)
        if strange:
            learn_namespaces(self.backend, self.index)
            strange = self._strange(batch)
        if not strange and not held:
            return batch
        kept = []
        for step in batch:
            entry = step.entry
            if isinstance(entry, NamespaceEntry):
                strange.discard(entry.nsid)
            elif isinstance(entry, SegmentEntry) and entry.nsid in strange:
                if step.writer not in held:
                    result.unreachable += 1
                    result.problems.append(
                        f"log/{step.writer}: of namespace {entry.nsid.hex()}, unknown here"
                    )
                held.add(step.writer)
            if step.writer not in held:
                kept.append(step)
        return kept

    def _strange(self, batch: list[_Step]) -> set[bytes]:
        """Ids of namespaces that segments are of and that are unknown here."""
        ids = {e.nsid for s in batch if isinstance(e := s.entry, SegmentEntry)}
        if not ids:
            return ids
        return self.index.query(lambda a: {n for n in ids if a.namespace(n) is None})

    def replay(
        self, applier: Applier, progress: Progress | None = None,
        since: Sequence[JournalState] = (),
    ) -> Followed:  # fmt: skip
        """Applies all journals from their beginning within the caller's transaction.

        since: how far some are applied in it already.
        """
        result = Followed()
        last: dict[bytes, JournalState] = {}
        for state in since:
            if state.writer_id not in last or state.number > last[state.writer_id].number:
                last[state.writer_id] = state
        names = self.backend.names("log")
        ids = {name: i for name in names if (i := writer_id_of(name)) is not None}
        for batch in _batches(self._steps(last, ids, result)):
            _apply(applier, batch)
            result.entries += len(batch)
            if progress is not None:
                progress(len(batch))
        return result

    def _steps(
        self, last: dict[bytes, JournalState], writers: dict[str, bytes], result: Followed
    ) -> Iterator[_Step]:
        """The new entries of these writers (name -> id), merged by time; last: where each is."""
        reading = max(_READ_LEAST, min(_READ, _READ_TOGETHER // max(1, len(writers))))
        streams = []
        for writer, writer_id in writers.items():
            state = last.get(writer_id)
            if state is None or state.ended != LAST:
                result.journals += 1
                streams.append(self._writer(writer, writer_id, state, result, reading))
        merged = heapq.merge(*(_timed(s, i) for i, s in enumerate(streams)))
        return (step for _, _, _, step in merged)

    def _writer(
        self, writer: str, writer_id: bytes, state: JournalState | None, result: Followed,
        reading: int,
    ) -> Iterator[_Step]:  # fmt: skip
        """One writer's new entries, over all its journals."""
        number, offset = 0, FIRST_FRAME
        if state is not None and state.ended == ENDED:
            number, state = state.number + 1, None
        elif state is not None:
            number, offset = state.number, max(state.offset, FIRST_FRAME)
        while True:
            reader = JournalReader(self.backend, writer, number, self.store)
            try:
                for step in self._journal(reader, writer, writer_id, offset, reading, result):
                    yield step
                    offset = step.end
                    if isinstance(step.entry, SealEntry) and step.entry.last:
                        return
                if not self._goes_on(writer, number + 1, offset):
                    return
            except FileNotFoundError:
                if state is not None:
                    result.missing.append(state)
                    return
                left = None if number else self._first_left(writer)
                if left is None:
                    return  # it is only not there yet
                number = left
                continue
            except (OSError, FormatError) as e:
                result.unreachable += isinstance(e, OSError)
                result.problems.append(f"{reader.path}: {e}")
                return
            number, offset, state = number + 1, FIRST_FRAME, None

    def _first_left(self, writer: str) -> int | None:
        """The first journal that is left of a writer whose earlier ones are removed and forgotten.

        None where the first may only not show yet: all journals were not yet read as they were some
        minutes after the one that is there was made.
        """
        numbers = [int(n[:-4]) for n in self.backend.names(f"log/{writer}") if n[:-4].isdecimal()]
        left = min(numbers, default=0)
        if not left:
            return None
        reader = JournalReader(self.backend, writer, left, self.store)
        reader.read(0, 0)
        made = reader.header
        return left if made and made.created_ms + _LATE_MS <= self._followed_ms() else None

    def _followed_ms(self) -> int:
        return self.index.query(lambda a: a.meta_int(FOLLOWED))

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
        self, reader: JournalReader, writer: str, writer_id: bytes, offset: int, reading: int,
        result: Followed,
    ) -> Iterator[_Step]:  # fmt: skip
        limit = reading
        while True:
            data = reader.read(offset, limit)
            before = offset
            for entry, end in reader.decode(data, offset):
                header = reader.header
                assert header is not None  # entries were decoded
                yield _Step(writer, writer_id, header.number, offset, end, entry, header.created_ms)
                offset = end
            rest = data[offset - before :]
            whole = _frame_bytes(rest) <= len(rest)
            if len(data) < limit or (offset == before and whole):
                if rest:
                    size = self.backend.size(reader.path)
                    assert reader.header is not None  # else there were no data
                    number = reader.header.number
                    result.torn.append(Torn(writer, writer_id, number, offset, size, whole))
                return
            limit = _frame_bytes(rest) if offset == before else reading


def _frame_bytes(data: bytes) -> int:
    """Length of the frame that begins data, by its head; 0 if that cannot be right."""
    if len(data) < HEAD.size:
        return HEAD.size
    body = int(HEAD.unpack_from(data)[0])
    return 0 if body > MAX_BODY else HEAD.size + body + -body % 8


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
    if entry is None or isinstance(entry, NamespaceEntry):
        return None
    return entry.when_ms


_OF_WHAT_IS_THERE = (
    RenewEntry, CutEntry, DropEntry, SealEntry, MoveEntry, KeepEntry, RemoveEntry,
)  # fmt: skip


def _time(step: _Step) -> int:
    ms = entry_ms(step.entry)
    # A name is not before its journal, and before what others made of it.
    return step.created_ms if ms is None else ms


def _rank(entry: Entry | None) -> int:
    """What is renewed or removed in the millisecond it was made in comes first."""
    return int(isinstance(entry, _OF_WHAT_IS_THERE))


def _batches(steps: Iterator[_Step]) -> Iterator[list[_Step]]:
    """Steps that go into one transaction each."""
    batch: list[_Step] = []
    room = BATCH_BYTES
    for step in steps:
        batch.append(step)
        room -= step.end - step.start
        if len(batch) >= BATCH or room <= 0:
            yield batch
            batch, room = [], BATCH_BYTES
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
