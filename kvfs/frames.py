"""The entries of a journal and of a segment's footer, and how they are framed.

A frame is 16 bytes of head and a body, padded with zeros to a multiple of 8; little-endian:

  offset  size  field
  0       4     body length in bytes, without padding
  4       1     type
  5       3     zeros
  8       8     xxh3-64 of bytes 0..7 and the body, seeded with the file's seed plus the frame's
                offset, so that bytes of another file or place are not taken for a frame

Bodies (strings are a u16 length and UTF-8; hashes 16 bytes; times are milliseconds since 1970):

  1 NAMESPACE  nsid 16, json string (u32 length)
  2 CLASS      name string, seconds u64, when u64; of two definitions the later one counts
  3 SEGMENT    segment id 16, nsid 16, stride u32, extent u64, first u64, created u64,
               ttl seconds u64, class string, path string
  4 RUN        nsid 16, segment id 16, slot u32, block u32, written u64, expires u64, parent 16,
               number of path heads u16, heads 16 each, number of blocks u32, hashes 16 each
  5 RENEW      nsid 16, head 16, expires u64, when u64, class string, force u8
  6 CUT        nsid 16, segment id 16, slot u32, count u32, when u64
  7 DROP       segment id 16, when u64
  8 SEAL       when u64, last u8: nothing follows in this journal; 1: nor in a next one
  9 MOVE       when u64, number of sources u32, sources (segment id 16, slot u32, count u32) each,
               then as RUN
  10 MOVED     nsid 16, source (segment id 16, slot u32, count u32), segment id 16, slot u32,
               head 16, when u64; in checkpoints only
  11 SLOT, 12 SLOTGONE: see kvfs.slot_entries; 13 KEEP, 14 REMOVE: see kvfs.chain_entries

The path heads of a RUN are the first hashes of the runs that lead to it in its writer's index, the
root's child first: with them an index that cut the same chain into other runs finds the place.
A MOVE says that blocks which were visible already are in another place from now on: unlike those of
a RUN, which give way to what shows them, its blocks take the place of whatever does, on every host
and in whatever order the journals come in. The sources are the places that they were copied from,
in the order of the blocks: what is cut there later, or was cut unseen by the copier, is cut in the
new place, and a move that comes in behind a later one of the same blocks changes nothing. A MOVED
says the same of the past, one source at a time; `head` is the hash of its first block.
A RENEW reaches a run by its first block alone and a CUT one copy of its blocks: RENEW is written
no more, CUT only where one copy is bad.
An unknown type is skipped and counted; it never changes what the others mean. One whose numbers no
index can hold (kvfs.bodies) is refused. No I/O here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import xxhash

from kvfs.bodies import (
    MAX_NAME,
    check_class_name,
    check_geometry,
    check_ms,
    check_path,
    check_seconds,
    check_slots,
    string,
    take_string,
)
from kvfs.chain import HASH_BYTES
from kvfs.chain_entries import KeepEntry, RemoveEntry
from kvfs.errors import FormatError
from kvfs.geometry import Geometry
from kvfs.slot_entries import SlotEntry, SlotGoneEntry

HEAD = struct.Struct("<IB3xQ")
_LEAD = struct.Struct("<IB3x")
MAX_BODY = 64 << 20
MAX_PATH_HEADS = 255

_SEGMENT = struct.Struct("<16s16sIQQQQ")
_RUN = struct.Struct("<16s16sIIQQ16sH")
_RENEW = struct.Struct("<16s16sQQ")
_CUT = struct.Struct("<16s16sIIQ")
_DROP = struct.Struct("<16sQ")
_SEAL = struct.Struct("<QB")
_MOVE = struct.Struct("<QI")
_SOURCE = struct.Struct("<16sII")
_MOVED = struct.Struct("<16s16sII16sI16sQ")


@dataclass(frozen=True, slots=True)
class NamespaceEntry:
    """A namespace came to be."""

    nsid: bytes
    json: str

    def body(self) -> bytes:
        data = self.json.encode()
        return self.nsid + struct.pack("<I", len(data)) + data


@dataclass(frozen=True, slots=True)
class ClassEntry:
    """A TTL class was defined or changed."""

    name: str
    seconds: int
    when_ms: int

    def body(self) -> bytes:
        return string(self.name) + struct.pack("<QQ", self.seconds, self.when_ms)


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """A segment was begun; published before its first run."""

    segment: bytes
    nsid: bytes
    stride: int
    extent: int
    first: int
    created_ms: int
    ttl_seconds: int
    ttl_class: str
    path: str

    def body(self) -> bytes:
        fixed = _SEGMENT.pack(
            self.segment, self.nsid, self.stride, self.extent, self.first,
            self.created_ms, self.ttl_seconds,
        )  # fmt: skip
        return fixed + string(self.ttl_class) + string(self.path)


@dataclass(frozen=True, slots=True)
class RunEntry:
    """Consecutive blocks of one chain became visible."""

    nsid: bytes
    segment: bytes
    slot: int
    block: int
    written_ms: int
    expires_ms: int
    parent: bytes
    heads: bytes
    """Path heads, 16 bytes each."""
    hashes: bytes
    """Chain hash of every block, 16 bytes each."""

    @property
    def count(self) -> int:
        return len(self.hashes) // HASH_BYTES

    def part(self, first: int, end: int) -> RunEntry:
        """The blocks first..end-1 as a run of their own."""
        if (first, end) == (0, self.count):
            return self
        at = first * HASH_BYTES
        return replace(
            self,
            slot=self.slot + first,
            block=self.block + first,
            parent=self.hashes[at - HASH_BYTES : at] if first else self.parent,
            heads=self.heads + self.hashes[:HASH_BYTES] if first else self.heads,
            hashes=self.hashes[at : end * HASH_BYTES],
        )

    def body(self) -> bytes:
        fixed = _RUN.pack(
            self.nsid, self.segment, self.slot, self.block, self.written_ms, self.expires_ms,
            self.parent, len(self.heads) // HASH_BYTES,
        )  # fmt: skip
        return b"".join((fixed, self.heads, struct.pack("<I", self.count), self.hashes))


@dataclass(frozen=True, slots=True)
class RenewEntry:
    """A run's expiry moves: later only, or with `force` to exactly the time given."""

    nsid: bytes
    head: bytes
    expires_ms: int
    when_ms: int
    ttl_class: str
    force: bool

    def body(self) -> bytes:
        fixed = _RENEW.pack(self.nsid, self.head, self.expires_ms, self.when_ms)
        return fixed + string(self.ttl_class) + bytes([self.force])


