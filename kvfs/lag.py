"""How far this host is behind each writer: what its journal holds that the index has not applied.

Reads the shared storage; changes nothing. A writer that said it is gone, and was read to its end,
is not looked at: a store sees thousands of them come and go.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvfs.backend import Backend
from kvfs.errors import FormatError
from kvfs.follow import entry_ms, writer_id_of
from kvfs.index import Index
from kvfs.index.index import LAST, JournalState
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
    """Entries that are not."""
    bytes: int
    """Bytes of those."""
    seconds: float
    """Age of the oldest of them, 0 if there is none."""
    problem: str | None
    """Why the journal cannot be read on, if so."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def lags(backend: Backend, index: Index, store: bytes, now_ms: int) -> list[Lag]:
    """The lag of every writer that may still write, by name. Raises OSError if `log` cannot be
    listed."""
    last: dict[bytes, JournalState] = {}
    for (writer_id, number), state in index.journals().items():
        if writer_id not in last or number > last[writer_id].number:
            last[writer_id] = state
    out = []
    for writer in backend.names("log"):
        known = writer_id_of(writer)
        if known is None:
            continue
        reached = last.get(known)
        if reached is None:
            out.append(_lag(backend, writer, 0, 0, store, now_ms))
        elif reached.ended != LAST:
            out.append(_lag(backend, writer, reached.number, reached.offset, store, now_ms))
    return out


def _lag(backend: Backend, writer: str, number: int, offset: int, store: bytes, now_ms: int) -> Lag:
    records, oldest, problem, at = 0, now_ms, None, offset
    reader = JournalReader(backend, writer, number, store)
    try:
        while data := reader.read(at, _READ):
            before = at
            for entry, end in reader.decode(data, at):
                records, at = records + 1, end
                oldest = min(oldest, entry_ms(entry) or now_ms)
            if at == before:
                problem = f"{len(data)} bytes behind offset {at} are no whole entry"
                break
    except (OSError, FormatError) as e:
        problem = str(e)
    seconds = max(0, now_ms - oldest) / 1000 if records else 0.0
    return Lag(writer, number, offset, records, max(0, at - offset), seconds, problem)
