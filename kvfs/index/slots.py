"""Who holds which slot, in the index: hints of all hosts, as their journals told them.

A hint says that a pool holds the slot of an anchor; only the pool's host knows. What is here may be
stale, and costs one failed pull then. The tables, as in kvfs.index.schema:

  slots   l  ns, anchor 16, pool id 16       SLOT: position, generation, expires, purge
  pools   h  pool id 16                      POOL: ns, slots not known to be gone, generation up to
                                             which all are; then host, a zero byte, address
  serving d  ns, address                     pool id 16, ms: which pool was heard of last there
  purge   e  ms u64, ns, anchor 16, pool 16  empty: when the row in `slots` may go

A row whose `expires` is 0 remembers that a slot is gone, for as long as older news of it may still
come in. Invariants: a row in `slots` has exactly one in `purge`, and its pool one in `pools`; the
slots counted there are the pool's rows with an expiry. Entries may come in any order, and twice. A
pool at whose address another one was heard of later is gone for good: its host was started anew.
One that has been without a row in `slots` for a day is forgotten; since when that is so stands in
`meta`, "idle:" and its id.

Everything happens in the transaction that is handed in.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvfs.chain import HASH_BYTES
from kvfs.index.schema import (
    META,
    POOL,
    POOLS,
    PREFIX,
    PURGE,
    RUN,
    RUNS,
    SERVING,
    SLOT,
    SLOTS,
    place_key,
    scan,
    scan_copies,
)
from kvfs.plan import SlotHint
from kvfs.slot_entries import MAX_TEXT, WHOLE_POOL, SlotEntry, SlotGoneEntry

if TYPE_CHECKING:
    from kvfs.index.apply import Applier
    from kvfs.index.lookup import Match

_MS = struct.Struct(">Q")
_IDLE = META + b"idle:"
IDLE_MS = 86_400_000
"""How long a pool of which nothing is known any more is remembered."""
_REMEMBER_MS = 600_000
"""How long older news of a slot may come in after the news that it is gone."""
_PURGED_AT_ONCE = 4
"""Rows that have expired and go whenever one comes in, so that none has to be looked for."""


@dataclass(frozen=True, slots=True)
class _Pool:
    """A row of `pools`."""

    ns: int
    count: int
    gone: int
    host: str
    address: str

    @classmethod
    def decode(cls, value: bytes | memoryview) -> _Pool:
        ns, count, gone = POOL.unpack_from(value)
        host, _, address = bytes(value[POOL.size :]).partition(b"\0")
        return cls(ns, count, gone, host.decode(), address.decode())

    def value(self) -> bytes:
        texts = self.host.encode() + b"\0" + self.address.encode()
        return POOL.pack(self.ns, self.count, self.gone) + texts


def _pool(txn: Any, pool: bytes) -> _Pool | None:
    value = txn.get(POOLS + pool)
    return None if value is None else _Pool.decode(value)


def _row(txn: Any, where: bytes) -> bytes | None:
    """A row of `slots`, copied: what LMDB gives is valid only until the next write."""
    value = txn.get(SLOTS + where)
    return None if value is None else bytes(value)


# news come in


def apply_slot(applier: Applier, entry: SlotEntry) -> None:
    """A slot is there, or is there for longer."""
    txn, ns = applier.txn, applier.namespace(entry.nsid)
    if ns is None:
        applier.count("unknown_namespace")
        return
    if not _sound(entry):
        applier.count("slots_refused")
        return
    known = _pool(txn, entry.pool)
    pool = known or _Pool(ns, 0, 0, entry.host, entry.address)
    pool = replace(pool, host=entry.host, address=_address(txn, entry, pool))
    _note_address(txn, entry, ns)
    where = PREFIX.pack(ns) + entry.anchor + entry.pool
    old = _row(txn, where)
    news = _is_news(entry, old, pool)
    if news:
        _put(txn, where, old, entry.position, entry.generation, entry.expires_ms, entry.expires_ms)
        pool = replace(pool, count=pool.count + (old is None or not SLOT.unpack(old)[2]))
        applier.count("slots")
    if pool != known:
        txn.put(POOLS + entry.pool, pool.value())
    if news:
        _purge(applier, entry.when_ms)


def _is_news(entry: SlotEntry, old: bytes | None, pool: _Pool) -> bool:
    """Whether the slot is later than what is known, or lives longer. old: its row."""
    if old is None:
        return entry.generation > pool.gone
    _, generation, expires, _ = SLOT.unpack(old)
    known_gone = not expires and entry.generation <= generation
    return not known_gone and (entry.generation, entry.expires_ms) > (generation, expires)


def _address(txn: Any, entry: SlotEntry, pool: _Pool) -> str:
    """Where the pool answers, as far as is known now: what was said last of it.

    An entry without an address says nothing of that: it is from a process of the pool's host that
    stores slots, and another one answers for them.
    """
    if not pool.address or not entry.address:
        return entry.address or pool.address
    said = _served(txn, entry.pool, pool)
    before = said is not None and (entry.when_ms, entry.address) < (said, pool.address)
    return pool.address if before else entry.address


def _sound(entry: SlotEntry) -> bool:
    """Whether it can be kept: keys and times have their limits, whoever wrote the journal."""
    texts = (entry.host, entry.address)
    return (
        entry.expires_ms > 0
        and entry.anchor != WHOLE_POOL
        and all("\0" not in text and len(text.encode()) <= MAX_TEXT for text in texts)
    )


def _note_address(txn: Any, entry: SlotEntry, ns: int) -> None:
    """Notes which pool was heard of last at an address."""
    if not entry.address:
        return
    key = SERVING + PREFIX.pack(ns) + entry.address.encode()
    news = (entry.when_ms, entry.pool)
    old = txn.get(key)
    if old is None or news > (_MS.unpack_from(old, 16)[0], bytes(old[:16])):
        txn.put(key, entry.pool + _MS.pack(entry.when_ms))


def _served(txn: Any, pool_id: bytes, pool: _Pool) -> int | None:
    """When the pool was heard of last at its address; None if another one was, later."""
    if not pool.address:
        return 0
    value = txn.get(SERVING + PREFIX.pack(pool.ns) + pool.address.encode())
    if value is None or bytes(value[:16]) != pool_id:
        return None
    return int(_MS.unpack_from(value, 16)[0])


def apply_slot_gone(applier: Applier, entry: SlotGoneEntry) -> None:
    """A slot is no longer there, or none of a pool."""
    txn, ns = applier.txn, applier.namespace(entry.nsid)
    if ns is None:
        applier.count("unknown_namespace")
        return
    pool = _pool(txn, entry.pool) or _Pool(ns, 0, 0, "", "")
    if entry.anchor == WHOLE_POOL:
        gone = max(pool.gone, entry.generation)
        txn.put(POOLS + entry.pool, replace(pool, gone=gone).value())
        return
    where = PREFIX.pack(ns) + entry.anchor + entry.pool
    old = _row(txn, where)
    expires = 0
    if old is not None:
        _, generation, expires, _ = SLOT.unpack(old)
        if generation > entry.generation:
            return
    if expires:
        pool = replace(pool, count=max(0, pool.count - 1))
    txn.put(POOLS + entry.pool, pool.value())
    _put(txn, where, old, 0, entry.generation, 0, entry.when_ms + _REMEMBER_MS)
    applier.count("slots_gone")


def removed_anchors(applier: Applier, ns: int, anchors: Iterable[bytes] | None) -> None:
    """The blocks in front of these boundaries were removed (None: all of a namespace), and with
    them the slots behind them. A slot that is stored from now on is another one."""
    txn, prefix = applier.txn, SLOTS + PREFIX.pack(ns)
    if next(scan(txn, prefix), None) is None:
        return
    for start in [prefix] if anchors is None else (prefix + a for a in anchors):
        for key, value in list(scan_copies(txn, start)):
            _, generation, expires, purge = SLOT.unpack(value)
            if expires:
                where = key[1:]
                pool = _pool(txn, where[-16:])
                assert pool is not None  # each row has one
                changed = replace(pool, count=max(0, pool.count - 1))
                txn.put(POOLS + where[-16:], changed.value())
                _put(txn, where, value, 0, generation, 0, max(purge, expires))
                applier.count("slots_gone")


def _put(
    txn: Any,
    where: bytes,
    old: bytes | None,
    position: int,
    generation: int,
    expires: int,
    purge: int,
) -> None:
    if old is not None:
        txn.delete(PURGE + _MS.pack(SLOT.unpack(old)[3]) + where)
    txn.put(SLOTS + where, SLOT.pack(position, generation, expires, purge))
    txn.put(PURGE + _MS.pack(purge) + where, b"")


def _purge(applier: Applier, now_ms: int) -> None:
    """Takes out a few rows whose time is long over. now_ms is somebody else's clock: a wrong one
    loses a few hints for each of its own."""
    txn = applier.txn
    done: list[bytes] = []
    for key, _ in scan(txn, PURGE):
        (ms,) = _MS.unpack_from(key, 1)
        if ms + _REMEMBER_MS > now_ms or len(done) == _PURGED_AT_ONCE:
            break
        done.append(bytes(key))
    for key in done:
        where = key[1 + _MS.size :]
        txn.delete(key)
        value = txn.get(SLOTS + where)
        _, _, expires, _ = SLOT.unpack(value)
        txn.delete(SLOTS + where)
        pool = _pool(txn, where[-16:])
        if pool is not None and expires:
            txn.put(POOLS + where[-16:], replace(pool, count=max(0, pool.count - 1)).value())
        applier.count("slots_purged")


def idle_pools(txn: Any) -> tuple[set[bytes], bool]:
    """Ids of the pools without a row in `slots`, and whether `forget_pools` has to do with any."""
    holding = {bytes(key[-16:]) for key, _ in scan(txn, SLOTS)}
    idle = {pool for key, _ in scan(txn, POOLS) if (pool := bytes(key[1:])) not in holding}
    return idle, bool(idle) or next(scan(txn, _IDLE), None) is not None


def forget_pools(applier: Applier, idle: set[bytes], now_ms: int) -> int:
    """Forgets pools that have been idle for long, and notes since when the others are. Returns how
    many were forgotten."""
    txn, gone = applier.txn, set()
    since = {key[len(_IDLE) :]: _MS.unpack(ms)[0] for key, ms in scan_copies(txn, _IDLE)}
    for pool_id in idle - since.keys():
        txn.put(_IDLE + pool_id, _MS.pack(now_ms))
    for pool_id, ms in since.items():
        pool = _pool(txn, pool_id)
        if pool_id not in idle or pool is None or pool.count:
            txn.delete(_IDLE + pool_id)
        elif now_ms - ms >= IDLE_MS:
            txn.delete(_IDLE + pool_id)
            txn.delete(POOLS + pool_id)
            gone.add(pool_id)
    for key, value in list(scan_copies(txn, SERVING)) if gone else ():
        if value[:16] in gone:
            txn.delete(key)
    return len(gone)


def all_entries(txn: Any, nsids: dict[int, bytes]) -> Iterator[SlotEntry | SlotGoneEntry]:
    """Everything the tables say, as entries from which they can be made anew."""
    pools: dict[bytes, tuple[_Pool, int | None]] = {}
    for key, value in scan(txn, POOLS):
        pool_id, pool = bytes(key[1:]), _Pool.decode(value)
        pools[pool_id] = pool, _served(txn, pool_id, pool)
        if pool.gone:
            yield SlotGoneEntry(nsids[pool.ns], pool_id, WHOLE_POOL, pool.gone, 0)
    for key, value in scan(txn, SLOTS):
        (ns,) = PREFIX.unpack_from(key, 1)
        anchor, pool_id = bytes(key[5:21]), bytes(key[21:])
        position, generation, expires, purge = SLOT.unpack(value)
        pool, served = pools[pool_id]
        if not expires:
            yield SlotGoneEntry(nsids[ns], pool_id, anchor, generation, purge - _REMEMBER_MS)
        elif generation > pool.gone and served is not None:
            yield SlotEntry(
                nsids[ns], pool_id, anchor, position, generation, expires, served, pool.host,
                pool.address,
            )  # fmt: skip


# looking them up


def anchor_hash(txn: Any, runs: list[Match], blocks: int) -> bytes | None:
    """The chain hash of the last of a prompt's first `blocks` blocks, which are stored in `runs`.

    Taken from the index, where it stands already: nothing has to be hashed. None if the runs are
    no longer there.
    """
    for match in runs:
        at = blocks - 1 - match.block
        if not 0 <= at < match.shared:
            continue
        key = txn.get(place_key(match.seg, match.slot))
        value = None if key is None else txn.get(RUNS + bytes(key))
        if value is None:
            return None
        seg, slot, count, *_ = RUN.unpack_from(value)
        if (seg, slot) != (match.seg, match.slot) or at >= count:
            return None
        first = RUN.size + HASH_BYTES * at
        return bytes(value[first : first + HASH_BYTES])
    return None


def holders(txn: Any, ns: int, anchor: bytes, now_ms: int, here: str) -> list[SlotHint]:
    """Who is said to hold the slot of an anchor: this host first, then who holds fewest slots."""
    found = []
    for key, value in scan(txn, SLOTS + PREFIX.pack(ns) + anchor):
        position, generation, expires, _ = SLOT.unpack(value)
        pool_id = bytes(key[21:])
        pool = _pool(txn, pool_id)
        if pool is None or expires <= now_ms or generation <= pool.gone:
            continue
        if _served(txn, pool_id, pool) is None:
            continue
        hint = SlotHint(position, pool.host, pool.address, pool_id, generation, expires)
        found.append((pool.host != here, pool.count, pool.host, pool_id, hint))
    return [hint for *_, hint in sorted(found)]
