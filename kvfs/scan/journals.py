"""Journal files as they lie: which there are, what they tell, and where their readable part ends.

For rebuild and fsck, which must not believe the index; whoever follows journals uses
kvfs.follow.follower. Blocking; reads the shared storage and writes nothing. No state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from kvfs.backend import Backend, read_into
from kvfs.frames import Entry
from kvfs.journal import HEADER_BYTES, MAGIC, VERSION, JournalReader
from kvfs.scan.segments import names

_READ = 1 << 20
_READ_LIMIT = 128 << 20  # above the largest frame


@dataclass(slots=True)
class JournalTail:
    """Where the readable part of a journal ends."""

    path: str
    end: int = 0
    """Offset behind the last whole, sound frame."""
    size: int = 0

    @property
    def unread(self) -> int:
        """Bytes behind the last sound frame: torn, damaged, or still being written."""
        return max(0, self.size - self.end)


def journal_files(backend: Backend) -> Iterator[tuple[str, int]]:
    """Yields (writer's name, number) of every journal file, by writer and number."""
    for writer in names(backend, "log"):
        for name in names(backend, f"log/{writer}"):
            number, dot, suffix = name.partition(".")
            if dot and suffix == "log" and number.isdecimal():
                yield writer, int(number)


def read_journal(
    backend: Backend, writer: str, number: int, store: bytes, tail: JournalTail
) -> Iterator[Entry | None]:
    """Yields the entries of one journal (None: of an unknown type) and notes its end in `tail`.

    Raises OSError, and FormatError for another version, another store or a damaged header.
    """
    reader = JournalReader(backend, writer, number, store)
    tail.path = reader.path
    tail.size = backend.size(reader.path)
    limit = _READ
    while True:
        data = reader.read(tail.end, limit)
        if reader.header is not None:
            tail.end = max(tail.end, HEADER_BYTES)
        before = tail.end
        for entry, end in reader.decode(data, tail.end):
            tail.end = end
            yield entry
        if len(data) < limit or limit > _READ_LIMIT:
            return
        if tail.end == before:  # a frame larger than what was read, or a damaged one
            limit *= 4


def journal_version(backend: Backend, path: str) -> int | None:
    """The version a journal states if it is not the one this code reads, else None."""
    with suppress(OSError):
        file = backend.open(path)
        try:
            head = bytearray(12)
            read_into(backend, file, [memoryview(head)], 0)
        finally:
            backend.close(file)
        version = int.from_bytes(head[8:12], "little")
        if bytes(head[:8]) == MAGIC and version != VERSION:
            return version
    return None
