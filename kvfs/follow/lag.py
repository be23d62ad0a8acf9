"""How far this host is behind each writer: what its journal holds that the index has not applied.

Reads the shared storage; changes nothing. A writer that said it is gone, and was read to its end,
is not looked at: a store sees thousands of them come and go. Where days of journals are unread,
their first megabytes stand for the rest, so that looking costs little.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvfs.backend import Backend
from kvfs.errors import FormatError
from kvfs.follow.follower import entry_ms, writer_id_of
from kvfs.index import Index
from kvfs.index.index import ENDED, FIRST_FRAME, LAST
from kvfs.journal import JournalReader

_READ = 4 << 20


@dataclass(frozen=True, slots=True)
class Lag:
    """One writer, as this host has followed it."""

    writer: str
    journal: int
    """Number of the journal that is read now."""
    offset: int
    """Bytes of it that are applied."""
    records: int
    """Entries that are not, this journal's and later ones'; an estimate where there are many."""
    bytes: int
    """Bytes that are not."""
    total: int
    """Bytes of entries in all its journals that are there."""
    seconds: float
    """Age of the oldest of them, 0 if there is none."""
    problem: str | None
    """Why the journal cannot be read on, if so."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def lags(backend: Backend, index: Index, store: bytes, now_ms: int) -> list[Lag]:
    """The lag of every writer that may still write, by name. Raises OSError if `log` cannot be
    listed."""
    writers = {name: i for name in backend.names("log") if (i := writer_id_of(name)) is not None}
    last = index.last_journals(writers.values())
    out = []
    for writer, writer_id in writers.items():
        number, offset = 0, FIRST_FRAME
        if (reached := last.get(writer_id)) is not None:
            if reached.ended == LAST:
                continue
            number, offset = reached.number, reached.offset
            if reached.ended == ENDED:
                number, offset = number + 1, FIRST_FRAME
        out.append(_lag(backend, writer, number, offset, store, now_ms))
    return out


def _lag(backend: Backend, writer: str, number: int, offset: int, store: bytes, now_ms: int) -> Lag:
    records, oldest, at, total, unread, problem = 0, now_ms, offset, 0, 0, None
    reader = JournalReader(backend, writer, number, store)
    try:
        total, unread = _sizes(backend, writer, number, offset)
        data = reader.read(offset, _READ) if unread else b""
        for entry, end in reader.decode(data, offset):
            records, at = records + 1, end
            oldest = min(oldest, entry_ms(entry) or now_ms)
        rest = len(data) - (at - offset)
        if rest and (len(data) < _READ or not records):
            problem = f"{rest} bytes behind offset {at} are no whole entry"
    except (OSError, FormatError) as e:
        problem = str(e)
    if records:
        records = records * unread // (at - offset)
    seconds = max(0, now_ms - oldest) / 1000 if records else 0.0
    return Lag(writer, number, offset, records, unread, total, seconds, problem)


def _sizes(backend: Backend, writer: str, number: int, offset: int) -> tuple[int, int]:
    """Bytes of entries in all of a writer's journals, and of those behind a place in one."""
    total = unread = 0
    for name in backend.names(f"log/{writer}"):
        digits = name.partition(".")[0]
        if not digits.isdecimal():
            continue
        size = backend.size(f"log/{writer}/{name}")
        total += max(0, size - FIRST_FRAME)
        if int(digits) >= number:
            unread += max(0, size - (offset if int(digits) == number else FIRST_FRAME))
    return total, unread