@dataclass(frozen=True, slots=True)
class CutEntry:
    """The records in `count` slots are no longer visible, nor what follows them in their run."""

    nsid: bytes
    segment: bytes
    slot: int
    count: int
    when_ms: int

    def body(self) -> bytes:
        return _CUT.pack(self.nsid, self.segment, self.slot, self.count, self.when_ms)


@dataclass(frozen=True, slots=True)
class DropEntry:
    """A segment is no longer visible; its file goes after a grace period."""

    segment: bytes
    when_ms: int

    def body(self) -> bytes:
        return _DROP.pack(self.segment, self.when_ms)


@dataclass(frozen=True, slots=True)
class SealEntry:
    """The journal ends here; `last`: its writer is gone for good, there is no next one."""

    when_ms: int
    last: bool

    def body(self) -> bytes:
        return _SEAL.pack(self.when_ms, self.last)


class Source(NamedTuple):
    """A stretch of slots that blocks were copied from."""

    segment: bytes
    slot: int
    count: int  # type: ignore[assignment]  # hides tuple.count


@dataclass(frozen=True, slots=True)
class MoveEntry:
    """Visible blocks are in another place from now on."""

    when_ms: int
    sources: tuple[Source, ...]
    """Where they were copied from, block by block."""
    run: RunEntry
    """Where they are."""

    def body(self) -> bytes:
        sources = b"".join(_SOURCE.pack(*s) for s in self.sources)
        return _MOVE.pack(self.when_ms, len(self.sources)) + sources + self.run.body()


