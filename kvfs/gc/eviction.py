"""Which runs go where a store, a namespace or a tenant is above its limit: the longest unused.

A run was last used when its expiry was last set: that is what a put, a touch and a hit do. Whole
runs go, leaves first: one that other runs follow is as recent as the most recent of those, so no
suffix is ever left without its prefix. What has been renewed, or got a follower, since it was
chosen is spared: that is looked at again in the transaction that takes it out of sight (REMOVE).

Choosing reads the index and holds a few hundred bytes for each run; it looks at each block of the
store once, some microseconds per thousand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from kvfs.frames import Entry
from kvfs.index.apply import Applier
from kvfs.index.schema import Run
from kvfs.removal import heard_ms, holders, path_heads, removal_of
from kvfs.store import Store

_BATCH = 500


@dataclass(frozen=True, slots=True)
class Evicted:
    """Runs of a namespace that went, or would go."""

    namespace: str
    runs: int
    blocks: int
    bytes: int
    unused_ms: int
    """How long the most recent of them had not been used."""


def by_use(store: Store, numbers: Iterable[int], now_ms: int) -> list[tuple[int, Run]]:
    """All live runs of some namespaces (by number), the first to go first, and when each or
    something behind it was last used (ms)."""
    seconds = store.catalog.seconds_by_number()
    runs = [r for n in numbers for r in store.index.all_runs(n) if r.expires_ms > now_ms]
    used = {r.key(): r.expires_ms - seconds.get(r.class_id, 0) * 1000 for r in runs}
    known = holders(runs)
    for run in sorted(runs, key=lambda r: r.block, reverse=True):
        parent = known.get((run.ns, run.parent))
        if parent is not None:
            used[parent.key()] = max(used[parent.key()], used[run.key()])
    return sorted(((used[r.key()], r) for r in runs), key=lambda u: (u[0], -u[1].block, u[1].head))


def choose(
    ordered: Iterable[tuple[int, Run]], room: Callable[[Run], int], need: int
) -> Iterator[tuple[int, Run]]:
    """The runs that have to go for `need` bytes. room: bytes that one takes."""
    for used, run in ordered:
        if need <= 0:
            return
        yield used, run
        need -= room(run)


def evict(store: Store, chosen: list[Run], now_ms: int) -> list[Run]:
    """Takes runs out of sight, in the order given; returns those that went.

    Raises BackendError, SpaceError, IndexFault.
    """
    gone: list[Run] = []
    numbers = {ns.number: ns for ns in store.namespaces()}
    known = holders(chosen)
    when_ms = heard_ms(store.index, now_ms)
    runs = iter(chosen)
    while batch := list(islice(runs, _BATCH)):
        here: list[Run] = []

        def decide(
            applier: Applier, batch: list[Run] = batch, here: list[Run] = here
        ) -> list[Entry]:
            here.clear()
            entries: list[Entry] = []
            heads: set[bytes] = set()
            for run in batch:
                if _unchanged(applier, run, heads):
                    heads.add(run.head)
                    here.append(run)
                    path = path_heads(run, known)
                    entries.append(removal_of(numbers[run.ns], run, 0, path, when_ms))
            return entries

        store.writer().publish_checked(decide)
        gone += here
    counts = Counter({f"evicted_blocks.{numbers[n].name}": 0 for n in {r.ns for r in gone}})
    for run in gone:
        counts[f"evicted_blocks.{numbers[run.ns].name}"] += run.count
    store.index.count({**counts, "evicted_blocks": counts.total()} if gone else {})
    return gone


def _unchanged(applier: Applier, run: Run, going: set[bytes]) -> bool:
    """A run is as it was when it was chosen, and only runs that go follow it."""
    now = applier.run(run.ns, run.head)
    if now is None or (now.seg, now.slot, now.count) != (run.seg, run.slot, run.count):
        return False
    if now.expires_ms != run.expires_ms:
        return False
    for i in range(run.count):
        for child in applier.children(run.ns, run.hash(i), len(going) + 1):
            if child.head not in going and child.block > run.block:
                return False
    return True
