"""Where the slots of a segment lie: pure arithmetic, apart from what reads and writes segments.

A plan and the index need no more of a segment than this, so that a check loads no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

PAGE = 4096


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where slots lie: pure arithmetic on stride, extent and the offset of slot 0 (bytes)."""

    stride: int
    extent: int
    first: int

    @classmethod
    def fit(cls, stride: int, extent: int, first: int = PAGE) -> Geometry:
        """The geometry for records of a stride; an extent too small for one record is multiplied.

        extent: the file system's chunk in bytes, at least 4096.
        """
        return cls(stride, -(-stride // extent) * extent, first)

    @property
    def in_first(self) -> int:
        """Slots that fit in extent 0, behind the header."""
        return (self.extent - self.first) // self.stride

    @property
    def in_extent(self) -> int:
        return self.extent // self.stride

    def offset(self, slot: int) -> int:
        """The byte offset of a slot."""
        if slot < self.in_first:
            return self.first + slot * self.stride
        extent, index = divmod(slot - self.in_first, self.in_extent)
        return (extent + 1) * self.extent + index * self.stride

    def room(self, count: int) -> int:
        """Bytes that a run of so many records takes: whole extents where each begins its own."""
        if self.first < self.extent:
            return count * self.stride
        return -(-count // self.in_extent) * self.extent

    def next_extent(self, slot: int) -> int:
        """The first slot of an extent, from this one on."""
        if slot <= self.in_first:
            return self.in_first if slot else 0
        return slot + (self.in_first - slot) % self.in_extent

    def pieces(self, slot: int, count: int, most: int = 0) -> Iterator[tuple[int, int]]:
        """Yields (offset, records) for each contiguous stretch of `count` slots from `slot` on.

        most: bytes a stretch may have, if it holds more than one record; 0: no limit.
        """
        limit = max(1, most // self.stride) if most else count
        while count:
            if slot < self.in_first:
                n = self.in_first - slot
            else:
                n = self.in_extent - (slot - self.in_first) % self.in_extent
            n = min(n, count, limit)
            yield self.offset(slot), n
            slot, count = slot + n, count - n

    def slots_within(self, size: int) -> int:
        """How many slots lie whole in the first `size` bytes of the file."""
        if size < self.extent:
            return max(0, size - self.first) // self.stride
        whole, rest = divmod(size - self.extent, self.extent)
        last = min(rest // self.stride, self.in_extent)
        return self.in_first + whole * self.in_extent + last
