"""Sliding-window state: when a slot is taken, where it is kept, what a hit needs of it.

ring.py      the arithmetic of the ring, and a slot's bytes in logical order
decode.py    the copy zone of a sequence that is being decoded
decision.py  how much of a prompt is hit, which slot is loaded, what is replayed
policy.py    which boundaries get a slot, and what that costs
slot.py      what is known of a slot, and how an anchor names one
slots.py     the pool of them in host memory: poolfile.py its file, table.py what is in it
inventory.py which pools a host has, and removing those out of use
tensors.py   slots from and into torch tensors

docs/state.md explains all of it with examples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvfs.state.decision import Decision, Replay, decide
    from kvfs.state.decode import Copy, CopyZone
    from kvfs.state.policy import Policy
    from kvfs.state.ring import Ring
    from kvfs.state.slot import Anchor, SlotMeta
    from kvfs.state.slots import Slot, SlotPool

_HOME = {
    "Anchor": "slot", "Copy": "decode", "CopyZone": "decode", "Decision": "decision",
    "Policy": "policy", "Replay": "decision", "Ring": "ring", "Slot": "slots",
    "SlotMeta": "slot", "SlotPool": "slots", "decide": "decision",
}  # fmt: skip

__all__ = [
    "Anchor", "Copy", "CopyZone", "Decision", "Policy", "Replay", "Ring", "Slot", "SlotMeta",
    "SlotPool", "decide",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # As in kvfs itself: a router that decides hits loads nothing of what keeps slots.
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f"kvfs.state.{_HOME[name]}"), name)
    raise AttributeError(f"module 'kvfs.state' has no attribute {name!r}")
