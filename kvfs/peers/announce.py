"""A thread that tells the other hosts which slots are here: what comes, what goes, what lives on.

A slot behind a block that was removed from the store goes as well, within a turn of the index's
having heard of it.

The pool is asked, not those who fill it: so it does not matter which process stored a slot, or
whether it was killed right after. A look is cheap while nothing has changed. All slots are told
anew at the start and from time to time, since those that are in use live longer than was told.

A fault in one turn is logged and the next turn tells again.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field

from kvfs.index import told as told_of
from kvfs.peers.pools import Pools
from kvfs.periodic import Periodic
from kvfs.state.directory import Directory
from kvfs.state.slot import Anchor, SlotMeta
from kvfs.state.slots import SlotPool
from kvfs.store import Store

log = logging.getLogger(__name__)
INTERVAL_SECONDS = 0.5
REFRESH_SECONDS = 300.0
ATTACH_SECONDS = 10.0
_CHANGES = ("stored", "evicted", "expired", "removed", "damaged", "recovered")


@dataclass(slots=True)
class _Told:
    """What was told of a pool."""

    changes: tuple[int, ...] = ()
    slots: dict[bytes, SlotMeta] = field(default_factory=dict)
    due: float = 0.0
    """When all of it is told anew."""
    removals: int = 0
    """Of kvfs.index.told, when the slots were last held against them."""


class Announcer(Periodic):
    """Publishes the slots of all pools of this host until it is stopped; what was told stays: the
    slots are still here. A context manager."""

    def __init__(
        self, store: Store, pools: Pools, address: str, *, interval: float = INTERVAL_SECONDS
    ) -> None:
        """address: where this host answers for them; interval: seconds between looks."""
        super().__init__("kvfs-announce", "telling of the slots here", log)
        self._store = store
        self._pools = pools
        self._address = address
        self._interval = interval
        self._told: dict[bytes, _Told] = {}
        self._attached = 0.0
        self._lock = threading.Lock()

    def turn(self) -> int:
        """One look, on the caller's thread. Returns how many slots were told of."""
        with self._lock:
            return self._turn()

    def pause(self) -> float:
        return self._interval

    def _turn(self) -> int:
        now = time.monotonic()
        if not self._attached or now - self._attached >= ATTACH_SECONDS:
            self._attached = now
            self._pools.attach_all()
        with self._pools.look() as pools:
            return sum(self._tell(pool, now) for pool in pools)

    def _erase(self, pool: SlotPool, told: _Told) -> None:
        """Empties the slots whose blocks were removed since they were stored."""
        index = self._store.index
        known = index.namespace(pool.identity.nsid)
        number = known.number if known else 0
        heard = index.query(lambda a: told_of.removals(a, number)) if known else 0
        if heard == told.removals:
            return
        metas = pool.metas()
        oldest = min((meta.stored_ms for meta in metas), default=0)
        said = index.query(lambda a: told_of.since(a, number, oldest))
        for meta in metas:
            if meta.stored_ms <= said.removed_ms(meta.anchor):
                pool.remove(Anchor(meta.anchor, meta.position, meta.lineage))
        told.removals = heard  # not before: a pool that is busy is looked at again

    def _tell(self, pool: SlotPool, now: float) -> int:
        told = self._told.setdefault(pool.pool_id, _Told())
        self._erase(pool, told)
        stats = pool.stats()
        changes = tuple(stats[name] for name in _CHANGES)
        if changes == told.changes and now < told.due:
            return 0
        directory = Directory(self._store, pool, address=self._address)
        held = {meta.anchor: meta for meta in pool.metas()}
        all_of_it = now >= told.due
        gone = [m for a, m in told.slots.items() if a not in held]
        news = [m for m in held.values() if all_of_it or told.slots.get(m.anchor) != m]
        if gone:
            directory.withdraw(gone)
        if news:
            directory.announce(news)
        told.changes, told.slots = changes, held
        if all_of_it:
            told.due = now + REFRESH_SECONDS
        self._pools.get(pool.identity.nsid)  # it is in use
        return len(news)
