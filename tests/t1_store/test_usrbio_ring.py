"""A ring, with the daemon's side done by hand: what comes late, short, wrong or never."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.arena import Arena
from kvfs.backend import usrbio_layout as layout
from kvfs.backend.semaphores import Semaphore
from kvfs.backend.usrbio_io import Lease
from kvfs.backend.usrbio_layout import COMPLETION, RingShape, ring_name
from kvfs.backend.usrbio_ring import DaemonDead, Io, Ring
from kvfs.backend.usrbio_session import READ, Bounce, Kind, Session, address_of
from kvfs.testing.threefs.bench import own_seconds
from kvfs.testing.threefs.rings import ServedRing, Shared

pytestmark = pytest.mark.skipif(not os.path.isdir(layout.SHM), reason="needs /dev/shm")
KEY = uuid.uuid4().bytes
SIZE = 1 << 20


class Pair:
    """Both ends of a ring. `answer` is what the daemon says to each I/O."""

    def __init__(self, entries: int, depth: int = 0) -> None:
        # Of just this size: an arena's is rounded up.
        with tempfile.NamedTemporaryFile(dir=layout.SHM, prefix="kvfs-test-") as file:
            file.truncate(RingShape.size_for(entries))
            memory = memoryview(mmap.mmap(file.fileno(), 0))
            name = ring_name(uuid.uuid4(), read=True, depth=depth, flags=3)
            self.served = ServedRing(Shared(file.name, name, 1, 0))
        self.memory = memory
        self.posted = threading.Semaphore(0)
        self.dead = False
        self.late: list[int] = []
        self.ring = Ring(
            memory, address_of(memory), _Posted(self.posted),
            lambda: not self.dead, {KEY: SIZE}.get, self.late.append,
        )  # fmt: skip

    def serve(self, answer: Callable[[int, int], int]) -> int:
        """Does what is queued now; answer(offset, length). Returns how many I/Os."""
        done = 0
        while jobs := self.served.jobs():
            for first, count in jobs:
                slots = [self.served.submission(first + i)[0] for i in range(count)]
                results = [answer(*self.served.arguments(slot)[3:5]) for slot in slots]
                self.served.finish(first, results)
                done += count
        return done

    def answering(self, answer: Callable[[int, int], int]) -> threading.Thread:
        """A daemon's thread that serves until the test ends it by `dead`."""

        def work() -> None:
            while not self.dead:
                if self.posted.acquire(timeout=0.05):
                    self.serve(answer)

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    def complete(self, slot: int, result: int, serial: int) -> None:
        """A completion as the daemon would write it, true or not."""
        marks = self.memory[: layout.MARKS].cast("i")
        head = marks[layout.COMPLETED]
        at = self.served.shape.completions + COMPLETION.size * head
        COMPLETION.pack_into(self.memory, at, slot, 0, result, serial)
        marks[layout.COMPLETED] = (head + 1) % self.served.shape.n


class _Posted(Semaphore):
    def __init__(self, semaphore: threading.Semaphore) -> None:
        self._semaphore = semaphore

    def post(self) -> None:
        self._semaphore.release()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(7)
    yield made
    made.dead = True


def ios(n: int, length: int = 4096) -> list[Io]:
    return [Io(KEY, i * length, 5, i, length) for i in range(n)]


def test_sizes_agree() -> None:
    for entries in range(1, 300):
        assert RingShape.of_size(RingShape.size_for(entries)).n == entries + 1


def test_names() -> None:
    key = uuid.UUID(int=1)
    assert ring_name(key, read=True, depth=-16, flags=3) == f"{key}.r-16.t0.f11"
    assert ring_name(key, read=False, depth=0, flags=0) == f"{key}.w0.t0"


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 9), st.sampled_from([0, -1, -3]))
@settings(max_examples=25)
def test_each_io_gets_its_own_result(batches: list[int], entries: int, depth: int) -> None:
    pair = Pair(entries, depth)
    thread = pair.answering(lambda offset, length: offset * 1000)
    try:
        for n in batches:
            _, results = pair.ring.run(ios(n, 8), 10.0)
            assert results == [i * 1000 for i in range(n)]
            assert pair.ring.in_flight == 0
    finally:
        pair.dead = True
        thread.join()


def test_results_below_zero_are_as_they_are(pair: Pair) -> None:
    thread = pair.answering(lambda offset, length: -errno.EREMOTEIO if offset else length)
    assert pair.ring.run(ios(3), 10.0)[1] == [4096, -errno.EREMOTEIO, -errno.EREMOTEIO]
    pair.dead = True
    thread.join()


def test_a_slot_is_not_used_again_before_its_completion(pair: Pair) -> None:
    base, results = pair.ring.run(ios(3), 0.01)
    assert results == [None] * 3 and pair.ring.in_flight == 3
    thread = threading.Thread(target=lambda: pair.posted.acquire() and pair.posted.acquire())
    thread.start()
    first_serials = {pair.served.submission(i)[1] for i in range(3)}
    _, results = pair.ring.run(ios(10), 0.05)  # four slots are left: six are never handed over
    assert results == [None] * 4 + [-errno.ETIMEDOUT] * 6
    assert {pair.served.submission(i)[1] for i in range(7)} > first_serials
    assert len({pair.served.submission(i)[0] for i in range(7)}) == 7
    pair.serve(lambda offset, length: length)
    pair.ring.reap()
    assert pair.late == list(range(base, base + 7)) and pair.ring.in_flight == 0
    thread.join()


