"""What is known of a slot: 136 bytes that go with its data, in memory and between hosts.

  offset  size  field                                                       little-endian
  0       4     magic "KVSL"
  4       2     version, 1
  6       2     zeros
  8       8     generation: even, never given twice in the life of a pool
  16      16    pool id: which life of which pool
  32      16    namespace id
  48      16    anchor: chain hash of the last block before the slot's position
  64      16    lineage: blake2b-128 of the namespace's root and all tokens before the position
  80      8     position: tokens before it, a multiple of the block
  88      4     window, tokens
  92      4     backtrack, tokens
  96      4     layers
  100     4     bytes of a token in one layer
  104     4     rotation: place in the ring of the token at the position
  108     4     overshoot: tokens written into the ring behind the position
  112     8     when it was stored, milliseconds since 1970
  120     8     xxh3-64 of the data
  128     8     xxh3-64 of bytes 0..127

The data are layers x (window + backtrack) x token bytes, [layer][place]. The anchor finds a slot;
the lineage, which is cryptographic, decides whether it is of this prompt. Immutable; no I/O.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import xxhash

from kvfs.chain import HASH_BYTES, PrefixHasher
from kvfs.errors import FormatError, InputError
from kvfs.layout import StateLayout

MAGIC = b"KVSL"
VERSION = 1
META_BYTES = 136
_META = struct.Struct("<4sH2xQ16s16s16s16sQIIIIIIQQ")
_SUM = struct.Struct("<Q")
_SUM_AT = 128
assert _META.size == _SUM_AT


@dataclass(frozen=True, slots=True)
class Anchor:
    """Which slot of a namespace: a boundary of one prompt.

    hash: chain hash of the block that ends there; position: tokens before it; lineage:
    cryptographic digest of them, b"" where only a hint is at hand.
    """

    hash: bytes
    position: int
    lineage: bytes = b""

    @classmethod
    def of(cls, hasher: PrefixHasher, position: int) -> Anchor:
        """The anchor of a prompt at a boundary. Raises InputError if it is none."""
        blocks, rest = divmod(position, hasher.root.block_tokens)
        if rest or not 0 < blocks <= hasher.n_blocks:
            raise InputError(f"{position} is no boundary behind a whole block of the prompt")
        lineage = hasher.lineages(blocks)[-HASH_BYTES:]
        return cls(hasher.digest(blocks), position, lineage)


@dataclass(frozen=True, slots=True)
class SlotMeta:
    """A slot's description; `data_sum` is the checksum of its data."""

    generation: int
    pool: bytes
    nsid: bytes
    anchor: bytes
    lineage: bytes
    position: int
    layout: StateLayout
    rotation: int
    overshoot: int
    stored_ms: int
    data_sum: int = field(repr=False)

    def encode(self) -> bytes:
        """The 136 bytes above."""
        s = self.layout
        fixed = _META.pack(
            MAGIC, VERSION, self.generation, self.pool, self.nsid, self.anchor, self.lineage,
            self.position, s.window, s.backtrack, s.layers, s.token_bytes, self.rotation,
            self.overshoot, self.stored_ms, self.data_sum,
        )  # fmt: skip
        return fixed + _SUM.pack(xxhash.xxh3_64_intdigest(fixed))

    @classmethod
    def decode(cls, data: Any) -> SlotMeta:
        """The inverse of `encode`. Raises FormatError for bytes that are not whole or not ours."""
        view = memoryview(data).cast("B")
        if len(view) < META_BYTES:
            raise FormatError(f"a slot's description has {META_BYTES} bytes, not {len(view)}")
        magic, version, *ids, window, backtrack, layers, token_bytes, rotation, overshoot, \
            stored_ms, data_sum = _META.unpack_from(view)  # fmt: skip
        if magic != MAGIC:
            raise FormatError("not the description of a slot")
        if version != VERSION:
            raise FormatError(f"slot of version {version}; this kvfs reads {VERSION}")
        if _SUM.unpack_from(view, _SUM_AT)[0] != xxhash.xxh3_64_intdigest(view[:_SUM_AT]):
            raise FormatError("the description of the slot is damaged (checksum)")
        try:
            layout = StateLayout(window, backtrack, layers, token_bytes)
        except InputError as e:
            raise FormatError(f"the slot's layout is none: {e}") from e
        fields: tuple[Any, ...] = (*ids, layout, rotation, overshoot, stored_ms, data_sum)
        return cls(*fields)

    def is_for(self, anchor: Anchor) -> bool:
        """Whether it is the slot of this anchor; the lineage counts where it is known."""
        return (
            self.anchor == anchor.hash
            and self.position == anchor.position
            and anchor.lineage in (b"", self.lineage)
        )

    def accepts(self, data: Any) -> bool:
        """Whether these are the slot's data, whole and unchanged."""
        return len(data) == self.layout.slot_bytes and checksum(data) == self.data_sum


def checksum(data: Any) -> int:
    """xxh3-64 of a slot's data."""
    return xxhash.xxh3_64_intdigest(data)
