"""A writer's journal: the append-only account of what it made visible.

File header, 64 bytes, little-endian; frames (kvfs.frames) follow:

  offset  size  field
  0       8     magic "KVFSLOG1"
  8       4     version, 1
  12      4     number of this journal among its writer's
  16      12    writer id
  28      4     end of the writer's journal before this one, 0 for its first
  32      16    store uuid
  48      8     time made, milliseconds since 1970 UTC
  56      8     xxh3-64 of the 56 bytes before

The seed of its frames is the number in the first 8 bytes of the writer id plus 2^40 times the
journal's number, which no offset reaches. A journal is written by one process only, front to back,
never reopened; readers take whole, sound frames and stop at the first that is not. A reader goes on
to the next journal once it has read this one to the end that the next one names: a shared file
system may show a new file before an old one's last bytes. The caller serialises calls to a
JournalWriter.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import xxhash

from kvfs.backend import Backend, OpenFile, read_into, write_all
from kvfs.errors import FormatError
from kvfs.frames import Entry, decode_all, encode

MAGIC = b"KVFSLOG1"
VERSION = 1
HEADER_BYTES = 64
ROLL_BYTES = 64 << 20
IDLE_SECONDS = 3600
"""A writer that published nothing for so long goes on in a new journal, so that a journal that has
not grown for much longer is known to be over, also when its writer was killed."""
_HEADER = struct.Struct("<8sII12sI16sQ")
_SUM = struct.Struct("<Q")


def journal_path(writer: str, number: int) -> str:
    return f"log/{writer}/{number:06d}.log"


def frame_seed(writer_id: bytes, number: int) -> int:
    return int.from_bytes(writer_id[:8], "little") + (number << 40)


@dataclass(frozen=True, slots=True)
class Header:
    """A journal's header."""

    writer_id: bytes
    number: int
    before: int
    """End of the writer's journal before this one; 0 if there is none."""
    store: bytes
    created_ms: int

    def encode(self) -> bytes:
        fixed = _HEADER.pack(
            MAGIC, VERSION, self.number, self.writer_id, self.before, self.store, self.created_ms
        )
        return fixed + _SUM.pack(xxhash.xxh3_64_intdigest(fixed))


def decode_header(data: bytes, path: str, store: bytes) -> Header | None:
    """Returns the header, or None if it is not whole yet.

    Raises FormatError for another version, another store's journal or a damaged header.
    """
    if len(data) < HEADER_BYTES:
        return None
    magic, version, number, writer_id, before, uuid, created_ms = _HEADER.unpack_from(data)
    if magic != MAGIC:
        if not any(data[:HEADER_BYTES]):
            return None  # a file system may show the length before the bytes
        raise FormatError(f"{path}: not a journal")
    if version != VERSION:
        raise FormatError(f"{path}: journal version {version}; this kvfs reads {VERSION}")
    if _SUM.unpack_from(data, HEADER_BYTES - 8)[0] != xxhash.xxh3_64_intdigest(data[:56]):
        raise FormatError(f"{path}: damaged journal header (checksum)")
    if uuid != store:
        raise FormatError(f"{path}: a journal of another store ({uuid.hex()})")
    return Header(writer_id, number, before, uuid, created_ms)


class JournalWriter:
    """Appends entries to one journal file. An I/O error leaves `end` at the last good frame."""

    def __init__(self, backend: Backend, writer: str, header: Header) -> None:
        """Creates the file. Raises OSError; then nothing is left behind, if the storage lets it."""
        self.backend = backend
        self.number = header.number
        self.path = journal_path(writer, header.number)
        self._seed = frame_seed(header.writer_id, header.number)
        self.file: OpenFile = backend.create(self.path)
        try:
            write_all(backend, self.file, [header.encode()], 0)
        except OSError:
            with contextlib.suppress(OSError):
                backend.close(self.file)
            with contextlib.suppress(OSError):
                backend.unlink(self.path)
            raise
        self.end = HEADER_BYTES

    def append(self, entries: Iterable[Entry]) -> tuple[int, list[int]]:
        """Writes the entries as one write; returns where they begin and where each ends.

        Raises OSError (WriteCut) if they are not all there; the journal must then be abandoned,
        since bytes behind `end` may be torn and a reader stops at them.
        """
        start, at = self.end, self.end
        frames, ends = [], []
        for entry in entries:
            frames.append(encode(entry, self._seed, at))
            at += len(frames[-1])
            ends.append(at)
        write_all(self.backend, self.file, frames, start)
        self.end = at
        return start, ends

    def sync(self) -> None:
        self.backend.sync(self.file)

    def close(self) -> None:
        self.backend.close(self.file)


class JournalReader:
    """Reads a journal from an offset on. Not thread-safe; keeps no file open between calls."""

    def __init__(self, backend: Backend, writer: str, number: int, store: bytes) -> None:
        self.backend = backend
        self.path = journal_path(writer, number)
        self.store = store
        self.header: Header | None = None
        """Known once it was read."""

    def read(self, offset: int, limit: int = 16 << 20) -> bytes:
        """Returns up to `limit` bytes from `offset` on (0: the first frame); b"" if none.

        Raises OSError, and FormatError for a file that is not this store's journal.
        """
        file = self.backend.open(self.path)
        try:
            if self.header is None:
                head = bytearray(HEADER_BYTES)
                n = read_into(self.backend, file, [memoryview(head)], 0)
                self.header = decode_header(bytes(head[:n]), self.path, self.store)
                if self.header is None:
                    return b""
            data = bytearray(limit)
            n = read_into(self.backend, file, [memoryview(data)], max(offset, HEADER_BYTES))
            return bytes(data[:n])
        finally:
            self.backend.close(file)

    def decode(self, data: bytes, offset: int) -> Iterator[tuple[Entry | None, int]]:
        """Yields (entry, offset behind it) of what `read(offset)` returned."""
        if self.header is None:
            return iter(())
        seed = frame_seed(self.header.writer_id, self.header.number)
        return decode_all(memoryview(data), seed, max(offset, HEADER_BYTES))
