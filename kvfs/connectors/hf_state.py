"""The state of one sequence as a slot: the windows at a block's end, bound to all tokens before.

The data are the pieces of the state (kvfs.connectors.hf_layout), filled up with zeros to the size
of a slot of the namespace; what they are of is said by kvfs.state.slot. They are kept in a slot
pool of this host, pulled from another host's, or handed out as bytes: description, then data. A
state is used only for the tokens, the model and the layout it was taken with; what does not fit is
a miss with a reason.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvfs.chain import PrefixHasher
from kvfs.errors import FormatError, InputError, KvfsError
from kvfs.namespace import Namespace
from kvfs.peers.client import PeerClient
from kvfs.peers.load import find_slot
from kvfs.state.slot import META_BYTES, Anchor, SlotMeta, checksum
from kvfs.state.slots import SlotPool
from kvfs.store import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class State:
    """A state that fits. tokens: its position; data: its bytes, as many as a slot has."""

    tokens: int
    data: Any


class Places(NamedTuple):
    """Where states are looked for: a slot pool of this host, and other hosts for some seconds."""

    pool: SlotPool | None
    client: PeerClient | None
    seconds: float


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


def find(
    store: Store, ns: Namespace, hasher: PrefixHasher, blocks: range, places: Places
) -> State | None:
    """The state of the longest of the prefixes of so many blocks that is here or at another host.

    blocks: descending. Nothing is raised.
    """
    until = time.monotonic() + places.seconds
    reasons: list[str] = []
    try:
        for block in blocks:
            anchor = Anchor.of(hasher, block * ns.block_tokens)
            here = places.pool is not None and places.pool.lookup(anchor) is not None
            away = places.client is not None and time.monotonic() < until
            hints = store.slot_holders(ns, hasher, anchor.position) if away else []
            if not here and not hints:
                continue
            slot, source = find_slot(
                ns, anchor, hints, until, reasons, pool=places.pool, client=places.client
            )
            if slot is not None:
                log.debug("%s: the slot at %d: %s", ns.name, anchor.position, source)
                return State(anchor.position, slot.data)
    except KvfsError as e:
        reasons.append(str(e))
    if reasons:
        log.info("%s: no slot: %s", ns.name, "; ".join(reasons))
    return None
