"""What stands in the LMDB index: tables, keys and values. The authoritative description.

The index is a cache derived from the journals: it may be thrown away at any time. All tables live
in LMDB's main database, told apart by the first byte of the key: named databases would have to be
opened in a write transaction, and a reader must not wait for a writer. Numbers in keys are
big-endian so that they sort; in values little-endian. `ns` is a u32 the index gives to each
namespace: the first four bytes of its id with the top bit set, or, if another one has that, a count
from 1; `seg` a u32 it gives to each segment. Neither leaves this index.

  table     byte  key behind it           value
  meta      m     name                    "format", "store": bytes; others are counters: u64
  ns        n     namespace id 16         ns u32, identity as JSON
  classes   t     class name              id u16, seconds u64, when defined u64 (ms)
  segids    i     segment id 16           seg u32
  segments  s     seg                     SEGMENT below, path
  runs      r     ns, hash of 1st block   RUN below, then the 16-byte hash of every block of the run
  children  c     ns, parent hash, hash   empty; `hash` is the first block of a run that follows
                                          the block with hash `parent`
  placed    p     seg, slot of a run      ns, hash of its first block
  waiting   w     ns, parent hash, seg,   RUN and hashes, as in `runs`: a run whose parent block is
                  slot                    not in `runs` yet, then a byte 1 if it is a moved one; the
                                          counter "orphans" says how many
  cuts      x     segment id 16, slot     count u32: records taken out of sight, also before they
                                          came in
  moved     v     segment id 16, slot     MOVE below: blocks that were copied from here
  aliases   a     ns, hash                ALIAS below: where the first block of a run that was moved
                                          into the middle of another one is now
  keys      k     ns, hash of a block     KEY below: which run holds the block; only of namespaces
                                          that are keyed by their engine, for which the counter
                                          "keyed:" and the ns is 1
  told      o     ns, ms u64, kind u8,    TOLD_VALUE below, hashes: what was told of blocks by hash,
                  two hashes              for those that come in later (kvfs.index.told)
  journals  j     writer id 12, number    offset u64 applied up to, ended u8, writer's name
  slots     l     ns, anchor 16, pool 16  SLOT below: who is said to hold sliding-window state
  pools     h     pool id 16              POOL below, then host, a zero byte, address
  serving   d     ns, address             pool id 16, ms (big-endian): heard of last at an address
  purge     e     ms u64, ns, anchor 16,  empty: when the row in `slots` may go
                  pool 16

Invariants, kept within each transaction: a row in `runs` has exactly one in `placed`, found by its
seg and slot, and one in `children`, found by its parent; the counter "blocks" is the sum of the
counts of all runs; a hash stands in one row of `runs` at most, so that every stored prefix is found
by going from the end of one run to the first block of the next. Where an engine keys the blocks,
each block of a run has its row in `keys` as well. Those of the last four tables are in
kvfs.index.slots. Who repairs: `kvctl rebuild`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from kvfs.chain import HASH_BYTES
from kvfs.geometry import Geometry

FORMAT = b"1"
META, NS, CLASSES, SEGIDS, SEGMENTS = b"m", b"n", b"t", b"i", b"s"
RUNS, CHILDREN, PLACED, WAITING, CUTS, JOURNALS = b"r", b"c", b"p", b"w", b"x", b"j"
SLOTS, POOLS, SERVING, PURGE = b"l", b"h", b"d", b"e"
MOVED, ALIASES, KEYS = b"v", b"a", b"k"
TOLD = b"o"

U16 = struct.Struct("<H")
U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")
PREFIX = struct.Struct(">I")
PLACE = struct.Struct(">II")
CLASS = struct.Struct("<HQQ")
JOURNAL = struct.Struct("<QB")
RUN = struct.Struct("<IIIIQQH6x16s")
"""seg, slot, blocks, block number of the first, written ms, expires ms, class id, parent hash."""
SEGMENT = struct.Struct("<16sIHBxIQQQQQ")
"""segment id, ns, class id, state, stride, extent, first, created ms, ttl s, dropped ms."""

MOVE = struct.Struct("<II16sI16sQ")
"""ns, blocks, segment id and slot of the first block's new place, its hash, ms when it moved."""
ALIAS = struct.Struct("<16sI")
"""Segment id and slot of the new place."""

KEY = struct.Struct("<16sI")
"""Hash of the first block of the run, and the block's place in it."""
TOLD_KEY = struct.Struct(">IQB")
"""ns, ms of the entry, kind: 0 removed, 1 kept."""
TOLD_VALUE = struct.Struct("<QH")
"""expires ms and class id of what is kept (0: its own), zeros of what is removed."""

SLOT = struct.Struct("<QQQQ")
"""position, generation, expires ms (0: known to be gone up to this generation), purge ms."""
POOL = struct.Struct("<IIQ")
"""ns, slots that are not known to be gone, generation up to which all are gone."""

REMOVALS = "removals:"
"""In `meta`, in front of the number of a namespace: how many removals of it were heard of."""
UNLISTED = "removed:"
"""In `meta`, in front of the number of a namespace that was removed: kvfs.index.told."""
KEYED = "keyed:"
"""In `meta`, in front of the number of a namespace that is keyed by its engine."""

LIVE, DROPPED, GONE = 0, 1, 2
"""States of a segment: in use; out of sight, its file waits for the grace to end; file removed."""

