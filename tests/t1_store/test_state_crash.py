"""Killed at any instant: a slot is whole or it is no hit, and the memory stays what it was.

First exhaustively: a child is killed at each line that an operation runs through, one after the
other. Then at random, with several writers and readers over ten thousand slots.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from kvfs import presets
from kvfs.state.poolfile import Geometry
from kvfs.state.slot import Anchor
from kvfs.state.slots import SlotPool

SWA = presets.get("tiny-swa", weights="w", tokenizer="t")
SLOT = 134 * 16
# Modules whose every line is an instant to be killed at.
TRACED = ("kvfs/state/slots.py", "kvfs/state/table.py", "kvfs/state/poolfile.py")

pytestmark = pytest.mark.crash
# Every line is for the slow tests; every seventh still meets each kind of instant.
every_line = pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])


def budget(n: int) -> int:
    return Geometry(n, SLOT).file_bytes


def anchor(number: int) -> Anchor:
    # The first bytes choose the bucket: three anchors share one.
    return Anchor(bytes([number // 3]) * 15 + bytes([number]), 128, bytes([number]) * 16)


def data_of(key: Anchor) -> bytes:
    return (key.hash * (SLOT // 16 + 1))[:SLOT]


@pytest.fixture
def shm(tmp_path: Path) -> str:
    path = tmp_path / "shm"
    path.mkdir()
    return str(path)


class KillAt:
    """A trace function that kills its process at the n-th line of the traced modules."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, frame: FrameType, event: str, _: Any) -> KillAt | None:
        if not frame.f_code.co_filename.endswith(TRACED):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return self


def survives(n: int, work: Callable[[], object]) -> bool:
    """Whether a child that does the work comes to its end before its n-th line."""
    child = os.fork()
    if not child:
        code = 1
        try:
            sys.settrace(KillAt(n))
            work()
            code = 0
        finally:
            sys.settrace(None)
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == 0


def check_sound(pool: SlotPool, slots: int) -> set[int]:
    """The numbers of the anchors that are held, once it is clear that everything fits together."""
    # Before the repair a slot may be out of sight for a while; what is seen is whole.
    for n in range(20):
        found = pool.read(anchor(n))
        assert found is None or found.data == data_of(anchor(n))
    pool.remove(anchor(255))  # there is none: but it takes the lock, and repairs
    held = {n for n in range(20) if pool.lookup(anchor(n)) is not None}
    for n in range(20):
        found = pool.read(anchor(n))
        assert (found is not None) == (n in held)
    assert pool.stats()["used"] == len(held) == len(pool.metas())
    table = pool._table
    order = list(table.by_age())
    assert sorted(order) == list(range(slots))  # each slot once in the list
    empty = [slot for slot in order if table.meta(slot) is None]
    assert order[: len(empty)] == empty  # and the empty ones first
    return held


def exhaust(
    shm: str, slots: int, before: set[int], work: Callable[[SlotPool], object],
    allowed: list[set[int]], every: int,
) -> int:  # fmt: skip
    """Kills the work at lines it runs through; each time, what is held must be in `allowed`."""
    lines = 1 - every
    with SlotPool.open(SWA, budget(slots), directory=shm) as pool:
        size = os.stat(pool.path).st_blocks
        while True:
            lines += every
            pool.clear()
            for n in sorted(before):
                pool.write(anchor(n), data_of(anchor(n)))
            done = survives(lines, lambda: work(pool))
            held = check_sound(pool, slots)
            assert held in allowed, f"killed at line {lines}: {held}"
            assert os.stat(pool.path).st_blocks == size
            # Whatever happened, the pool goes on as if it had not.
            for n in range(10, 10 + slots):
                assert pool.write(anchor(n), data_of(anchor(n))).new
            assert check_sound(pool, slots) == set(range(10, 10 + slots))
            if done:
                assert held == allowed[-1]
                return lines


@every_line
def test_killed_while_storing_into_an_empty_slot(shm: str, every: int) -> None:
    key = anchor(2)
    lines = exhaust(
        shm, 4, {0, 1}, lambda p: p.write(key, data_of(key)), [{0, 1}, {0, 1, 2}], every
    )  # fmt: skip
    assert lines > 60


@every_line
def test_killed_while_storing_over_the_oldest(shm: str, every: int) -> None:
    key = anchor(3)
    exhaust(
        shm, 3, {0, 1, 2}, lambda p: p.write(key, data_of(key)),
        [{0, 1, 2}, {1, 2}, {1, 2, 3}], every,
    )  # fmt: skip


