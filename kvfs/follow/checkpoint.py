"""Checkpoints: the state of an index as a file on the store.

A new host loads the newest one and follows the journals from where it ends, instead of reading days
of history; and a journal that a checkpoint covers and nobody reads any more can be removed.

A checkpoint is `ckpt/<milliseconds>-<writer>.ckpt`: a 64-byte header like a journal's with the
magic "KVFSCKP1", frames (kvfs.frames) for namespaces, classes, segments, cuts, runs, moves, slots,
and what was renewed and removed lately, then JSON with how far each journal was applied, then 40
bytes at the end: magic "KVFSCKE1", u32 version 1, u32 zero, u64 offset and u64 length of the JSON,
u64 xxh3-64 of the JSON. It is written front to back under its final name and believed only when its
end is there; one that is not is passed over.
A run that is visible has its present expiry and no path heads here: it is put in place as it
stands. One that waits for its parent has its parent's hash for a path head.

Blocking; reads and writes the shared storage. Writing holds one read transaction while the index
is copied into a file beside it, and none while that goes to the storage: a storage that hangs must
not keep the index from growing, and all checks waiting for that.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

import xxhash

from kvfs.backend import Backend, OpenFile, read_into, write_all
from kvfs.chain import HASH_BYTES
from kvfs.chain_entries import KeepEntry, RemoveEntry
from kvfs.errors import FormatError
from kvfs.frames import (
    ClassEntry,
    CutEntry,
    DropEntry,
    Entry,
    MovedEntry,
    MoveEntry,
    NamespaceEntry,
    RenewEntry,
    RunEntry,
    SegmentEntry,
    Source,
    decode_all,
    encode,
)
from kvfs.index import Index, slots, told
from kvfs.index.apply import Applier
from kvfs.index.index import ENDED, LAST
from kvfs.index.schema import (
    CLASS,
    CLASSES,
    CUTS,
    JOURNAL,
    JOURNALS,
    LIVE,
    MOVE,
    MOVED,
    NS,
    RUN,
    RUNS,
    SEGMENTS,
    U32,
    WAITING,
    Run,
    Segment,
    scan,
    waiting_hashes,
)
from kvfs.index.wipe import wipe
from kvfs.journal import journal_path

DIRECTORY = "ckpt"
MAGIC, END_MAGIC = b"KVFSCKP1", b"KVFSCKE1"
VERSION = 1
_HEADER = struct.Struct("<8sII16sQ16x")
_SUM = struct.Struct("<Q")
_END = struct.Struct("<8sIIQQQ")
HEADER_BYTES = 64
_CHUNK = 4 << 20
_LIMIT = 256 << 20
assert _HEADER.size + _SUM.size == HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a journal was applied."""

    writer: str
    writer_id: bytes
    number: int
    offset: int
    ended: int

    def to_json(self) -> list[Any]:
        return [self.writer, self.writer_id.hex(), self.number, self.offset, self.ended]

    @classmethod
    def from_json(cls, data: list[Any]) -> Mark:
        writer, writer_id, number, offset, ended = data
        return cls(str(writer), bytes.fromhex(writer_id), int(number), int(offset), int(ended))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is whole: where its parts are, and which journals it covers."""

    path: str
    created_ms: int
    end: int
    """Offset behind the last frame."""
    marks: list[Mark] = field(repr=False)

    def covers(self, writer_id: bytes, number: int, offset: int) -> bool:
        """Says whether everything of a journal up to `offset` is in it."""
        return any(
            m.writer_id == writer_id and (m.number, m.offset) >= (number, offset)
            for m in self.marks
        )


def write(backend: Backend, index: Index, writer: str, now_ms: int) -> Checkpoint:
    """Writes the state of the index as a checkpoint. Raises OSError; then nothing is left."""
    path = f"{DIRECTORY}/{now_ms:013d}-{writer}.ckpt"
    with tempfile.TemporaryFile(dir=index.path) as local:
        marks = index.query(lambda a: _write(local, a, index.store, now_ms))
        marks, end = list(_mentioned(backend, marks)), local.tell()
        text = json.dumps([m.to_json() for m in marks]).encode()
        check = xxhash.xxh3_64_intdigest(text)
        local.write(text + _END.pack(END_MAGIC, VERSION, 0, end, len(text), check))
        _copy(local, backend, path)
    return Checkpoint(path, now_ms, end, marks)


def _write(file: IO[bytes], applier: Applier, store: bytes, now_ms: int) -> list[Mark]:
    """Writes header and frames; returns how far each journal was applied."""
    head = _HEADER.pack(MAGIC, VERSION, 0, store, now_ms)
    at = file.write(head + _SUM.pack(xxhash.xxh3_64_intdigest(head)))
    seed = _seed(store, now_ms)
    for entry in _entries(applier, now_ms):
        at += file.write(encode(entry, seed, at))
    return list(_marks(applier))


def _copy(local: IO[bytes], backend: Backend, path: str) -> None:
    file = backend.create(path)
    try:
        local.seek(0)
        at = 0
        while chunk := local.read(_CHUNK):
            at += write_all(backend, file, [chunk], at)
        backend.sync(file)
    except BaseException:
        backend.close(file)
        backend.unlink(path)
        raise
    backend.close(file)


def _seed(store: bytes, now_ms: int) -> int:
    return int.from_bytes(store[:8], "little") ^ now_ms


def _entries(applier: Applier, now_ms: int) -> Iterator[Entry]:
    """Everything the index says, in an order in which it can be said again."""
    txn = applier.txn
    nsids: dict[int, bytes] = {}
    for key, value in scan(txn, NS):
        nsids[U32.unpack_from(value)[0]] = bytes(key[1:])
        yield NamespaceEntry(bytes(key[1:]), bytes(value[4:]).decode())
    classes: dict[int, str] = {}
    for key, value in scan(txn, CLASSES):
        number, seconds, when_ms = CLASS.unpack(value)
        classes[number] = bytes(key[1:]).decode()
        yield ClassEntry(classes[number], seconds, when_ms)
    segments: dict[int, Segment] = {}
    for key, value in scan(txn, SEGMENTS):
        s = Segment.decode(int.from_bytes(key[1:], "big"), value)
        segments[s.number] = s
        g = s.geometry
        yield SegmentEntry(
            s.segment, nsids[s.ns], g.stride, g.extent, g.first, s.created_ms, s.ttl_seconds,
            classes.get(s.class_id, ""), s.path,
        )  # fmt: skip
        if s.state != LIVE:
            yield DropEntry(s.segment, s.dropped_ms)
    for key, value in scan(txn, CUTS):
        slot = int.from_bytes(key[-4:], "big")
        yield CutEntry(bytes(16), bytes(key[1:17]), slot, U32.unpack(value)[0], now_ms)
    for key, value in scan(txn, RUNS):
        r = Run.decode(key, value)
        yield RunEntry(
            nsids[r.ns], segments[r.seg].segment, r.slot, r.block, r.written_ms, r.expires_ms,
            r.parent, b"", r.hashes,
        )  # fmt: skip
        if r.class_id != segments[r.seg].class_id and r.class_id in classes:
            name = classes[r.class_id]
            yield RenewEntry(nsids[r.ns], r.head, r.expires_ms, now_ms, name, True)
    for _, value in scan(txn, WAITING):
        seg, slot, _, block, written, expires, _, parent = RUN.unpack_from(value)
        hashes, moved = waiting_hashes(value)
        run = RunEntry(
            nsids[segments[seg].ns], segments[seg].segment, slot, block, written, expires,
            parent, parent, hashes,
        )  # fmt: skip
        yield MoveEntry(now_ms, (), run) if moved else run
    for key, value in scan(txn, MOVED):
        ns, count, target, at, head, when = MOVE.unpack(value)
        source = Source(bytes(key[1:17]), int.from_bytes(key[17:], "big"), count)
        yield MovedEntry(nsids[ns], source, target, at, head, when)
    yield from slots.all_entries(txn, nsids)
    yield from told.all_entries(txn, nsids, classes)


def _marks(applier: Applier) -> Iterator[Mark]:
    """How far every journal was applied."""
    for key, value in scan(applier.txn, JOURNALS):
        offset, ended = JOURNAL.unpack_from(value)
        writer = bytes(value[JOURNAL.size :]).decode()
        yield Mark(writer, bytes(key[1:13]), int.from_bytes(key[13:], "big"), offset, ended)


def _mentioned(backend: Backend, marks: list[Mark]) -> Iterator[Mark]:
    """Without writers that are gone, and whose journals are removed."""
    there = set(backend.names("log"))
    gone = {m.writer_id for m in marks if m.ended == LAST and m.writer not in there}
    return (m for m in marks if m.writer_id not in gone)


def written_ms(name: str) -> int:
    """When a checkpoint was written, by its name; 0 if it is not named like one."""
    digits = name.partition("-")[0]
    return int(digits) if digits.isdecimal() else 0


def newer(backend: Backend, path: str) -> bool:
    """Says whether a file is a checkpoint of a version that this code does not read yet."""
    try:
        file = backend.open(path)
        try:
            head = _read(backend, file, 0, 12)
        finally:
            backend.close(file)
    except (OSError, FormatError):
        return False
    return head[:8] == MAGIC and int.from_bytes(head[8:], "little") > VERSION


def newest(backend: Backend, store: bytes) -> Checkpoint | None:
    """The newest checkpoint that is whole and of this store, or None."""
    for name in reversed(backend.names(DIRECTORY)):
        try:
            return _open(backend, f"{DIRECTORY}/{name}", store)
        except (OSError, FormatError, ValueError, struct.error):
            continue
    return None


def _open(backend: Backend, path: str, store: bytes) -> Checkpoint:
    """Raises FormatError unless it is a whole checkpoint of this store."""
    size = backend.size(path)
    file = backend.open(path)
    try:
        head = _read(backend, file, 0, HEADER_BYTES)
        magic, version, _, uuid, created_ms = _HEADER.unpack_from(head)
        check = xxhash.xxh3_64_intdigest(head[: _HEADER.size])
        if magic != MAGIC or version != VERSION or uuid != store:
            raise FormatError(f"{path}: not a checkpoint of this store and version {VERSION}")
        if _SUM.unpack_from(head, _HEADER.size)[0] != check:
            raise FormatError(f"{path}: damaged header")
        tail = _read(backend, file, size - _END.size, _END.size)
        magic, version, _, at, length, check = _END.unpack(tail)
        if magic != END_MAGIC or version != VERSION or length > _LIMIT:
            raise FormatError(f"{path}: without an end")
        text = _read(backend, file, at, length)
        if xxhash.xxh3_64_intdigest(text) != check:
            raise FormatError(f"{path}: damaged")
    finally:
        backend.close(file)
    return Checkpoint(path, created_ms, at, [Mark.from_json(m) for m in json.loads(text)])


def _read(backend: Backend, file: OpenFile, offset: int, size: int) -> bytes:
    data = bytearray(size)
    if read_into(backend, file, [memoryview(data)], max(0, offset)) != size:
        raise FormatError(f"{file.path}: cut short")
    return bytes(data)


def load(backend: Backend, applier: Applier, checkpoint: Checkpoint, store: bytes) -> int:
    """Puts the index into the state of a checkpoint, within the caller's transaction.

    Returns the number of runs. Raises FormatError if the file is not whole, or damaged; the
    caller's transaction must then not be committed.
    """
    wipe(applier, journals=True)
    runs = 0
    for entry in read_entries(backend, checkpoint, store):
        if isinstance(entry, RunEntry) and not entry.heads:
            runs += _place(applier, entry)
        elif isinstance(entry, KeepEntry | RemoveEntry):  # what stands in runs is what it has left
            told.note_entry(applier, entry)
        elif entry is not None:
            applier.apply(entry)
    for m in checkpoint.marks:
        key = JOURNALS + m.writer_id + m.number.to_bytes(4, "big")
        ended = m.ended or (0 if _exists(backend, m) else ENDED)
        applier.txn.put(key, JOURNAL.pack(m.offset, ended) + m.writer.encode())
    return runs


def _exists(backend: Backend, mark: Mark) -> bool:
    """Says whether a journal that may go on is there; one that is not was left alone for so long
    that its writer, should it live, goes on in the next."""
    try:
        backend.size(journal_path(mark.writer, mark.number))
    except FileNotFoundError:
        return False
    return True


def _place(applier: Applier, e: RunEntry) -> int:
    """Inserts a run as it stands: it is from an index that had put it in its place."""
    ns, number = applier.namespace(e.nsid), applier.segment_number(e.segment)
    segment = None if number is None else applier.segment(number)
    if ns is None or segment is None or segment.state != LIVE:
        return 0
    head = e.hashes[:HASH_BYTES]
    applier.insert(
        Run(
            ns,
            head,
            segment.number,
            e.slot,
            e.count,
            e.block,
            e.written_ms,
            e.expires_ms,
            segment.class_id,
            e.parent,
            e.hashes,
        )  # fmt: skip
    )
    return 1


def read_entries(backend: Backend, checkpoint: Checkpoint, store: bytes) -> Iterator[Entry | None]:
    """Yields what a checkpoint says. Raises OSError, FormatError if it is damaged."""
    seed = _seed(store, checkpoint.created_ms)
    file = backend.open(checkpoint.path)
    try:
        at, size = HEADER_BYTES, _CHUNK
        while at < checkpoint.end:
            data = _read(backend, file, at, min(size, checkpoint.end - at))
            before = at
            for entry, end in decode_all(memoryview(data), seed, at):
                yield entry
                at = end
            if at == before:  # a frame larger than the chunk, or a damaged one
                if len(data) < size or size > _LIMIT:
                    raise FormatError(f"{checkpoint.path}: damaged at offset {at}")
                size *= 4
    finally:
        backend.close(file)


def all_whole(backend: Backend, store: bytes) -> Iterator[Checkpoint]:
    """All whole checkpoints, oldest first."""
    for name in backend.names(DIRECTORY):
        try:
            yield _open(backend, f"{DIRECTORY}/{name}", store)
        except (OSError, FormatError, ValueError, struct.error):
            continue
