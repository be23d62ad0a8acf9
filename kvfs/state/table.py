"""The table of a slot pool: entries, the list by use and the buckets, in mapped memory.

An entry, one for each slot, 192 bytes, little-endian:

  0       136   description (kvfs.state.slot)
  136     8     sequence: equal to the description's generation where the slot holds something;
                odd while it is written; else the slot is empty
  144     8     last use, milliseconds of the pool's clock
  152     8     when it expires, same clock
  160     4     neighbour used more recently, slot number or 2^32 - 1
  164     4     neighbour used less recently
  168     4     next slot in its bucket
  172     20    zeros

and at byte 1024 of the file, 8 bytes each: 0 while nobody is changing the table, else who is; last
generation given; slots that hold something; the slot used last; the one used longest ago; then the
counters. A bucket holds the number of its first slot plus one, found by the anchor's first 4 bytes.

Invariants while the first word is 0: every slot is in the list once, the empty ones at its end; a
slot that holds something is in its anchor's bucket, others are in none. Who repairs: `recover`,
which needs nothing but the entries.

Methods that change something are for the holder of the pool's lock; the others may be called at any
time: they may miss a slot, but never take one for another. Words are written whole.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Iterator

from kvfs.errors import FormatError
from kvfs.state.poolfile import ENTRY_BYTES, STATE_AT, Header
from kvfs.state.slot import META_BYTES, Anchor, SlotMeta, checksum

COUNTERS = ("stored", "kept", "evicted", "expired", "removed", "hits", "misses", "torn", "damaged",
            "recovered")  # fmt: skip
_NONE = 0xFFFFFFFF
# Words of 8 bytes at STATE_AT.
_CHANGING, _GENERATION, _USED, _FIRST, _LAST, _COUNTERS = range(STATE_AT // 8, STATE_AT // 8 + 6)
# Words of 8 and of 4 bytes within an entry, and where the anchor is.
_SEQUENCE, _LAST_USE, _EXPIRES = 17, 18, 19
_NEWER, _OLDER, _NEXT = 40, 41, 42
_ANCHOR = slice(48, 64)

Fill = Callable[[memoryview], object]
"""Writes a slot's data into the buffer it is given."""


