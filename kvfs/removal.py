"""Which journal entries renew or remove what: shared by the library, kvctl, the mount and gc.

Reads the index only. Removal always takes what follows in the chain as well: a suffix without its
prefix can never be hit and would only take room.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from kvfs.catalog import TtlClass
from kvfs.chain import HASH_BYTES
from kvfs.chain_entries import BLOCKS, LISTING, KeepEntry, RemoveEntry
from kvfs.frames import CutEntry, Entry, shortened
from kvfs.index import Index
from kvfs.index.apply import CLOCKS_MS, NEWEST, Applier
from kvfs.index.schema import Run
from kvfs.index.told import after_all_told
from kvfs.namespace import Namespace

_FEW = 4


def few(heads: bytes) -> bytes:
    """The first and the nearest of path heads: enough to find a block by, where many are told."""
    return shortened(heads, _FEW)


class Holders(dict[tuple[int, bytes], Run]):
    """(namespace, hash of a block that runs follow) -> the run that holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: dict[tuple[int, bytes], bytes] = {}
        """(namespace, first hash) of a run -> its path heads, as `path_heads` has found them."""


def holders(runs: Iterable[Run]) -> Holders:
    """Which of these runs hold the blocks that others of them follow."""
    runs = list(runs)
    wanted = {(r.ns, r.parent) for r in runs if r.block}
    hashes = {h for _, h in wanted}
    found = Holders()
    for run in runs:
        data = run.hashes
        for at in range(0, len(data), HASH_BYTES):
            if data[at : at + HASH_BYTES] in hashes:
                found[run.ns, data[at : at + HASH_BYTES]] = run
    return found


def path_heads(run: Run, known: Holders) -> bytes:
    """The path heads of a run, as far as they are among the `holders` known, 16 bytes each.

    Of a chain each run is looked at once, for all of them together.
    """
    way = [run]
    while (path := known.paths.get((way[-1].ns, way[-1].head))) is None:
        at = way[-1]
        parent = known.get((at.ns, at.parent)) if at.block else None
        if parent is None or parent.block >= at.block:  # only keys of an engine run in circles
            path = known.paths[at.ns, at.head] = b""
            break
        way.append(parent)
    for above, below in zip(way[:0:-1], way[-2::-1], strict=True):
        path = known.paths[below.ns, below.head] = few(path + above.head)
    return path


def renewals_for(
    index: Index, ns: Namespace, heads: list[bytes], ttl: TtlClass | None,
    class_names: dict[int, str], classes: dict[str, int], now_ms: int,
) -> list[Entry]:  # fmt: skip
    """KEEP entries for runs, each by its own class or all by `ttl`."""
    out: list[Entry] = []
    held = [index.holding(ns.number, head)[0] for head in heads]
    runs = list({run.head: run for run in held if run is not None}.values())
    known, when_ms = holders(runs), heard_ms(index, now_ms)
    for run in runs:
        own = class_names.get(run.class_id, "")
        seconds = classes.get(own, 0) if ttl is None else ttl.seconds
        name = "" if ttl is None or ttl.name == own else ttl.name
        expires = now_ms + seconds * 1000
        entry = KeepEntry(
            ns.nsid, expires, max(when_ms, run.written_ms), run.block, name, ttl is not None,
            path_heads(run, known), run.hashes,
        )  # fmt: skip
        out.append(entry)
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


def heard_ms(index: Index, now_ms: int) -> int:
    """A time for what is told of blocks: now, and not before any run that this host has heard of,
    whatever the clock of its writer. By that other hosts know which copies are meant."""
    newest = index.query(lambda a: a.meta_int(NEWEST))
    return min(max(now_ms, newest), now_ms + CLOCKS_MS)


def removal_of(ns: Namespace, run: Run, first: int, heads: bytes, when_ms: int) -> RemoveEntry:
    """The REMOVE of a run's blocks from `first` on. heads: of the run; when_ms: at the earliest."""
    if first:
        heads += run.head
    hashes = run.hashes[first * HASH_BYTES :]
    when_ms = max(when_ms, run.written_ms)  # by a clock that is ahead, or after one told by such
    return RemoveEntry(ns.nsid, when_ms, run.block + first, few(heads), hashes)


def removals_for(
    index: Index, ns: Namespace, head: bytes, keep: int, now_ms: int, heads: bytes = b""
) -> tuple[list[Entry], int]:
    """REMOVE entries for a run behind its first `keep` blocks and for all that follows, and how
    many blocks that takes out of sight. head: as for Index.holding; `keep` counts from there;
    heads: path heads of the run, if they are known."""
    run, place = index.holding(ns.number, head)
    keep += place
    if run is None or keep >= run.count:
        return [], 0
    below = descendants(index, ns, run, keep)
    known, when = holders([run, *below]), heard_ms(index, now_ms)
    # What follows first: it is found from what it follows.
    below.sort(key=lambda r: r.block, reverse=True)
    entries: list[Entry] = [
        removal_of(ns, r, 0, few(heads + path_heads(r, known)), when) for r in below
    ]
    entries.append(removal_of(ns, run, keep, heads, when))
    return entries, run.count - keep + sum(r.count for r in below)


def removals_for_all(
    index: Index, ns: Namespace, now_ms: int, *, whole: bool = False, batch: int = 1000
) -> Iterator[tuple[list[Entry], int]]:
    """REMOVE entries for all runs of a namespace, in batches, each with its number of blocks; at
    the end one for what other hosts hold of it that was not heard of here.

    whole: the namespace itself goes, too.
    """
    runs, written = index.all_runs(ns.number), 0
    while some := list(islice(runs, batch)):
        when = heard_ms(index, now_ms)
        entries: list[Entry] = [removal_of(ns, run, 0, b"", when) for run in some]
        yield entries, sum(run.count for run in some)
        written = max(written, *(run.written_ms for run in some))
    when = max(heard_ms(index, now_ms), written)
    yield [of_namespace(index, ns.nsid, LISTING if whole else BLOCKS, when)], 0


def of_namespace(index: Index, nsid: bytes, what: int, when_ms: int) -> RemoveEntry:
    """The REMOVE of a whole namespace, which counts over all that was told of it before.

    what: see kvfs.chain_entries; when_ms: at the earliest.
    """

    def after(applier: Applier) -> int:
        number = applier.namespace(nsid)
        return when_ms if number is None else max(when_ms, after_all_told(applier, number))

    return RemoveEntry(nsid, index.query(after), what)


def cuts_for(
    index: Index, ns: Namespace, head: bytes, keep: int, now_ms: int
) -> tuple[list[Entry], int]:
    """CUT entries for a run behind its first `keep` blocks and for all that follows, and how many
    blocks that takes out of sight: of this copy alone, which is bad; others may be sound. head: as
    for Index.holding; `keep` counts from there."""
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
