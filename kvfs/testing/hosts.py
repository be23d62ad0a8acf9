"""A host of a fleet as a process: it puts, follows the others, and notes when it finds theirs.

    python -m kvfs.testing.hosts STORE INDEX NUMBER HOSTS PUTS

All hosts of a fleet are numbered from 0 and know which prompts the others will put. Each prints one
JSON object at the end: "put": {seed: time}, when a put returned; "seen": {seed: time}, when check
found it here; "whole": {seed: time}, when a fetch delivered all of it; "reasons": {reason: times},
why a fetch delivered less; "slowest": seconds of the slowest put, check and fetch. A wrong byte
ends the process with an error.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from typing import Any

from kvfs.follow.following import Following
from kvfs.store import Store
from kvfs.testing.command import environment
from kvfs.testing.stock import Clock, Stock, tokens

TOKENS = 40
LIMIT_SECONDS = 60.0
PAUSE_SECONDS = 0.1


def seed_of(host: int, i: int) -> int:
    return host * 10_000 + i


class Host:
    """One of `hosts`; puts `puts` prompts and waits for as many of each of the others."""

    def __init__(self, store: Store, number: int, hosts: int, puts: int) -> None:
        self.stock = Stock(store, store.namespaces()[0], Clock())
        self.number = number
        self.puts = puts
        self.others = [n for n in range(hosts) if n != number]
        self.rng = random.Random(number)
        self.slowest = {"put": 0.0, "check": 0.0, "fetch": 0.0}
        self.put_at: dict[int, float] = {}
        self.seen: dict[int, float] = {}
        self.whole: dict[int, float] = {}
        self.reasons: Counter[str] = Counter()

    def timed(self, what: str, work: Any) -> Any:
        start = time.monotonic()
        result = work()
        self.slowest[what] = max(self.slowest[what], time.monotonic() - start)
        return result

    def put(self) -> None:
        seed = seed_of(self.number, len(self.put_at))
        result = self.timed("put", lambda: self.stock.put(tokens(seed, TOKENS)))
        if result.error is not None:
            raise result.error
        self.put_at[seed] = time.time()

    def look(self) -> None:
        """At the next prompt of every other host, and at what could not be read yet."""
        for host in self.others:
            done = sum(s // 10_000 == host for s in self.seen)
            if done < self.puts:
                self._look(seed_of(host, done))
        for seed in self.seen.keys() - self.whole.keys():
            self._fetch(seed)

    def _look(self, seed: int) -> None:
        if self.timed("check", lambda: self.stock.stored(tokens(seed, TOKENS))):
            self.seen[seed] = time.time()

    def _fetch(self, seed: int) -> None:
        blocks, reason = self.timed("fetch", lambda: self.stock.fetch(tokens(seed, TOKENS)))
        if blocks == TOKENS // 4:
            self.whole[seed] = time.time()
        else:
            self.reasons[reason or f"{blocks} blocks"] += 1

    def run(self) -> None:
        due, end = time.monotonic(), time.monotonic() + LIMIT_SECONDS
        wanted = len(self.others) * self.puts
        while len(self.whole) < wanted or len(self.put_at) < self.puts:
            now = time.monotonic()
            if now > end:
                break
            if now >= due and len(self.put_at) < self.puts:
                self.put()
                due = now + self.rng.random() * 2 * PAUSE_SECONDS
            self.look()
            time.sleep(0.005)

    def told(self) -> str:
        return json.dumps(
            {
                "put": self.put_at,
                "seen": self.seen,
                "whole": self.whole,
                "reasons": self.reasons,
                "slowest": self.slowest,
            }  # fmt: skip
        )


def start(
    store: str, index: str, number: int, hosts: int, puts: int, *, name: str | None = None
) -> subprocess.Popen[str]:
    """Starts a host; it begins once a line is written to its input.

    name: its host name, in a namespace of its own (needs root); None: that of this machine.
    """
    words = [sys.executable, "-m", "kvfs.testing.hosts", store, index]
    if name is not None:
        words = ["unshare", "--uts", "sh", "-c", f'hostname {name} && exec "$@"', "sh", *words]
    return subprocess.Popen(
        [*words, *map(str, (number, hosts, puts))], env=environment(), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def main() -> None:
    path, index, *numbers = sys.argv[1:]
    with Store.open(path, index=index) as store:
        host = Host(store, *map(int, numbers))
        host.stock.sound(tokens(0, TOKENS))  # loads what the first fetch needs
        print("ready", flush=True)
        sys.stdin.readline()
        with Following(store):
            host.run()
        print(host.told(), flush=True)
        sys.stdin.readline()  # files are sealed only when all are done


if __name__ == "__main__":
    main()
