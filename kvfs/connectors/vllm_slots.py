"""Slots of the vLLM connector: windows kept in this host's memory, found again, or had from others.

The pool is of the worker's own namespace, also for requests with a salt or an adapter: an anchor's
hash and lineage begin with the root of the request's namespace, so no request finds another's
window. A worker keeps and loads (`Keeper`); the scheduler asks whether a slot is there for every
worker (`Finder`), and has one that another host holds copied into this host's pool first.

Nothing here raises into the engine: a slot that is not had is a window that vLLM replays. Threads:
a Keeper keeps on one thread and loads on one; a Finder looks on the thread it is given.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kvfs.chain import PrefixHasher
from kvfs.connectors.background import Background
from kvfs.connectors.vllm_layout import NULL_BLOCK, Layout
from kvfs.connectors.vllm_meta import Tables, Window
from kvfs.connectors.vllm_settings import Settings
from kvfs.errors import ConfigError, KvfsError
from kvfs.gpu.host_memory import Landed
from kvfs.gpu.paged import HOLE
from kvfs.gpu.streams import Event
from kvfs.layout import Identity
from kvfs.namespace import Namespace
from kvfs.peers.auth import Secret
from kvfs.peers.client import PeerClient
from kvfs.peers.load import find_slot
from kvfs.state.directory import Directory
from kvfs.state.poolfile import DIRECTORY
from kvfs.state.slot import Anchor
from kvfs.state.slots import SlotPool
from kvfs.store import Store

log = logging.getLogger(__name__)


class Keeper:
    """A worker's slots."""

    def __init__(self, store: Store, layout: Layout, pool: SlotPool) -> None:
        """layout: of kvfs.connectors.vllm_window.measure_window."""
        self._layout = layout
        self._pool = pool
        self._directory = Directory(store, pool)
        self._swapper = layout.swapper()
        self._decoded: dict[str, Anchor] = {}

    @classmethod
    def open(
        cls, settings: Settings, store: Store, identity: Identity, layout: Layout,
        directory: str = DIRECTORY,
    ) -> Keeper | None:  # fmt: skip
        """None, with a line in the log, where there is no memory for slots."""
        if not settings.slot_bytes:
            return None
        try:
            return cls(store, layout, SlotPool.open(identity, settings.slot_bytes,
                                                    directory=directory))  # fmt: skip
        except KvfsError as e:
            log.warning("kvfs keeps no windows, vLLM replays them: %s", e)
            return None

    @property
    def pool_id(self) -> bytes:
        return self._pool.pool_id

    @property
    def row_bytes(self) -> int:
        """Bytes of a window."""
        return self._layout.row_bytes

    def gather(self, tables: Tables, into: Any) -> Any:
        """The bytes of a window, within the step that has just computed it. into: where to."""
        return self._layout.gather(tables, into)

    def keep(self, request: str, hasher: PrefixHasher, window: Window, row: Any) -> bool:
        """Puts a window into a slot; says whether it is there now.

        row: of `gather`. Of what is generated, a request keeps the last window alone.
        """
        try:
            anchor = Anchor.of(hasher, window.position)
            data = row.view(-1).numpy().tobytes().ljust(self._pool.slot_bytes, b"\0")
            self._directory.stored(self._pool.write(anchor, data))
            if not window.lasting:
                before, self._decoded[request] = self._decoded.get(request), anchor
                gone = self._pool.remove(before) if before not in (None, anchor) else None
                self._directory.withdraw([gone] if gone else [])
        except KvfsError as e:
            log.info("%s: no slot: %s", self._pool.path, e)
            return False
        return True

    def forget(self, request: str) -> None:
        """A request has ended; its last window stays."""
        self._decoded.pop(request, None)

    def load(
        self, hasher: PrefixHasher, position: int, tables: Tables, after: Event | None = None
    ) -> str:
        """Copies a window into vLLM's blocks. Returns why it is not there, "" if it is.

        tables: as many as the window has groups, null for a block that is not wanted; after: as
        Swapper.load.
        """
        if len(tables) != len(self._layout.groups):
            return "vLLM has no blocks for the window"
        slot = self._pool.read(Anchor.of(hasher, position))
        if slot is None:
            return f"there is no slot at {position} any more"
        size = self._layout.row_bytes
        ticket = Landed(memoryview(slot.data)[:size], size, size, 1)
        wanted = [[HOLE if block == NULL_BLOCK else block for block in t] for t in tables]
        swap = self._swapper.load(ticket, wanted, after)
        return "" if swap.finish() == 1 else str(swap.reason)

    def close(self) -> None:
        """When its threads have ended. The slots stay."""
        self._swapper.close()
        self._pool.close()