@dataclass(frozen=True, slots=True)
class MovedEntry:
    """A checkpoint's account of a source of a move: slot `slot` of `segment` took its first
    block, whose hash is `head`."""

    nsid: bytes
    source: Source
    segment: bytes
    slot: int
    head: bytes
    when_ms: int

    def body(self) -> bytes:
        return _MOVED.pack(
            self.nsid, *self.source, self.segment, self.slot, self.head, self.when_ms
        )


Entry = (
    NamespaceEntry | ClassEntry | SegmentEntry | RunEntry | RenewEntry | CutEntry | DropEntry
    | SealEntry | MoveEntry | MovedEntry | SlotEntry | SlotGoneEntry | KeepEntry | RemoveEntry
)  # fmt: skip
_TYPES: tuple[type[Entry], ...] = (
    NamespaceEntry, ClassEntry, SegmentEntry, RunEntry, RenewEntry, CutEntry, DropEntry, SealEntry,
    MoveEntry, MovedEntry, SlotEntry, SlotGoneEntry, KeepEntry, RemoveEntry,
)  # fmt: skip
_NUMBER = {t: i for i, t in enumerate(_TYPES, 1)}


def shortened(heads: bytes, most: int = MAX_PATH_HEADS) -> bytes:
    """Of path heads the first and the nearest, `most` together."""
    limit = most * HASH_BYTES
    return heads if len(heads) <= limit else heads[:HASH_BYTES] + heads[HASH_BYTES - limit :]


def encode(entry: Entry, seed: int, offset: int) -> bytes:
    """Returns the frame of an entry that will stand at `offset` of a file with this seed."""
    body = entry.body()
    lead = _LEAD.pack(len(body), _NUMBER[type(entry)])
    frame = HEAD.pack(len(body), _NUMBER[type(entry)], _sum(lead, body, seed + offset))
    return b"".join((frame, body, bytes(-len(body) % 8)))


def _sum(lead: bytes, body: bytes | memoryview, seed: int) -> int:
    h = xxhash.xxh3_64(lead, seed=seed & 0xFFFFFFFFFFFFFFFF)
    h.update(body)
    digest: int = h.intdigest()
    return digest


def decode_all(data: memoryview, seed: int, offset: int) -> Iterator[tuple[Entry | None, int]]:
    """Yields (entry, offset behind it) for each whole, sound frame from the start of `data` on.

    data: bytes of the file from `offset` on. Stops without an error at the first frame that is
    torn, damaged or not there yet: what follows cannot be trusted. An entry of an unknown type is
    yielded as None.
    """
    at = 0
    while at + HEAD.size <= len(data):
        length, kind, check = HEAD.unpack_from(data, at)
        end = at + HEAD.size + length
        if length > MAX_BODY or end > len(data):
            return
        body = data[at + HEAD.size : end]
        if _sum(_LEAD.pack(length, kind), body, seed + offset + at) != check:
            return
        at = end + -length % 8
        if at > len(data):
            return
        yield _decode(kind, body), offset + at


def _decode(kind: int, body: memoryview) -> Entry | None:
    """Decodes a body whose checksum is right. Raises FormatError if it does not fit its type."""
    if not 1 <= kind <= len(_DECODERS):
        return None
    try:
        return _DECODERS[kind - 1](body)
    except (struct.error, ValueError) as e:
        raise FormatError(f"journal entry of type {kind} does not fit its layout: {e}") from e


