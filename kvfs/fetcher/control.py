"""A ticket's progress, in the arena's control area: written by the fetcher, read by anybody.

Record of 128 bytes for ticket slot k at k * 128; integers in the byte order of the host, which is
the only one that sees them:

  offset  size  field
  0       4     generation: a slot that is used again has another
  4       4     state
  8       4     good: leading blocks that are in the arena, sound
  12      4     wanted
  16      4     1 if the block that ended the prefix is bad or gone for good, not out of reach
  20      76    why the prefix ends, UTF-8, padded with zeros
  96      32    zeros

`good` only grows. The state is written last. A reader needs no system call and no lock: each field
is an aligned word that is written and read in one piece, and a reader that finds another generation
than its own has lost the ticket, and with it the blocks.
"""

from __future__ import annotations

RECORD = 128
SLOTS = 1024
CONTROL_BYTES = RECORD * SLOTS
_WORDS = RECORD // 4
_GENERATION, _STATE, _GOOD, _WANTED, _LASTING = range(5)
_REASON_AT, _REASON_BYTES = 20, 76
_LARGEST = 0xFFFFFFFF

FREE, RUNNING, DONE, FAILED, EXPIRED, CANCELLED = range(6)
"""States. DONE: all wanted blocks; FAILED: a shorter prefix; EXPIRED: the deadline came first."""
ENDED = frozenset({DONE, FAILED, EXPIRED, CANCELLED})


class ControlArea:
    """The records of all tickets in a buffer of at least CONTROL_BYTES.

    One thread at a time writes a record; any number read it.
    """

    def __init__(self, buffer: memoryview) -> None:
        self._bytes = buffer[:CONTROL_BYTES]
        # A view of words and not struct: its items are moved whole, never byte by byte.
        self._words = self._bytes.cast("I")

    def begin(self, slot: int, generation: int, wanted: int) -> None:
        """A slot that was free becomes that of a running ticket."""
        words, at = self._words, slot * _WORDS
        words[at + _STATE] = FREE
        words[at + _GOOD] = 0
        words[at + _WANTED] = wanted
        words[at + _LASTING] = 0
        self._reason(slot, b"")
        words[at + _GENERATION] = generation
        words[at + _STATE] = RUNNING

    def advance(self, slot: int, good: int) -> None:
        self._words[slot * _WORDS + _GOOD] = good

    def end(self, slot: int, state: int, reason: str = "", lasting: bool = False) -> None:
        """reason: cut to 76 bytes."""
        self._reason(slot, reason.encode())
        self._words[slot * _WORDS + _LASTING] = int(lasting)
        self._words[slot * _WORDS + _STATE] = state

    def free(self, slot: int, generation: int) -> int:
        """Takes the slot from whoever holds its generation; returns the next one."""
        following = generation + 1 if generation < _LARGEST else 1
        self._words[slot * _WORDS + _STATE] = FREE
        self._words[slot * _WORDS + _GENERATION] = following
        return following

    def _reason(self, slot: int, text: bytes) -> None:
        at = slot * RECORD + _REASON_AT
        self._bytes[at : at + _REASON_BYTES] = text[:_REASON_BYTES].ljust(_REASON_BYTES, b"\0")

    def generation(self, slot: int) -> int:
        return self._words[slot * _WORDS + _GENERATION]

    def state(self, slot: int) -> int:
        return self._words[slot * _WORDS + _STATE]

    def good(self, slot: int) -> int:
        return self._words[slot * _WORDS + _GOOD]

    def outcome(self, slot: int) -> tuple[str, bool]:
        """(why the prefix ends or "", lasting), once the state is an end."""
        at = slot * RECORD + _REASON_AT
        text = bytes(self._bytes[at : at + _REASON_BYTES]).rstrip(b"\0")
        return text.decode("utf-8", "ignore"), bool(self._words[slot * _WORDS + _LASTING])
