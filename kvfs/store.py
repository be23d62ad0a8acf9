"""The store: what a router or an engine process opens, and the one way in for everything else.

Threads: all methods may be called from several threads. Fork: a child may go on using a store it
inherited; it gets its own index connection and its own writer. Blocking: `check` touches only the
local index; everything else reads or writes the shared storage.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from kvfs import chain
from kvfs.backend import Backend, PosixBackend
from kvfs.catalog import Catalog, TtlClass, namespace_path
from kvfs.chain import PrefixHasher
from kvfs.config import MARKER, StoreConfig, check_alive, check_class, load_config
from kvfs.errors import BackendError, ConfigError, InputError, KvfsError
from kvfs.fetch import FetchResult, Reader
from kvfs.follow import Followed, Follower, Progress
from kvfs.frames import ClassEntry, NamespaceEntry
from kvfs.index import Index
from kvfs.index.apply import Applier
from kvfs.index.env import MAP_BYTES
from kvfs.index.lookup import Found
from kvfs.index.place import default_root, recall, remember, require_local
from kvfs.layout import Identity
from kvfs.namespace import Namespace
from kvfs.plan import Extent, Plan
from kvfs.put import PutResult, Putter, as_payloads
from kvfs.removal import cuts_for, renewals_for
from kvfs.writer import Writer

_FLUSH_SECONDS = 10.0


class Store:
    """An open store. Make one with `init` or `open`; it is a context manager."""

    def __init__(
        self, path: str, backend: Backend | None, config: StoreConfig | None, index: Index,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        """For `init` and `open`. backend and config are None where only `check` is wanted."""
        self.path = path
        self.index = index
        self.clock = clock
        self._backend = backend
        self._config = config
        self._lock = threading.RLock()
        self.catalog = Catalog(index)
        self._writer: Writer | None = None
        self._reader: Reader | None = None
        self._counters: dict[str, int] = {}
        self._flushed = time.monotonic()
        self._closed = False

    @classmethod
    def init(
        cls, path: str | os.PathLike[str], *, extent: int = 64 << 20,
        segment_bytes: int = 256 << 20, durability: str = "batch",
        classes: dict[str, int] | None = None, grace_seconds: float = 60.0,
        **open_options: Any,
    ) -> Store:  # fmt: skip
        """Makes a store in an empty or new directory and opens it (options as for `open`).

        Raises ConfigError if the directory holds something, InputError for bad settings.
        """
        root = os.path.abspath(os.fspath(path))
        more = {} if classes is None else {"classes": dict(classes)}
        config = StoreConfig(
            secrets.token_bytes(16), extent, segment_bytes, durability,
            grace_seconds=grace_seconds, **more,
        )  # fmt: skip
        backend = open_options.get("backend") or PosixBackend(root)
        try:
            os.makedirs(root, 0o700, exist_ok=True)
            if backend.names(""):
                raise ConfigError(f"{root}: not empty; a store begins in an empty directory")
            backend.put_new(MARKER, config.encode())
        except OSError as e:
            raise ConfigError(f"{root}: {e.strerror}") from e
        return cls.open(root, **open_options)

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, index: str | None = None,
        clock: Callable[[], float] = time.time, backend: Backend | None = None,
        catch_up: bool = True, map_bytes: int = MAP_BYTES, progress: Progress | None = None,
    ) -> Store:  # fmt: skip
        """Opens a store and its local index, and applies what the journals have that it has not.

        index: directory for this host's indexes (default: $KVFS_INDEX or the user's cache);
        clock: seconds since 1970; backend: for fault injection and other storage; catch_up: False
        leaves the journals unread; progress: called with entries applied.
        Raises NoStoreError, FormatError, ConfigError, BackendError, IndexFault.
        """
        chain.self_test()
        root = os.path.abspath(os.fspath(path))
        backend = backend or PosixBackend(root)
        config = load_config(backend)
        place = index or default_root()
        require_local(place)
        opened = Index(os.path.join(place, config.uuid.hex()), config.uuid, map_bytes=map_bytes)
        store = cls(root, backend, config, opened, clock)
        try:
            remember(place, root, config.uuid.hex())
            store._count("namespaces_unreadable", len(store.catalog.seed(backend, config)))
            if catch_up:
                store.catch_up(progress)
        except OSError as e:
            store.close()
            raise ConfigError(f"{place}: {e.strerror}") from e
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def open_index(
        cls, path: str | os.PathLike[str], *, index: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> Store | None:  # fmt: skip
        """Opens only the local index of a store this host has opened before; None if it has not.

        Not one system call goes to the shared storage: `check` works while it hangs. Everything
        but `check` and what reads the index raises BackendError. Raises ConfigError, IndexFault.
        """
        chain.self_test()
        root = os.path.abspath(os.fspath(path))
        place = index or default_root()
        uuid = recall(place, root)
        if uuid is None or not os.path.exists(os.path.join(place, uuid, "data.mdb")):
            return None
        require_local(place)
        opened = Index(os.path.join(place, uuid), bytes.fromhex(uuid))
        if opened.discarded is not None:  # nothing in it: only a full open fills it again
            opened.close()
            return None
        return cls(root, None, None, opened, clock)

    # what is open

    @property
    def backend(self) -> Backend:
        if self._backend is None:
            raise BackendError(f"{self.path}: only the index of this store was opened")
        return self._backend

    @property
    def config(self) -> StoreConfig:
        if self._config is None:
            raise BackendError(f"{self.path}: only the index of this store was opened")
        return self._config

    @property
    def uuid(self) -> bytes:
        return self.index.store

    def now_ms(self) -> int:
        return int(self.clock() * 1000)

    def writer(self) -> Writer:
        """This process's writer, made when first needed. Raises NoStoreError, BackendError."""
        with self._lock:
            if self._writer is None or self._writer.pid != os.getpid():
                check_alive(self.backend, self.uuid)
                self._writer = Writer(self.backend, self.index, self.config, self.clock)
            return self._writer

    def reader(self) -> Reader:
        with self._lock:
            if self._reader is None:
                self._reader = Reader(self.backend)
            return self._reader

    def close(self) -> None:
        """Seals this process's files and leaves the index. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._writer is not None:
                self._writer.close()
            if self._reader is not None:
                self._reader.close()
            with contextlib.suppress(KvfsError):
                self.flush_counters()
            self.index.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # namespaces and classes

    def create_namespace(self, identity: Identity, *, default_class: str = "chatbot") -> Namespace:
        """Returns the namespace of an identity, made if it is new.

        default_class: TTL class of puts that name none, for this handle. Raises BackendError.
        """
        self.catalog.ttl(default_class)
        if not self.catalog.known(identity):
            data = json.dumps(identity.to_json())
            try:
                self.backend.put_new(namespace_path(identity.name), data.encode())
            except OSError as e:
                raise BackendError(f"{self.path}/ns/{identity.name}: {e.strerror}") from e
            self.writer().publish([], [NamespaceEntry(identity.nsid, data)])
        return self.catalog.get(identity, default_class)

    def namespaces(self) -> list[Namespace]:
        """All namespaces, by name."""
        return self.catalog.all()

    def namespace(self, name: str | bytes) -> Namespace:
        """A namespace by name, unique beginning of a name, or 16-byte id. Raises InputError."""
        return self.catalog.find(name)

    def classes(self) -> dict[str, int]:
        """TTL class -> seconds."""
        return self.catalog.classes()

    def define_class(self, name: str, seconds: int) -> None:
        """Defines or changes a TTL class, for what is stored or renewed from now on."""
        check_class(name, seconds)
        self.writer().publish([], [ClassEntry(name, seconds)])

    # the three questions, and put

    def check(self, ns: Namespace, tokens: Any) -> Plan:
        """The longest stored prefix of a prompt. Local index only; raises for bad input alone.

        tokens: as for kvfs.chain.as_u32, or a PrefixHasher of the namespace, which is the faster
        way for a request that grows.
        """
        hasher = ns.as_hasher(tokens, lazy=True)
        found = self.index.check(ns.number, hasher, self.now_ms())
        reason = found.reason
        if reason in ("diverged", "expired"):
            reason = f"{reason} at block {found.blocks}"
        self._count(f"check.{found.reason.replace(' ', '_')}")
        stored = found.blocks * ns.block_tokens
        return Plan(
            ns.name, ns.nsid, hasher.n_tokens, ns.block_tokens, stored,
            min(stored, ns.identity.hit_cap(hasher.n_tokens)), reason, self._extents(found),
        )  # fmt: skip

    def _extents(self, found: Found) -> tuple[Extent, ...]:
        out = []
        for seg, slot, shared, block, expires, _ in found.runs:
            s = self.index.segment(seg)
            out.append(Extent(s.path, s.segment, s.geometry, slot, shared, block, expires))
        return tuple(out)

    def fetch(
        self, ns: Namespace, plan: Plan, tokens: Any, into: Any = None, *,
        blocks: int | None = None, payload_checksum: bool = True,
    ) -> FetchResult:  # fmt: skip
        """Reads and verifies the blocks of a plan: see kvfs.fetch.Reader.fetch.

        A block that turns out to be bad or gone is forgotten at once by this host's index, so that
        the next check is right and the block can be stored again.
        """
        hasher = ns.as_hasher(tokens)
        result = self.reader().fetch(
            ns, plan, hasher, into, blocks=blocks, payload_checksum=payload_checksum
        )
        self._count("fetch_blocks", result.blocks)
        self._count("fetch_bytes", result.blocks * ns.row_bytes)
        if result.reason is not None:
            self._count(f"fetch_miss.{result.reason.replace(' ', '_')}")
            if result.lasting and self._marker_in_place():
                self._forget(ns, plan, hasher, result.blocks)
        return result

    def _marker_in_place(self) -> bool:
        """A whole store that is away looks like all its segments missing: forget nothing then."""
        try:
            check_alive(self.backend, self.uuid)
        except KvfsError:
            self._count("backend_down")
            return False
        return True

    def _forget(self, ns: Namespace, plan: Plan, hasher: PrefixHasher, block: int) -> None:
        """Takes a block and what follows in its run out of this host's index."""
        extent = next(e for e in plan.extents if e.block <= block < e.block + e.count)
        head = hasher.digest(extent.block + 1)

        def shorten(applier: Applier) -> None:
            run = applier.run(ns.number, head)
            segment = None if run is None else applier.segment(run.seg)
            if run is None or segment is None:
                return
            if (segment.segment, run.slot) == (extent.segment_id, extent.slot):
                applier.shorten(run, block - extent.block)

        with contextlib.suppress(KvfsError):
            self.index.write(shorten)

    def put(
        self, ns: Namespace, tokens: Any, blocks: Any, *, first_block: int = 0,
        ttl_class: str | None = None,
    ) -> PutResult:  # fmt: skip
        """Stores the whole blocks of a prompt that are not stored yet.

        tokens: all tokens of the prompt, as for `check`; blocks: the payloads of blocks
        first_block.. of it, one contiguous buffer or a sequence of buffers of row_bytes each.
        Tokens behind the last whole block are counted and left out. Raises InputError for
        arguments that do not fit; what the storage does is in the result's `error`.
        """
        hasher = ns.as_hasher(tokens)
        if not 0 <= first_block <= hasher.n_blocks:
            raise InputError(f"first_block is {first_block}; the prompt has {hasher.n_blocks}")
        ttl = self.catalog.ttl(ttl_class or ns.default_class)
        payloads = as_payloads(blocks, hasher.n_blocks - first_block, ns.row_bytes)
        try:
            writer = self.writer()
        except KvfsError as e:
            self._count("store_failures")
            rest = hasher.n_tokens % ns.block_tokens
            return PutResult(hasher.n_blocks, 0, 0, 0, rest, False, e)
        putter = Putter(self.index, writer, self.catalog.seconds_by_number())
        return putter.put(ns, hasher, payloads, first_block, ttl)

    # renewing and removing

    def touch(self, ns: Namespace, tokens: Any, *, ttl_class: str | None = None) -> int:
        """Renews the stored prefix of a prompt: it expires a whole TTL from now.

        ttl_class: moves it to this class, which may also shorten its time; None: each run keeps
        its class. Returns the number of runs renewed. Raises InputError, BackendError, SpaceError.
        """
        ttl = None if ttl_class is None else self.catalog.ttl(ttl_class)
        hasher = ns.as_hasher(tokens)
        now = self.now_ms()
        found = self.index.check(ns.number, hasher, now)
        heads = [hasher.digest(m.block + 1) for m in found.runs]
        return self.renew_runs(ns, heads, ttl)

    def renew_runs(self, ns: Namespace, heads: list[bytes], ttl: TtlClass | None) -> int:
        """Renews runs by the hash of their first block; see `touch`."""
        names, classes = self.index.class_names(), self.classes()
        entries = renewals_for(self.index, ns, heads, ttl, names, classes, self.now_ms())
        if entries:
            self.writer().publish([], entries, {"renewed_runs": len(entries)})
        return len(entries)

    def remove(self, ns: Namespace, tokens: Any, *, from_block: int = 0) -> int:
        """Takes the stored blocks of a prompt from `from_block` on out of sight, and all that
        follows them in any chain. Returns the number of blocks. Raises BackendError, SpaceError.
        """
        hasher = ns.as_hasher(tokens)
        found = self.index.check(ns.number, hasher, self.now_ms())
        for match in found.runs:
            if match.block <= from_block < match.block + match.shared:
                head = hasher.digest(match.block + 1)
                return self.remove_blocks(ns, head, from_block - match.block)
        return 0

    def remove_blocks(self, ns: Namespace, head: bytes, keep: int = 0) -> int:
        """Takes out of sight a run (by its first hash) behind its first `keep` blocks, and all
        that follows. Returns the number of blocks."""
        entries, blocks = cuts_for(self.index, ns, head, keep, self.now_ms())
        if entries:
            self.writer().publish([], entries, {"removed_blocks": blocks})
        return blocks

    # following, counting

    def catch_up(self, progress: Progress | None = None) -> Followed:
        """Applies what the journals have and the local index has not."""
        return Follower(self.backend, self.index, self.uuid).catch_up(progress=progress)

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
            "index_readers": info["num_readers"], **self.index.counters(),
        }  # fmt: skip
