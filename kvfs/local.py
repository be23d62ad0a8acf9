"""The part of a store that is on this host: its index, and the answers that need nothing else.

`check` lives here, so that a router, and `kvctl check` that is started for each request, load
nothing of what writes or reads blocks. kvfs.store.Store builds on it.

Threads: all methods may be called from several threads. Fork: a child may go on using it; it gets
an index connection of its own. No system call goes to the shared storage.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self

from kvfs import chain, forking
from kvfs.catalog import Catalog
from kvfs.errors import ConfigError, InputError, KvfsError
from kvfs.index import Index
from kvfs.index.lookup import Found
from kvfs.index.place import default_root, recall, require_local
from kvfs.namespace import Namespace
from kvfs.plan import Extent, Plan, SlotHint, slot_anchors
from kvfs.store_path import path_of

if TYPE_CHECKING:
    from kvfs.keys import Key

_FLUSH_SECONDS = 10.0


def index_below(place: str, store: bytes, **options: Any) -> Index:
    """The index of a store (by its uuid) in a directory for indexes. options: as for Index.

    Raises ConfigError where none can be made or opened, IndexFault.
    """
    try:
        return Index(os.path.join(place, store.hex()), store, **options)
    except OSError as e:
        raise ConfigError(f"{place}: {e.strerror or e}") from e


class LocalStore:
    """A store as far as this host's index goes. Get one with `open_index`; a context manager."""

    def __init__(self, path: str, index: Index, clock: Callable[[], float]) -> None:
        """path: absolute path of the store; clock: seconds since 1970."""
        self.path = path
        self.index = index
        self.clock = clock
        self.catalog = Catalog(index)
        self.host = os.uname().nodename
        """This host's name, as slots that it holds are published under."""
        self._lock = threading.RLock()
        self._counters: dict[str, int] = {}
        self._flushed = time.monotonic()
        self._closed = False
        forking.register(self)

    def after_fork(self) -> None:
        """The child counts on its own: its parent's counts are the parent's to add."""
        self._lock = threading.RLock()
        self._counters = {}

    @staticmethod
    def open_index(
        path: str | os.PathLike[str], *, index: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> LocalStore | None:  # fmt: skip
        """Opens the local index of a store this host has opened before; None if it has not.

        Not one system call goes to the shared storage: `check` works while it hangs. index,
        clock: as for Store.open. Raises ConfigError, IndexFault.
        """
        chain.self_test()
        root = path_of(path)
        place = index or default_root()
        uuid = recall(place, root)
        if uuid is None or not os.path.exists(os.path.join(place, uuid, "data.mdb")):
            return None
        require_local(place)
        opened = index_below(place, bytes.fromhex(uuid))
        if opened.discarded is not None:  # nothing in it: only a full open fills it again
            opened.close()
            return None
        return LocalStore(root, opened, clock)

    @property
    def uuid(self) -> bytes:
        return self.index.store

    def now_ms(self) -> int:
        return int(self.clock() * 1000)

    def close(self) -> None:
        """Leaves the index. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:  # without the lock: what is waited for may want it
            self._finish()
        finally:
            with contextlib.suppress(KvfsError):
                self.flush_counters()
            self.index.close()

    def _finish(self) -> None:
        """What has to be done before the index is left."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # namespaces and classes

    def namespaces(self) -> list[Namespace]:
        """All namespaces, by name, also those that were removed."""
        return self.catalog.all()

    def listed_namespaces(self) -> list[Namespace]:
        """All namespaces that were not removed, by name."""
        return self.catalog.listed()

    def namespace(self, name: str | bytes) -> Namespace:
        """A namespace by name, unique beginning of a name, or 16-byte id. Raises InputError."""
        return self.catalog.find(name)

    def classes(self) -> dict[str, int]:
        """TTL class -> seconds."""
        return self.catalog.classes()

    # the first question

    def check(self, ns: Namespace, tokens: Any) -> Plan:
        """The longest stored prefix of a prompt. Local index only; raises for bad input alone.

        tokens: as for kvfs.chain.as_u32, or a PrefixHasher of the namespace, which is the faster
        way for a request that grows, or a KeyChain where the engine keys the blocks: blocks of the
        plan are then counted among the keys.
        """
        hasher = ns.as_hasher(tokens, lazy=True)
        found = self.index.check(ns.number, hasher, self.now_ms())
        reason = found.reason
        if reason in ("diverged", "expired"):
            reason = f"{reason} at block {found.blocks}"
        self._count(f"check.{found.reason.replace(' ', '_')}")
        stored = found.blocks * ns.block_tokens
        hit = stored if ns.keyed else min(stored, ns.identity.hit_cap(hasher.n_tokens))
        hints: tuple[SlotHint, ...] = ()
        if hit and ns.identity.state is not None:
            hints = self._slot_hints(ns, found, hit, stored)
        return Plan(
            ns.name, ns.nsid, hasher.n_tokens, ns.block_tokens, stored, hit, reason,
            self._extents(found), hints,
        )  # fmt: skip

    def check_keys(self, ns: Namespace, keys: Iterable[Key]) -> Plan:
        """As `check`, of the blocks that an engine has keyed so: how many leading ones are there.

        keys: of consecutive blocks, also from the middle of a prefix on. The engine decides what of
        it may be hit: no token is held back. Raises InputError.
        """
        return self.check(ns, ns.keys(keys))

    def have_keys(self, ns: Namespace, keys: Iterable[Key]) -> list[bool]:
        """For each key whether its block is stored, whatever else is. Raises InputError."""
        chain = ns.keys(keys)
        there = [False] * chain.n_blocks
        for match in self.index.stored(ns.number, chain, self.now_ms()).runs:
            there[match.block : match.block + match.shared] = [True] * match.shared
        return there

    def _slot_hints(
        self, ns: Namespace, found: Found, hit: int, stored: int
    ) -> tuple[SlotHint, ...]:
        """Who holds a slot for this hit; where nobody does, one beyond it, to say why."""
        block = ns.block_tokens
        for anchors in (slot_anchors(hit, block), range(hit + block, stored + 1, block)):
            blocks = [anchor // block for anchor in anchors]
            hints = self.index.slot_hints(ns.number, found, blocks, self.now_ms(), self.host)
            if hints:
                return tuple(hints)
        return ()

    def slot_holders(self, ns: Namespace, tokens: Any, position: int) -> list[SlotHint]:
        """Who is said to hold the slot of a prompt at a boundary, whatever is stored of it.

        This host first, then who holds fewest slots. tokens: as for `check`. Raises InputError.
        """
        hasher = ns.as_hasher(tokens)
        blocks, rest = divmod(position, ns.block_tokens)
        if rest or not 0 < blocks <= hasher.n_blocks:
            raise InputError(f"{position} is no boundary behind a whole block of the prompt")
        anchor = hasher.digest(blocks)
        return self.index.slot_holders(ns.number, anchor, self.now_ms(), self.host)

    def _extents(self, found: Found) -> tuple[Extent, ...]:
        out = []
        for seg, slot, shared, block, expires, _ in found.runs:
            s = self.index.segment(seg)
            out.append(Extent(s.path, s.segment, s.geometry, slot, shared, block, expires))
        return tuple(out)

    # counting

    def _count(self, name: str, n: int = 1) -> None:
        if not n:
            return
        counters = self._counters
        counters[name] = counters.get(name, 0) + n
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            with contextlib.suppress(KvfsError):
                self.flush_counters()

    def flush_counters(self) -> None:
        """Adds this handle's counters to those all processes of the host share."""
        with self._lock:
            counters, self._counters = self._counters, {}
            self._flushed = time.monotonic()
        if counters:
            self.index.count(counters)

    def stats(self) -> dict[str, Any]:
        """Figures of the index and the counters of all processes of this host."""
        self.flush_counters()
        info = self.index.env().info()
        segments = self.index.segments()
        return {
            "store": self.path, "uuid": self.uuid.hex(),
            "namespaces": len(self.index.namespaces()),
            "segments": sum(s.state == 0 for s in segments),
            "index_bytes": info["used_bytes"], "index_map_bytes": info["map_size"],
            "index_readers": info["num_readers"], "blocks": 0, "orphans": 0,
            **self.index.counters(),
        }  # fmt: skip
