"""Writers, followers and collectors of three hosts are killed five hundred times.

After every fifty the store is sound, the index of each host too, and every block whose storing was
acknowledged and whose time is not over is found and right, unless its removal had begun.
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

import pytest

from kvfs.repair.fsck import fsck
from kvfs.testing.command import environment
from kvfs.testing.indexcheck import index_faults
from kvfs.testing.stock import Clock, Stock, tokens

KILLS, BATCH, ALIVE, HOSTS = 500, 50, 5, 3
ROLES = ("write", "write", "follow", "collect", "checkpoint")
# Left by those who were killed; nothing of it is lost or wrong.
EXPECTED = {"unsealed", "dropped", "orphan", "unfinished", "checkpoint", "behind", "strange"}

# Starts processes by fork, because an interpreter takes longer to start than they live.
NURSERY = """
import os, random, signal, sys, time
from kvfs.follow import checkpoint
from kvfs.errors import BusyError
from kvfs.follow.following import Following
from kvfs.repair.fsck import fsck
from kvfs.gc.collector import Collector
from kvfs.follow.history import prune
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
    time.sleep(0.005)
    if not brief:
        note("stored", seed)
    if i % 10 == 9:
        note("removed", seed - 5)
        stock.store.remove(stock.ns, tokens(seed - 5, 40), from_block=3)

def follow(stock, number, i):
    if i == 0:
        stock.following = Following(stock.store, interval=0.01)
    stock.following.turn()

def collect(stock, number, i):
    try:
        Collector(stock.store, force=True).run()
    except BusyError:
        time.sleep(0.01)

def write_checkpoint(stock, number, i):
    store = stock.store
    name = store.writer().name
    store.catch_up()
    checkpoint.write(store.backend, store.index, name, store.now_ms())
    prune(store.backend, store.uuid, store.now_ms(), 0, 0)
    time.sleep(0.02)

WORK = {"write": write, "follow": follow, "collect": collect, "checkpoint": write_checkpoint}

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
            import traceback
            note("failed", f"{role} {number}: " + traceback.format_exc())
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

    def kill(self) -> None:
        pid = self.alive.pop(self.rng.randrange(len(self.alive)))
        os.kill(pid, signal.SIGKILL)
        while os.path.exists(f"/proc/{pid}"):
            time.sleep(0.001)


@contextmanager
def nursery(stock: Stock, place: Path) -> Iterator[Nursery]:
    process = subprocess.Popen(
        [sys.executable, "-c", NURSERY, stock.store.path, str(place)], env=environment(),
        text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    made = Nursery(process, random.Random(11))
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield made
    finally:
        while made.alive:
            made.kill()
        process.kill()
        process.communicate()


def noted(place: Path, what: str) -> set[int]:
    file = place / what
    return {int(line) for line in file.read_text().split()} if file.exists() else set()


def examine(stock: Stock, place: Path) -> int:
    """Looks at the store and all indexes while nobody is alive; returns how many were found."""
    assert not (place / "failed").exists(), (place / "failed").read_text()
    stock.clock.now = time.time()
    stock.store.catch_up()
    stored, removed = noted(place, "stored"), noted(place, "removed")
    lost = [s for s in stored - removed if stock.sound(tokens(s, 40)) != 10]
    assert lost == []
    assert [s for s in removed if stock.sound(tokens(s, 40)) not in (3, 10)] == []
    report = fsck(stock.store)
    assert not report.damaged and report.counts.keys() <= EXPECTED, report.findings
    for n in range(HOSTS):
        host = stock.another(index=str(place / f"h{n}"))
        assert index_faults(host.store.index) == []
        assert host.runs() == stock.runs()
        host.store.close()
    return len(stored)


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.timeout(240)
def test_killed_five_hundred_times(ram_dir: Path) -> None:
    place = ram_dir / "place"
    place.mkdir()
    stock = Stock.make(
        ram_dir / "store", clock=Clock(time.time()), index=str(ram_dir / "looker"),
        grace_seconds=0.2, segment_bytes=1 << 18, classes={"brief": 1, "chatbot": 86_400},
    )  # fmt: skip
    found = 0
    with nursery(stock, place) as made:
        for kill in range(1, KILLS + 1):
            while len(made.alive) < ALIVE:
                made.start()
            time.sleep(made.rng.random() * 0.08)
            made.kill()
            if kill % BATCH == 0:
                while made.alive:
                    made.kill()
                found = examine(stock, place)
    assert found > KILLS
    stock.close()
