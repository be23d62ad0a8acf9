"""Moves this host's slots to others before it leaves, the ones used last first.

A slot is gone here only once a peer has said, with its MAC, that it has it; the news of both go
through the journals, so a router that still asks here costs a replay at most. It ends when the time
is over, with whatever is left where it is.

Where the others have too little room, what they get drives out what they have: so it is refused,
unless forced, if the slots that are held, ours included, would fill more than a share of theirs.

One thread, blocking.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvfs.errors import BackendError, BusyError, InputError, KvfsError
from kvfs.peers.client import BUSY, PeerClient
from kvfs.state.slot import Anchor, SlotMeta
from kvfs.state.slots import SlotPool

GRACE_SECONDS = 60.0
SHARE = 0.8
PUSH_SECONDS = 5.0
_ASK_SECONDS = 5.0
_PUBLISHED_AT_ONCE = 64
_PAUSE_SECONDS = 0.05

Withdraw = Callable[[SlotPool, Sequence[SlotMeta]], object]


@dataclass(slots=True)
class Drained:
    """What became of this host's slots."""

    moved: int = 0
    kept: int = 0
    """Of the moved ones: those that the peer had already."""
    bytes: int = 0
    left: int = 0
    peers: dict[str, int] = field(default_factory=dict)
    """Address -> slots moved there."""
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "moved": self.moved, "kept": self.kept, "bytes": self.bytes, "left": self.left,
            "peers": self.peers, "problems": self.problems, "seconds": self.seconds,
        }  # fmt: skip


@dataclass(slots=True)
class _Peer:
    """A host that takes slots. free: slots it has room for without driving one out, by nsid."""

    address: str
    slots: dict[bytes, int]
    used: dict[bytes, int]
    moved: int = 0
    problem: str = ""

    def free(self, nsid: bytes) -> int:
        return self.slots[nsid] - self.used[nsid]


def use(pools: Iterable[SlotPool], peers: Iterable[_Peer]) -> dict[bytes, float]:
    """Of each namespace, which share of the peers' slots would be held with ours among them."""
    shares = {}
    for pool in pools:
        nsid = pool.identity.nsid
        room = sum(peer.slots.get(nsid, 0) for peer in peers)
        held = len(pool.metas()) + sum(peer.used.get(nsid, 0) for peer in peers)
        shares[nsid] = held / room if room else float("inf")
    return shares


def drain(
    pools: Sequence[SlotPool], client: PeerClient, to: Sequence[str], *,
    grace: float = GRACE_SECONDS, share: float = SHARE, force: bool = False,
    withdraw: Withdraw = lambda pool, metas: None,
) -> Drained:  # fmt: skip
    """Moves the slots of some pools of this host to the peers `to`.

    grace: seconds for all of it; share: of the peers' slots that may be held afterwards; force:
    whatever that is; withdraw: told what is gone from here. Raises InputError (no peer), BusyError
    (refused: nothing was moved), BackendError (no peer answers).
    """
    began = time.monotonic()
    if not to:
        raise InputError("name at least one host to drain to")
    deadline = began + grace
    result = Drained()
    peers = _ask(client, to, deadline, {pool.pool_id for pool in pools}, result)
    holding = [pool for pool in pools if pool.metas()]
    if not force:
        _require_room(holding, peers, share)
    for pool in holding:
        _move(pool, client, peers, deadline, withdraw, result)
    result.left = sum(len(pool.metas()) for pool in holding)
    result.peers = {peer.address: peer.moved for peer in peers}
    result.problems += [f"{peer.address}: {peer.problem}" for peer in peers if peer.problem]
    if result.left and time.monotonic() >= deadline:
        result.problems.append(f"the time of {grace:g} s is over")
    result.seconds = time.monotonic() - began
    return result


def _ask(
    client: PeerClient, to: Iterable[str], deadline: float, ours: set[bytes], result: Drained
) -> list[_Peer]:
    peers = []
    for address in dict.fromkeys(to):
        asked = client.status(address, min(deadline, time.monotonic() + _ASK_SECONDS))
        try:
            found = [] if asked.value is None else asked.value["pools"]
            slots = {bytes.fromhex(p["nsid"]): int(p["slots"]) for p in found}
            used = {bytes.fromhex(p["nsid"]): int(p["used"]) for p in found}
            if ours & {bytes.fromhex(p["pool"]) for p in found}:
                raise InputError(f"{address} is this host itself")
        except (KeyError, TypeError, ValueError) as e:
            result.problems.append(f"{address}: its status is none: {e!r}")
            continue
        if asked.value is None:
            result.problems.append(f"{address}: {asked.reason}")
        else:
            peers.append(_Peer(address, slots, used))
    if not peers:
        raise BackendError(f"no host to drain to answers: {'; '.join(result.problems)}")
    return peers


