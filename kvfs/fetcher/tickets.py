"""A ticket's progress, in the arena's control area: written by the fetcher, read by anybody.

Record of 128 bytes for ticket slot k at k * 128; little-endian:

  offset  size  field
  0       4     generation: a slot that is used again has another
  4       4     state
  8       4     good: leading blocks that are in the arena, verified
  12      4     wanted
  16      4     1 if the block that ended the prefix is bad or gone for good, not out of reach
  20      76    why the prefix ends, UTF-8, padded with zeros
  96      32    zeros

`good` only grows. The state is written last. A reader needs no system call and no lock: each field
is an aligned word, and a reader that finds another generation than its own has lost the ticket.
"""

from __future__ import annotations

import struct

RECORD = 128
SLOTS = 1024
CONTROL_BYTES = RECORD * SLOTS
_U32 = struct.Struct("<I")
_REASON_AT, _REASON_BYTES = 20, 76

FREE, RUNNING, DONE, FAILED, EXPIRED, CANCELLED = range(6)
"""States. DONE: all wanted blocks; FAILED: a shorter prefix; EXPIRED: the deadline came first."""
ENDED = frozenset({DONE, FAILED, EXPIRED, CANCELLED})


class ControlArea:
    """The records of all tickets in a buffer of CONTROL_BYTES."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer

    def _put(self, slot: int, at: int, value: int) -> None:
        _U32.pack_into(self._buffer, slot * RECORD + at, value)

    def _get(self, slot: int, at: int) -> int:
        return int(_U32.unpack_from(self._buffer, slot * RECORD + at)[0])

    def begin(self, slot: int, generation: int, wanted: int) -> None:
        self._put(slot, 4, FREE)
        self._put(slot, 8, 0)
        self._put(slot, 12, wanted)
        self._put(slot, 16, 0)
        at = slot * RECORD + _REASON_AT
        self._buffer[at : at + _REASON_BYTES] = bytes(_REASON_BYTES)
        self._put(slot, 0, generation)
        self._put(slot, 4, RUNNING)

    def advance(self, slot: int, good: int) -> None:
        self._put(slot, 8, good)

    def end(self, slot: int, state: int, reason: str = "", lasting: bool = False) -> None:
        at = slot * RECORD + _REASON_AT
        text = reason.encode()[:_REASON_BYTES]
        self._buffer[at : at + len(text)] = text
        self._put(slot, 16, int(lasting))
        self._put(slot, 4, state)

    def free(self, slot: int, generation: int) -> None:
        """Invalidates the slot for whoever still holds its generation."""
        self._put(slot, 4, FREE)
        self._put(slot, 0, generation + 1)

    def generation(self, slot: int) -> int:
        return self._get(slot, 0)

    def state(self, slot: int) -> int:
        return self._get(slot, 4)

    def good(self, slot: int) -> int:
        return self._get(slot, 8)

    def outcome(self, slot: int) -> tuple[str, bool]:
        """(why the prefix ends or "", lasting), once the state is an end."""
        at = slot * RECORD + _REASON_AT
        text = bytes(self._buffer[at : at + _REASON_BYTES]).rstrip(b"\0")
        return text.decode("utf-8", "replace"), bool(self._get(slot, 16))
