"""Writers that are killed at any instant: what they were told is stored is stored, and right.

Writers are forked, since an interpreter takes longer to start than they live. Each notes in a pipe
what was acknowledged. Some are killed a moment after their start, while they open the store, others
a moment after they have stored something; in half of the rounds somebody else has the index open,
in the others the next to open it has to look it through.
"""

from __future__ import annotations

import itertools
import os
import random
import select
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.repair.fsck import fsck
from kvfs.repair.rebuild import rebuild
from kvfs.store import Store
from kvfs.testing import children
from kvfs.testing.indexcheck import index_faults
from kvfs.testing.stock import START, Stock, tokens

BLOCK = 4
ROUNDS, WRITERS = 50, 4
# What the killed leave behind; none of it is lost or wrong.
LEFT_BEHIND = {"unsealed", "orphan", "strange", "copy", "hole"}

Prompt = tuple[int, ...]


class Acknowledged:
    """What writers were told, as read from their pipes."""

    def __init__(self) -> None:
        self.stored: set[Prompt] = set()
        self.going: set[Prompt] = set()
        """Removal had begun."""
        self.gone: set[Prompt] = set()

    def note(self, lines: str, seed: int) -> None:
        """Takes what a writer wrote: on each line a sign and the number of a prompt."""
        prompts = prompts_of(seed)
        known: list[Prompt] = []
        for line in lines.split("\n")[:-1]:
            target = {"+": self.stored, "r": self.going, "-": self.gone}[line[0]]
            while int(line[1:]) >= len(known):
                known.append(next(prompts))
            target.add(known[int(line[1:])])


def prompts_of(seed: int) -> Iterator[Prompt]:
    """What one writer stores, in order: a conversation that grows and branches, and short ones of
    its own. The first blocks are shared by all writers of a round."""
    rng = random.Random(seed)
    tree = [tokens(seed // WRITERS, 6 * BLOCK)]
    for n in itertools.count():
        if n % 5 == 4:
            prompt = tokens(1000 + 100 * seed + n // 5, BLOCK * rng.randrange(1, 6))
        else:
            start = rng.choice(tree[-100:])
            keep = BLOCK * rng.randrange(1, len(start) // BLOCK + 1)
            prompt = start[:keep] + tokens(rng.randrange(10**6), BLOCK * rng.randrange(1, 9))
            tree.append(prompt)
        yield tuple(prompt)


def writer(place: Path, seed: int, pipe: int) -> Callable[[], None]:
    """Stores its prompts; takes some of those that are only its own away again."""

    def work() -> None:
        store = Store.open(place / "store", index=str(place / "index"), clock=lambda: START)
        stock = Stock(store, store.namespaces()[0], None)  # type: ignore[arg-type]
        for n, prompt in enumerate(prompts_of(seed)):
            if stock.put(list(prompt)).complete:
                os.write(pipe, f"+{n}\n".encode())
            if n % 10 == 9:
                os.write(pipe, f"r{n}\n".encode())
                store.remove(stock.ns, list(prompt))
                os.write(pipe, f"-{n}\n".encode())
            if n % 16 == 7:
                store.touch(stock.ns, list(prompt))

    return work


def kill_some(place: Path, turn: int, rng: random.Random, told: Acknowledged) -> list[int]:
    """Starts writers and kills each at an instant of its own; returns how many lines they wrote."""
    running: dict[int, tuple[int, float | None, int]] = {}  # pipe -> pid, when to kill, seed
    for number in range(WRITERS):
        seed = turn * WRITERS + number
        reader, pipe = os.pipe()
        pid = children.start(writer(place, seed, pipe))
        os.close(pipe)
        at_start = number % 2 == 0
        kill_at = time.monotonic() + rng.uniform(0, 0.06) if at_start else None
        running[reader] = (pid, kill_at, seed)
    written: dict[int, str] = dict.fromkeys(running, "")
    while running:
        due = [when for _, when, _ in running.values() if when is not None]
        timeout = max(0.0, min(due) - time.monotonic()) if due else None
        for reader in select.select(list(running), [], [], timeout)[0]:
            data = os.read(reader, 1 << 16).decode()
            written[reader] += data
            pid, when, seed = running[reader]
            assert data, f"writer {seed} ended by itself: {children.wait(pid)}"
            if when is None:  # it has begun: from now on any instant is as good
                running[reader] = pid, time.monotonic() + rng.uniform(0, 0.04), seed
        for reader, (pid, when, seed) in list(running.items()):
            if when is not None and when <= time.monotonic():
                os.kill(pid, signal.SIGKILL)
                assert children.wait(pid) == -signal.SIGKILL
                while data := os.read(reader, 1 << 16).decode():
                    written[reader] += data
                os.close(reader)
                told.note(written[reader], seed)
                del running[reader]
    return [text.count("\n") for text in written.values()]


def look_at_all(stock: Stock, told: Acknowledged) -> Counter[str]:
    """Compares what is found with what was told; nothing that is delivered may be wrong."""
    seen: Counter[str] = Counter()
    for prompt in told.stored:
        found, whole = stock.good(list(prompt)), len(prompt) // BLOCK
        if prompt in told.gone:
            assert found == 0, f"removed, and found again: {prompt}"
        elif prompt not in told.going:
            assert found == whole, f"acknowledged: {whole} blocks; found: {found} of {prompt}"
        seen["whole" if found == whole else "gone"] += 1
    assert index_faults(stock.store.index) == []
    return seen


@pytest.mark.crash
@pytest.mark.timeout(300)
@pytest.mark.parametrize("durability", ["none", "batch"])
def test_writers_that_are_killed(place: Path, durability: str) -> None:
    seed = 2024 + len(durability)
    print(f"seed {seed}")
    rng = random.Random(seed)
    made = Stock.make(
        place / "store", index=str(place / "index"), durability=durability, map_bytes=1 << 20,
        segment_bytes=1 << 17,
    )  # fmt: skip
    nsid = made.ns.nsid
    made.close()
    told, kills, early = Acknowledged(), 0, 0

    def open_again() -> Stock:
        store = Store.open(place / "store", index=str(place / "index"), clock=lambda: START)
        return Stock(store, store.namespace(nsid), None)  # type: ignore[arg-type]

    for turn in range(ROUNDS // 2):
        holder = open_again() if turn % 2 else None
        lines = kill_some(place, turn, rng, told)
        kills += len(lines)
        early += lines.count(0)
        if holder is not None:
            look_at_all(holder, told)
            holder.store.close()
    assert kills == ROUNDS // 2 * WRITERS and early < kills
    stock = open_again()
    seen = look_at_all(stock, told)
    assert seen["whole"] > 100 and told.gone
    before = {p: stock.stored(list(p)) for p in told.stored}
    report = fsck(stock.store)
    assert set(report.counts) <= LEFT_BEHIND, [str(f) for f in report.findings]

    rebuild(stock.store, source="journals")
    assert {p: stock.stored(list(p)) for p in told.stored} == before
    look_at_all(stock, told)
    rebuild(stock.store, source="segments")  # which know nothing of what was removed
    found = {p: stock.good(list(p)) for p in told.stored}
    assert all(found[p] >= n for p, n in before.items())
    assert index_faults(stock.store.index) == []
    assert all(stock.put(list(p)).complete for p in told.stored)
    assert all(stock.good(list(p)) == len(p) // BLOCK for p in told.stored)
    stock.store.close()
