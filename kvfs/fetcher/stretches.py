"""What a fetcher reads and keeps: stretches of consecutive records, and where to find them.

A record is known by its namespace, file and offset: what stands there never changes, so a stretch
that was read for one request serves all. Not thread-safe: the core's lock covers it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple

from kvfs.errors import InputError
from kvfs.namespace import Namespace
from kvfs.record import Landing

if TYPE_CHECKING:
    from kvfs.fetcher.core import Ticket

QUEUED, READING, READ, DROPPED, LOST = range(5)
"""States of a stretch. DROPPED: nobody wanted it any more before it was read; LOST: its read may
never end, and keeps its memory until it does."""
ENDED = frozenset({READ, LOST})
"""There will be no more of it than there is."""


class Stretch:
    """Consecutive records of one file, in one range of the arena."""

    __slots__ = (
        "checked", "count", "lasting", "loaded", "ns", "offset", "path", "place", "priority",
        "reason", "refs", "state", "stride", "waiting",
    )  # fmt: skip

    def __init__(self, ns: Namespace, path: str, place: int, count: int, checked: bool) -> None:
        self.ns = ns
        self.stride = ns.stride
        self.path = path
        self.place = place  # byte offset in the file
        self.count = count
        self.checked = checked  # its checksums are verified when it is read
        self.offset = -1  # in the arena
        self.loaded = 0  # leading records that are here and sound
        self.state = QUEUED
        self.priority = 0
        self.refs = 0  # parts of tickets
        self.reason: str | None = None  # why `loaded` is less than `count`
        self.lasting = False
        self.waiting: dict[Ticket, None] = {}

    def following(self, count: int) -> Stretch:
        """A stretch of the `count` records behind this one's."""
        return Stretch(self.ns, self.path, self.end, count, self.checked)

    @property
    def size(self) -> int:
        return self.count * self.stride

    @property
    def end(self) -> int:
        return self.place + self.size

    @property
    def whole(self) -> bool:
        """All of it is here and sound: it may be kept for requests to come."""
        return self.state == READ and self.reason is None and self.checked

    def memory(self, arena: memoryview) -> memoryview:
        return arena[self.offset : self.offset + self.size]

    def landing(self, arena: memoryview) -> Landing:
        return Landing.whole(self.ns.shape, self.memory(arena))


class Part(NamedTuple):
    """Blocks of a request that lie in one stretch: `count` from record `index` on."""

    stretch: Stretch
    index: int  # type: ignore[assignment]  # hides tuple.index
    count: int  # type: ignore[assignment]  # hides tuple.count
    block: int


class Shelf:
    """The stretches that new requests find. Those of one file never overlap."""

    def __init__(self) -> None:
        self._files: dict[tuple[bytes, str], tuple[list[int], dict[int, Stretch]]] = {}
        self.records = 0

    def find(self, ns: Namespace, path: str, place: int) -> tuple[Stretch | None, int]:
        """(the stretch that holds the record at a place or None, where the next one begins or -1).

        Raises InputError for a place between two records.
        """
        starts, stretches = self._files.get((ns.nsid, path), _NOTHING)
        i = bisect_right(starts, place)
        following = starts[i] if i < len(starts) else -1
        if i:
            stretch = stretches[starts[i - 1]]
            if place < stretch.end:
                if (place - stretch.place) % stretch.stride:
                    raise InputError(f"{path}: no record begins at {place}")
                return stretch, following
        return None, following

    def add(self, stretch: Stretch) -> None:
        """Raises InputError if another stretch has some of its records."""
        found, following = self.find(stretch.ns, stretch.path, stretch.place)
        if found is not None or 0 <= following < stretch.end:
            raise InputError(f"{stretch.path}: records near {stretch.place} asked for twice")
        starts, stretches = self._files.setdefault((stretch.ns.nsid, stretch.path), ([], {}))
        starts.insert(bisect_left(starts, stretch.place), stretch.place)
        stretches[stretch.place] = stretch
        self.records += stretch.count

    def remove(self, stretch: Stretch) -> None:
        """Takes a stretch off, if it is there."""
        key = stretch.ns.nsid, stretch.path
        starts, stretches = self._files.get(key, _NOTHING)
        if stretches.get(stretch.place) is not stretch:
            return
        del stretches[stretch.place]
        del starts[bisect_left(starts, stretch.place)]
        self.records -= stretch.count
        if not starts:
            del self._files[key]


_NOTHING: tuple[list[int], dict[int, Stretch]] = ([], {})
