"""Journal entries that name blocks by their chain hashes: what is renewed, and what is removed.

Hosts cut one chain into different runs, and two hosts may have stored the same blocks at once: a
hash is what all of them know a block by, in whatever place each shows it. Framed as all entries are
(kvfs.frames); bodies, little-endian:

  13 KEEP      nsid 16, expires u64, when u64, block u32, class string, force u8,
               number of path heads u16, heads 16 each, number of blocks u32, hashes 16 each
  14 REMOVE    nsid 16, when u64, block u32, number of path heads u16, heads 16 each,
               number of blocks u32, hashes 16 each; none: the whole namespace; `block` is then
               BLOCKS, LISTING (it is also listed no more, until something is stored in it) or
               NOTHING (it is listed again)

The hashes are of consecutive blocks of one chain, `block` is the number of the first; path heads as
in a RUN. A REMOVE takes every copy of its blocks out of sight that was written no later than
`when`, also one that comes in afterwards; its writer gives it a time that is not before anything it
has heard of, and a put that follows it on any host a later one. A KEEP holds for blocks that come
in afterwards as well. So neither depends on the order in which journals come in. No I/O here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kvfs.bodies import MAX_NAME, check_ms, string, take_string
from kvfs.chain import HASH_BYTES

_KEEP = struct.Struct("<16sQQI")
_REMOVE = struct.Struct("<16sQI")
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
BLOCKS, LISTING, NOTHING = 0, 1, 2
"""What goes of a whole namespace."""


@dataclass(frozen=True, slots=True)
class KeepEntry:
    """Blocks expire later, or with `force` at exactly the time given."""

    nsid: bytes
    expires_ms: int
    when_ms: int
    block: int
    ttl_class: str
    """The class they move to, "": each keeps its own."""
    force: bool
    heads: bytes
    """Path heads, 16 bytes each."""
    hashes: bytes
    """Chain hash of every block, 16 bytes each."""

    def body(self) -> bytes:
        fixed = _KEEP.pack(self.nsid, self.expires_ms, self.when_ms, self.block)
        middle = string(self.ttl_class), bytes([self.force])
        return b"".join((fixed, *middle, *_stretch(self.heads, self.hashes)))

    @classmethod
    def decode(cls, body: memoryview) -> KeepEntry:
        """The inverse of `body`. Raises struct.error, ValueError."""
        nsid, expires_ms, when_ms, block = _KEEP.unpack_from(body)
        name, at = take_string(body, _KEEP.size, MAX_NAME)
        (force,) = struct.unpack_from("<?", body, at)
        heads, hashes = _take_stretch(body, at + 1)
        if not hashes:
            raise ValueError("no block")
        check_ms(expires_ms, when_ms)
        return cls(nsid, expires_ms, when_ms, block, name, force, heads, hashes)


@dataclass(frozen=True, slots=True)
class RemoveEntry:
    """Blocks are no longer visible, in no copy that was written by then."""

    nsid: bytes
    when_ms: int
    block: int
    heads: bytes = b""
    """Path heads, 16 bytes each."""
    hashes: bytes = b""
    """Chain hash of every block, 16 bytes each; none: of the whole namespace what `block` says."""

    def body(self) -> bytes:
        fixed = _REMOVE.pack(self.nsid, self.when_ms, self.block)
        return b"".join((fixed, *_stretch(self.heads, self.hashes)))

    @classmethod
    def decode(cls, body: memoryview) -> RemoveEntry:
        """The inverse of `body`. Raises struct.error, ValueError."""
        nsid, when_ms, block = _REMOVE.unpack_from(body)
        check_ms(when_ms)
        return cls(nsid, when_ms, block, *_take_stretch(body, _REMOVE.size))


def _stretch(heads: bytes, hashes: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    counts = _U16.pack(len(heads) // HASH_BYTES), _U32.pack(len(hashes) // HASH_BYTES)
    return counts[0], heads, counts[1], hashes


def _take_stretch(body: memoryview, at: int) -> tuple[bytes, bytes]:
    (n_heads,) = _U16.unpack_from(body, at)
    first = at + _U16.size
    end = first + n_heads * HASH_BYTES
    (count,) = _U32.unpack_from(body, end)
    if len(body) != end + _U32.size + count * HASH_BYTES:
        raise ValueError(f"{count} hashes in {len(body)} bytes")
    return bytes(body[first:end]), bytes(body[end + _U32.size :])