@every_line
def test_killed_while_reading(shm: str, every: int) -> None:
    lines = exhaust(shm, 3, {0, 1, 2}, lambda p: p.read(anchor(0)), [{0, 1, 2}], every)
    assert lines > 40


@every_line
def test_killed_while_removing(shm: str, every: int) -> None:
    # 0, 1 and 2 share a bucket: its middle one goes.
    exhaust(shm, 4, {0, 1, 2, 3}, lambda p: p.remove(anchor(1)), [{0, 1, 2, 3}, {0, 2, 3}], every)


@every_line
def test_killed_while_repairing(shm: str, every: int) -> None:
    """A repair that is cut off is done by the next one."""

    def work(pool: SlotPool) -> None:
        pool._table._u64[128] = 1  # as somebody left it who was killed while changing the pool
        pool.remove(anchor(255))

    exhaust(shm, 3, {0, 1}, work, [{0, 1}], every)


@every_line
def test_killed_while_making_the_pool(shm: str, every: int) -> None:
    path = ""
    for lines in range(1, 10_000, every):
        done = survives(lines, lambda: SlotPool.open(SWA, budget(4), directory=shm).close())
        with SlotPool.open(SWA, budget(4), directory=shm) as pool:
            path = pool.path
            pool.write(anchor(1), data_of(anchor(1)))
            assert check_sound(pool, 4) == {1}
        assert os.listdir(shm) == [os.path.basename(path)]
        if done:
            assert lines > 40
            return
        # Every second time the next one finds a pool that is there, else none.
        if lines // every % 2:
            os.unlink(path)


# at random

SLOTS = 16
NUMBERS = 64


def key(number: int) -> Anchor:
    return Anchor(number.to_bytes(4, "big") * 4, 128, number.to_bytes(16, "big"))


def write_for_ever(shm: str, seed: int) -> None:
    rng = random.Random(seed)
    pool = SlotPool.open(SWA, directory=shm)
    while True:
        chosen = key(rng.randrange(NUMBERS))
        pool.write(chosen, data_of(chosen), wait=60)


def read_for_ever(shm: str, seed: int) -> None:
    rng = random.Random(seed)
    pool = SlotPool.open(SWA, directory=shm)
    while True:
        chosen = key(rng.randrange(NUMBERS))
        found = pool.read(chosen)
        if found is not None and (found.data != data_of(chosen) or not found.meta.is_for(chosen)):
            os._exit(3)


class Crew:
    """Children that work until they are killed, and are replaced at once."""

    def __init__(self, shm: str) -> None:
        self.shm = shm
        self.works: dict[int, Callable[[str, int], None]] = {}
        self.born = 0

    def hire(self, work: Callable[[str, int], None]) -> None:
        self.born += 1
        child = os.fork()
        if not child:
            try:
                work(self.shm, self.born)
            finally:
                os._exit(4)
        self.works[child] = work

    def kill(self, child: int) -> Callable[[str, int], None]:
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        assert status == signal.SIGKILL, f"a child ended by itself: {status}"
        return self.works.pop(child)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("churn", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_slots_of_churn(shm: str, churn: int) -> None:
    rng = random.Random(5)
    crew = Crew(shm)
    kills = 0
    with SlotPool.open(SWA, budget(SLOTS), directory=shm) as pool:
        size, blocks = pool.file_bytes, os.stat(pool.path).st_blocks
        for work in (write_for_ever, write_for_ever, read_for_ever, read_for_ever):
            crew.hire(work)
        memory = 0
        deadline = time.monotonic() + 90
        while pool.stats()["stored"] < churn or kills < churn / 100:
            assert time.monotonic() < deadline, (pool.stats(), kills)
            time.sleep(rng.uniform(0.001, 0.03))  # the instant of the kill is the point
            crew.hire(crew.kill(rng.choice(list(crew.works))))
            kills += 1
            for n in range(NUMBERS):
                found = pool.read(key(n))
                assert found is None or found.data == data_of(key(n))
            memory = memory or resident()
        for child in list(crew.works):
            crew.kill(child)
        stats = pool.stats()
        assert stats["damaged"] == 0
        assert (os.stat(pool.path).st_size, os.stat(pool.path).st_blocks) == (size, blocks)
        assert os.listdir(shm) == [os.path.basename(pool.path)]
        assert resident() - memory < 4 << 20
        # A kill in the middle of a change was met, and all is in order again.
        pool.write(key(0), data_of(key(0)))
        assert stats["recovered"] > 0 or churn < 10_000
        held = [n for n in range(NUMBERS) if pool.read(key(n)) is not None]
        assert len(held) == pool.stats()["used"] <= SLOTS
        assert sorted(pool._table.by_age()) == list(range(SLOTS))
