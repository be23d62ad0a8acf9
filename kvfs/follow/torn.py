"""Journals whose bytes stop making sense: since when, and whether they still grow.

Bytes behind the last sound frame are nothing new: their writer is in the middle of a frame, or was
killed in it. But where a frame in the middle is damaged a follower stands still for good while the
writer goes on behind it. That is worth a word, and no sign that the writer is dead: a journal that
still grows must not be removed (kvfs.follow.history).

Rows in `meta` of the index, "torn:" and the key of a journal: u64 offset at which it stops, size,
milliseconds since when it stops there, and since when it has this size. Functions over one index.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvfs.index import Index
from kvfs.index.apply import CLOCKS_MS, Applier
from kvfs.index.schema import META, scan

_TORN = META + b"torn:"
_ROW = struct.Struct("<QQQQ")
_TOLD_MS = 86_400_000
"""What has not grown for so long is told of no more: it is what a dead writer left."""


@dataclass(frozen=True, slots=True)
class Torn:
    """A journal with bytes behind the last sound frame, as it was found."""

    writer: str
    writer_id: bytes
    number: int
    offset: int
    """Behind the last sound frame."""
    size: int
    whole: bool
    """The next frame is all there, and not sound."""

    @property
    def key(self) -> bytes:
        return _key(self.writer_id, self.number)


def _key(writer_id: bytes, number: int) -> bytes:
    return _TORN + writer_id + number.to_bytes(4, "big")


def note(
    index: Index, found: Sequence[Torn], looked_at: Collection[bytes] | None, now_ms: int
) -> list[str]:
    """Notes what was found; returns what is to be told of it.

    looked_at: ids of the writers whose journals were read, None: of all.
    """
    known = index.query(_rows)
    if not known and not found:
        return []
    rows = {t.key: _row(t, known.get(t.key), now_ms) for t in found}
    over = {
        key
        for key in known.keys() - rows.keys()
        if looked_at is None or key[len(_TORN) : -4] in looked_at
    }

    def work(applier: Applier) -> None:
        for key in over:
            applier.txn.delete(key)
        for key, row in rows.items():
            applier.txn.put(key, _ROW.pack(*row))

    if over or any(known.get(key) != row for key, row in rows.items()):
        index.write(work)
    return [_text(t) for t in found if _stays(t, rows[t.key], now_ms)]


def unchanged_since(index: Index, writer_id: bytes, number: int, size: int) -> int | None:
    """Since when a journal has this size, in milliseconds since 1970, as far as that was noted."""
    row = index.query(_rows).get(_key(writer_id, number))
    return row[3] if row is not None and row[1] == size else None


def _rows(applier: Applier) -> dict[bytes, tuple[int, int, int, int]]:
    return {bytes(key): _ROW.unpack(value) for key, value in scan(applier.txn, _TORN)}


def _row(
    torn: Torn, old: tuple[int, int, int, int] | None, now_ms: int
) -> tuple[int, int, int, int]:
    if old is None or old[0] != torn.offset:
        return torn.offset, torn.size, now_ms, now_ms
    return torn.offset, torn.size, old[2], old[3] if old[1] == torn.size else now_ms


def _stays(torn: Torn, row: tuple[int, int, int, int], now_ms: int) -> bool:
    """It is no frame that somebody is just writing, or that a killed writer left."""
    _, _, since, changed = row
    return (torn.whole or changed > since) and since + CLOCKS_MS <= now_ms < changed + _TOLD_MS


def _text(torn: Torn) -> str:
    return (
        f"log/{torn.writer}/{torn.number:06d}.log: damaged at offset {torn.offset}: "
        f"{torn.size - torn.offset} bytes from there on are not read"
    )
