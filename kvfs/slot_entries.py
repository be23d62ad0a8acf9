"""The journal entries about sliding-window slots: who holds which. kvfs.frames frames them.

Bodies (strings are a u16 length and UTF-8; times are milliseconds since 1970):

  11 SLOT      nsid 16, pool id 16, anchor 16, position u64, generation u64, expires u64, when u64,
               host string, address string
  12 SLOTGONE  nsid 16, pool id 16, anchor 16 (zeros: all of the pool), generation u64, when u64

A SLOTGONE takes back the slots of up to its generation. A pool never gives a generation twice and
they only grow, so the two mean the same in whatever order they come. No I/O here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from kvfs.bodies import check_ms, string, take_string

_SLOT = struct.Struct("<16s16s16sQQQQ")
_GONE = struct.Struct("<16s16s16sQQ")
WHOLE_POOL = bytes(16)
"""In place of an anchor: every one."""
MAX_TEXT = 255
"""Bytes of a host's name, and of an address."""


@dataclass(frozen=True, slots=True)
class SlotEntry:
    """A host holds sliding-window state at a boundary of a prompt. A hint: the host decides."""

    nsid: bytes
    pool: bytes
    anchor: bytes
    """Chain hash of the last block before the position."""
    position: int
    generation: int
    expires_ms: int
    """When the hint is of no use any more, if it is not given again."""
    when_ms: int
    host: str
    address: str
    """Where the host answers for it, "" if that is not said here."""

    def body(self) -> bytes:
        fixed = _SLOT.pack(
            self.nsid, self.pool, self.anchor, self.position, self.generation, self.expires_ms,
            self.when_ms,
        )  # fmt: skip
        return b"".join((fixed, string(self.host), string(self.address)))

    @classmethod
    def decode(cls, body: memoryview) -> SlotEntry:
        """The inverse of `body`. Raises struct.error, ValueError."""
        host, at = take_string(body, _SLOT.size)
        address, _ = take_string(body, at)
        fields: tuple[Any, ...] = (*_SLOT.unpack_from(body), host, address)
        entry = cls(*fields)
        check_ms(entry.expires_ms, entry.when_ms)
        return entry


@dataclass(frozen=True, slots=True)
class SlotGoneEntry:
    """A slot of up to this generation is no longer there, or (WHOLE_POOL) no slot of the pool."""

    nsid: bytes
    pool: bytes
    anchor: bytes
    generation: int
    when_ms: int

    def body(self) -> bytes:
        return _GONE.pack(self.nsid, self.pool, self.anchor, self.generation, self.when_ms)

    @classmethod
    def decode(cls, body: memoryview) -> SlotGoneEntry:
        """The inverse of `body`. Raises struct.error, ValueError."""
        entry = cls(*_GONE.unpack_from(body))
        check_ms(entry.when_ms)
        return entry
