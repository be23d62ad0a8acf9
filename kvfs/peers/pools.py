"""The slot pools of a host that answers others: opened when they are asked for, let go when idle.

A pool that is open cannot be made anew with another budget, so one that nobody asked for in a while
is left. Pools are never made here: that is for the engine whose memory they take.

Threads: all methods, from any.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kvfs.errors import KvfsError
from kvfs.layout import Identity
from kvfs.state.poolfile import DIRECTORY
from kvfs.state.slots import SlotPool

IDLE_SECONDS = 30.0
MOMENT_SECONDS = 5.0


class Pools:
    """The pools of some namespaces on this host. A context manager."""

    def __init__(
        self, identities: Callable[[], Iterable[Identity]], directory: str = DIRECTORY,
        idle: float = IDLE_SECONDS,
    ) -> None:  # fmt: skip
        """identities: the namespaces there are, asked again for one that is not known yet; idle:
        seconds until a pool that nobody asks for is let go."""
        self._identities = identities
        self._directory = directory
        self._idle = idle
        self._lock = threading.Lock()
        self._known: dict[bytes, Identity] = {}
        self._open: dict[bytes, tuple[SlotPool, float]] = {}
        self._lookers = 0

    def get(self, nsid: bytes) -> SlotPool | None:
        """The pool of a namespace; None if there is none on this host, or no such namespace."""
        with self._lock:
            found = self._open.get(nsid)
            pool = self._attach(nsid) if found is None else found[0]
            if pool is not None:
                self._open[nsid] = pool, time.monotonic()
            return pool

    @contextlib.contextmanager
    def look(self) -> Iterator[list[SlotPool]]:
        """The pools that are open, and stay so as long as the block lasts. It is no use of them:
        who looks all the time keeps none open."""
        with self._lock:
            self._lookers += 1
            pools = [pool for pool, _ in self._open.values()]
        try:
            yield pools
        finally:
            with self._lock:
                self._lookers -= 1

    def attach_all(self) -> None:
        """Opens the pools that are there and not open, for a moment if nobody asks for them."""
        moment = time.monotonic() - self._idle + MOMENT_SECONDS
        with self._lock:
            self._learn()
            for nsid in self._known.keys() - self._open.keys():
                pool = self._attach(nsid)
                if pool is not None:
                    self._open[nsid] = pool, moment

    def let_go(self) -> None:
        """Leaves the pools that nobody asked for in a while, unless somebody looks at them."""
        over = time.monotonic() - self._idle
        with self._lock:
            if self._lookers:
                return
            for nsid in [n for n, (_, asked) in self._open.items() if asked < over]:
                self._open.pop(nsid)[0].close()

    def all(self) -> list[SlotPool]:
        """The pools of all namespaces that have one on this host."""
        with self._lock:
            self._learn()
            wanted = [nsid for nsid, i in self._known.items() if i.state is not None]
        return [pool for nsid in wanted if (pool := self.get(nsid)) is not None]

    def status(self) -> list[dict[str, Any]]:
        """Of each pool: nsid, pool, slots, used, slot_bytes."""
        return [
            {"nsid": pool.identity.nsid.hex(), "pool": pool.pool_id.hex(), "slots": pool.slots,
             "used": len(pool.metas()), "slot_bytes": pool.slot_bytes}
            for pool in self.all()
        ]  # fmt: skip

    def close(self) -> None:
        with self._lock:
            for pool, _ in self._open.values():
                pool.close()
            self._open.clear()

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _learn(self) -> None:
        self._known.update((identity.nsid, identity) for identity in self._identities())

    def _attach(self, nsid: bytes) -> SlotPool | None:
        if nsid not in self._known:
            self._learn()
        identity = self._known.get(nsid)
        if identity is None or identity.state is None:
            return None
        try:
            return SlotPool.open(identity, directory=self._directory)
        except KvfsError:
            return None  # none here, or somebody is making it just now
