"""The ring of a sliding window: which token stands where, which window is still whole, and a
slot's bytes in logical order.

Positions are numbers of tokens from the beginning of the sequence. A ring that was begun at
position `start` has the token at position x in place (x - start) mod size, each newer token over
the oldest one. An anchor is a boundary between blocks; its window are the tokens right before it.
A slot is the ring as it was when its last written token was `overshoot` tokens behind the anchor;
its rotation is the place that the token *at* the anchor has, or will have.

Every number comes from the namespace's layout. Pure arithmetic and byte moves, no I/O, no state:
safe in any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from kvfs.errors import InputError
from kvfs.layout import Identity, StateLayout


class Points(NamedTuple):
    """Where slots are taken after a prefill."""

    anchors: tuple[int, ...]
    """In ascending order."""
    left_out: dict[int, str]
    """Anchor -> why there is no slot for it, although the rules ask for one."""


@dataclass(frozen=True, slots=True)
class Ring:
    """A sliding window of one namespace: its layout, and the block it has to meet."""

    layout: StateLayout
    block: int
    """Tokens of a block."""

    @classmethod
    def of(cls, identity: Identity) -> Ring | None:
        """The ring of a namespace; None for a model without a sliding window."""
        return None if identity.state is None else cls(identity.state, identity.block_tokens)

    @property
    def size(self) -> int:
        """Tokens in the ring: window plus backtrack."""
        return self.layout.ring

    @property
    def overshoot(self) -> int:
        """Tokens at most by which a copy runs past its boundary: a step's, less the one that
        crosses it."""
        return max(0, self.layout.backtrack - 1)

    @property
    def step(self) -> int:
        """Tokens at most by which one step of decoding makes a sequence longer."""
        return self.overshoot + 1

    # places

    def index(self, position: int, start: int) -> int:
        """The place of a token in a ring that was begun at `start`."""
        return (position - start) % self.size

    def rotation(self, anchor: int, start: int) -> int:
        """The rotation of a slot with this anchor, taken from a ring begun at `start`."""
        return self.index(anchor, start)

    def window_start(self, anchor: int) -> int:
        """First token of the window of an anchor."""
        return max(0, anchor - self.layout.window)

    def holds(self, anchor: int, start: int, end: int) -> bool:
        """Whether a ring begun at `start` and written up to `end` has the anchor's whole window."""
        return self._reaches(anchor, max(start, end - self.size), end)

    def _reaches(self, anchor: int, oldest: int, end: int) -> bool:
        return oldest <= self.window_start(anchor) and anchor <= end

    # after a prefill

    def last_boundary(self, tokens: int) -> int:
        """Where the slot of a prefill belongs: the last boundary with a token behind it; 0: none.

        The hit of a prompt that goes on from here ends there.
        """
        return max(0, tokens - 1) // self.block * self.block

    def retry_boundary(self, tokens: int) -> int:
        """Where a hit of the very same prompt ends at most, as Identity.hit_cap has it; 0: none."""
        return max(0, tokens - self.size) // self.block * self.block

    def after_prefill(
        self, tokens: int, *, chunk: int = 0, start: int = 0, retry: bool = True
    ) -> Points:
        """Where to take slots at the end of a prefill of `tokens` tokens.

        chunk: where its last chunk begins, the only one that slots are taken in: at hand are the
        tokens of that chunk and of the ring before it. start: first token that ever came into the
        ring; behind a slot loaded at h it is h less the window, behind a replay the replay's
        start. retry: also where an exact retry can hit.
        """
        _check_range(chunk, start, tokens)
        wanted = [self.last_boundary(tokens)]
        if retry:
            wanted.insert(0, self.retry_boundary(tokens))
        anchors, left_out = [], {}
        oldest = max(start, chunk - self.size)
        for anchor in sorted({a for a in wanted if a}):
            if self._reaches(anchor, oldest, tokens):
                anchors.append(anchor)
            else:
                left_out[anchor] = (
                    f"its window begins at {self.window_start(anchor)} and nothing before "
                    f"{oldest} is at hand in a last chunk from {chunk} on"
                )
        return Points(tuple(anchors), left_out)

    def latest_chunk(self, tokens: int, *, retry: bool = True) -> int:
        """Where the last chunk of a prefill has to begin at the latest for all slots to be taken.

        An engine that cuts prompts anywhere loses slots; one that keeps to this loses none.
        """
        anchor = self.retry_boundary(tokens) if retry else 0
        anchor = anchor or self.last_boundary(tokens)
        return min(self.window_start(anchor) + self.size, max(0, tokens - 1))

    # bytes

    def unroll(self, slot: Any, rotation: int, overshoot: int = 0) -> bytes:
        """The ring's tokens in logical order, the oldest first: [layer][token].

        slot: a buffer of slot_bytes, [layer][place]. Where fewer tokens than the ring has places
        were ever written, what comes first is whatever stood there. Raises InputError.
        """
        self._check_slot(rotation, overshoot)
        return self._turned(slot, rotation + overshoot)

    def roll(self, ordered: Any, rotation: int, overshoot: int = 0) -> bytes:
        """The inverse of `unroll`. Raises InputError."""
        self._check_slot(rotation, overshoot)
        return self._turned(ordered, -(rotation + overshoot))

    def turn(self, slot: Any, rotation: int, to: int) -> bytes:
        """The slot with another rotation: for a ring that was begun elsewhere."""
        self._check_slot(rotation, 0)
        self._check_slot(to, 0)
        return self._turned(slot, rotation - to)

    def window_of(self, slot: Any, rotation: int) -> bytes:
        """The anchor's window in logical order, [layer][window]; the same for any overshoot."""
        self._check_slot(rotation, 0)
        layout, size = self.layout, self.size
        ordered = memoryview(self._turned(slot, rotation - layout.window))
        layer = size * layout.token_bytes
        take = layout.window * layout.token_bytes
        return b"".join(ordered[at : at + take] for at in range(0, len(ordered), layer))

    def _check_slot(self, rotation: int, overshoot: int) -> None:
        if not 0 <= rotation < self.size:
            raise InputError(f"rotation is {rotation}, outside 0..{self.size - 1}")
        if not 0 <= overshoot <= self.layout.backtrack:
            raise InputError(f"overshoot is {overshoot}, outside 0..{self.layout.backtrack}")

    def _turned(self, data: Any, places: int) -> bytes:
        """Each layer's tokens, moved to the front by so many places."""
        layout = self.layout
        view = memoryview(data).cast("B")
        if len(view) != layout.slot_bytes:
            raise InputError(f"a slot has {layout.slot_bytes} bytes, not {len(view)}")
        layer = self.size * layout.token_bytes
        by = places % self.size * layout.token_bytes
        if not by:
            return bytes(view)
        pieces: list[memoryview] = []
        for at in range(0, len(view), layer):
            pieces += (view[at + by : at + layer], view[at : at + by])
        return b"".join(pieces)


def _check_range(chunk: int, start: int, tokens: int) -> None:
    if tokens < 0 or start < 0:
        raise InputError(f"{tokens} tokens from {start} on are no prompt")
    if not 0 <= chunk <= tokens:
        raise InputError(f"the last chunk begins at {chunk}, outside 0..{tokens}")