def _namespace(body: memoryview) -> NamespaceEntry:
    (n,) = struct.unpack_from("<I", body, 16)
    if 20 + n > len(body):
        raise ValueError("identity beyond the body")
    return NamespaceEntry(bytes(body[:16]), bytes(body[20 : 20 + n]).decode())


def _class(body: memoryview) -> ClassEntry:
    name, at = take_string(body, 0, MAX_NAME)
    seconds, when_ms = struct.unpack_from("<QQ", body, at)
    check_class_name(name)
    check_seconds(seconds)
    check_ms(when_ms)
    return ClassEntry(name, seconds, when_ms)


def _segment(body: memoryview) -> SegmentEntry:
    name, at = take_string(body, _SEGMENT.size, MAX_NAME)
    path, _ = take_string(body, at)
    fields: tuple[Any, ...] = (*_SEGMENT.unpack_from(body), name, path)
    entry = SegmentEntry(*fields)
    check_path(path)
    check_geometry(Geometry(entry.stride, entry.extent, entry.first))
    check_ms(entry.created_ms)
    check_seconds(entry.ttl_seconds)
    return entry


def _run(body: memoryview) -> RunEntry:
    *fixed, n_heads = _RUN.unpack_from(body)
    at = _RUN.size + n_heads * HASH_BYTES
    (count,) = struct.unpack_from("<I", body, at)
    if len(body) != at + 4 + count * HASH_BYTES or not count:
        raise ValueError(f"{count} hashes in {len(body)} bytes")
    heads, hashes = bytes(body[_RUN.size : at]), bytes(body[at + 4 :])
    fields: tuple[Any, ...] = (*fixed, heads, hashes)
    entry = RunEntry(*fields)
    check_slots(entry.slot, count)
    check_slots(entry.block, count)
    check_ms(entry.written_ms, entry.expires_ms)
    return entry


def _renew(body: memoryview) -> RenewEntry:
    name, at = take_string(body, _RENEW.size, MAX_NAME)
    (force,) = struct.unpack_from("<?", body, at)
    fields: tuple[Any, ...] = (*_RENEW.unpack_from(body), name, force)
    entry = RenewEntry(*fields)
    check_ms(entry.expires_ms, entry.when_ms)
    return entry


def _cut(body: memoryview) -> CutEntry:
    entry = CutEntry(*_CUT.unpack_from(body))
    check_slots(entry.slot, entry.count)
    check_ms(entry.when_ms)
    return entry


def _drop(body: memoryview) -> DropEntry:
    entry = DropEntry(*_DROP.unpack_from(body))
    check_ms(entry.when_ms)
    return entry


def _seal(body: memoryview) -> SealEntry:
    when_ms, last = _SEAL.unpack_from(body)
    check_ms(when_ms)
    return SealEntry(when_ms, bool(last))


def _move(body: memoryview) -> MoveEntry:
    when_ms, n = _MOVE.unpack_from(body)
    at = _MOVE.size + n * _SOURCE.size
    sources = tuple(Source(*s) for s in _SOURCE.iter_unpack(body[_MOVE.size : at]))
    run = _run(body[at:])
    if sum(s.count for s in sources) > run.count:
        raise ValueError(f"{run.count} blocks from more slots")
    for source in sources:
        check_slots(source.slot, source.count)
    check_ms(when_ms)
    return MoveEntry(when_ms, sources, run)


def _moved(body: memoryview) -> MovedEntry:
    nsid, source, first, count, *rest = _MOVED.unpack_from(body)
    entry = MovedEntry(nsid, Source(source, first, count), *rest)
    check_slots(first, count)
    check_slots(entry.slot, count)
    check_ms(entry.when_ms)
    return entry


_DECODERS = (
    _namespace, _class, _segment, _run, _renew, _cut, _drop, _seal, _move, _moved,
    SlotEntry.decode, SlotGoneEntry.decode, KeepEntry.decode, RemoveEntry.decode,
)  # fmt: skip
