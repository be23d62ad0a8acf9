"""Sliding-window state in a replay: what each policy of kvfs.state.policy would have hit.

Slots are remembered by their anchors alone, for ever and without a limit, beside whatever the store
itself finds. "request ends" is another rule, for comparison: a prefix is of use only where an
earlier request ended, and then without any replay, as public services publish it. Traces do not
say where the answers of the model ended, so no rule gets a slot there.

One object belongs to one replay in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvfs.chain import HASH_BYTES
from kvfs.errors import InputError
from kvfs.layout import Identity
from kvfs.plan import slot_anchors
from kvfs.state.decision import decide_length
from kvfs.state.policy import Policy
from kvfs.state.ring import Ring

ENDS = "request ends"


@dataclass(slots=True)
class Sums:
    """What one rule came to. slots: how many it took; bytes: theirs."""

    policy: str
    hit_tokens: int = 0
    replay_tokens: int = 0
    slots: int = 0
    bytes: int = 0

    def to_json(self, input_tokens: int) -> dict[str, Any]:
        """With the share of the input tokens that was hit."""
        rate = self.hit_tokens / input_tokens if input_tokens else 0.0
        return {**asdict(self), "hit_rate": rate}


class Windows:
    """Follows a replay request by request. `sums` has one entry for each policy, and "request
    ends"."""

    def __init__(self, identity: Identity, policies: Sequence[str]) -> None:
        """policies: as for Policy.parse. Raises InputError, also for a model without a window."""
        ring = Ring.of(identity)
        if ring is None:
            raise InputError(f"{identity.model} has no sliding window: try the preset tiny-swa")
        self._identity, self._ring = identity, ring
        self._rules = [Policy.parse(name) for name in policies]
        for rule in self._rules:
            rule.check(ring)
        self._ends = Policy("last", retry=False)
        self._known: list[set[bytes]] = [set() for _ in range(len(self._rules) + 1)]
        self.sums = [Sums(str(rule)) for rule in self._rules] + [Sums(ENDS)]

    def step(self, tokens: int, stored: int, keys: bytes) -> None:
        """A request of `tokens` tokens, of which `stored` were stored; keys: its chain hashes."""
        block = self._ring.block
        hit = min(stored, self._identity.hit_cap(tokens))
        for rule, known, sums in zip(self._rules, self._known, self.sums, strict=False):
            there = {a for a in slot_anchors(hit, block) if self._key(keys, a) in known}
            decision = decide_length(self._identity, tokens, stored, there)
            sums.hit_tokens += decision.hit_tokens
            sums.replay_tokens += decision.replay_tokens
            self._take(rule, known, sums, tokens, keys)
        self._step_ends(hit, tokens, keys)

    def _step_ends(self, hit: int, tokens: int, keys: bytes) -> None:
        known, sums, block = self._known[-1], self.sums[-1], self._ring.block
        at = hit
        while at and self._key(keys, at) not in known:
            at -= block
        sums.hit_tokens += at
        self._take(self._ends, known, sums, tokens, keys)

    def _take(self, rule: Policy, known: set[bytes], sums: Sums, tokens: int, keys: bytes) -> None:
        known.update(self._key(keys, a) for a in rule.in_prefill(self._ring, tokens).anchors)
        sums.slots = len(known)
        sums.bytes = sums.slots * self._ring.layout.slot_bytes

    def _key(self, keys: bytes, position: int) -> bytes:
        end = position // self._ring.block * HASH_BYTES
        return keys[end - HASH_BYTES : end]
