"""Writers, followers, housekeepers and who writes checkpoints, of three hosts, are killed five
hundred times: a hundred times each in five stores, since what is looked at after each kill grows.

After each, while the others are held still wherever they are, the store is sound, and every block
whose storing was acknowledged since the kill before is found and right, unless its removal had
begun. After every fifty, when all are killed, so is every block that ever was and whose time is not
over, and the index of each host is sound too. Housekeepers copy forward what is left in worn
segments, and take the lease over from those that were killed with it.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvfs.limits import Limits
from kvfs.repair.fsck import fsck
from kvfs.testing.command import environment
from kvfs.testing.indexcheck import index_faults
from kvfs.testing.stock import Clock, Stock, tokens

STORES, KILLS, BATCH, ALIVE, HOSTS = 5, 100, 50, 6, 3
ROLES = ("write", "keep", "follow", "write", "keep", "checkpoint")
# Left by those who were killed; nothing of it is lost or wrong.
EXPECTED = {
    "unsealed", "dropped", "orphan", "unfinished", "checkpoint", "behind", "strange", "copy",
    "hole",
}  # fmt: skip

# Starts processes by fork, because an interpreter takes longer to start than they live.
NURSERY = """
import os, random, signal, sys, time
from kvfs.follow import checkpoint
from kvfs.follow.following import Following
from kvfs.follow.history import prune
from kvfs.gc.housekeeping import Housekeeper
from kvfs.gc.lease import holder
from kvfs.store import Store
from kvfs.testing.stock import Clock, Stock, tokens
import numpy

path, place = sys.argv[1:]

