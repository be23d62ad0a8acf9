"""The fetcher's book: which blocks are in the arena, who waits for them, what to read next.

A block that is here or on its way serves every request for it (single flight), and stays until its
room is needed. Here blocks are only checked to be whole, once, when they are read; each client
compares them with its own tokens.

A stretch that a worker is reading keeps its range whatever happens to the requests that wanted it:
late I/O can never write into memory that somebody else got.

Thread-safe. Locks, outer one first: a ticket's own, then the core's. Nothing under them blocks or
hashes.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvfs.arena import Ranges
from kvfs.errors import BackendError, BusyError
from kvfs.fetcher.control import CANCELLED, DONE, EXPIRED, FAILED, SLOTS, ControlArea
from kvfs.fetcher.stretches import (
    DROPPED,
    ENDED,
    LOST,
    QUEUED,
    READ,
    READING,
    Part,
    Shelf,
    Stretch,
)
from kvfs.fetcher.wire import MAX_RANGES, Piece
from kvfs.namespace import Namespace

MAX_UNFINISHED = 256
# One read and one range of the arena; the first of a request is smaller, to be there at once.
STRETCH_BYTES = 8 << 20
FIRST_BYTES = 4 << 20
_BEING_READ = frozenset({READING, LOST})


class Ticket:
    """One request: its parts in chain order and how far they are there."""

    __slots__ = (
        "ended", "generation", "good", "lock", "next", "ns", "parts", "priority", "short", "slot",
        "wanted",
    )  # fmt: skip

    def __init__(self, ns: Namespace, priority: int = 0) -> None:
        self.ns = ns
        self.priority = priority
        self.parts: list[Part] = []
        self.good = 0
        self.wanted = 0
        self.next = 0  # part that is not complete
        self.ended = False
        self.short = ""  # why fewer blocks are wanted than were asked for
        self.slot = self.generation = -1
        self.lock = threading.Lock()


class Core:
    """See the module docstring."""

    def __init__(self, arena: memoryview, ranges: Ranges, control: ControlArea) -> None:
        """ranges: the part of the arena that blocks may lie in."""
        self.arena = arena
        self.ranges = ranges
        self.control = control
        self._counters: dict[str, int] = {}
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._shelf = Shelf()
        self._idle: OrderedDict[Stretch, None] = OrderedDict()  # unreferenced, least recent first
        self._queue: list[tuple[int, int, Stretch]] = []
        self._order = itertools.count()
        self._free_slots = list(range(SLOTS))
        self._generations = [1] * SLOTS
        self._unfinished = 0
        self.stopping = False

    def count(self, name: str, n: int = 1) -> None:
        with self._lock:
            self._count(name, n)

    def _count(self, name: str, n: int = 1) -> None:
        self._counters[name] = self._counters.get(name, 0) + n

    # requests in

    def admit(
        self, ticket: Ticket, pieces: Sequence[Piece], *, checksums: bool = True, down: str = ""
    ) -> None:
        """Takes a request in: finds what is here, queues what is not, for `work_on`.

        If not all of it fits in the arena the ticket wants only what does. down: nothing is read,
        for this reason; what is here is served. Raises BusyError, BackendError (down, and nothing
        is here) and InputError; then nothing has changed.
        """
        with self._lock:
            if self._unfinished >= MAX_UNFINISHED or not self._free_slots:
                self._count("busy")
                raise BusyError(f"{self._unfinished} requests are under way")
            self._take_in(ticket, pieces, checksums, down)
            ticket.slot = self._free_slots.pop()
            ticket.generation = self._generations[ticket.slot]
            self.control.begin(ticket.slot, ticket.generation, ticket.wanted)
            self._unfinished += 1
            self._work.notify()
        self._advance(ticket)

    def _take_in(self, ticket: Ticket, pieces: Sequence[Piece], checksums: bool, down: str) -> None:
        """Finds or makes the parts of a request: `admit` without the ticket's slot."""
        found: list[Part] = []
        try:
            self._find_parts(ticket, pieces, checksums, found)
            found.reverse()
            self._place_parts(ticket, found, down)
            if pieces and not ticket.parts:
                self._refuse(down)
        except BaseException:
            ticket.ended = True
            self._drop_parts(ticket, ticket.parts)
            ticket.parts = []
            raise
        finally:  # what is here but behind a gap for which there is no room
            self._drop_parts(ticket, [p for p in found if p.stretch.offset >= 0])

    def _refuse(self, down: str) -> None:
        if down:
            self._count("refused_down")
            raise BackendError(down)
        self._count("busy")
        raise BusyError("the arena is full of blocks in use")

    def _find_parts(
        self, ticket: Ticket, pieces: Sequence[Piece], checksums: bool, found: list[Part]
    ) -> None:
        """Appends the parts of a request to `found`, up to what the arena could ever hold.

        Those that are here or on their way are referred to at once, so that making room for the
        others does not evict them.
        """
        block = room = 0
        for piece in pieces:
            for part in self._parts(ticket.ns, piece, block, checksums):
                if room > self.ranges.total or len(found) >= MAX_RANGES:
                    ticket.short = "arena full"
                    return
                found.append(part)
                if part.stretch.offset >= 0:
                    self._refer(part.stretch, ticket)
                else:
                    room += part.stretch.size
            block += piece.count

    def _parts(self, ns: Namespace, piece: Piece, block: int, checksums: bool) -> Iterator[Part]:
        stride, most = ns.stride, max(1, STRETCH_BYTES // ns.stride)
        first = min(most, max(1, FIRST_BYTES // ns.stride))
        place, end = piece.offset, piece.offset + piece.count * ns.stride
        while place < end:
            stretch, following = self._shelf.find(ns, piece.path, place)
            if stretch is not None and checksums and not stretch.checked:
                self._shelf.remove(stretch)  # those who have it keep it; it is not for this one
                continue
            if stretch is None:
                until = min(end, following) if following >= 0 else end
                count = min(most if block else first, -(-(until - place) // stride))
                stretch = Stretch(ns, piece.path, place, count, checksums)
            index = (place - stretch.place) // stride
            count = min(stretch.count - index, (end - place) // stride)
            yield Part(stretch, index, count, block)
            place, block = place + count * stride, block + count

    def _place_parts(self, ticket: Ticket, found: list[Part], down: str) -> None:
        """Moves parts from the end of `found` to the ticket, giving room to those that have none,
        as far as it goes."""
        while found:
            part = found[-1]
            stretch = part.stretch
            if stretch.offset < 0:
                if down or not self._place(stretch, ticket.priority):
                    ticket.short = down or "arena full"
                    return
                self._refer(stretch, ticket)
            else:
                self._count("blocks_shared", part.count)
            found.pop()
            if stretch.count < part.count:  # there was room for some of it
                rest = stretch.following(part.count - stretch.count)
                found.append(Part(rest, 0, rest.count, part.block + stretch.count))
                part = part._replace(count=stretch.count)
            ticket.parts.append(part)
            ticket.wanted += part.count

    def _place(self, stretch: Stretch, priority: int) -> bool:
        """Gives a new stretch room and queues it; a shorter one if there is no room for all."""
        offset = self._room(stretch)
        if offset is None:
            return False
        try:
            self._shelf.add(stretch)
        except BaseException:
            self.ranges.give(offset)
            raise
        stretch.offset, stretch.priority = offset, priority
        heapq.heappush(self._queue, (priority, next(self._order), stretch))
        return True

    def _room(self, stretch: Stretch) -> int | None:
        offset = self.ranges.take(stretch.size)
        while offset is None and self._idle:
            self._evict()
            offset = self.ranges.take(stretch.size)
        while offset is None and stretch.count > 1:
            stretch.count //= 2
            offset = self.ranges.take(stretch.size)
        return offset

    def _evict(self) -> None:
        victim, _ = self._idle.popitem(last=False)
        self._forget(victim)
        self._count("blocks_evicted", victim.count)

    def _refer(self, stretch: Stretch, ticket: Ticket) -> None:
        stretch.refs += 1
        self._idle.pop(stretch, None)
        if stretch.state not in ENDED:
            stretch.waiting[ticket] = None
            if ticket.priority < stretch.priority and stretch.state == QUEUED:
                stretch.priority = ticket.priority
                heapq.heappush(self._queue, (stretch.priority, next(self._order), stretch))

    # work out

    def work_on(self) -> None:
        """Wakes all readers. Apart from `admit`, which wakes one, so that the answer goes out
        before they are all at work: a thread that copies from the page cache does not give its
        processor back for milliseconds."""
        with self._lock:
            self._work.notify_all()

    def take(self, timeout: float | None = None) -> Stretch | None:
        """The next stretch to read; waits for one. None: there was none in `timeout` seconds, or
        the fetcher stops."""
        with self._lock:
            while not self.stopping:
                while self._queue:
                    stretch = heapq.heappop(self._queue)[2]
                    if stretch.state == QUEUED:
                        stretch.state = READING
                        return stretch
                if not self._work.wait(timeout):
                    break
            return None

    def give_up(self, stretch: Stretch) -> bool:
        """Asked by the worker that reads a stretch: does nobody want it any more?

        If so no new request finds it either, so that none ends because others were cancelled.
        """
        with self._lock:
            if not stretch.refs:
                self._shelf.remove(stretch)
            return not stretch.refs

    def finished(self, stretch: Stretch, loaded: int, reason: str | None, lasting: bool) -> None:
        """A worker is through with a stretch; `loaded` records of it are good."""
        with self._lock:
            if stretch.state == LOST:  # it ended after all, for nobody
                reason, lasting = stretch.reason, False
                loaded = 0
            else:
                self._count("bytes_read", loaded * stretch.stride)
                if reason is not None:
                    self._count(f"miss.{reason.replace(' ', '_')}")
            waiting = self._settle(stretch, READ, loaded, reason, lasting)
            if not stretch.refs:
                self._retire(stretch)
        for ticket in waiting:
            self._advance(ticket)

    def lose(self, stretch: Stretch) -> None:
        """The read of a stretch may never end: nobody waits for it any more, and a new request for
        its blocks reads them again, into other memory. `finished` may still come."""
        with self._lock:
            if stretch.state != READING:
                return
            self._count("reads_lost")
            waiting = self._settle(stretch, LOST, 0, "no answer", False)
        for ticket in waiting:
            self._advance(ticket)

    def _settle(
        self, stretch: Stretch, state: int, loaded: int, reason: str | None, lasting: bool
    ) -> dict[Ticket, None]:
        """Sets what became of a stretch; returns the tickets that wait for it."""
        # The state last: `_advance` looks without the lock.
        stretch.loaded, stretch.reason, stretch.lasting = loaded, reason, lasting
        stretch.state = state
        if reason is not None:
            self._shelf.remove(stretch)  # the next request for these blocks reads them again
        waiting, stretch.waiting = stretch.waiting, {}
        return waiting

    def _advance(self, ticket: Ticket) -> None:
        """Moves a ticket on over the parts that are there."""
        with ticket.lock:
            while not ticket.ended and ticket.next < len(ticket.parts):
                stretch, index, count, _ = ticket.parts[ticket.next]
                if stretch.state not in ENDED:
                    return
                have = max(0, min(count, stretch.loaded - index))
                ticket.good += have
                self.control.advance(ticket.slot, ticket.good)
                if have < count:
                    self._end(ticket, FAILED, stretch.reason or "gone", stretch.lasting)
                ticket.next += 1
            if not ticket.ended:
                self._end(ticket, FAILED if ticket.short else DONE, ticket.short)

    # ends

    def _end(self, ticket: Ticket, state: int, reason: str = "", lasting: bool = False) -> None:
        """Ends a ticket, under its lock. What it has stays; what it has not is let go."""
        ticket.ended = True
        with self._lock:
            self.control.end(ticket.slot, state, reason, lasting)
            self._unfinished -= 1
            self._count("blocks_delivered", ticket.good)
            parts = ticket.parts
            ticket.parts = [p for p in parts if p.block < ticket.good]
            self._drop_parts(ticket, parts[len(ticket.parts) :])

    def expire(self, ticket: Ticket) -> None:
        """The deadline came: the good prefix is delivered."""
        with ticket.lock:
            if not ticket.ended:
                self._end(ticket, EXPIRED, "deadline")
                self.count("expired")

    def release(self, ticket: Ticket) -> None:
        """The client needs the blocks no more, or is gone. May be called twice."""
        with ticket.lock:
            if not ticket.ended:
                self._end(ticket, CANCELLED, "cancelled")
                self.count("cancelled")
            with self._lock:
                if ticket.slot >= 0:
                    # Before its blocks go: a client that still looks at them can tell.
                    following = self.control.free(ticket.slot, ticket.generation)
                    self._generations[ticket.slot] = following
                    self._free_slots.append(ticket.slot)
                    ticket.slot = -1
                parts, ticket.parts = ticket.parts, []
                self._drop_parts(ticket, parts)

    def _drop_parts(self, ticket: Ticket, parts: Sequence[Part]) -> None:
        for part in parts:
            stretch = part.stretch
            stretch.refs -= 1
            stretch.waiting.pop(ticket, None)
            if not stretch.refs and stretch.state not in _BEING_READ:
                self._retire(stretch)

    def _retire(self, stretch: Stretch) -> None:
        """Nobody refers to a stretch: a whole one stays as cache, any other goes."""
        if stretch.whole:
            self._idle[stretch] = None
        else:
            if stretch.state == QUEUED:
                stretch.state = DROPPED
            self._forget(stretch)

    def _forget(self, stretch: Stretch) -> None:
        self._shelf.remove(stretch)
        self.ranges.give(stretch.offset)

    def evict_idle(self) -> None:
        """Drops the blocks that no ticket uses."""
        with self._lock:
            while self._idle:
                self._evict()

    def stop(self) -> None:
        """Ends the workers' waiting; what is queued is not read."""
        with self._lock:
            self.stopping = True
            self._work.notify_all()

    def stats(self) -> dict[str, int]:
        """Counters, and how full the arena is."""
        with self._lock:
            return {
                **self._counters,
                "arena_bytes": self.ranges.total,
                "arena_free_bytes": self.ranges.free_bytes,
                "arena_idle_bytes": sum(s.size for s in self._idle),
                "blocks_here": self._shelf.records,
                "requests": self._unfinished,
                "tickets": SLOTS - len(self._free_slots),
            }