def _require_room(pools: Sequence[SlotPool], peers: Sequence[_Peer], share: float) -> None:
    for pool in pools:
        found = use([pool], peers)[pool.identity.nsid]
        if found > share:
            what = "they have no slots for it" if found == float("inf") else (
                f"they would be {found:.0%} full, more than {share:.0%}"
            )  # fmt: skip
            raise BusyError(
                f"{pool.identity.name}: the other hosts have too little room: {what}; --force "
                "moves slots all the same and drives out others"
            )


def _move(
    pool: SlotPool, client: PeerClient, peers: Sequence[_Peer], deadline: float,
    withdraw: Withdraw, result: Drained,
) -> None:  # fmt: skip
    """Round after round, until nothing is left, the time is over or nobody takes any."""
    nsid = pool.identity.nsid
    while time.monotonic() < deadline:
        todo = _last_used_first(pool)
        takers = [p for p in peers if not p.problem and nsid in p.slots]
        if todo and not takers:
            result.problems.append(f"{pool.identity.name}: no host takes its slots any more")
        if not todo or not takers:
            return
        if not _round(pool, todo, client, takers, deadline, withdraw, result):
            time.sleep(_PAUSE_SECONDS)  # all of them are busy


def _round(
    pool: SlotPool, todo: list[tuple[Anchor, SlotMeta]], client: PeerClient, takers: list[_Peer],
    deadline: float, withdraw: Withdraw, result: Drained,
) -> int:  # fmt: skip
    """Offers every slot once. Returns how many went."""
    before, gone = result.moved, []
    try:
        for anchor, meta in todo:
            there = [p for p in takers if not p.problem]
            if not there or time.monotonic() >= deadline:
                break
            if _give(pool, anchor, client, there, deadline, result):
                gone.append(meta)
            if len(gone) >= _PUBLISHED_AT_ONCE:
                told, gone = gone, []
                withdraw(pool, told)
    finally:
        if gone:
            withdraw(pool, gone)
    return result.moved - before


def _last_used_first(pool: SlotPool) -> list[tuple[Anchor, SlotMeta]]:
    """The slots by how long they still live, which each use extends."""
    found = []
    for meta in pool.metas():
        anchor = Anchor(meta.anchor, meta.position, meta.lineage)
        found.append((-pool.left_ms(anchor), meta.generation, anchor, meta))
    return [(anchor, meta) for _, _, anchor, meta in sorted(found, key=lambda f: f[:2])]


def _give(
    pool: SlotPool, anchor: Anchor, client: PeerClient, takers: list[_Peer], deadline: float,
    result: Drained,
) -> bool:  # fmt: skip
    """Gives one slot to the peer with most room, or the next one. Whether it is gone from here.

    One that is busy is asked again in the next round.
    """
    slot = pool.read(anchor)
    if slot is None:
        return False  # expired or driven out meanwhile
    nsid = pool.identity.nsid
    for peer in sorted(takers, key=lambda p: -p.free(nsid)):
        until = min(deadline, time.monotonic() + PUSH_SECONDS)
        pushed = client.push(peer.address, slot, until)
        if pushed.meta is None:
            if time.monotonic() >= deadline:
                return False  # which is no fault of the peer
            if not pushed.reason.startswith(BUSY):
                peer.problem = pushed.reason
            continue
        peer.used[nsid] += pushed.new
        peer.moved += 1
        result.moved += 1
        result.kept += not pushed.new
        result.bytes += len(slot.data) * pushed.new
        return _remove(pool, anchor, result)
    return False


def _remove(pool: SlotPool, anchor: Anchor, result: Drained) -> bool:
    try:
        return pool.remove(anchor) is not None
    except KvfsError as e:
        result.problems.append(f"{pool.identity.name}: {e}")
        return False
