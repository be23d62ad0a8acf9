"""The fetcher's book: which blocks are in the arena, who waits for them, what to read next.

Blocks are known by (segment, slot): what stands there never changes, so a block that was read for
one request serves all others (single flight), and stays until its room is needed. Here they are
only checked to be whole, once, when they are read; each client compares them with its own tokens.

A stretch that a worker is reading keeps its range whatever happens to the requests that wanted it:
late I/O can never write into memory that somebody else got.

Thread-safe: one lock; nothing under it blocks or hashes.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import OrderedDict
from dataclasses import dataclass

from kvfs.arena import Ranges
from kvfs.fetcher.tickets import (
    CANCELLED,
    DONE,
    EXPIRED,
    FAILED,
    SLOTS,
    ControlArea,
)
from kvfs.namespace import Namespace
from kvfs.plan import Plan
from kvfs.record import Landing

QUEUED, READING, READ = range(3)
MAX_UNFINISHED = 256
# One read and one range of the arena; small enough for the first blocks to arrive at once.
STRETCH_BYTES = 4 << 20


class Stretch:
    """Consecutive records of one segment, in one range of the arena."""

    __slots__ = (
        "checked", "count", "key", "lasting", "loaded", "ns", "offset", "path", "place", "priority",
        "reason", "refs", "slot", "state", "waiting",
    )  # fmt: skip

    def __init__(
        self, ns: Namespace, path: str, key: bytes, slot: int, place: int, checked: bool
    ) -> None:
        self.ns = ns
        self.path = path
        self.key = key  # segment id
        self.slot = slot
        self.place = place  # byte offset in the segment
        self.count = 0
        self.offset = -1  # in the arena
        self.loaded = 0  # leading records that are here and sound
        self.state = QUEUED
        self.priority = 0
        self.refs = 0
        self.checked = checked  # its checksums are verified when it is read
        self.reason: str | None = None
        self.lasting = False
        self.waiting: list[Ticket] = []

    def after(self, records: int, count: int) -> Stretch:
        """A stretch of `count` records that begins so many records behind this one's start."""
        place = self.place + records * self.ns.stride
        new = Stretch(self.ns, self.path, self.key, self.slot + records, place, self.checked)
        new.count = count
        return new

    @property
    def size(self) -> int:
        return self.count * self.ns.stride

    @property
    def ended(self) -> bool:
        return self.state == READ


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks of a request that lie in one stretch: `count` from record `index` on."""

    stretch: Stretch
    index: int
    count: int
    block: int


class Ticket:
    """One request: its parts in chain order and how far they are there."""

    __slots__ = (
        "client", "ended", "generation", "good", "lock", "next", "ns", "parts", "priority",
        "reason", "slot", "wanted",
    )  # fmt: skip

    def __init__(self, client: object, ns: Namespace, priority: int) -> None:
        self.client = client
        self.ns = ns
        self.priority = priority
        self.parts: list[Part] = []
        self.good = 0
        self.wanted = 0
        self.next = 0  # part that is not complete
        self.ended = False
        self.reason = ""  # why not more is wanted than fits
        self.slot = self.generation = -1
        self.lock = threading.Lock()


class Busy(Exception):
    """The request was not taken; the text says what is full."""


class Core:
    """See the module docstring."""

    def __init__(self, view: memoryview, ranges: Ranges, control: ControlArea) -> None:
        self.view = view
        self.ranges = ranges
        self.control = control
        self.counters: dict[str, int] = {}
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._blocks: dict[tuple[bytes, int], Stretch] = {}
        self._idle: OrderedDict[Stretch, None] = OrderedDict()  # unreferenced, least recent first
        self._queue: list[tuple[int, int, Stretch]] = []
        self._order = itertools.count()
        self._free_slots = list(range(SLOTS))
        self._generations = [0] * SLOTS
        self._unfinished = 0
        self._stopping = False

    def count(self, name: str, n: int = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + n

    # requests in

    def admit(self, ticket: Ticket, plan: Plan, wanted: int, *, checksums: bool) -> None:
        """Takes a request in: finds what is here, queues what is not. Raises Busy.

        If not all of it fits in the arena the ticket wants only what does.
        """
        with self._lock:
            if self._unfinished >= MAX_UNFINISHED or not self._free_slots:
                self.count("busy")
                raise Busy(f"{self._unfinished} requests are under way")
            try:
                self._find_parts(ticket, plan, wanted, checksums)
            except BaseException:
                self._drop_parts(ticket.parts)
                raise
            if wanted and not ticket.parts:
                self.count("busy")
                raise Busy("the arena is full of blocks in use")
            ticket.slot = self._free_slots.pop()
            self._generations[ticket.slot] += 1
            ticket.generation = self._generations[ticket.slot]
            self.control.begin(ticket.slot, ticket.generation, ticket.wanted)
            self._unfinished += 1
            self._work.notify_all()
        self._advance(ticket)

    def _find_parts(self, ticket: Ticket, plan: Plan, wanted: int, checksums: bool) -> None:
        for extent in plan.extents:
            slot, block = extent.slot, extent.block
            left = min(extent.count, wanted - block)
            for place, n in extent.geometry.pieces(slot, max(0, left), STRETCH_BYTES):
                new = Stretch(ticket.ns, extent.segment, extent.segment_id, slot, place, checksums)
                if not self._find(ticket, new, n, block):
                    ticket.reason = "arena full"
                    return
                slot, block = slot + n, block + n

    def _find(self, ticket: Ticket, like: Stretch, n: int, block: int) -> bool:
        """Parts for n consecutive records: shared where they are here already, else to be read.

        like: a stretch at the first of them, as a new one would be. Returns False if there is no
        more room; what was found before stays.
        """
        at = 0
        while at < n:
            stretch = self._known(like, at)
            if stretch is not None:
                index = like.slot + at - stretch.slot
                count = min(stretch.count - index, n - at)
                self.count("blocks_shared", count)
            else:
                index, count = 0, 1
                while at + count < n and self._known(like, at + count) is None:
                    count += 1
                stretch = like.after(at, count)
                stretch.priority = ticket.priority
                if not self._place(stretch):
                    return False
            self._refer(stretch, ticket)
            ticket.parts.append(Part(stretch, index, count, block + at))
            ticket.wanted += count
            at += count
        return True

    def _known(self, like: Stretch, at: int) -> Stretch | None:
        """The stretch that holds a record, unless it is unverified and this must not be."""
        stretch = self._blocks.get((like.key, like.slot + at))
        return None if stretch is None or (like.checked and not stretch.checked) else stretch

    def _place(self, stretch: Stretch) -> bool:
        """Gives a new stretch room, taking that of the least recently used idle ones."""
        offset = self.ranges.take(stretch.size)
        while offset is None and self._idle:
            victim, _ = self._idle.popitem(last=False)
            self._forget(victim)
            self.count("blocks_evicted", victim.count)
            offset = self.ranges.take(stretch.size)
        if offset is None:
            return False
        stretch.offset = offset
        for i in range(stretch.count):
            self._blocks[stretch.key, stretch.slot + i] = stretch
        heapq.heappush(self._queue, (stretch.priority, next(self._order), stretch))
        return True

    def _refer(self, stretch: Stretch, ticket: Ticket) -> None:
        stretch.refs += 1
        self._idle.pop(stretch, None)
        if not stretch.ended:
            stretch.waiting.append(ticket)
            if ticket.priority < stretch.priority and stretch.state == QUEUED:
                stretch.priority = ticket.priority
                heapq.heappush(self._queue, (stretch.priority, next(self._order), stretch))

    # work out

    def take(self) -> Stretch | None:
        """The next stretch to read; waits for one. None: the fetcher stops."""
        with self._lock:
            while True:
                while self._queue:
                    _, _, stretch = heapq.heappop(self._queue)
                    if stretch.state == QUEUED and stretch.refs:
                        stretch.state = READING
                        return stretch
                if self._stopping:
                    return None
                self._work.wait()

    def landing(self, stretch: Stretch) -> Landing:
        records = self.view[stretch.offset : stretch.offset + stretch.size]
        return Landing.whole(stretch.ns.shape, records)

    def finished(self, stretch: Stretch, reason: str | None, lasting: bool) -> None:
        """A worker is through with a stretch; `stretch.loaded` records of it are good."""
        with self._lock:
            stretch.state, stretch.reason, stretch.lasting = READ, reason, lasting
            waiting, stretch.waiting = stretch.waiting, []
            self.count("bytes_read", stretch.loaded * stretch.ns.stride)
            if reason is not None:
                # The next request for these blocks reads them again.
                self._unlist(stretch)
                self.count(f"miss.{reason.replace(' ', '_')}")
            if not stretch.refs:
                self._retire(stretch)
        for ticket in waiting:
            self._advance(ticket)

    def _advance(self, ticket: Ticket) -> None:
        """Moves a ticket on over the parts that are there."""
        with ticket.lock:
            while not ticket.ended and ticket.next < len(ticket.parts):
                part = ticket.parts[ticket.next]
                if not part.stretch.ended:
                    return
                have = max(0, min(part.count, part.stretch.loaded - part.index))
                ticket.good += have
                self.control.advance(ticket.slot, ticket.good)
                if have < part.count:
                    stretch = part.stretch
                    self._end(ticket, FAILED, stretch.reason or "gone", stretch.lasting)
                    return
                ticket.next += 1
            if not ticket.ended:
                state = FAILED if ticket.reason else DONE
                self._end(ticket, state, ticket.reason, False)

    # ends

    def _end(self, ticket: Ticket, state: int, reason: str, lasting: bool) -> None:
        """Ends a ticket, under its lock. What it has stays; what it has not is let go."""
        ticket.ended = True
        self.control.end(ticket.slot, state, reason, lasting)
        with self._lock:
            self._unfinished -= 1
            self.count("blocks_delivered", ticket.good)
            kept = [p for p in ticket.parts if p.block < ticket.parts[0].block + ticket.good]
            dropped = ticket.parts[len(kept) :]
            ticket.parts = kept
            self._drop_parts(dropped)

    def expire(self, ticket: Ticket) -> None:
        """The deadline came: the good prefix is delivered."""
        with ticket.lock:
            if not ticket.ended:
                self.count("expired")
                self._end(ticket, EXPIRED, "deadline", False)

    def release(self, ticket: Ticket) -> None:
        """The client needs the blocks no more, or is gone."""
        with ticket.lock:
            if not ticket.ended:
                self.count("cancelled")
                self._end(ticket, CANCELLED, "cancelled", False)
            with self._lock:
                parts, ticket.parts = ticket.parts, []
                self._drop_parts(parts)
                if ticket.slot >= 0:
                    self.control.free(ticket.slot, ticket.generation)
                    self._generations[ticket.slot] = ticket.generation + 1
                    self._free_slots.insert(0, ticket.slot)
                    ticket.slot = -1

    def _drop_parts(self, parts: list[Part]) -> None:
        for part in parts:
            stretch = part.stretch
            stretch.refs -= 1
            if not stretch.refs and stretch.state != READING:
                self._retire(stretch)

    def _retire(self, stretch: Stretch) -> None:
        """Nobody refers to a stretch: a whole one stays as cache, any other goes."""
        if stretch.ended and stretch.reason is None and stretch.checked:
            self._idle[stretch] = None
        else:
            self._forget(stretch)

    def _forget(self, stretch: Stretch) -> None:
        self._unlist(stretch)
        if stretch.offset >= 0:
            self.ranges.give(stretch.offset, stretch.size)
            stretch.offset = -1

    def _unlist(self, stretch: Stretch) -> None:
        for i in range(stretch.count):
            key = stretch.key, stretch.slot + i
            if self._blocks.get(key) is stretch:
                del self._blocks[key]

    def evict_idle(self) -> None:
        """Drops the blocks that no ticket uses."""
        with self._lock:
            while self._idle:
                victim, _ = self._idle.popitem(last=False)
                self._forget(victim)
                self.count("blocks_evicted", victim.count)

    def stop(self) -> None:
        with self._lock:
            self._stopping = True
            self._work.notify_all()

    def stats(self) -> dict[str, int]:
        """Counters, and how full the arena is."""
        with self._lock:
            return {
                **self.counters,
                "arena_bytes": self.ranges.total,
                "arena_free_bytes": self.ranges.free_bytes,
                "arena_idle_bytes": sum(s.size for s in self._idle),
                "blocks_here": len(self._blocks),
                "requests": self._unfinished,
                "tickets": SLOTS - len(self._free_slots),
            }