def note(what, seed):
    fd = os.open(f"{place}/{what}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, f"{seed}\\n".encode())
    os.close(fd)

def write(stock, number, i):
    seed = number * 150 + i  # below 100,000, where prompts begin anew
    brief = i % 4 == 3
    result = stock.put(tokens(seed, 40), ttl_class="brief" if brief else "chatbot")
    assert result.error is None, result.error
    time.sleep(0.01)
    if not brief:
        note("stored", seed)
    if i % 3 == 2:  # so that segments are worn
        note("removed", seed - 2)
        stock.store.remove(stock.ns, tokens(seed - 2, 40), from_block=3)

def follow(stock, number, i):
    if i == 0:
        stock.following = Following(stock.store, interval=0.01)
    stock.following.turn()

class Keeper(Housekeeper):
    def turn(self):
        before = holder(self.store.backend)
        try:
            result = super().turn()
        except BaseException:
            failed("keep")
            raise
        if result is not None:
            note("moved", result.reclaimed.moved.moved_blocks)
            if before is not None and before.dead():
                note("taken", before.pid)
        return result

def keep(stock, number, i):
    if i == 0:
        Keeper(stock.store, 0.01, force=True).start()
    time.sleep(1)

def write_checkpoint(stock, number, i):
    store = stock.store
    name = store.writer().name
    store.catch_up()
    checkpoint.write(store.backend, store.index, name, store.now_ms())
    prune(store.backend, store.uuid, store.now_ms(), 0, 0)
    time.sleep(0.02)

WORK = {"write": write, "follow": follow, "keep": keep, "checkpoint": write_checkpoint}

def failed(what):
    import traceback
    note("failed", f"{what}: " + traceback.format_exc())

def live(role, number, host):
    store = Store.open(path, index=f"{place}/{host}")
    stock = Stock(store, store.namespaces()[0], Clock())
    for i in range(150 if role == "write" else 100_000):
        WORK[role](stock, number, i)
    while True:
        time.sleep(1)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
for line in sys.stdin:
    role, number, host = line.split()
    pid = os.fork()
    if pid == 0:
        try:
            live(role, int(number), host)
        except BaseException:
            failed(f"{role} {number}")
        finally:
            os._exit(1)
    print(pid, flush=True)
"""


class Nursery:
    """Starts and kills the processes of the three hosts."""

    def __init__(self, process: subprocess.Popen[str], rng: random.Random) -> None:
        self.process = process
        self.rng = rng
        self.number = 0
        self.alive: list[int] = []

    def start(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.number += 1
        role, host = ROLES[self.number % len(ROLES)], f"h{self.rng.randrange(HOSTS)}"
        self.process.stdin.write(f"{role} {self.number} {host}\n")
        self.process.stdin.flush()
        self.alive.append(int(self.process.stdout.readline()))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nobody moves."""
        for pid in self.alive:
            os.kill(pid, signal.SIGSTOP)
        for pid in self.alive:
            while state(pid) not in "TZ":
                time.sleep(0.001)
        yield
        for pid in self.alive:
            os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        pid = self.alive.pop(self.rng.randrange(len(self.alive)))
        os.kill(pid, signal.SIGKILL)
        while os.path.exists(f"/proc/{pid}"):
            time.sleep(0.001)


def state(pid: int) -> str:
    """Of a process; "Z" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@contextmanager
def nursery(stock: Stock, place: Path, seed: int) -> Iterator[Nursery]:
    process = subprocess.Popen(
        [sys.executable, "-c", NURSERY, stock.store.path, str(place)], env=environment(),
        text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    made = Nursery(process, random.Random(seed))
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield made
    finally:
        while made.alive:
            made.kill()
        process.kill()
        process.communicate()


def noted(place: Path, what: str) -> list[int]:
    file = place / what
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def look(stock: Stock, place: Path, known: int) -> int:
    """At the store, and at what was stored behind the first `known`; returns how much that is."""
    assert not (place / "failed").exists(), (place / "failed").read_text()
    stock.clock.now = time.time()
    stock.store.catch_up()
    report = fsck(stock.store)
    assert not report.damaged and report.counts.keys() <= EXPECTED, report.findings
    stored, removed = noted(place, "stored"), set(noted(place, "removed"))
    lost = [s for s in stored[known:] if s not in removed and stock.sound(tokens(s, 40)) != 10]
    assert lost == []
    return len(stored)


def living(stock: Stock) -> set[tuple[Any, ...]]:
    """Runs that have not expired. Whether others show depends on what came in first: one whose
    prefix went before it came is not put in its place any more."""
    return {run for run in stock.runs() if run[6] > stock.clock.now * 1000}


def examine(stock: Stock, place: Path) -> int:
    """Looks for everything and at all indexes while nobody is alive; returns how much there is."""
    look(stock, place, 0)
    stored = set(noted(place, "stored"))
    begun = stored & set(noted(place, "removed"))
    assert [s for s in begun if stock.sound(tokens(s, 40)) not in (3, 10)] == []
    for n in range(HOSTS):
        host = stock.another(index=str(place / f"h{n}"))
        assert index_faults(host.store.index) == []
        assert living(host) == living(stock)
        host.store.close()
    return len(stored)


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(STORES))
def test_killed_a_hundred_times(ram_dir: Path, seed: int) -> None:
    place = ram_dir / "place"
    place.mkdir()
    stock = Stock.make(
        ram_dir / "store", clock=Clock(time.time()), index=str(ram_dir / "looker"),
        grace_seconds=0.2, segment_bytes=1 << 17, classes={"brief": 1, "chatbot": 86_400},
    )  # fmt: skip
    Limits(clean_share=0.8, copy_rate=None, remove_rate=None).save(stock.store.backend)
    found = known = 0
    with nursery(stock, place, seed) as made:
        for kill in range(1, KILLS + 1):
            while len(made.alive) < ALIVE:
                made.start()
            time.sleep(made.rng.random() * 0.08)
            made.kill()
            with made.held():
                known = look(stock, place, known)
            if kill % BATCH == 0:
                while made.alive:
                    made.kill()
                found = examine(stock, place)
    assert found > KILLS
    assert sum(noted(place, "moved")) > KILLS and len(noted(place, "taken")) > KILLS // 50
    stock.close()
