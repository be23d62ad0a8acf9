"""Which boundaries get a slot, and what that costs: bytes to keep, tokens to replay.

  full          every block boundary
  periodic:N    every N tokens, N a multiple of the block
  last          where the request ends: the last boundary of the prompt and the one at which an
                exact retry can hit, then the last boundary that decoding crossed. The default
  last:1        the same without the one for an exact retry
  zero          none: every hit replays

A namespace's engines choose one; blocks are stored and hit alike under all of them. Arithmetic
only, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvfs.errors import InputError
from kvfs.layout import Identity
from kvfs.state.decision import Decision, decide_length
from kvfs.state.ring import Points, Ring

KINDS = ("full", "periodic", "last", "zero")


@dataclass(frozen=True, slots=True)
class Policy:
    """A rule for taking slots. `period` is for periodic alone, `retry` for last alone."""

    kind: str
    period: int = 0
    retry: bool = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"no policy {self.kind!r}; there are {', '.join(KINDS)}")
        if (self.kind == "periodic") != (self.period > 0):
            raise InputError("periodic, and only it, needs a number of tokens: periodic:4096")

    @classmethod
    def parse(cls, text: str) -> Policy:
        """A policy from its name, as above. Raises InputError."""
        kind, colon, rest = text.partition(":")
        if kind == "last" and colon:
            if rest != "1":
                raise InputError(f"policy {text!r}: last takes no number but 1")
            return cls("last", retry=False)
        if not colon:
            return cls(kind)
        if not rest.isascii() or not rest.isdigit():
            raise InputError(f"policy {text!r}: {rest!r} is not a number of tokens")
        return cls(kind, int(rest))

    def __str__(self) -> str:
        if self.kind == "periodic":
            return f"periodic:{self.period}"
        return self.kind if self.retry or self.kind != "last" else "last:1"

    def check(self, ring: Ring) -> None:
        """Raises InputError if the policy does not fit the namespace's blocks."""
        if self.period % ring.block:
            raise InputError(f"{self}: no multiple of the {ring.block} tokens of a block")

    @property
    def every_boundary(self) -> bool:
        """A slot is stored as soon as its boundary is crossed, not when the request ends."""
        return self.kind in ("full", "periodic")

    def spacing(self, ring: Ring) -> int:
        """Tokens from one boundary that may become a slot to the next; 0: none does."""
        return 0 if self.kind == "zero" else self.period or ring.block

    def in_prefill(
        self, ring: Ring, tokens: int, *, chunk: int = 0, end: int | None = None, start: int = 0
    ) -> Points:
        """Where to take slots in one chunk, [chunk, end), of a prefill of `tokens` tokens.

        end: None for the last chunk; start: as for Ring.after_prefill. Raises InputError.
        """
        self.check(ring)
        end = tokens if end is None else end
        if not 0 <= chunk <= end <= tokens:
            raise InputError(f"tokens {chunk} to {end} are no chunk of {tokens}")
        if self.kind == "zero" or (self.kind == "last" and end < tokens):
            return Points((), {})
        if self.kind == "last":
            return ring.after_prefill(tokens, chunk=chunk, start=start, retry=self.retry)
        every = self.spacing(ring)
        first = (chunk // every + 1) * every
        whole = max(start, chunk - ring.size)
        anchors = range(first, end + 1, every)
        late = "its window begins before what was ever computed here"
        taken = tuple(a for a in anchors if ring.window_start(a) >= whole)
        return Points(taken, {a: late for a in anchors if ring.window_start(a) < whole})


@dataclass(frozen=True, slots=True)
class Cost:
    """What a policy costs for a prompt that is computed once, from its beginning, in one chunk.

    slots, slot_bytes: what is kept; share: of the bytes of the prompt's blocks; retry: the decision
    for the same prompt again; turn: for one that goes on behind it. fork_lost, fork_replay: tokens
    computed anew and tokens replayed on average by a prompt that shares some number of its blocks,
    each number as likely as any.
    """

    policy: Policy
    slots: int
    slot_bytes: int
    share: float
    retry: Decision
    turn: Decision
    fork_lost: float
    fork_replay: float

    def to_json(self) -> dict[str, Any]:
        return {
            "policy": str(self.policy), "slots": self.slots, "bytes": self.slot_bytes,
            "share": self.share, "retry": self.retry.to_json(), "turn": self.turn.to_json(),
            "fork_lost": self.fork_lost, "fork_replay": self.fork_replay,
        }  # fmt: skip


def cost(policy: Policy, identity: Identity, tokens: int) -> Cost:
    """The cost of a policy for a prompt of `tokens` tokens. Raises InputError.

    Raises InputError for a model without a sliding window too: it has no slots.
    """
    ring = Ring.of(identity)
    if ring is None:
        raise InputError(f"{identity.model} has no sliding window: no policy applies")
    anchors = set(policy.in_prefill(ring, tokens).anchors)
    stored = tokens // ring.block * ring.block
    # So much longer that the cap does not stand in the way of anything that is stored.
    longer = stored + ring.size
    lost = replayed = 0
    for shared in range(ring.block, stored + 1, ring.block):
        fork = decide_length(identity, longer, shared, anchors)
        lost += shared - fork.hit_tokens
        replayed += fork.replay_tokens
    forks = max(1, stored // ring.block)
    kept = len(anchors) * ring.layout.slot_bytes
    return Cost(
        policy, len(anchors), kept, kept / (forks * identity.row_bytes),
        decide_length(identity, tokens, stored, anchors),
        decide_length(identity, longer, stored, anchors),
        lost / forks, replayed / forks,
    )  # fmt: skip
