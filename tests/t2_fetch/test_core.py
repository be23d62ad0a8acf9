"""The fetcher's book without threads, sockets or storage: the test is the worker.

Records are pages whose first bytes say where they come from, so that a block of anything else in a
ticket is seen.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvfs.arena import Ranges
from kvfs.errors import BackendError, BusyError, InputError
from kvfs.fetcher import core as core_module
from kvfs.fetcher.control import (
    CONTROL_BYTES,
    DONE,
    EXPIRED,
    FAILED,
    FREE,
    RUNNING,
    SLOTS,
    ControlArea,
)
from kvfs.fetcher.core import Core, Ticket
from kvfs.fetcher.stretches import LOST, QUEUED, READ, READING, Stretch
from kvfs.fetcher.wire import Piece
from kvfs.namespace import Namespace
from kvfs.testing.blocks import small_identity

PAGE = 4096
NS = Namespace(small_identity(), 1, "")
OTHER = Namespace(small_identity(salt="other"), 2, "")
assert NS.stride == PAGE
_MARK = struct.Struct("<16s8sQ")


@pytest.fixture(autouse=True)
def four_records_a_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "STRETCH_BYTES", 4 * PAGE)


def mark(ns: Namespace, path: str, place: int) -> bytes:
    return _MARK.pack(ns.nsid, path.encode(), place)


class Rig:
    """A core with an arena of so many records, and what a worker does."""

    def __init__(self, records: int) -> None:
        self.memory = memoryview(bytearray(CONTROL_BYTES + records * PAGE))
        self.ranges = Ranges(CONTROL_BYTES, len(self.memory))
        self.control = ControlArea(self.memory)
        self.core = Core(self.memory, self.ranges, self.control)
        self.records = records

    def ask(
        self, pieces: Iterable[tuple[str, int, int]], *, ns: Namespace = NS, priority: int = 0,
        checksums: bool = True, down: str = "",
    ) -> Ticket:  # fmt: skip
        """pieces: (path, first record, records)."""
        ticket = Ticket(ns, priority)
        wanted = [Piece(path, PAGE * (1 + first), n) for path, first, n in pieces]
        self.core.admit(ticket, wanted, checksums=checksums, down=down)
        return ticket

    def take(self) -> Stretch | None:
        """The next stretch to read, or None if none is queued."""
        queued = any(stretch.state == QUEUED for *_, stretch in self.core._queue)
        return self.core.take() if queued else None

    def read(
        self, stretch: Stretch, n: int | None = None, reason: str | None = None, last: bool = False
    ) -> None:
        """Writes the first n records and hands the stretch back."""
        n = stretch.count if n is None else n
        for i in range(n):
            at, place = stretch.offset + i * PAGE, stretch.place + i * PAGE
            self.memory[at : at + _MARK.size] = mark(stretch.ns, stretch.path, place)
        self.core.finished(stretch, n, reason, last)

    def read_all(self) -> list[tuple[str, int, int]]:
        done = []
        while (stretch := self.take()) is not None:
            self.read(stretch)
            done.append((stretch.path, stretch.place // PAGE - 1, stretch.count))
        return done

    def state(self, ticket: Ticket) -> tuple[int, int]:
        """(state, good) as a client reads them."""
        return self.control.state(ticket.slot), self.control.good(ticket.slot)

    def check(self, ticket: Ticket, pieces: Iterable[tuple[str, int, int]]) -> None:
        """The good blocks of a ticket are the records that were asked for."""
        places = [(path, first + i) for path, first, n in pieces for i in range(n)]
        seen = 0
        for stretch, index, count, block in ticket.parts:
            for i in range(min(count, max(0, ticket.good - block))):
                at = stretch.offset + (index + i) * PAGE
                path, record = places[block + i]
                want = mark(ticket.ns, path, PAGE * (1 + record))
                assert bytes(self.memory[at : at + _MARK.size]) == want
                seen += 1
        assert seen == ticket.good

    def is_empty(self) -> bool:
        stats = self.core.stats()
        return (
            self.ranges.free_bytes == self.ranges.total
            and not stats["blocks_here"]
            and not stats["requests"]
            and not stats["tickets"]
        )


def test_blocks_arrive_in_chain_order_whatever_order_they_are_read_in() -> None:
    rig = Rig(64)
    ticket = rig.ask([("a", 0, 10), ("b", 3, 2)])
    first, second, third, fourth = (rig.take() for _ in range(4))
    assert rig.take() is None
    assert rig.state(ticket) == (RUNNING, 0)
    rig.read(third)
    rig.read(second)
    assert rig.state(ticket) == (RUNNING, 0)
    rig.read(first)
    assert rig.state(ticket) == (RUNNING, 10)
    rig.read(fourth)
    assert rig.state(ticket) == (DONE, 12)
    rig.check(ticket, [("a", 0, 10), ("b", 3, 2)])
    rig.core.release(ticket)
    rig.core.evict_idle()
    assert rig.is_empty()


def test_what_is_here_or_on_its_way_is_not_read_again() -> None:
    rig = Rig(64)
    first = rig.ask([("a", 0, 10)])
    stretch = rig.take()
    second = rig.ask([("a", 2, 12)])
    rig.read(stretch)
    assert rig.read_all() == [("a", 4, 4), ("a", 8, 2), ("a", 10, 4)]
    assert rig.state(first) == (DONE, 10) and rig.state(second) == (DONE, 12)
    rig.check(second, [("a", 2, 12)])
    again = rig.ask([("a", 1, 13)])
    assert rig.state(again) == (DONE, 13)
    assert rig.core.stats()["bytes_read"] == 14 * PAGE


def test_the_same_place_in_another_namespace_is_another_block() -> None:
    rig = Rig(64)
    rig.ask([("a", 0, 4)])
    rig.read_all()
    other = rig.ask([("a", 0, 4)], ns=OTHER)
    assert rig.state(other) == (RUNNING, 0)
    rig.read_all()
    rig.check(other, [("a", 0, 4)])


def test_unchecked_blocks_are_for_those_who_do_not_ask_for_checks() -> None:
    rig = Rig(64)
    trusting = rig.ask([("a", 0, 4)], checksums=False)
    rig.read_all()
    assert rig.state(rig.ask([("a", 0, 4)], checksums=False)) == (DONE, 4)
    strict = rig.ask([("a", 0, 6)])
    assert rig.state(strict) == (RUNNING, 0)
    assert rig.read_all() == [("a", 0, 4), ("a", 4, 2)]
    rig.core.release(strict)
    assert rig.state(rig.ask([("a", 0, 6)], checksums=False)) == (DONE, 6), "checked is enough"
    rig.check(trusting, [("a", 0, 4)])


def test_a_bad_block_ends_the_prefix_and_the_next_request_reads_it_again() -> None:
    rig = Rig(64)
    ticket = rig.ask([("a", 0, 12)])
    behind = rig.ask([("a", 6, 2)])
    rig.read(rig.take())
    rig.read(rig.take(), 2, "checksum of part kv", True)
    assert rig.state(ticket) == (FAILED, 6)
    assert rig.control.outcome(ticket.slot) == ("checksum of part kv", True)
    assert rig.state(behind) == (FAILED, 0)
    assert rig.take() is None, "nobody wants what follows"
    again = rig.ask([("a", 0, 8)])
    rig.read_all()
    assert rig.state(again) == (DONE, 8)
    for each in (ticket, behind, again):
        rig.core.release(each)
    rig.core.evict_idle()
    assert rig.is_empty()


def test_idle_blocks_make_room_the_least_recently_used_first() -> None:
    rig = Rig(8)
    for path in "ab":
        ticket = rig.ask([(path, 0, 4)])
        rig.read_all()
        rig.core.release(ticket)
    rig.core.release(rig.ask([("a", 0, 4)]))
    rig.core.release(rig.ask([("c", 0, 4)]))  # cancelled before it is read
    assert rig.core.stats()["blocks_here"] == 4
    assert rig.state(rig.ask([("a", 0, 4)])) == (DONE, 4)


def test_room_is_not_made_by_evicting_what_the_same_request_wants() -> None:
    rig = Rig(8)
    for first in (4, 0):
        ticket = rig.ask([("a", first, 4)])
        rig.read_all()
        rig.core.release(ticket)
    rig.core.evict_idle()
    for path, first in (("a", 4), ("b", 0)):
        ticket = rig.ask([(path, first, 4)])
        rig.read_all()
        rig.core.release(ticket)
    before = rig.core.stats()["bytes_read"]
    both = rig.ask([("a", 0, 8)])
    rig.read_all()
    assert rig.state(both) == (DONE, 8)
    assert rig.core.stats()["bytes_read"] - before == 4 * PAGE


def test_a_request_gets_what_fits_and_says_so() -> None:
    rig = Rig(10)
    ticket = rig.ask([("a", 0, 100)])
    assert ticket.wanted == 10
    rig.read_all()
    assert rig.state(ticket) == (FAILED, 10)
    assert rig.control.outcome(ticket.slot) == ("arena full", False)
    with pytest.raises(BusyError, match="arena is full"):
        rig.ask([("b", 0, 1)])
    assert rig.state(rig.ask([("a", 0, 10)])) == (DONE, 10), "what is here needs no room"


def test_a_gap_that_is_too_short_takes_a_part_of_a_stretch() -> None:
    rig = Rig(8)
    keep = [rig.ask([("x", 2 * i, 1)]) for i in range(8)]
    rig.read_all()
    for ticket in keep[1:3] + keep[5:6]:
        rig.core.release(ticket)
    ticket = rig.ask([("a", 0, 4)])
    assert [(p.block, p.count) for p in ticket.parts] == [(0, 2), (2, 1)]
    rig.read_all()
    assert rig.state(ticket) == (FAILED, 3)
    rig.check(ticket, [("a", 0, 4)])


def test_storage_that_is_down_is_not_asked_but_what_is_here_is_served() -> None:
    rig = Rig(16)
    rig.ask([("a", 0, 5)])
    rig.read_all()
    ticket = rig.ask([("a", 0, 9)], down="backend down")
    assert rig.state(ticket) == (FAILED, 5)
    assert rig.control.outcome(ticket.slot) == ("backend down", False)
    with pytest.raises(BackendError, match="backend down"):
        rig.ask([("b", 0, 4)], down="backend down")
    assert rig.take() is None


def test_at_its_deadline_a_ticket_keeps_the_good_prefix() -> None:
    rig = Rig(64)
    ticket = rig.ask([("a", 0, 12)])
    rig.read(rig.take())
    hanging = rig.take()
    rig.core.expire(ticket)
    rig.core.expire(ticket)
    assert rig.state(ticket) == (EXPIRED, 4)
    assert rig.take() is None
    rig.read(hanging)
    assert rig.state(ticket) == (EXPIRED, 4), "late blocks are not delivered"
    rig.check(ticket, [("a", 0, 12)])
    assert rig.state(rig.ask([("a", 0, 8)])) == (DONE, 8), "but they are here for the next"


def test_a_range_that_is_being_read_into_is_nobody_elses() -> None:
    """A read that hangs may end long after everybody has given up on it."""
    rig = Rig(8)
    ticket = rig.ask([("a", 0, 8)])
    hanging = rig.take()
    rig.core.release(ticket)
    other = rig.ask([("b", 0, 8)])
    assert other.wanted == 4
    rig.read_all()
    late = rig.memory[hanging.offset : hanging.offset + hanging.size]
    late[:] = b"\xee" * len(late)
    assert rig.state(other) == (FAILED, 4)
    rig.check(other, [("b", 0, 8)])
    rig.core.finished(hanging, 4, None, False)
    rig.core.release(other)
    rig.core.evict_idle()
    assert rig.is_empty()


def test_a_lost_read_ends_those_who_wait_and_keeps_its_memory_until_it_ends() -> None:
    rig = Rig(12)
    before = rig.ask([("a", 0, 4)])
    rig.read_all()
    ticket, both = rig.ask([("a", 4, 4)]), rig.ask([("a", 0, 8)])
    lost = rig.take()
    rig.core.lose(lost)
    rig.core.lose(lost)
    assert rig.state(ticket) == (FAILED, 0) and rig.state(both) == (FAILED, 4)
    assert rig.control.outcome(both.slot) == ("no answer", False)
    assert rig.core.stats()["reads_lost"] == 1
    again = rig.ask([("a", 4, 4)])
    other = rig.take()
    assert other.place == lost.place and other.offset != lost.offset
    rig.read(other)
    assert rig.state(again) == (DONE, 4)
    for each in (before, ticket, both, again):
        rig.core.release(each)
    rig.core.evict_idle()
    assert rig.ranges.free_bytes == rig.ranges.total - lost.size, "late I/O may still write there"
    rig.read(lost)
    rig.core.evict_idle()
    assert rig.is_empty(), "it is nobody's when it comes"
    assert rig.core.stats()["bytes_read"] == 8 * PAGE


def test_a_cancelled_read_does_not_end_a_request_that_comes_then() -> None:
    rig = Rig(64)
    first = rig.ask([("a", 0, 4)])
    stretch = rig.take()
    rig.core.release(first)
    second = rig.ask([("a", 0, 4)])
    assert not rig.core.give_up(stretch), "somebody wants it again"
    rig.core.release(second)
    assert rig.core.give_up(stretch)
    third = rig.ask([("a", 0, 4)])
    rig.read(stretch, 1, "cancelled")
    assert rig.state(third) == (RUNNING, 0)
    rig.read_all()
    assert rig.state(third) == (DONE, 4)


def test_waiting_requests_come_before_prefetches() -> None:
    rig = Rig(64)
    rig.ask([("prefetch", 0, 12)], priority=5)
    rig.ask([("wait", 0, 4)])
    rig.ask([("prefetch", 8, 4)])
    order = [(path, first) for path, first, _ in rig.read_all()]
    assert order == [("wait", 0), ("prefetch", 8), ("prefetch", 0), ("prefetch", 4)]


def test_too_many_requests_are_refused_and_change_nothing() -> None:
    rig = Rig(1000)
    tickets = [rig.ask([("a", i, 1)]) for i in range(core_module.MAX_UNFINISHED)]
    free = rig.ranges.free_bytes
    with pytest.raises(BusyError):
        rig.ask([("b", 0, 4)])
    assert rig.ranges.free_bytes == free
    rig.core.release(tickets[0])
    rig.ask([("b", 0, 4)])


@pytest.mark.parametrize(
    "pieces",
    [
        [("a", 0, 4), ("a", 2, 4)],
        [("a", 0, 4), ("a", 0, 4)],
        [("a", 4, 4), ("b", 0, 1), ("a", 0, 5)],
    ],
)
def test_a_request_for_a_record_twice_is_refused_and_changes_nothing(
    pieces: list[tuple[str, int, int]],
) -> None:
    rig = Rig(64)
    with pytest.raises(InputError, match="twice"):
        rig.ask(pieces)
    assert rig.is_empty()
    assert rig.take() is None


def test_a_place_between_two_records_is_refused_and_changes_nothing() -> None:
    wide = Namespace(small_identity(row_bytes=8000), 1, "")
    rig = Rig(64)
    rig.ask([("b", 0, 2)], ns=wide)
    rig.ask([("a", 0, 2)], ns=wide)
    free = rig.ranges.free_bytes
    with pytest.raises(InputError, match="no record begins"):
        rig.ask([("c", 0, 1), ("b", 0, 2), ("a", 1, 1)], ns=wide)
    assert rig.ranges.free_bytes == free and rig.core.stats()["requests"] == 2


def test_a_slot_that_is_used_again_has_another_generation() -> None:
    rig = Rig(64)
    seen = set()
    for _ in range(100):
        ticket = rig.ask([("a", 0, 1)])
        key = ticket.slot, ticket.generation
        assert rig.control.generation(ticket.slot) == ticket.generation
        assert key not in seen
        seen.add(key)
        rig.core.release(ticket)
        assert rig.control.generation(key[0]) != key[1]
        assert rig.control.state(key[0]) == FREE


def test_a_generation_comes_round_without_meeting_itself() -> None:
    control = ControlArea(memoryview(bytearray(CONTROL_BYTES)))
    control.begin(SLOTS - 1, 0xFFFFFFFF, 3)
    assert control.free(SLOTS - 1, 0xFFFFFFFF) == 1


def test_a_reason_is_cut_to_its_field_and_the_next_one_does_not_show_the_rest() -> None:
    control = ControlArea(memoryview(bytearray(CONTROL_BYTES)))
    control.begin(5, 1, 1)
    control.begin(6, 1, 1)
    control.end(5, FAILED, "ü" * 100, True)
    assert control.outcome(5) == ("ü" * 38, True)
    assert control.outcome(6) == ("", False)
    control.end(5, FAILED, "short")
    assert control.outcome(5) == ("short", False)


def test_an_empty_request_is_done() -> None:
    rig = Rig(4)
    ticket = rig.ask([])
    assert rig.state(ticket) == (DONE, 0)
    rig.core.release(ticket)
    assert rig.is_empty()


# anything, in any order


@dataclass
class Asked:
    ticket: Ticket
    pieces: list[tuple[str, int, int]]
    slot: int
    generation: int
    good: int = 0


@dataclass
class Model:
    asked: list[Asked] = field(default_factory=list)
    reading: list[Stretch] = field(default_factory=list)


PIECES = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 20), st.integers(1, 9)),
    min_size=1, max_size=4, unique_by=lambda piece: piece[0],
)  # fmt: skip


class Anything(RuleBasedStateMachine):
    """No range is handed out twice, no block is another's, and in the end everything is free."""

    @initialize(records=st.integers(3, 40))
    def begin(self, records: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(core_module, "STRETCH_BYTES", 4 * PAGE)
        self.rig = Rig(records)
        self.model = Model()

    @rule(pieces=PIECES, priority=st.integers(0, 2), checks=st.booleans(), down=st.booleans())
    def ask(
        self, pieces: list[tuple[str, int, int]], priority: int, checks: bool, down: bool
    ) -> None:
        try:
            ticket = self.rig.ask(
                pieces, priority=priority, checksums=checks, down="down" if down else ""
            )
        except (BusyError, BackendError):
            return
        assert 0 < ticket.wanted <= sum(n for *_, n in pieces)
        self.model.asked.append(Asked(ticket, pieces, ticket.slot, ticket.generation))

    @rule()
    def take(self) -> None:
        stretch = self.rig.take()
        if stretch is not None:
            self.model.reading.append(stretch)

    @precondition(lambda self: self.model.reading)
    @rule(data=st.data(), fails=st.booleans())
    def finish(self, data: st.DataObject, fails: bool) -> None:
        stretch = data.draw(st.sampled_from(self.model.reading))
        self.model.reading.remove(stretch)
        if not stretch.refs and data.draw(st.booleans()):
            assert self.rig.core.give_up(stretch)
            self.rig.read(stretch, 0, "cancelled")
        elif fails:
            self.rig.read(stretch, data.draw(st.integers(0, stretch.count - 1)), "bad", True)
        else:
            self.rig.read(stretch)

    @precondition(lambda self: self.model.reading)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.rig.core.lose(data.draw(st.sampled_from(self.model.reading)))

    @precondition(lambda self: self.model.asked)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        asked = data.draw(st.sampled_from(self.model.asked))
        self.rig.core.expire(asked.ticket)
        assert self.rig.control.state(asked.slot) not in (FREE, RUNNING)

    @precondition(lambda self: self.model.asked)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        asked = data.draw(st.sampled_from(self.model.asked))
        self.model.asked.remove(asked)
        self.rig.core.release(asked.ticket)
        assert self.rig.control.generation(asked.slot) != asked.generation
        assert asked.ticket.ended and not asked.ticket.parts

    @rule()
    def evict(self) -> None:
        self.rig.core.evict_idle()

    @invariant()
    def tickets_hold_their_own_blocks(self) -> None:
        if not hasattr(self, "rig"):
            return
        for asked in self.model.asked:
            ticket = asked.ticket
            assert self.rig.control.generation(asked.slot) == asked.generation
            assert asked.good <= ticket.good == self.rig.control.good(asked.slot) <= ticket.wanted
            assert (self.rig.control.state(asked.slot) == DONE) <= (ticket.good == ticket.wanted)
            asked.good = ticket.good
            self.rig.check(ticket, asked.pieces)

    @invariant()
    def no_range_is_handed_out_twice(self) -> None:
        if not hasattr(self, "rig"):
            return
        stretches = {p.stretch for a in self.model.asked for p in a.ticket.parts}
        stretches |= set(self.model.reading) | set(self.rig.core._idle)
        spans = sorted((s.offset, s.offset + s.size) for s in stretches)
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
        taken = self.rig.ranges.total - self.rig.ranges.free_bytes
        assert taken == sum(s.size for s in stretches), "a range is held by nobody"
        refs = [p.stretch for a in self.model.asked for p in a.ticket.parts]
        assert all(s.refs == refs.count(s) for s in stretches)
        assert all(s.state in (READ, READING, LOST) or s.refs for s in stretches)
        assert not any(ticket.ended for s in stretches for ticket in s.waiting)

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for asked in self.model.asked:
            self.rig.core.release(asked.ticket)
        for stretch in self.model.reading:
            self.rig.read(stretch)
        assert self.rig.take() is None
        self.rig.core.evict_idle()
        assert self.rig.is_empty()
        self.patch.undo()


TestAnything = Anything.TestCase
