"""The copy zone: how a sequence that is being decoded always has a whole slot to leave behind.

A step may carry a sequence past a block boundary by a few tokens, and soon the ring has overwritten
what the boundary's window needs. So each crossing copies the ring aside at once, before the next
step writes, and when the request ends the last copy that was *completed* is stored. A copy that is
still under way then is as good as none, hence two halves: the one that is being written never
holds the last completed one.

This keeps account only; the memory and the copying are the engine's. One sequence, one thread.
"""

from __future__ import annotations

from typing import NamedTuple

from kvfs.errors import InputError
from kvfs.state.policy import Policy
from kvfs.state.ring import Ring


class Copy(NamedTuple):
    """A copy of the ring to be made, or made."""

    anchor: int
    """The boundary that was crossed."""
    overshoot: int
    """Tokens of the sequence behind the anchor when the copy was ordered."""
    rotation: int
    half: int
    """Which half of the copy zone it goes to, 0 or 1."""


class CopyZone:
    """Follows one sequence through decoding."""

    def __init__(self, ring: Ring, start: int, policy: Policy | None = None) -> None:
        """start: where its ring was begun; policy: default `last`."""
        self.ring = ring
        self.start = start
        self.policy = policy or Policy("last")
        self._under_way: Copy | None = None
        self._completed: Copy | None = None

    def step(self, before: int, after: int) -> Copy | None:
        """The sequence grew from `before` to `after` accepted tokens; returns the copy to make now.

        Drafted tokens that were taken back do not count, although the ring was written with them:
        the places of `backtrack` are there for those. Raises InputError for a step that is longer
        than the ring has room for. Where blocks are so short that a step crosses several
        boundaries, the copy is of the last.
        """
        if not 0 <= after - before <= self.ring.step:
            raise InputError(
                f"a step from {before} to {after} tokens; the ring has room for {self.ring.step}"
            )
        every = self.policy.spacing(self.ring)
        anchor = after // every * every if every else 0
        if anchor <= before:
            return None
        if not self.ring.holds(anchor, self.start, after):
            return None  # begun too late for a whole window, as behind a short replay
        half = 0 if self._completed is None else 1 - self._completed.half
        rotation = self.ring.rotation(anchor, self.start)
        self._under_way = Copy(anchor, after - anchor, rotation, half)
        return self._under_way

    def complete(self, copy: Copy) -> bool:
        """A copy is whole now. Returns whether the policy wants it stored at once."""
        if copy != self._under_way:
            return False  # another copy took its half meanwhile
        self._completed, self._under_way = copy, None
        return self.policy.every_boundary

    def finish(self) -> Copy | None:
        """The request has ended: the copy to store, or None. One that is under way is given up."""
        self._under_way = None
        return None if self.policy.every_boundary else self._completed
