"""What the segments of a store hold that is still of use, and which of them are worth cleaning.

Read from the index, sizes from the files. Nothing is changed here.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvfs.gc.expiry import Expiry
from kvfs.index.schema import LIVE, Run, Segment


@dataclass(frozen=True, slots=True)
class Occupied:
    """A segment in use."""

    segment: Segment
    bytes: int
    """Size of its file."""
    runs: tuple[Run, ...]
    """Those that must not go: visible, not expired."""

    @property
    def live_bytes(self) -> int:
        """Room that the runs take, here or wherever they are copied: where each begins an extent of
        its own, what it leaves of its last one is no more to be won than the rest."""
        return sum(map(self.segment.geometry.room, (run.count for run in self.runs)))

    @property
    def share(self) -> float:
        """The part of the file that is in use, 0 to 1."""
        return min(1.0, self.live_bytes / self.bytes) if self.bytes else 0.0


def occupied(expiry: Expiry) -> list[Occupied]:
    """All segments in use whose files are there."""
    index = expiry.store.index
    out = []
    for segment in index.segments():
        if segment.state != LIVE:
            continue
        size = expiry.size(segment.path)
        if size:
            limit = expiry.limit(segment)
            runs = tuple(r for r in index.runs_of(segment.number) if r.expires_ms > limit)
            out.append(Occupied(segment, size, runs))
    return out


def worth_cleaning(segments: list[Occupied], below: float, enough: int | None) -> list[Occupied]:
    """The segments to be copied forward, the least used first.

    below: share from which on it does not pay; enough: bytes to be won, None: all there are.
    """
    chosen = []
    for s in sorted(segments, key=lambda s: s.share):
        if s.share >= below or (enough is not None and enough <= 0):
            break
        chosen.append(s)
        enough = None if enough is None else enough - (s.bytes - s.live_bytes)
    return chosen
