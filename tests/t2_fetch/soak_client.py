"""A process of the soak test: threads that fetch at random and look at every byte.

    soak_client.py STORE THREADS SEED

It runs until its standard input ends, and prints what happened as a line of JSON. A wrong byte or a
thread that is stuck ends it with a code that is not 0.
"""

from __future__ import annotations

import collections
import json
import os
import random
import sys
import threading
import time

import numpy as np

from kvfs.chain import PrefixHasher
from kvfs.errors import KvfsError
from kvfs.fetcher.engine import Fetcher
from kvfs.fetcher.launch import Options
from kvfs.fetcher.ticket import Ticket
from kvfs.local import LocalStore

ARENA_BYTES = 48 << 20
PROMPTS = 24
BLOCKS = 80
BLOCK_TOKENS = 16


def prompt_of(n: int) -> list[int]:
    """Prompt n: the second half of every third one is its own, the first that of another."""
    from kvfs.testing.stock import tokens

    own = tokens(n, BLOCK_TOKENS * BLOCKS)
    return own if n % 3 else tokens(n // 3, BLOCK_TOKENS * BLOCKS // 2, own[: len(own) // 2])


class Client(threading.Thread):
    """One of them, with a connection of its own."""

    def __init__(self, store: LocalStore, seed: int) -> None:
        super().__init__(daemon=True)
        self.rng = random.Random(seed)
        self.store = store
        (self.ns,) = store.namespaces()
        self.seen: collections.Counter[str] = collections.Counter()
        self.wrong = ""
        self.stop = False
        self.slowest = 0.0

    def run(self) -> None:
        options = Options(ARENA_BYTES, threads=2, idle_seconds=5)
        with Fetcher(self.store.path, self.store.uuid, options) as fetcher:
            while not self.stop and not self.wrong:
                if not fetcher.ready(0.2):
                    continue
                self.once(fetcher)

    def once(self, fetcher: Fetcher) -> None:
        rng, prompt = self.rng, prompt_of(int(self.rng.triangular(0, PROMPTS, 0)) % PROMPTS)
        hasher = self.ns.hasher(prompt)
        plan = self.store.check(self.ns, hasher)
        deadline = rng.choice([0.005, 0.05, 0.5, 2.0])
        first = rng.choice([0, 0, 0, rng.randrange(plan.hit_blocks)])
        began = time.monotonic()
        ticket = fetcher.fetch(
            self.ns, plan, hasher, deadline=deadline, first=first, priority=rng.choice([0, 0, 3])
        )
        with ticket:
            cancel = rng.random() < 0.2
            if cancel:
                ticket.wait(rng.randrange(30), timeout=rng.random() * 0.02)
            else:
                ticket.wait()
                late = time.monotonic() - began - deadline
                self.slowest = max(self.slowest, late)
            self.look(ticket, hasher)
            if rng.random() < 0.1:  # an engine that takes its time
                time.sleep(rng.random() * 0.1)
                self.look(ticket, hasher)
            self.seen["cancelled" if cancel else ticket.reason.split(":")[0] or "whole"] += 1

    def look(self, ticket: Ticket, hasher: PrefixHasher) -> None:
        """Compares all good blocks."""
        good, first = ticket.good, ticket.first
        lineages = hasher.lineages(first + good, first=first)
        for i in range(good):
            want = np.frombuffer(lineages[16 * i : 16 * i + 16], np.uint8)
            have = np.frombuffer(ticket.payload(first + i), np.uint8).reshape(-1, 16)
            if not (have == want).all() and ticket.held:
                self.wrong = f"block {first + i} of {good} from {first} on is another's"
                return
        self.seen["blocks"] += good


def main() -> None:
    store = LocalStore.open_index(sys.argv[1])
    assert store is not None
    clients = [Client(store, int(sys.argv[3]) * 1000 + i) for i in range(int(sys.argv[2]))]
    for client in clients:
        client.start()
    print("ready", flush=True)
    sys.stdin.read()
    for client in clients:
        client.stop = True
    for client in clients:
        client.join(20)
    stuck = sum(client.is_alive() for client in clients)
    seen = sum((client.seen for client in clients), collections.Counter())
    wrong = [client.wrong for client in clients if client.wrong]
    slowest = max(client.slowest for client in clients)
    print(json.dumps({**seen, "wrong": wrong, "stuck": stuck, "slowest": slowest}), flush=True)
    os._exit(1 if wrong or stuck else 0)


if __name__ == "__main__":
    try:
        main()
    except KvfsError as e:
        sys.exit(f"{e}")
