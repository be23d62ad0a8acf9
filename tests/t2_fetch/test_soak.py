"""64 clients that fetch, cancel and die, and a fetcher that is killed again and again."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from kvfs.errors import BackendError
from kvfs.fetcher import launch
from kvfs.testing.stock import Stock
from tests.t2_fetch import soak_client
from tests.t2_fetch.conftest import end
from tests.t2_fetch.test_fetcher import eventually, unused

SCRIPT = Path(soak_client.__file__)
LIMIT = soak_client.ARENA_BYTES + (200 << 20)


class Soak:
    """Client processes, and what happens to them."""

    def __init__(self, stock: Stock, processes: int, threads: int, seed: int) -> None:
        self.stock = stock
        self.threads = threads
        self.rng = random.Random(seed)
        self.started = 0
        self.largest = 0
        self.counted: dict[int, dict[str, int]] = {}  # by fetcher, as it was last seen
        self.clients = [self._client() for _ in range(processes)]

    def _client(self) -> subprocess.Popen[str]:
        self.started += 1
        command = [sys.executable, SCRIPT, self.stock.store.path, self.threads, self.started]
        return subprocess.Popen(
            [str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def kill_a_client(self) -> None:
        i = self.rng.randrange(len(self.clients))
        self.clients[i].kill()
        self._bury(self.clients[i])
        self.clients[i] = self._client()

    def kill_the_fetcher(self) -> bool:
        """Kills the fetcher if there is one that has done something; says whether."""
        pid = self.fetcher()
        if not self.counted.get(pid, {}).get("blocks_delivered"):
            return False
        os.kill(pid, signal.SIGKILL)
        return True

    def fetcher(self) -> int:
        """The pid of the fetcher, whose memory and counters are looked at; 0 if there is none."""
        client = launch.find(self.stock.store.uuid)
        if client is None:
            return 0
        with client, contextlib.suppress(BackendError):
            self.largest = max(self.largest, _resident(client.fetcher_pid))
            self.counted[client.fetcher_pid] = client.stats()
        return client.fetcher_pid

    def seen(self, counter: str) -> int:
        """What all fetchers have counted."""
        return sum(counted.get(counter, 0) for counted in self.counted.values())

    @property
    def enough(self) -> bool:
        """Blocks were delivered, and deadlines came first."""
        return bool(self.seen("blocks_delivered") and self.seen("expired"))

    def finish(self) -> Counter[str]:
        """Ends the clients; what they have seen together."""
        seen: Counter[str] = Counter()
        for process in self.clients:
            assert process.stdin
            process.stdin.close()
        for process in self.clients:
            assert process.stdout
            said = process.stdout.read()
            assert process.wait(30) == 0, said
            process.stdout.close()
            found = json.loads(said.splitlines()[-1])
            assert not found.pop("wrong") and not found.pop("stuck")
            seen["slowest"] = max(seen["slowest"], found.pop("slowest"))
            seen.update(found)
        return seen

    def _bury(self, process: subprocess.Popen[str]) -> None:
        process.wait()
        assert process.stdin and process.stdout
        process.stdin.close()
        process.stdout.close()

    def abandon(self) -> None:
        for process in self.clients:
            if process.poll() is None:
                process.kill()
            self._bury(process)


def _resident(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(x.split()[1]) << 10 for x in text.splitlines() if x.startswith("VmRSS")), 0)


def soak(stock: Stock, seconds: float, every: float, *, processes: int, threads: int) -> None:
    for n in range(soak_client.PROMPTS):
        assert stock.put(soak_client.prompt_of(n)).error is None
    stock.store.flush_counters()
    run = Soak(stock, processes, threads, seed=1)
    killed = clients = 0
    try:
        began = time.monotonic()
        fetcher_dies = client_dies = began + every
        while (passed := time.monotonic() - began) < seconds or (
            passed < 5 * seconds and not (killed and clients and run.enough)
        ):
            time.sleep(0.1)
            if time.monotonic() >= fetcher_dies and run.kill_the_fetcher():
                killed += 1
                fetcher_dies = time.monotonic() + every
            if time.monotonic() >= client_dies:
                run.kill_a_client()
                clients += 1
                client_dies = time.monotonic() + every / 2
            run.fetcher()
        seen = run.finish()
    finally:
        run.abandon()
        client = launch.find(stock.store.uuid)
    assert killed and clients and run.enough
    # Of those that were alive at the end; what the others saw went with them.
    assert seen["whole"]
    allowed = {"whole", "cancelled", "deadline", "fetcher gone", "arena full", "busy", "slowest"}
    assert set(seen) <= allowed | {"blocks", "fetcher silent"}, seen
    # 64 busy interpreters on two cores: what is left is the wait for a turn, not for a fetcher,
    # which a client that was stuck would wait for as long as the test goes on.
    assert seen["slowest"] < seconds / 2, "a client waited for longer than its deadline"
    assert run.largest < LIMIT
    if client is not None:
        with client:
            eventually(lambda: unused(client))
            stats = client.evict()
            assert stats["arena_free_bytes"] == stats["arena_bytes"], stats
            assert _resident(client.fetcher_pid) < LIMIT
        end(client.fetcher_pid)


@pytest.mark.posix("what it gets done in its time is the stand-in's")
def test_soak_for_ten_seconds(stock: Stock) -> None:
    soak(stock, 10, 2, processes=4, threads=4)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_soak_for_a_minute(stock: Stock) -> None:
    soak(stock, 60, 5, processes=8, threads=8)