@dataclass(frozen=True, slots=True)
class Search:
    """Whether the window before `end` is in this host's memory, for every worker."""

    end: int
    until: float
    found: Future[bool]

    def there(self) -> bool | None:
        """None while it may still turn out to be."""
        if not self.found.done():
            return None if time.monotonic() < self.until else False
        return self.found.exception() is None and self.found.result()


class Finder:
    """The scheduler's view of its workers' slots."""

    def __init__(
        self, store: Store, pools: Sequence[tuple[Namespace, SlotPool]], client: PeerClient | None,
        seconds: float,
    ) -> None:  # fmt: skip
        """pools: of all workers, in order, with their own namespaces; client: None to ask no other
        host; seconds: for all of one search."""
        self._store = store
        self._pools = list(pools)
        self._client = client
        self._seconds = seconds

    @classmethod
    def open(
        cls, settings: Settings, store: Store, workers: Sequence[tuple[Identity, bytes]],
        directory: str = DIRECTORY,
    ) -> Finder | None:  # fmt: skip
        """workers: identity and pool id of each. None if one of them keeps no slots, or not in
        memory that this process sees: a worker on another host."""
        if not all(pool for _, pool in workers):
            return None
        pools: list[tuple[Namespace, SlotPool]] = []
        try:
            for identity, pool_id in workers:
                if not store.catalog.known(identity):
                    raise ConfigError(f"{identity.name}: its worker has made no namespace")
                pool = SlotPool.open(identity, directory=directory)
                pools.append((store.catalog.get(identity, settings.ttl_class), pool))
                if pool.pool_id != pool_id:
                    raise ConfigError(f"{pool.path} is not the pool of its worker")
            secret = Secret.load(settings.secret_file) if settings.secret_file else None
        except KvfsError as e:
            log.warning("kvfs loads no windows, vLLM replays them: %s", e)
            for _, pool in pools:
                pool.close()
            return None
        client = None if secret is None else PeerClient(secret)
        return cls(store, pools, client, settings.slot_seconds)

    def search(self, pool: Background, hashers: Sequence[PrefixHasher], end: int) -> Search:
        """Begins to look, on another thread. hashers: of the request's tokens, for each worker, and
        for this search alone."""
        until = time.monotonic() + self._seconds
        return Search(end, until, pool.submit(self._find, list(hashers), end, until))

    def _find(self, hashers: Sequence[PrefixHasher], end: int, until: float) -> bool:
        if len(hashers) != len(self._pools):
            return False
        reasons: list[str] = []
        try:
            return all(
                self._have(ns, pool, Anchor.of(hasher, end), until, reasons)
                for (ns, pool), hasher in zip(self._pools, hashers, strict=True)
            )
        except KvfsError as e:
            reasons.append(str(e))
            return False
        finally:
            if reasons:
                log.debug("no slot: %s", "; ".join(reasons))

    def _have(
        self, ns: Namespace, pool: SlotPool, anchor: Anchor, until: float, reasons: list[str]
    ) -> bool:
        """Whether the slot is in the pool; one that another host holds is put there."""
        # Read, not only looked up: it is verified, and the last to be given to another anchor.
        if pool.read(anchor) is not None:
            return True
        if self._client is None:
            return False
        hints = self._store.index.slot_holders(
            ns.number, anchor.hash, self._store.now_ms(), self._store.host
        )
        slot, _ = find_slot(ns, anchor, hints, until, reasons, pool=pool, client=self._client)
        if slot is None:
            return False
        pool.write(anchor, slot.data, rotation=slot.meta.rotation, overshoot=slot.meta.overshoot)
        return True

    def close(self) -> None:
        """When nothing is looked for any more."""
        if self._client is not None:
            self._client.close()
        for _, pool in self._pools:
            pool.close()