NEVER_MS = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Run:
    """A row of `runs`, decoded. `ns` and `head` are its key."""

    ns: int
    head: bytes
    seg: int
    slot: int
    count: int
    block: int
    written_ms: int
    expires_ms: int
    class_id: int
    parent: bytes
    hashes: bytes

    @classmethod
    def decode(cls, key: bytes | memoryview, value: bytes | memoryview) -> Run:
        (ns,) = PREFIX.unpack_from(key, 1)
        hashes = bytes(value[RUN.size :])
        fields: tuple[Any, ...] = (ns, bytes(key[5:]), *RUN.unpack_from(value), hashes)
        return cls(*fields)

    def key(self) -> bytes:
        return run_key(self.ns, self.head)

    def value(self) -> bytes:
        fixed = RUN.pack(
            self.seg, self.slot, self.count, self.block, self.written_ms, self.expires_ms,
            self.class_id, self.parent,
        )  # fmt: skip
        return fixed + self.hashes

    def hash(self, i: int) -> bytes:
        """Chain hash of the i-th block of the run."""
        return self.hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]


@dataclass(frozen=True, slots=True)
class Segment:
    """A row of `segments`, decoded. `number` is its key."""

    number: int
    segment: bytes
    ns: int
    class_id: int
    state: int
    geometry: Geometry
    created_ms: int
    ttl_seconds: int
    dropped_ms: int
    path: str

    @classmethod
    def decode(cls, number: int, value: bytes | memoryview) -> Segment:
        (segment, ns, class_id, state, stride, extent, first, created, ttl,
         dropped) = SEGMENT.unpack_from(value)  # fmt: skip
        path = bytes(value[SEGMENT.size :]).decode()
        geometry = Geometry(stride, extent, first)
        return cls(number, segment, ns, class_id, state, geometry, created, ttl, dropped, path)

    def value(self) -> bytes:
        g = self.geometry
        fixed = SEGMENT.pack(
            self.segment, self.ns, self.class_id, self.state, g.stride, g.extent, g.first,
            self.created_ms, self.ttl_seconds, self.dropped_ms,
        )  # fmt: skip
        return fixed + self.path.encode()


def part(run: Run, first: int, end: int) -> Run:
    """The blocks first..end-1 of a run as a run of their own."""
    return replace(
        run,
        head=run.hash(first),
        slot=run.slot + first,
        count=end - first,
        block=run.block + first,
        parent=run.hash(first - 1) if first else run.parent,
        hashes=run.hashes[first * HASH_BYTES : end * HASH_BYTES],
    )


def run_key(ns: int, head: bytes) -> bytes:
    """Key of a run in `runs`, by the hash of its first block; with b"" what all of a `ns` share."""
    return RUNS + PREFIX.pack(ns) + head


def child_key(ns: int, parent: bytes, head: bytes = b"") -> bytes:
    """Key in `children`; without a head what all children of a parent share."""
    return CHILDREN + PREFIX.pack(ns) + parent + head


def place_key(seg: int, slot: int | None = None) -> bytes:
    """Key in `placed`; without a slot what all runs of a segment share."""
    return PLACED + (PREFIX.pack(seg) if slot is None else PLACE.pack(seg, slot))


def waiting_key(ns: int, parent: bytes, seg: int | None = None, slot: int = 0) -> bytes:
    """Key in `waiting`; without a segment what all runs that wait for a parent share."""
    return WAITING + PREFIX.pack(ns) + parent + (b"" if seg is None else PLACE.pack(seg, slot))


def moved_key(segment: bytes, slot: int) -> bytes:
    """Key in `moved`."""
    return MOVED + segment + slot.to_bytes(4, "big")


def alias_key(ns: int, head: bytes) -> bytes:
    """Key in `aliases`."""
    return ALIASES + PREFIX.pack(ns) + head


def key_key(ns: int, hash_: bytes) -> bytes:
    """Key in `keys`; with b"" what all of a `ns` share."""
    return KEYS + PREFIX.pack(ns) + hash_


def waiting_hashes(value: bytes | memoryview) -> tuple[bytes, bool]:
    """The hashes of a row of `waiting`, and whether it is a moved run."""
    hashes = bytes(value[RUN.size :])
    moved = len(hashes) % HASH_BYTES == 1
    return (hashes[:-1] if moved else hashes), moved


def scan(txn: Any, prefix: bytes, start: bytes = b"") -> Iterator[tuple[Any, Any]]:
    """Yields (key, value) buffers of all keys with a prefix, from `start` on, in order.

    The buffers are valid until the next write of the transaction.
    """
    with txn.cursor() as cursor:
        if cursor.set_range(start or prefix):
            for key, value in cursor.iternext():
                if key[: len(prefix)] != prefix:
                    return
                yield key, value


def scan_copies(txn: Any, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    """As `scan`, with copies."""
    for key, value in scan(txn, prefix):
        yield bytes(key), bytes(value)


def common(a: bytes, b: bytes) -> int:
    """The number of leading 16-byte hashes that two strings of hashes share."""
    n = min(len(a), len(b)) // HASH_BYTES
    if a[: n * HASH_BYTES] == b[: n * HASH_BYTES]:
        return n
    for i in range(n):
        at = i * HASH_BYTES
        if a[at : at + HASH_BYTES] != b[at : at + HASH_BYTES]:
            return i
    return n
