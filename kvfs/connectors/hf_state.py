"""The state of one sequence as a slot: the windows at a block's end, bound to all tokens before.

The data are the pieces of the state (kvfs.connectors.hf_layout), filled up with zeros to the size
of a slot of the namespace; what they are of is said by kvfs.state.slot. They are kept in a slot
pool of this host, or handed out as bytes: description, then data. A state is used only for the
tokens, the model and the layout it was taken with; what does not fit is a miss with a reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvfs.chain import PrefixHasher
from kvfs.errors import FormatError, InputError, KvfsError
from kvfs.namespace import Namespace
from kvfs.state.slot import META_BYTES, Anchor, SlotMeta, checksum
from kvfs.state.slots import SlotPool


@dataclass(frozen=True, slots=True)
class State:
    """A state that fits. tokens: its position; data: its bytes, as many as a slot has."""

    tokens: int
    data: Any


def fill(ns: Namespace, payload: Any) -> bytes:
    """The data of a slot from the pieces of a state. payload: a buffer."""
    layout = ns.identity.state
    assert layout is not None
    return bytes(memoryview(payload).cast("B")).ljust(layout.slot_bytes, b"\0")


def seal(ns: Namespace, hasher: PrefixHasher, state: State) -> bytes:
    """A state as bytes that stand alone."""
    layout = ns.identity.state
    assert layout is not None
    anchor = Anchor.of(hasher, state.tokens)
    meta = SlotMeta(
        generation=0, pool=bytes(16), nsid=ns.nsid, anchor=anchor.hash, lineage=anchor.lineage,
        position=state.tokens, layout=layout, rotation=0, overshoot=0, stored_ms=0,
        data_sum=checksum(state.data),
    )  # fmt: skip
    return b"".join((meta.encode(), state.data))


def unseal(ns: Namespace, hasher: PrefixHasher, sealed: Any) -> State | str:
    """The state in such bytes, if it is of this namespace and these tokens; else why not."""
    view = memoryview(sealed).cast("B")
    try:
        meta = SlotMeta.decode(view)
    except FormatError as e:
        return str(e)
    if meta.nsid != ns.nsid or meta.layout != ns.identity.state:
        return "the state is of another model"
    if not meta.accepts(view[META_BYTES:]):
        return "the state is damaged"
    try:
        anchor = Anchor.of(hasher, meta.position)
    except InputError:
        return "the state is of other tokens"
    if not meta.is_for(anchor):
        return "the state is of other tokens"
    return State(meta.position, view[META_BYTES:])


def keep(pool: SlotPool, hasher: PrefixHasher, state: State) -> None:
    """Puts a state into a slot. Raises BusyError, InputError (a pool of another namespace)."""
    pool.write(Anchor.of(hasher, state.tokens), state.data)


def find(pool: SlotPool, hasher: PrefixHasher, blocks: int, above: int) -> State | None:
    """The state in a pool of the longest prefix of `above` + 1 to `blocks` blocks."""
    size = hasher.root.block_tokens
    for block in range(blocks, above, -1):
        anchor = Anchor.of(hasher, block * size)
        try:
            slot = None if pool.lookup(anchor) is None else pool.read(anchor)
        except KvfsError:
            return None
        if slot is not None:
            return State(block * size, slot.data)
    return None