def test_submissions_behind_a_batch_that_takes_long_are_not_written_over() -> None:
    """Batches end in any order; the first one's submission is read again when it ends."""
    pair = Pair(7, depth=-1)

    def work() -> None:
        held, done = None, 0
        while not pair.dead:
            if not pair.posted.acquire(timeout=0.05 if done < 6 else 0.3) and done >= 6:
                # All that there is room for is done: time for the first one, at last.
                assert held is not None
                pair.served.finish(
                    held, [pair.served.arguments(pair.served.submission(held)[0])[3]]
                )
                break
            for first, _ in pair.served.jobs():
                if held is None:
                    held = first
                else:
                    slot = pair.served.submission(first)[0]
                    pair.served.finish(first, [pair.served.arguments(slot)[3]])
                    done += 1
        while not pair.dead:
            if pair.posted.acquire(timeout=0.05):
                pair.serve(lambda offset, length: offset)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert pair.ring.run(ios(40, 8), 30.0)[1] == list(range(40))
    finally:
        pair.dead = True
        thread.join()


def test_a_submission_is_not_written_over_before_its_result_is_here() -> None:
    """Daemons have given them back first, and read them after that."""
    pair = Pair(7, depth=-1)
    assert pair.ring.run(ios(7), 0.01)[1] == [None] * 7
    (first, _), *others = pair.served.jobs()
    for at, _ in others:
        pair.served.finish(at, [0])
    submission = pair.served.submission(first)
    pair.memory[: layout.MARKS].cast("i")[layout.TAKEN] = 7
    pair.ring.run(ios(3), 0.01)
    assert pair.served.submission(first) == submission
    pair.served.finish(first, [0])
    pair.serve(lambda offset, length: length)
    pair.ring.reap()
    assert pair.ring.in_flight == pair.ring.foreign == 0


def test_what_comes_late_is_no_result_of_a_later_run(pair: Pair) -> None:
    pair.ring.run(ios(3), 0.01)

    def answer() -> None:
        pair.posted.acquire()
        pair.posted.acquire()
        pair.serve(lambda offset, length: offset + 10)

    thread = threading.Thread(target=answer)
    thread.start()
    _, results = pair.ring.run(ios(2), 10.0)
    thread.join()
    assert results == [10, 11] and pair.late == [0, 1, 2]


def test_completions_that_nobody_waits_for(pair: Pair) -> None:
    for slot, serial in ((0, 77), (6, 0), (-3, 0), (1 << 20, 1), (2, 0)):
        pair.complete(slot, 4096, serial)
    pair.ring.reap()
    assert pair.ring.foreign == 5
    thread = pair.answering(lambda offset, length: length)
    assert pair.ring.run(ios(7), 10.0)[1] == [4096] * 7
    pair.complete(0, 1, 3)  # twice
    pair.ring.reap()
    assert pair.ring.foreign == 6 and pair.ring.in_flight == 0
    pair.dead = True
    thread.join()


@pytest.mark.parametrize("io", [
    Io(KEY, SIZE - 100, 5, 0, 101), Io(KEY, -1, 5, 0, 10), Io(KEY, 0, 5, 0, 0),
    Io(KEY, 0, 5, -1, 10), Io(KEY, SIZE, 5, 0, 1), Io(KEY, 0, 5, 0, SIZE + 1),
])  # fmt: skip
def test_bounds_are_ours_to_check(pair: Pair, io: Io) -> None:
    with pytest.raises(ValueError):
        pair.ring.run([*ios(2), io], 0.01)
    assert pair.ring.in_flight == 0 and pair.ring.serial == 0


def test_memory_of_somebody_else(pair: Pair) -> None:
    pair.ring._limit = lambda key: 0
    with pytest.raises(ValueError):
        pair.ring.run(ios(1), 0.01)


def test_a_dead_daemon_ends_a_wait(pair: Pair) -> None:
    pair.dead = True
    began = time.monotonic()
    with pytest.raises(DaemonDead):
        pair.ring.run(ios(2), float("inf"))
    assert time.monotonic() - began < 1.0


def test_bounce_memory_waits_for_what_is_late(pair: Pair) -> None:
    arena = Arena.create(8 << 12)
    bounce = Bounce(arena, KEY)
    pair.ring.late = lambda serial: bounce.late(pair.ring, serial)
    at = bounce.take(4 << 12, 1.0)
    base, results = pair.ring.run(ios(2), 0.01)
    bounce.keep(at, pair.ring, [base, base + 1])
    other = bounce.take(4 << 12, 1.0)
    with pytest.raises(TimeoutError):
        bounce.take(1, 0.01)
    pair.serve(lambda offset, length: length)
    pair.ring.reap()
    assert bounce.kept == 0 and bounce.take(1, 1.0) == at
    bounce.give(at)
    bounce.give(other)
    arena.close()


def test_memory_under_a_run_that_is_broken_off_stays_in_use(pair: Pair) -> None:
    """What was posted may still happen."""

    class Rings:
        @contextmanager
        def ring(self, kind: Kind) -> Iterator[Ring]:
            yield pair.ring

    lease = Lease(cast(Session, Rings()), 0, 1.0)
    pair.dead = True
    with pytest.raises(DaemonDead):
        lease.run(ios(2), READ)
    assert lease.unfinished


def test_one_post_for_a_batch_and_little_time_for_an_io() -> None:
    own, posts = own_seconds(rounds=100)
    assert posts == 1.0
    assert own < 10e-6  # 0.7 us on an idle machine