class SlotTable:
    """The table in a mapped pool file."""

    def __init__(self, memory: mmap.mmap, header: Header) -> None:
        g = header.geometry
        self.header = header
        self.slots = g.slots
        self._bytes = memoryview(memory)
        self._u64 = self._bytes.cast("Q")
        self._u32 = self._bytes.cast("I")
        self._buckets_at = g.buckets_at // 4

    def close(self) -> None:
        """Lets go of the memory; views that callers still hold keep it."""
        for view in (self._u64, self._u32, self._bytes):
            with contextlib.suppress(BufferError):
                view.release()

    def _word(self, slot: int, word: int) -> int:
        return (self.header.geometry.entries_at + slot * ENTRY_BYTES) // 8 + word

    def _half(self, slot: int, word: int) -> int:
        return (self.header.geometry.entries_at + slot * ENTRY_BYTES) // 4 + word

    # looking

    def find(self, anchor: bytes) -> int | None:
        """The slot whose description has this anchor; its description may be another's by now."""
        slot = self._u32[self._bucket(anchor)] - 1
        for _ in range(self.slots):
            if not 0 <= slot < self.slots:
                return None
            at = 8 * self._word(slot, 0)
            if self._bytes[at + _ANCHOR.start : at + _ANCHOR.stop] == anchor:
                return slot
            slot = self._u32[self._half(slot, _NEXT)]
        return None

    def meta(self, slot: int) -> SlotMeta | None:
        """What a slot holds, None if nothing; never half of one and half of another."""
        sequence = self.sequence(slot)
        if sequence == 0 or sequence & 1:
            return None
        at = 8 * self._word(slot, 0)
        try:
            meta = SlotMeta.decode(bytes(self._bytes[at : at + META_BYTES]))
        except FormatError:
            return None
        return meta if meta.generation == sequence else None

    def held(self, anchor: Anchor) -> tuple[int, SlotMeta] | None:
        """The slot of an anchor and its description, expired or not."""
        slot = self.find(anchor.hash)
        meta = None if slot is None else self.meta(slot)
        return None if slot is None or meta is None or not meta.is_for(anchor) else (slot, meta)

    def sequence(self, slot: int) -> int:
        return self._u64[self._word(slot, _SEQUENCE)]

    def expires_ms(self, slot: int) -> int:
        return self._u64[self._word(slot, _EXPIRES)]

    def data(self, slot: int) -> memoryview:
        """The slot's data, in place."""
        g = self.header.geometry
        at = g.data_at + slot * g.stride
        return self._bytes[at : at + g.slot_bytes]

    @property
    def used(self) -> int:
        """Slots that hold something."""
        return self._u64[_USED]

    @property
    def oldest(self) -> int:
        """An empty slot if there is one, else the one used longest ago."""
        return self._u64[_LAST]

    def by_age(self) -> Iterator[int]:
        """Yields all slots, the one used longest ago first. Under the lock only."""
        slot = self._u64[_LAST]
        while slot != _NONE:
            newer = self._u32[self._half(slot, _NEWER)]
            yield slot
            slot = newer

    def counters(self) -> dict[str, int]:
        return {name: self._u64[_COUNTERS + i] for i, name in enumerate(COUNTERS)}

    def count(self, name: str) -> None:
        # Readers count without the lock: of two at once one may be lost.
        self._u64[_COUNTERS + COUNTERS.index(name)] += 1

    # filling and emptying

    def fill(
        self, slot: int, anchor: Anchor, fill: Fill, rotation: int, overshoot: int
    ) -> SlotMeta:
        """Writes an empty slot. Order: odd sequence, data, description, sequence."""
        generation = self._u64[_GENERATION] + 2
        self._u64[_GENERATION] = generation
        self._u64[self._word(slot, _SEQUENCE)] = generation - 1
        view, header = self.data(slot), self.header
        fill(view)
        meta = SlotMeta(
            generation, header.pool, header.nsid, anchor.hash, anchor.lineage, anchor.position,
            header.layout, rotation, overshoot, int(time.time() * 1000), checksum(view),
        )  # fmt: skip
        at = 8 * self._word(slot, 0)
        self._bytes[at : at + META_BYTES] = meta.encode()
        self._u64[self._word(slot, _SEQUENCE)] = generation
        bucket = self._bucket(anchor.hash)
        self._u32[self._half(slot, _NEXT)] = self._first_in(bucket)
        self._u32[bucket] = slot + 1
        self._u64[_USED] += 1
        return meta

    def empty(self, slot: int) -> SlotMeta | None:
        """Takes what a slot holds out of sight, and returns it; the slot is the next to be used."""
        meta = self.meta(slot)
        if meta is not None:
            self._leave_bucket(slot, meta.anchor)
            self._u64[_USED] -= 1
        self._u64[self._word(slot, _SEQUENCE)] = 0
        self._leave_list(slot)
        self._join(self._u64[_LAST], slot)
        self._join(slot, _NONE)
        return meta

    def renew(self, slot: int, now_ms: int, expires_ms: int) -> None:
        """Notes a use."""
        self._u64[self._word(slot, _LAST_USE)] = now_ms
        self._u64[self._word(slot, _EXPIRES)] = expires_ms
        self._leave_list(slot)
        self._join(slot, self._u64[_FIRST])
        self._join(_NONE, slot)

    # buckets and list

    def _bucket(self, anchor: bytes) -> int:
        number = int.from_bytes(anchor[:4], "little") % self.header.geometry.buckets
        return self._buckets_at + number

    def _first_in(self, bucket: int) -> int:
        first = self._u32[bucket]
        return first - 1 if first else _NONE

    def _leave_bucket(self, slot: int, anchor: bytes) -> None:
        after, bucket = self._u32[self._half(slot, _NEXT)], self._bucket(anchor)
        at = self._first_in(bucket)
        if at == slot:
            self._u32[bucket] = 0 if after == _NONE else after + 1
            return
        while at != _NONE:
            following = self._u32[self._half(at, _NEXT)]
            if following == slot:
                self._u32[self._half(at, _NEXT)] = after
                return
            at = following

    def _leave_list(self, slot: int) -> None:
        self._join(self._u32[self._half(slot, _NEWER)], self._u32[self._half(slot, _OLDER)])

    def _join(self, newer: int, older: int) -> None:
        """Makes two slots neighbours; _NONE is the list's end on its side."""
        if newer == _NONE:
            self._u64[_FIRST] = older
        else:
            self._u32[self._half(newer, _OLDER)] = older
        if older == _NONE:
            self._u64[_LAST] = newer
        else:
            self._u32[self._half(older, _NEWER)] = newer

    # changes, and what is left of one that was cut off

    def begin(self) -> None:
        """Begins a change, after having repaired what somebody left who was killed in one."""
        if self._u64[_CHANGING]:
            self.count("recovered")
            self.recover()
        elif not self._u64[_GENERATION]:
            self.recover()  # new: all zeros
        self._u64[_CHANGING] = os.getpid()

    def end(self) -> None:
        self._u64[_CHANGING] = 0

    def recover(self) -> None:
        """Makes list and buckets anew from the entries; a slot that was being written is empty."""
        self._u64[_CHANGING] = os.getpid()
        newest, held, empty = self._u64[_GENERATION], [], []
        for slot in range(self.slots):
            meta = self.meta(slot)
            if meta is None:
                self._u64[self._word(slot, _SEQUENCE)] = 0
                empty.append(slot)
            else:
                newest = max(newest, meta.generation)
                held.append((self._u64[self._word(slot, _LAST_USE)], slot, meta.anchor))
        self._u64[_GENERATION] = max(2, newest)
        self._u64[_USED] = len(held)
        at, buckets = self._buckets_at, self.header.geometry.buckets
        self._u32[at : at + buckets] = memoryview(bytes(4 * buckets)).cast("I")
        held.sort(reverse=True)
        for _, slot, anchor in held:
            bucket = self._bucket(anchor)
            self._u32[self._half(slot, _NEXT)] = self._first_in(bucket)
            self._u32[bucket] = slot + 1
        before = _NONE
        for slot in [slot for _, slot, _ in held] + empty:
            self._join(before, slot)
            before = slot
        self._join(before, _NONE)
