"""The store: what a router or an engine process opens, and the one way in for everything else.

Threads: all methods may be called from several threads. Fork: a child may go on using a store it
inherited; it gets its own index connection and its own writer. Blocking: `check` touches only the
local index (kvfs.local); everything else reads or writes the shared storage.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from kvfs import chain
from kvfs.backend import Backend
from kvfs.backend.select import open_backend
from kvfs.catalog import TtlClass, namespace_path
from kvfs.chain_entries import NOTHING, RemoveEntry
from kvfs.config import (
    EXTENT,
    MARKER,
    RENEW_CAP_SECONDS,
    StoreConfig,
    check_alive,
    check_class,
    load_config,
)
from kvfs.errors import BackendError, BusyError, ConfigError, FormatError, InputError, KvfsError
from kvfs.fetch import FetchResult, Reader
from kvfs.follow.follower import Followed, Follower, Progress
from kvfs.follow.history import adopt, lost, note_followed
from kvfs.forgetting import forget
from kvfs.frames import ClassEntry, Entry, NamespaceEntry
from kvfs.index import Index
from kvfs.index.env import MAP_BYTES
from kvfs.index.place import default_root, remember, require_local
from kvfs.keys import Key
from kvfs.layout import Identity
from kvfs.local import LocalStore
from kvfs.namespace import Namespace
from kvfs.plan import Plan
from kvfs.put import PutResult, Putter, as_payloads
from kvfs.record import Shape
from kvfs.removal import heard_ms, removals_for, removals_for_all, renewals_for
from kvfs.renewal import Renewer
from kvfs.slot_entries import SlotEntry, SlotGoneEntry
from kvfs.store_path import path_of
from kvfs.usage import Space
from kvfs.writer import Writer

log = logging.getLogger(__name__)


class Store(LocalStore):
    """An open store. Make one with `init` or `open`; it is a context manager.

    `namespaces`, `namespace`, `classes`, `check` and `stats` are those of LocalStore.
    """

    def __init__(
        self, path: str, backend: Backend, config: StoreConfig, index: Index,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        """For `init` and `open`."""
        super().__init__(path, index, clock)
        self.backend = backend
        self.config = config
        self._writer: Writer | None = None
        self._reader: Reader | None = None
        self._owns_backend = False
        self._renewer = Renewer(self)

    @classmethod
    def init(
        cls, path: str | os.PathLike[str], *, extent: int | None = None,
        segment_bytes: int = 256 << 20, durability: str = "batch",
        classes: dict[str, int] | None = None, grace_seconds: float = 60.0,
        renew_cap_seconds: float = RENEW_CAP_SECONDS, own_extents: bool | None = None,
        **open_options: Any,
    ) -> Store:  # fmt: skip
        """Makes a store in an empty or new directory and opens it (path, options as for `open`).

        extent, own_extents: see StoreConfig; by default as the storage has it.

        Raises ConfigError if the directory holds something, InputError for bad settings.
        """
        root = path_of(path)
        given = open_options.pop("backend", None)
        backend = given or open_backend(path)
        more = {} if classes is None else {"classes": dict(classes)}
        try:
            chunk = backend.chunk_bytes()
            given_extent = chunk or EXTENT if extent is None else extent
            config = StoreConfig(
                secrets.token_bytes(16), given_extent, segment_bytes, durability,
                grace_seconds=grace_seconds, renew_cap_seconds=renew_cap_seconds,
                own_extents=bool(chunk) if own_extents is None else own_extents, **more,
            )  # fmt: skip
            os.makedirs(root, 0o700, exist_ok=True)
            if backend.names(""):
                raise ConfigError(f"{root}: not empty; a store begins in an empty directory")
            backend.put_new(MARKER, config.encode())
        except OSError as e:
            raise ConfigError(f"{root}: {e.strerror}") from e
        finally:
            if given is None:
                backend.release()
        return cls.open(path, backend=given, **open_options)

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, index: str | None = None,
        clock: Callable[[], float] = time.time, backend: Backend | None = None,
        catch_up: bool = True, map_bytes: int = MAP_BYTES, progress: Progress | None = None,
    ) -> Store:  # fmt: skip
        """Opens a store and its local index, and applies what the journals have that it has not.

        path: a directory, or `posix:DIR` or `3fs:DIR` where its mount is not to tell the backend;
        index: directory for this host's indexes (default: $KVFS_INDEX or the user's cache);
        clock: seconds since 1970; backend: for fault injection and other storage; catch_up: False
        leaves the journals unread; progress: called with entries applied.
        Raises NoStoreError, FormatError, ConfigError, BackendError, IndexFault.
        """
        chain.self_test()
        root, given = path_of(path), backend
        backend = given or open_backend(path)
        config = load_config(backend)
        place = index or default_root()
        require_local(place)
        opened = Index(os.path.join(place, config.uuid.hex()), config.uuid, map_bytes=map_bytes)
        store = cls(root, backend, config, opened, clock)
        store._owns_backend = given is None
        try:
            remember(place, root, config.uuid.hex())
            store._count("namespaces_unreadable", len(store.catalog.seed(backend, config)))
            if catch_up:
                store.catch_up(progress)
                if lost(backend, opened):
                    log.warning("%s: the journals are gone; `kvctl rebuild` finds the blocks", root)
        except OSError as e:
            store.close()
            raise ConfigError(f"{place}: {e.strerror}") from e
        except BaseException:
            store.close()
            raise
        return store

    # what is open

    def writer(self) -> Writer:
        """This process's writer, made when first needed. Raises NoStoreError, BackendError."""
        with self._lock:
            if self._writer is None or self._writer.pid != os.getpid():
                check_alive(self.backend, self.uuid)
                space = Space(self.backend, self.namespaces)
                self._writer = Writer(self.backend, self.index, self.config, self.clock, space)
            return self._writer

    def reader(self) -> Reader:
        with self._lock:
            if self._reader is None:
                self._reader = Reader(self.backend)
            return self._reader

    def _finish(self) -> None:
        """Publishes the renewals that are due and seals this process's files."""
        self._renewer.close()
        if self._writer is not None:
            self._writer.close()
        if self._reader is not None:
            self._reader.close()
        if self._owns_backend:
            self.backend.release()

    # namespaces and classes

    def create_namespace(
        self, identity: Identity, *, default_class: str | None = None
    ) -> Namespace:
        """Returns the namespace of an identity, made if it is new.

        default_class: TTL class of puts that name none, for this handle; None: "chatbot" where the
        store has it, else the class that keeps longest. Raises InputError for a class that is not
        there and a layout that cannot be stored, BackendError.
        """
        if default_class:
            self.catalog.ttl(default_class)
        Shape.of(identity)
        if not self.catalog.known(identity):
            data = json.dumps(identity.to_json())
            try:
                self.backend.put_new(namespace_path(identity.name), data.encode())
            except OSError as e:
                raise BackendError(f"{self.path}/ns/{identity.name}: {e.strerror}") from e
            entries: list[Entry] = [NamespaceEntry(identity.nsid, data)]
            if identity.nsid in self.index.namespaces():  # it was removed
                when_ms = heard_ms(self.index, self.now_ms())
                entries.append(RemoveEntry(identity.nsid, when_ms, NOTHING))
            self.writer().publish([], entries)
        return self.catalog.get(identity, default_class)

    def define_class(self, name: str, seconds: int) -> None:
        """Defines or changes a TTL class, for what is stored or renewed from now on."""
        check_class(name, seconds)
        self.writer().publish([], [ClassEntry(name, seconds, self.now_ms())])

    # the other questions, and put

    def fetch(
        self, ns: Namespace, plan: Plan, tokens: Any, into: Any = None, *,
        blocks: int | None = None, payload_checksum: bool = True,
    ) -> FetchResult:  # fmt: skip
        """Reads and verifies the blocks of a plan: see kvfs.fetch.Reader.fetch.

        A block that turns out to be bad or gone is forgotten at once by this host's index, so that
        the next check is right and the block can be stored again. What is delivered is renewed: see
        `note_hit`.
        """
        hasher = ns.as_hasher(tokens)
        result = self.reader().fetch(
            ns, plan, hasher, into, blocks=blocks, payload_checksum=payload_checksum
        )
        self._count("fetch_blocks", result.blocks)
        self._count("fetch_bytes", result.blocks * ns.row_bytes)
        if result.reason is not None:
            self._count(f"fetch_miss.{result.reason.replace(' ', '_')}")
            if result.lasting:
                self.report_bad(ns, plan, hasher, result.blocks)
        if result.blocks:
            whole = result.reason is None
            self._renewer.note(ns, plan, hasher, plan.stored_blocks if whole else result.blocks)
        return result

    def note_hit(self, ns: Namespace, plan: Plan, tokens: Any, blocks: int | None = None) -> None:
        """Tells that the prefix a plan found is used, or the first `blocks` blocks of it: `fetch`
        does so itself, and so does the fetcher of kvfs.fetcher.engine that is told of it.

        The prefix is renewed, off the critical path and as kvfs.renewal says: it expires a whole
        time to live from now, at most `renew_cap_seconds` after it was written. Never blocks on the
        storage. Raises InputError for tokens that are none.
        """
        used = plan.stored_blocks if blocks is None else blocks
        self._renewer.note(ns, plan, ns.as_hasher(tokens), used)

    def note_miss(self, reason: str) -> None:
        """Counts a fetch through the fetch process that brought less than it was asked for."""
        self._count(f"fetch_miss.{reason.split(':')[0].replace(' ', '_')}")

    def flush_renewals(self) -> int:
        """Publishes now what hits have renewed; returns the number of runs. Happens by itself every
        few seconds and at close. Raises BackendError, SpaceError, IndexFault."""
        return self._renewer.flush()

    def report_bad(self, ns: Namespace, plan: Plan, tokens: Any, block: int) -> bool:
        """Tells that a block of a plan is bad or gone, as a fetch found out (`lasting`).

        This host's index forgets it, and what follows in its run, at once, so that the next check
        is right and the block can be stored again; nothing, if the whole store is away, or if
        another host wrote the block so short a time ago that it may only not show here yet. Returns
        whether it did. Raises InputError for a block that is not in the plan.
        """
        extent = next((e for e in plan.extents if e.block <= block < e.block + e.count), None)
        if extent is None:
            raise InputError(f"block {block} is not in the plan")
        if not self._marker_in_place():
            return False
        self._count("blocks_reported_bad")
        head = ns.as_hasher(tokens).digest(extent.block + 1)
        done = forget(self.index, ns.number, extent, head, block, self.now_ms)
        if self._writer is not None:
            # Should it be a file we write: it failed, or somebody removed it. No more into it.
            self._writer.retire({extent.segment_id})
        return done

    def _marker_in_place(self) -> bool:
        """A whole store that is away looks like all its segments missing: forget nothing then."""
        try:
            check_alive(self.backend, self.uuid)
        except KvfsError:
            self._count("backend_down")
            return False
        return True

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
            rest = hasher.n_tokens % ns.block_tokens
            result = PutResult(hasher.n_blocks, 0, 0, 0, rest, False, e)
        else:
            putter = Putter(self.index, writer, self.catalog.seconds_by_number())
            result = putter.put(ns, hasher, payloads, first_block, ttl)
        if isinstance(result.error, BusyError):
            self._count("puts_dropped")
        elif result.error is not None and not isinstance(result.error, InputError):
            self._count("store_failures")
        return result

    # the same for an engine that keys the blocks itself

    def put_keys(
        self, ns: Namespace, keys: Iterable[Key], parent_key: Key | None, blocks: Any, *,
        first_block: int | None = None, ttl_class: str | None = None,
    ) -> PutResult:  # fmt: skip
        """As `put`, of consecutive blocks that an engine names by its own keys, one each.

        What is there already is left out, wherever it is. parent_key: of the block before the
        first, None if there is none or it is not known; first_block: the number of the first block
        in its chain, by default one more than the parent's as far as this host knows it, else 0.
        Both only tell what belongs together: they decide nothing about what is found.
        """
        if first_block is None:
            first_block = 0 if parent_key is None else self._behind(ns, parent_key)
        chain = ns.keys(keys, parent=parent_key, first_block=first_block)
        return self.put(ns, chain, blocks, ttl_class=ttl_class)

    def _behind(self, ns: Namespace, key: Key) -> int:
        """The number of the block behind the one with this key; 0 if that is not here."""
        run, place = self.index.holding(ns.number, ns.keys([key]).digest(1))
        return 0 if run is None else run.block + place + 1

    def fetch_keys(self, ns: Namespace, keys: Iterable[Key], into: Any = None) -> FetchResult:
        """Checks and fetches the leading ones of an engine's keys: see `check_keys` and `fetch`.

        `wanted` is the number of keys; a block that is not stored ends the prefix as one that
        does not verify does. Raises InputError.
        """
        chain = ns.keys(keys)
        plan = self.check(ns, chain)
        got = self.fetch(ns, plan, chain, into, blocks=plan.stored_blocks)
        whole = got.reason is None and plan.stored_blocks == chain.n_blocks
        return replace(
            got, wanted=chain.n_blocks, reason=None if whole else got.reason or plan.reason
        )

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
                before = [m for m in found.runs if m.block < match.block]
                heads = b"".join(hasher.digest(m.block + 1) for m in before)
                return self.remove_blocks(ns, head, from_block - match.block, heads)
        return 0

    def remove_blocks(
        self, ns: Namespace, head: bytes, keep: int = 0, heads: bytes = b""
    ) -> int:  # fmt: skip
        """Takes out of sight a run (by its first hash) behind its first `keep` blocks, and all
        that follows, in every copy on every host. heads: first hashes of the runs that lead to it,
        if they are known. Returns the number of blocks."""
        entries, blocks = removals_for(self.index, ns, head, keep, self.now_ms(), heads)
        if entries:
            self.writer().publish([], entries, {"removed_blocks": blocks})
        return blocks

    def remove_all(
        self, ns: Namespace, *, whole: bool = False, progress: Progress | None = None
    ) -> int:
        """Takes all blocks of a namespace out of sight, on every host.

        whole: the namespace itself as well, until it is made again or something is stored in it;
        progress: called with the blocks removed since the last call. Returns the number of blocks.
        Raises BackendError, SpaceError, IndexFault.
        """
        removed = 0
        for entries, blocks in removals_for_all(self.index, ns, self.now_ms(), whole=whole):
            self.writer().publish([], entries, {"removed_blocks": blocks})
            removed += blocks
            if progress is not None:
                progress(blocks)
        return removed

    # slots of sliding-window state

    def publish_slots(self, entries: Iterable[SlotEntry | SlotGoneEntry]) -> None:
        """Tells all hosts which slots a host holds, or does no longer: see kvfs.state.directory.

        Raises BackendError, SpaceError, IndexFault; then it may be told again.
        """
        told = list(entries)
        if told:
            self.writer().publish([], told)

    # following

    def catch_up(self, progress: Progress | None = None) -> Followed:
        """Applies what the journals have and the local index has not.

        Begins with the newest checkpoint where the index is new or journals are gone. Raises
        BackendError, IndexFault.
        """
        follower = Follower(self.backend, self.index, self.uuid)
        begun = self.now_ms()
        try:
            adopt(self.backend, self.index, self.uuid, begun)
            followed = follower.catch_up(progress=progress)
            if followed.missing:
                adopt(self.backend, self.index, self.uuid, begun, missing=followed.missing)
                followed = follower.catch_up(progress=progress)
        except FormatError as e:
            raise BackendError(f"{self.path}: {e}") from e
        except OSError as e:
            raise BackendError(f"{self.path}: {e.strerror or e}") from e
        if followed.complete:
            note_followed(self.index, begun)
        self.close_idle()
        return followed

    def close_idle(self) -> None:
        """Closes segments that were not read for a while: a removed one takes its room for as long
        as it is open. Whoever follows the journals does it; so do fetches."""
        if self._reader is not None:
            self._reader.close_idle()
