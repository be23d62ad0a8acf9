"""What has to be told once more before a segment goes: where else its blocks are.

Two writers may have stored the same blocks at once. Each host shows them from one place, whichever
journal it read first, and nothing ever tells one host which place the others chose. Before one of
the places goes, a MOVE without a copy says where the blocks are that this host shows from the
other one: for hosts that did the same it changes nothing.

Reads within the caller's transaction; changes nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kvfs.chain import HASH_BYTES
from kvfs.frames import MoveEntry, RunEntry, Source, shortened
from kvfs.index.apply import Applier
from kvfs.index.placer import Placer
from kvfs.index.schema import LIVE, Run, Segment, common
from kvfs.index.told import was_removed


def restated(
    applier: Applier, segment: Segment, told: Iterable[RunEntry],
    moved: Mapping[tuple[int, bytes], int], now_ms: int,
) -> Iterator[MoveEntry]:  # fmt: skip
    """Yields a MOVE for each stretch of other runs that shows blocks of this segment.

    told: the runs that the segment was written with; moved: runs that go elsewhere at the same
    time, which are told anyway.
    """
    for entry in told:
        at = 0
        for run, first, start in _shown(applier, segment, entry):
            if start < at:
                continue
            shown = common(run.hashes[first * HASH_BYTES :], entry.hashes[start * HASH_BYTES :])
            at = start + shown
            other = run.seg != segment.number and (run.ns, run.head) not in moved
            if shown and other and run.expires_ms > now_ms:
                move = _as_it_is(applier, entry, run, first, start, shown, now_ms)
                if move is not None:
                    yield move


def unheard(applier: Applier, segment: Segment, told: Iterable[RunEntry], limit_ms: int) -> bool:
    """Says whether a segment holds a run that this host seems not to have heard of yet: on a shared
    file system its file may show before the journal that tells of it does."""
    return any(
        entry.expires_ms > limit_ms and not _known(applier, segment, entry) for entry in told
    )


def _known(applier: Applier, segment: Segment, entry: RunEntry) -> bool:
    """Every block of an entry is shown from somewhere, or was taken out of sight."""
    at = 0
    for run, first, start in _shown(applier, segment, entry):
        if start > at:
            break
        at = max(at, start + common(
            run.hashes[first * HASH_BYTES :], entry.hashes[start * HASH_BYTES :]
        ))  # fmt: skip
    return (
        at >= entry.count
        or applier.is_cut(entry.segment, entry.slot + at)
        or was_removed(applier, entry, at)
    )


def _shown(applier: Applier, segment: Segment, entry: RunEntry) -> Iterator[tuple[Run, int, int]]:
    """Yields (visible run, its block, the entry's block) where blocks of an entry are shown."""
    head, _ = applier.holding(segment.ns, entry.hashes[:HASH_BYTES])
    if head is None and entry.block and entry.heads:
        parent = Placer(applier, segment, entry, entry.count).parent_run()
        if parent is not None and entry.block - parent.block < parent.count:
            yield parent, entry.block - parent.block, 0
    for i in range(entry.count):
        hash_ = entry.hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]
        run, place = applier.holding(segment.ns, hash_)
        if run is not None:
            yield run, place, i


def _as_it_is(
    applier: Applier, entry: RunEntry, run: Run, first: int, start: int, shown: int, now_ms: int
) -> MoveEntry | None:
    """A run as it stands, with the entry's slots as a source of the blocks they share."""
    place = applier.segment(run.seg)
    if place is None or place.state != LIVE:
        return None
    sources = [Source(place.segment, run.slot, first)] if first else []
    sources.append(Source(entry.segment, entry.slot + start, shown))
    behind = first + shown
    if behind < run.count:
        sources.append(Source(place.segment, run.slot + behind, run.count - behind))
    heads = b"" if first else entry.heads + (entry.hashes[:HASH_BYTES] if start else b"")
    told = RunEntry(
        entry.nsid, place.segment, run.slot, run.block, run.written_ms, run.expires_ms, run.parent,
        shortened(heads), run.hashes,
    )  # fmt: skip
    return MoveEntry(now_ms, tuple(sources), told)
