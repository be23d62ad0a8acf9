"""Which journal entries renew or remove what: shared by the library, kvctl, the mount and gc.

Reads the index only. Removal always takes what follows in the chain as well: a suffix without its
prefix can never be hit and would only take room.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from kvfs.catalog import TtlClass
from kvfs.frames import CutEntry, Entry, RenewEntry
from kvfs.index import Index
from kvfs.index.schema import Run
from kvfs.namespace import Namespace


def renewals_for(
    index: Index, ns: Namespace, heads: list[bytes], ttl: TtlClass | None,
    class_names: dict[int, str], classes: dict[str, int], now_ms: int,
) -> list[Entry]:  # fmt: skip
    """RENEW entries for runs, each by its own class or all by `ttl`."""
    out: list[Entry] = []
    for head in heads:
        run, _ = index.holding(ns.number, head)
        if run is None:
            continue
        own = class_names.get(run.class_id, "")
        seconds = classes.get(own, 0) if ttl is None else ttl.seconds
        name = "" if ttl is None or ttl.name == own else ttl.name
        expires = now_ms + seconds * 1000
        out.append(RenewEntry(ns.nsid, run.head, expires, now_ms, name, ttl is not None))
    return out


def descendants(index: Index, ns: Namespace, run: Run, keep: int) -> list[Run]:
    """The runs that follow the blocks of `run` from block `keep` on, at any depth."""
    out: list[Run] = []
    queue = [(run, keep)]
    seen = {run.head}
    while queue:
        at, first = queue.pop()
        for i in range(first, at.count):
            for head in index.children(ns.number, at.hash(i)):
                child = None if head in seen else index.run(ns.number, head)
                if child is not None:
                    seen.add(head)
                    out.append(child)
                    queue.append((child, 0))
    return out


def cuts_for(
    index: Index, ns: Namespace, head: bytes, keep: int, now_ms: int
) -> tuple[list[Entry], int]:
    """CUT entries for a run behind its first `keep` blocks and for all that follows, and how many
    blocks that takes out of sight. head: as for Index.holding; `keep` counts from there."""
    run, place = index.holding(ns.number, head)
    keep += place
    if run is None or keep >= run.count:
        return [], 0
    cut = [(run, keep), *((r, 0) for r in descendants(index, ns, run, keep))]
    entries: list[Entry] = []
    for r, first in cut:
        segment = index.segment(r.seg).segment
        count = r.count - first
        entries.append(CutEntry(ns.nsid, segment, r.slot + first, count, now_ms))
    return entries, sum(r.count - first for r, first in cut)


def cuts_for_all(
    index: Index, ns: Namespace, now_ms: int, batch: int = 1000
) -> Iterator[tuple[list[Entry], int]]:
    """CUT entries for all runs of a namespace, in batches, each with its number of blocks."""
    runs = index.all_runs(ns.number)
    while some := list(islice(runs, batch)):
        entries: list[Entry] = []
        for run in some:
            segment = index.segment(run.seg).segment
            entries.append(CutEntry(ns.nsid, segment, run.slot, run.count, now_ms))
        yield entries, sum(run.count for run in some)
