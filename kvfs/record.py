"""The record: one stored block, its 128 token ids and a trailer that says what it is.

Byte layout of a record of stride S (a multiple of 4096) for a payload of P bytes and T tokens a
block; all integers little-endian. The payload comes first so that it is aligned for O_DIRECT and
DMA; token ids and trailer end the record, at a place that does not depend on P.

  offset            size  field
  0                 P     payload: the engine's block row, all layers, main KV and indexer
  P                 pad   zeros
  S - 128 - 4*T     4*T   token ids, unsigned 32-bit
  S - 128           4     magic "KVR1"
  S - 124           2     version, 1
  S - 122           2     flags, 0
  S - 120           16    namespace id: first 16 bytes of the fingerprint
  S - 104           16    chain hash of the block
  S - 88            16    parent: chain hash of the block before, the root's for block 0
  S - 72            4     block number in its chain
  S - 68            4     P
  S - 64            8     xxh3-64 of the payload
  S - 56            2*8   xxh3-64 of each smaller part of the payload ("index", ...); 0 if absent
  S - 40            16    lineage: blake2b-128 of the root and all tokens up to this block's end
  S - 24            8     time written, milliseconds since 1970 UTC
  S - 16            4     position of the record in its run
  S - 12            4     number of records in the run
  S - 8             8     xxh3-64 of token ids and trailer up to here (4*T + 120 bytes)

A reader believes a record only if every field agrees with what it asked for. The lineage is
cryptographic: two prompts whose fast chain hashes were made to collide still differ in it, from the
first differing block on, even where the colliding block itself is followed by equal ones. The
checksums of the smaller parts say which part is damaged when the payload's checksum fails.
This module has no I/O and no state; `verify` lets other threads run while it hashes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash

from kvfs.chain import HASH_BYTES, TOKEN_BYTES
from kvfs.errors import InputError
from kvfs.geometry import PAGE as PAGE
from kvfs.keys import Chain

MAGIC = b"KVR1"
VERSION = 1
TRAILER_BYTES = 128
MAX_SIDE_PARTS = 2
_HEAD = struct.Struct("<4sHH16s16s16sII3Q16sQII")
_SUM = struct.Struct("<Q")
_SUM_AT = TRAILER_BYTES - _SUM.size
_CHECKSUM_AT = 64  # of the payload, from the trailer's start
_LINEAGE_AT = 88
assert _HEAD.size == _SUM_AT

_xxh = xxhash.xxh3_64_intdigest


class _Span(Protocol):
    @property
    def part(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...


class _Row(Protocol):
    """What the geometry needs of kvfs.layout.Identity."""

    @property
    def row_bytes(self) -> int: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def nsid(self) -> bytes: ...
    @property
    def spans(self) -> Sequence[Any]: ...
    @property
    def parts(self) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class Shape:
    """Where the fields of a namespace's records lie; made once per namespace."""

    nsid: bytes
    payload: int
    tokens_bytes: int
    stride: int
    side_parts: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
    """(part name, ((offset, length), ...)) of every part but the largest."""
    main_part: str

    @property
    def meta_at(self) -> int:
        """Offset of the token ids; tokens and trailer reach from here to the stride's end."""
        return self.stride - TRAILER_BYTES - self.tokens_bytes

    @classmethod
    def of(cls, row: _Row) -> Shape:
        """Returns the shape for an identity. Raises InputError for more than 5 parts."""
        main, *others = row.parts
        if len(others) > MAX_SIDE_PARTS:
            raise InputError(f"a layout has at most {MAX_SIDE_PARTS + 1} parts; got {row.parts}")
        tokens = row.block_tokens * TOKEN_BYTES
        whole = row.row_bytes + tokens + TRAILER_BYTES
        side = tuple(
            (p, tuple((s.offset, s.length) for s in row.spans if s.part == p)) for p in others
        )
        return cls(row.nsid, row.row_bytes, tokens, -(-whole // PAGE) * PAGE, side, main)


@dataclass(frozen=True, slots=True)
class RunBlocks:
    """Consecutive blocks of one chain, by identity: what a writer stores and a reader expects."""

    parent: bytes
    """Chain hash of the block before the first, the root's for block 0."""
    block: int
    """Number of the first block."""
    hashes: bytes
    """16 bytes a block."""
    lineages: bytes
    """16 bytes a block."""
    tokens: memoryview
    """u32 little-endian bytes of exactly these blocks."""
    keyed: bool = False
    """Named by keys: who asks does not know the parent and the number, which then may be any."""

    @classmethod
    def of(cls, chain: Chain, first: int, end: int) -> RunBlocks:
        """The blocks first..end-1 of a prompt, or of the keys that were given."""
        hashes = chain.hashes(end, first=first)
        lineages = chain.lineages(end, first=first)
        tokens, block = chain.blocks(first, end), chain.first_block + first
        return cls(chain.digest(first), block, hashes, lineages, tokens, chain.keyed)

    def part(self, first: int, end: int) -> RunBlocks:
        """The blocks first..end-1 of these, counted from 0."""
        at = slice(first * HASH_BYTES, end * HASH_BYTES)
        size = len(self.tokens) // self.count
        parent = self.hashes[at.start - HASH_BYTES : at.start] if first else self.parent
        tokens = self.tokens[first * size : end * size]
        return RunBlocks(
            parent, self.block + first, self.hashes[at], self.lineages[at], tokens, self.keyed
        )

    @property
    def count(self) -> int:
        return len(self.hashes) // HASH_BYTES


@dataclass(frozen=True, slots=True)
class Trailer:
    """A record's own account of itself, as read back."""

    version: int
    nsid: bytes
    hash: bytes
    parent: bytes
    block: int
    payload: int
    checksum: int
    part_sums: tuple[int, ...]
    lineage: bytes
    written_ms: int
    run_index: int
    run_count: int


def encode_metas(
    shape: Shape,
    run: RunBlocks,
    written_ms: int,
    payloads: Sequence[memoryview],
) -> Iterator[bytes]:
    """Yields what follows each payload in its record: padding, token ids and trailer.

    run: the identity of the blocks; payloads: one view of `shape.payload` bytes a block. Each
    payload is hashed just before its meta is yielded, so a caller that writes in small batches
    finds it in cache.
    """
    pad = bytes(shape.meta_at - shape.payload)
    parent, n, size = run.parent, len(payloads), shape.tokens_bytes
    for i, payload in enumerate(payloads):
        at = slice(i * HASH_BYTES, (i + 1) * HASH_BYTES)
        h = run.hashes[at]
        sums = [_part_sum(payload, spans) for _, spans in shape.side_parts]
        sums += [0] * (MAX_SIDE_PARTS - len(sums))
        trailer = _HEAD.pack(
            MAGIC, VERSION, 0, shape.nsid, h, parent, run.block + i, shape.payload,
            _xxh(payload), *sums, run.lineages[at], written_ms, i, n,
        )  # fmt: skip
        body = b"".join((run.tokens[i * size : (i + 1) * size], trailer))
        yield b"".join((pad, body, _SUM.pack(_xxh(body))))
        parent = h


def _part_sum(payload: memoryview, spans: tuple[tuple[int, int], ...]) -> int:
    h = xxhash.xxh3_64()
    for offset, length in spans:
        h.update(payload[offset : offset + length])
    digest: int = h.intdigest()
    return digest


@dataclass(frozen=True, slots=True)
class Landing:
    """Where n consecutive records lie in memory, whole or split into payloads and the rest.

    payloads, payload_step: payload i is at byte i * payload_step; metas, meta_step: token ids and
    trailer of record i are at byte i * meta_step.
    """

    shape: Shape
    payloads: memoryview
    payload_step: int
    metas: memoryview
    meta_step: int

    @classmethod
    def whole(cls, shape: Shape, records: memoryview) -> Landing:
        """Records as they lie in a segment: n * stride bytes."""
        return cls(shape, records, shape.stride, records[shape.meta_at :], shape.stride)

    @classmethod
    def split(cls, shape: Shape, payloads: memoryview, rests: memoryview) -> Landing:
        """Dense payloads (n * P bytes) and what follows each (n * (stride - P) bytes)."""
        step = shape.stride - shape.payload
        return cls(shape, payloads, shape.payload, rests[shape.meta_at - shape.payload :], step)

    def payload(self, i: int) -> memoryview:
        at = i * self.payload_step
        return self.payloads[at : at + self.shape.payload]

    def meta(self, i: int) -> memoryview:
        """Token ids and trailer of record i."""
        at = i * self.meta_step
        return self.metas[at : at + self.shape.tokens_bytes + TRAILER_BYTES]


def parse(meta: memoryview) -> Trailer | str:
    """Returns the trailer of a record, or why there is none to believe.

    meta: token ids and trailer. Checks magic, version and checksum; not the payload.
    """
    tail = meta[-TRAILER_BYTES:]
    fields = _HEAD.unpack_from(tail)
    if fields[0] != MAGIC:
        return "bad trailer" if any(tail) else "no record"
    if fields[1] != VERSION:
        return f"record version {fields[1]}"
    if _xxh(meta[: -_SUM.size]) != _SUM.unpack_from(tail, _SUM_AT)[0]:
        return "bad trailer"
    _, version, _, nsid, h, parent, block, payload, checksum, *rest = fields
    return Trailer(version, nsid, h, parent, block, payload, checksum, tuple(rest[:2]), *rest[2:])


def check_payload(shape: Shape, payload: memoryview, trailer: Trailer) -> str | None:
    """Returns None if the payload is what was written, else which part is damaged."""
    if _xxh(payload) == trailer.checksum:
        return None
    for (name, spans), want in zip(shape.side_parts, trailer.part_sums, strict=False):
        if _part_sum(payload, spans) != want:
            return f"checksum of part {name}"
    return f"checksum of part {shape.main_part}"


def verify(at: Landing, want: RunBlocks, *, payloads: bool = True) -> tuple[int, str | None]:
    """Compares consecutive records with what was asked for, and with their own checksums.

    payloads: False skips the payload checksum (the trailer's is always checked).
    Returns (number of good leading records, None or why the next one is bad).
    """
    good, mismatch = matches(at, want)
    whole, damage = sound(at, 0, good, payloads=payloads)
    return (whole, damage) if damage is not None else (good, mismatch)


def sound(at: Landing, first: int, end: int, *, payloads: bool = True) -> tuple[int, str | None]:
    """Checks records first..end-1 against their own checksums, in order.

    Returns (the first that is bad, why) or (end, None).
    """
    # Spelled out, since it runs for every block of every fetch: two thirds of the time of the same
    # with a call for each view.
    sum_at = at.shape.tokens_bytes + _SUM_AT
    payload_sum_at = at.shape.tokens_bytes + _CHECKSUM_AT
    metas, meta_step, size = at.metas, at.meta_step, at.shape.payload
    rows, row_step, unpack = at.payloads, at.payload_step, _SUM.unpack_from
    for i in range(first, end):
        m, p = i * meta_step, i * row_step
        if _xxh(metas[m : m + sum_at]) != unpack(metas, m + sum_at)[0]:
            return i, _damage(at, i)
        if payloads and _xxh(rows[p : p + size]) != unpack(metas, m + payload_sum_at)[0]:
            return i, _damage(at, i)
    return end, None


def _damage(at: Landing, i: int) -> str:
    trailer = parse(at.meta(i))
    if isinstance(trailer, str):
        return trailer
    return check_payload(at.shape, at.payload(i), trailer) or "bad trailer"


def matches(at: Landing, want: RunBlocks, first: int = 0) -> tuple[int, str | None]:
    """Compares what records first.. say they are with what was asked for, all at once.

    Token ids, chain hash, parent, lineage, block number, namespace and payload length must agree;
    of blocks that are named by keys, all but parent and number.
    `want` describes the records from `first` on. Returns (number of leading records that agree,
    None or why the next one does not).
    """
    import numpy as np

    n, size = want.count, at.shape.tokens_bytes
    metas, step = at.metas[first * at.meta_step :], at.meta_step
    rows: Any = np.ndarray((n, size + _CHECKSUM_AT), np.uint8, metas, 0, (step, 1))
    wanted = np.empty((n, size + _CHECKSUM_AT), np.uint8)
    wanted[:, :size] = np.frombuffer(want.tokens, np.uint8, n * size).reshape(n, size)
    fields = wanted[:, size:]
    hashes = np.frombuffer(want.parent + want.hashes, np.uint8).reshape(n + 1, HASH_BYTES)
    lead = struct.pack("<4sHH16s", MAGIC, VERSION, 0, at.shape.nsid)
    fields[:, :24] = np.frombuffer(lead, np.uint8)
    fields[:, 24:40] = hashes[1:]
    fields[:, 40:56] = hashes[:-1]
    numbers = np.empty((n, 2), "<u4")
    numbers[:, 0] = np.arange(want.block, want.block + n, dtype=np.uint32)
    numbers[:, 1] = at.shape.payload
    fields[:, 56:64] = numbers.view(np.uint8)
    if want.keyed:
        fields[:, 40:60] = rows[:, size + 40 : size + 60]
    ok = (rows == wanted).all(axis=1)
    lineages: Any = np.ndarray((n, HASH_BYTES), np.uint8, metas, size + _LINEAGE_AT, (step, 1))
    ok &= (lineages == np.frombuffer(want.lineages, np.uint8).reshape(n, HASH_BYTES)).all(axis=1)
    if ok.all():
        return n, None
    bad = int(ok.argmin())
    tokens_same = bool((rows[bad, :size] == wanted[bad, :size]).all())
    return bad, _why(at.shape, at.meta(first + bad), tokens_same)


def _why(shape: Shape, meta: memoryview, tokens_same: bool) -> str:
    """Names what is wrong with a record that is not the one asked for."""
    trailer = parse(meta)
    if isinstance(trailer, str):
        return trailer
    if trailer.nsid != shape.nsid:
        return "foreign namespace"
    if trailer.payload != shape.payload:
        return "payload length"
    return "identity mismatch: another block" if tokens_same else "identity mismatch: tokens"
