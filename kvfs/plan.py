"""What CHECK returns and FETCH needs: plain immutable data, no I/O.

Named tuples, since a check makes one for each run: a frozen dataclass takes three times as long.

A Plan carries the extents to read, so an inference host can fetch with the mount alone, without an
index of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvfs.errors import InputError
from kvfs.geometry import Geometry


class Extent(NamedTuple):
    """Consecutive stored blocks in one segment."""

    segment: str
    """Path of the segment in the store."""
    segment_id: bytes
    geometry: Geometry
    slot: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    block: int
    """Number of the first block in the chain."""
    expires_ms: int

    @property
    def offset(self) -> int:
        """Byte offset of the first record; records do not cross `geometry.extent`."""
        return self.geometry.offset(self.slot)

    def to_json(self) -> dict[str, Any]:
        g = self.geometry
        return {
            "segment": self.segment, "segment_id": self.segment_id.hex(), "slot": self.slot,
            "count": self.count, "block": self.block, "offset": self.offset, "stride": g.stride,
            "extent": g.extent, "first": g.first, "expires_ms": self.expires_ms,
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Extent:
        """The inverse of `to_json`. Raises InputError."""
        try:
            geometry = Geometry(int(data["stride"]), int(data["extent"]), int(data["first"]))
            return cls(
                str(data["segment"]), bytes.fromhex(data["segment_id"]), geometry,
                int(data["slot"]), int(data["count"]), int(data["block"]), int(data["expires_ms"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as e:
            raise InputError(f"not an extent of a plan: {e!r}") from e


class SlotHint(NamedTuple):
    """A host that is said to hold sliding-window state at a boundary of the prompt.

    position: tokens before it; address: where the host answers, "" if it does not; pool and
    generation: what to ask it for; expires_ms: when the hint is of no use any more.
    """

    position: int
    host: str
    address: str
    pool: bytes
    generation: int
    expires_ms: int

    def to_json(self) -> dict[str, Any]:
        return {
            "position": self.position, "host": self.host, "address": self.address,
            "pool": self.pool.hex(), "generation": self.generation, "expires_ms": self.expires_ms,
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SlotHint:
        """The inverse of `to_json`. Raises InputError."""
        try:
            return cls(
                int(data["position"]), str(data["host"]), str(data["address"]),
                bytes.fromhex(data["pool"]), int(data["generation"]), int(data["expires_ms"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as e:
            raise InputError(f"not a slot of a plan: {e!r}") from e


def slot_anchors(hit_tokens: int, block_tokens: int) -> tuple[int, ...]:
    """Boundaries at which a slot spares a hit of so many tokens the replay, the best first.

    With one a block further back that block is computed, as it would be with a replay.
    """
    return tuple(a for a in (hit_tokens, hit_tokens - block_tokens) if a > 0)


class Plan(NamedTuple):
    """The longest stored prefix of a prompt and where its blocks are.

    stored_tokens: stored prefix, a multiple of the block size; hit_tokens: what of it may be hit
    (at least one token, or a whole ring, is left to compute). reason: "hit" if every whole block
    is stored, else why the prefix ends at block `stored_tokens / block_tokens`: "no tokens",
    "short", "root unknown", "diverged at block K", "expired at block K". slots: where the state
    of a sliding window is said to be, the place of most use first; kvfs.state.decide says what to
    make of it.
    """

    namespace: str
    nsid: bytes
    tokens: int
    block_tokens: int
    stored_tokens: int
    hit_tokens: int
    reason: str
    extents: tuple[Extent, ...]
    slots: tuple[SlotHint, ...] = ()

    def __repr__(self) -> str:
        return (
            f"Plan({self.namespace!r}, tokens={self.tokens}, stored_tokens={self.stored_tokens}, "
            f"hit_tokens={self.hit_tokens}, reason={self.reason!r}, "
            f"extents=<{len(self.extents)} extents>)"
        )

    @property
    def stored_blocks(self) -> int:
        return self.stored_tokens // self.block_tokens

    @property
    def hit_blocks(self) -> int:
        return self.hit_tokens // self.block_tokens

    def to_json(self) -> dict[str, Any]:
        return {
            "namespace": self.namespace, "nsid": self.nsid.hex(), "tokens": self.tokens,
            "block_tokens": self.block_tokens, "stored_tokens": self.stored_tokens,
            "hit_tokens": self.hit_tokens, "reason": self.reason,
            "extents": [e.to_json() for e in self.extents],
            "slots": [slot.to_json() for slot in self.slots],
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """The inverse of `to_json`. Raises InputError."""
        try:
            extents = tuple(Extent.from_json(e) for e in data["extents"])
            slots = tuple(SlotHint.from_json(slot) for slot in data.get("slots", ()))
            return cls(
                str(data["namespace"]), bytes.fromhex(data["nsid"]), int(data["tokens"]),
                int(data["block_tokens"]), int(data["stored_tokens"]), int(data["hit_tokens"]),
                str(data["reason"]), extents, slots,
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as e:
            raise InputError(f"not a plan: {e!r}") from e
