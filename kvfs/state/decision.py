"""The hit decision: how much of a prompt is hit, which slot is loaded, what is replayed instead.

A prefix is of use to a model with a sliding window only if the window before its end is there too:
loaded from a slot, or made anew by a replay. A replay is bounded: it computes the tokens of one
window, in the layers whose state is stored, looks at nothing of the window before it, and writes no
block. Plain immutable data and arithmetic, no I/O.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from kvfs.errors import InputError
from kvfs.layout import Identity, StateLayout
from kvfs.plan import Plan, SlotHint, slot_anchors


@dataclass(frozen=True, slots=True)
class Replay:
    """Tokens to compute once more, only to fill the ring: their blocks are stored and hit.

    start, end: positions, the window that ends where the hit ends; layers: the first so many layers
    of the model, those whose state is stored; window: tokens that attention reads.
    """

    start: int
    end: int
    layers: int
    window: int

    @property
    def tokens(self) -> int:
        return self.end - self.start

    def exact_from(self, layer: int) -> int:
        """The first position whose state in `layer` is what the full computation would give.

        A layer's state at a token depends on the layer before at the `window` tokens up to it, so
        the missing tokens before `start` reach window - 1 tokens further with each layer.
        """
        if not 0 <= layer < self.layers:
            raise InputError(f"layer {layer} is not replayed; layers are 0..{self.layers - 1}")
        return 0 if self.start == 0 else self.start + layer * (self.window - 1)

    @property
    def exact_layers(self) -> int:
        """How many layers get a window that is exact from its first token to its last."""
        first = max(0, self.end - self.window)
        return sum(self.exact_from(layer) <= first for layer in range(self.layers))

    def to_json(self) -> dict[str, Any]:
        return {
            "start": self.start, "end": self.end, "tokens": self.tokens, "layers": self.layers,
            "exact_layers": self.exact_layers, "writes_blocks": False,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Decision:
    """What an engine does with a prompt.

    tokens: its length; cap: tokens that may be hit at most; l1: the longest stored prefix within
    the cap, whole blocks; hit_tokens: what is not computed; slot: anchor of the slot to load into
    the ring, None for none; replay: what fills the ring instead; reason: why it is so; holders: who
    is said to have that slot, the one to ask first in front.
    """

    tokens: int
    cap: int
    l1: int
    hit_tokens: int
    slot: int | None
    replay: Replay | None
    reason: str
    holders: tuple[SlotHint, ...] = ()

    @property
    def compute_tokens(self) -> int:
        """Tokens that all layers compute, at least one."""
        return self.tokens - self.hit_tokens

    @property
    def replay_tokens(self) -> int:
        return 0 if self.replay is None else self.replay.tokens

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens, "cap": self.cap, "l1": self.l1,
            "hit_tokens": self.hit_tokens, "compute_tokens": self.compute_tokens,
            "slot": self.slot,
            "replay": None if self.replay is None else self.replay.to_json(),
            "reason": self.reason, "holders": [hint.to_json() for hint in self.holders],
        }  # fmt: skip


def hit_cap(identity: Identity, tokens: int) -> int:
    """Tokens of a prompt that may be hit at most, before they are cut down to whole blocks.

    A whole ring is left to compute, or the one token that gives the next one.
    """
    keep = 1 if identity.state is None else identity.state.ring
    return max(0, tokens - keep)


def decide(
    plan: Plan, identity: Identity, slots: Collection[int] | None = None, *, exact: bool = False
) -> Decision:
    """What to do with a checked prompt.

    slots: anchors of this prompt for which there is a slot; None: those of the plan's hints.
    exact: replay so much that every stored layer's window is exact, not one window. A decision
    that rests on a slot which then cannot be had is made anew without it.
    """
    known = {hint.position for hint in plan.slots} if slots is None else slots
    found = decide_length(identity, plan.tokens, plan.stored_tokens, known, exact=exact)
    holders = tuple(hint for hint in plan.slots if hint.position == found.slot)
    return replace(found, holders=holders) if holders else found


def decide_length(
    identity: Identity, tokens: int, stored: int, slots: Collection[int] = (), *,
    exact: bool = False,
) -> Decision:  # fmt: skip
    """The same for a prompt of `tokens` tokens of which the first `stored` are stored."""
    cap, l1 = hit_cap(identity, tokens), min(stored, identity.hit_cap(tokens))
    state, block = identity.state, identity.block_tokens
    if state is None:
        return Decision(tokens, cap, l1, l1, None, None, "no sliding window")
    if not l1:
        reason = "nothing stored" if not stored else "the prompt is too short for a hit"
        return Decision(tokens, cap, 0, 0, None, None, reason)
    for anchor in slot_anchors(l1, block):
        if anchor in slots:
            return Decision(tokens, cap, l1, anchor, anchor, None, f"slot at {anchor}")
    hit = l1 - block
    replay = replay_before(state, hit, exact=exact)
    return Decision(tokens, cap, l1, hit, None, replay, _missing(l1, slots))


def replay_before(state: StateLayout, end: int, *, exact: bool = False) -> Replay | None:
    """The replay that fills the ring up to position `end`; None if there is nothing before it."""
    if not end:
        return None
    length = exact_tokens(state) if exact else state.window
    return Replay(max(0, end - length), end, state.layers, state.window)


def exact_tokens(state: StateLayout) -> int:
    """Tokens of a replay after which every stored layer's window is exact."""
    return state.window + (state.layers - 1) * (state.window - 1)


def _missing(l1: int, slots: Collection[int]) -> str:
    beyond = [anchor for anchor in slots if anchor > l1]
    if beyond:
        return f"no slot at {l1}: the one at {min(beyond)} is beyond what may be hit"
    return f"no slot at {l1}"
