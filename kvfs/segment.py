"""The segment file: a header page, records in fixed slots, a footer once it is sealed.

A segment belongs to one namespace, one TTL class and one writer, which made it with O_EXCL, writes
it front to back and never opens it again. Its id is the writer's 12-byte id and a number.

Header, the first 4096 bytes; integers little-endian:

  offset  size  field
  0       8     magic "KVFSSEG1"
  8       4     version, 1
  12      4     number of this segment among its writer's
  16      12    writer id
  28      4     stride of a record
  32      16    namespace id
  48      32    namespace fingerprint
  80      8     extent: no record crosses a multiple of it
  88      8     offset of slot 0
  96      8     time made, milliseconds since 1970 UTC
  104     8     time to live of the class, seconds
  112     32    name of the TTL class, UTF-8, padded with zeros
  144     16    store uuid
  160     4     payload bytes of a record
  4088    8     xxh3-64 of the 4088 bytes before

Slot k lies in extent 0 while it fits there, then from the start of each extent on; the rest of an
extent is a gap. The footer starts at the next page after the last record and is a journal frame
for the segment and one for each run (kvfs.frames), then 40 bytes at the file's very end: magic
"KVFSEND1", u32 version 1, u32 slots used, u64 footer offset, u64 footer length, u64 xxh3-64 of the
footer. A segment without a footer (its writer died) is read by its trailers.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from kvfs.bodies import check_geometry, check_ms, check_seconds
from kvfs.errors import FormatError
from kvfs.geometry import PAGE
from kvfs.geometry import Geometry as Geometry

MAGIC = b"KVFSSEG1"
END_MAGIC = b"KVFSEND1"
VERSION = 1
WRITER_BYTES = 12
SEGMENT_ID_BYTES = 16
_HEADER = struct.Struct("<8sII12sI16s32sQQQQ32s16sI")
_SUM = struct.Struct("<Q")
_END = struct.Struct("<8sIIQQQ")
END_BYTES = _END.size
FOOTER_LIMIT = 256 << 20


@dataclass(frozen=True, slots=True)
class Header:
    """The header page's content."""

    segment_id: bytes
    nsid: bytes
    fingerprint: bytes
    geometry: Geometry
    payload: int
    created_ms: int
    ttl_class: str
    ttl_seconds: int
    store: bytes

    def encode(self) -> bytes:
        """Returns the header page, 4096 bytes."""
        g = self.geometry
        fixed = _HEADER.pack(
            MAGIC, VERSION, segment_number(self.segment_id), self.segment_id[:WRITER_BYTES],
            g.stride, self.nsid, self.fingerprint, g.extent, g.first, self.created_ms,
            self.ttl_seconds, self.ttl_class.encode(), self.store, self.payload,
        )  # fmt: skip
        page = fixed.ljust(PAGE - _SUM.size, b"\0")
        return page + _SUM.pack(xxhash.xxh3_64_intdigest(page))

    @classmethod
    def decode(cls, page: bytes, path: str) -> Header:
        """Reads a header page. Raises FormatError naming `path` if it is not one of ours."""
        if len(page) < PAGE or page[:8] != MAGIC:
            raise FormatError(f"{path}: not a segment: it does not begin with {MAGIC.decode()}")
        (_, version, number, writer, stride, nsid, fingerprint, extent, first, created,
         ttl, name, store, payload) = _HEADER.unpack_from(page)  # fmt: skip
        if version != VERSION:
            raise FormatError(
                f"{path}: segment version {version}; this kvfs reads version {VERSION}"
            )
        if xxhash.xxh3_64_intdigest(page[: -_SUM.size]) != _SUM.unpack_from(page, PAGE - 8)[0]:
            raise FormatError(f"{path}: damaged segment header (checksum)")
        geometry = Geometry(stride, extent, first)
        try:
            check_geometry(geometry)
            check_ms(created)
            check_seconds(ttl)
            ttl_class = name.rstrip(b"\0").decode()
        except ValueError as e:
            raise FormatError(f"{path}: a segment header that cannot be: {e}") from e
        return cls(
            segment_id(writer, number), nsid, fingerprint, geometry, payload, created, ttl_class,
            ttl, store,
        )  # fmt: skip


def segment_id(writer: bytes, number: int) -> bytes:
    """Returns the 16-byte id of a writer's segment."""
    return writer + number.to_bytes(4, "little")


def segment_number(segment: bytes) -> int:
    return int.from_bytes(segment[WRITER_BYTES:], "little")


def segment_path(ttl_class: str, day: str, namespace: str, writer: str, number: int) -> str:
    """The path in the store; one class and one day per directory so that expiry is a removal."""
    return f"seg/{ttl_class}/{day}/{namespace}/{writer}-{number:06d}.seg"


def encode_end(footer: bytes, slots: int, offset: int) -> bytes:
    """The last bytes of a sealed segment."""
    sum_ = xxhash.xxh3_64_intdigest(footer)
    return _END.pack(END_MAGIC, VERSION, slots, offset, len(footer), sum_)


@dataclass(frozen=True, slots=True)
class End:
    """What the last bytes of a sealed segment say."""

    slots: int
    offset: int
    length: int
    checksum: int


def decode_end(tail: bytes) -> End | None:
    """Returns the end mark, or None if the segment was never sealed or the mark is damaged."""
    if len(tail) != END_BYTES:
        return None
    magic, version, slots, offset, length, sum_ = _END.unpack(tail)
    if magic != END_MAGIC or version != VERSION or length > FOOTER_LIMIT:
        return None
    return End(slots, offset, length, sum_)
