"""Which slots a DeepInfer sequence leaves behind: its account, from prefill through decoding.

The arithmetic is kvfs.state's; here is what the engine adds to it. Its ring may be longer than a
slot's (extra tokens kept for prefill), so that windows further back are whole. What it says a
sequence has is what it has accepted; steps that are under way have written more, which counts
against a window. And it recomputes sequences that it had to put aside.

Plain account keeping, no I/O. One engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvfs.state.decode import Copy, CopyZone
from kvfs.state.policy import Policy
from kvfs.state.ring import Ring


@dataclass(slots=True)
class Account:
    """One sequence. Positions are tokens.

    saved: blocks that are stored, or on their way; start: where its ring was begun; seen: tokens it
    had when the engine last asked; replaying: the block that a replay is computing anew, None for
    none; scheduled: the engine has computed something of it.
    """

    cacheable: bool = True
    saved: int = 0
    start: int = 0
    seen: int = 0
    zone: CopyZone | None = None
    copy: Copy | None = None
    replaying: int | None = None
    scheduled: bool = False

    def again(self) -> None:
        """It is computed anew from its beginning."""
        self.start = self.seen = 0
        self.zone = self.copy = self.replaying = None


@dataclass(frozen=True, slots=True)
class Slots:
    """The rules of one engine.

    ring: of a slot; big: of the engine; in_flight: tokens that steps under way may have written
    behind what the engine says a sequence has.
    """

    ring: Ring
    big: Ring
    policy: Policy = field(default_factory=lambda: Policy("last"))
    in_flight: int = 0

    def after_prefill(self, account: Account, tokens: int) -> tuple[int, ...]:
        """Anchors the policy wants at the end of a prefill, and whose windows are still whole."""
        wanted = self.policy.in_prefill(self.ring, tokens).anchors
        return tuple(anchor for anchor in wanted if self._whole(account, anchor, tokens))

    def _whole(self, account: Account, anchor: int, written: int) -> bool:
        return self.big.holds(anchor, account.start, written)

    def begin(self, account: Account, tokens: int) -> None:
        """Decoding begins."""
        account.seen = tokens
        account.copy = None
        account.zone = CopyZone(self.big, account.start, self.policy)

    def wants_copy(self, account: Account, tokens: int) -> bool:
        """Whether the ring is to be set aside now, that the sequence has `tokens` tokens.

        A step in which the sequence got longer than the ring has room for, or shorter, is one that
        this account knows nothing of: nothing is set aside until the next boundary.
        """
        before, account.seen = account.seen, tokens
        if account.zone is None:
            self.begin(account, tokens)
            account.start = tokens  # nothing is known of what was before
            account.zone = CopyZone(self.big, tokens, self.policy)
            return False
        if tokens // self.ring.block == before // self.ring.block:
            return False
        if not 0 <= tokens - before <= self.ring.step:
            return False
        copy = account.zone.step(before, tokens)
        if copy is None or not self._whole(account, copy.anchor, tokens + self.in_flight):
            return False
        account.copy = copy
        return True

    def completed(self, account: Account) -> None:
        """What was set aside is whole now."""
        if account.zone is not None and account.copy is not None:
            account.zone.complete(account.copy)
            account.copy = None

    def at_end(self, account: Account) -> Copy | None:
        """What to store of a sequence that ends."""
        return None if account.zone is None else account.zone.finish()
