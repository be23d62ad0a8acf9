"""The store: what a router or an engine process opens, and the one way in for everything else.

Threads: all methods may be called from several threads. Fork: a child may go on using a store it
inherited; it gets its own index connection and its own writer. Blocking: `check` touches only the
local index (kvfs.local); everything else reads or writes the shared storage.
"""

from __future__ import annotations

import contextlib
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
from kvfs.config import (
    EXTENT,
    MARKER,
    RENEW_CAP_SECONDS,
    StoreConfig,
    check_alive,
    load_config,
)
from kvfs.errors import (
    BackendError,
    BusyError,
    ConfigError,
    FormatError,
    IndexFault,
    InputError,
    KvfsError,
)
from kvfs.fetch import FetchResult, Reader
from kvfs.follow.follower import Followed, Follower, Progress
from kvfs.follow.history import adopt, lost, note_followed
from kvfs.forgetting import forget
from kvfs.index import Index
from kvfs.index.env import MAP_BYTES
from kvfs.index.place import default_root, remember, require_local
from kvfs.keys import Key
from kvfs.local import index_below
from kvfs.namespace import Namespace
from kvfs.notices import NoticeStore
from kvfs.plan import Plan
from kvfs.put import PutResult, Putter, as_payloads
from kvfs.renewal import Renewer
from kvfs.store_path import path_of

log = logging.getLogger(__name__)


class Store(NoticeStore):
    """An open store. Make one with `init` or `open`; it is a context manager.

    `namespaces`, `namespace`, `classes`, `check` and `stats` are those of LocalStore; what makes,
    renews and removes is NoticeStore's.
    """

    def __init__(
        self, path: str, backend: Backend, config: StoreConfig, index: Index,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        """For `init` and `open`."""
        super().__init__(path, backend, config, index, clock)
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
        root, given, place = path_of(path), backend, index or default_root()
        with contextlib.ExitStack() as undo:
            backend = given or open_backend(path)
            if given is None:
                undo.callback(backend.release)
            config = load_config(backend)
            require_local(place)
            opened = index_below(place, config.uuid, map_bytes=map_bytes)
            store = cls(root, backend, config, opened, clock)
            undo.callback(store.close)
            try:
                remember(place, root, config.uuid.hex())
            except OSError as e:
                raise ConfigError(f"{place}: {e.strerror or e}") from e
            store._learn(progress, catch_up=catch_up)
            store._owns_backend = given is None
            undo.pop_all()
        return store

    def _learn(self, progress: Progress | None, *, catch_up: bool) -> None:
        """What an index that was just opened is told by the store. Raises as `open`."""
        try:
            unreadable = self.catalog.seed(self.backend, self.config)
            self._count("namespaces_unreadable", len(unreadable))
            if not catch_up:
                return
            self.catch_up(progress)
            if lost(self.backend, self.index):
                log.warning(
                    "%s: the journals are gone; `kvctl rebuild` finds the blocks", self.path
                )
        except OSError as e:
            raise BackendError(f"{self.path}: {e.strerror or e}") from e

    # what is open

    def reader(self) -> Reader:
        with self._lock:
            if self._reader is None:
                self._reader = Reader(self.backend)
            return self._reader

    def _finish(self) -> None:
        """Publishes the renewals that are due and seals this process's files."""
        with contextlib.ExitStack() as left:  # one after another, whatever becomes of each
            if self._owns_backend:
                left.callback(self.backend.release)
            left.callback(self._close_files)
            self._renewer.close()

    def _close_files(self) -> None:
        for files in (self._writer, self._reader):
            if files is not None:
                files.close()

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
        payloads = as_payloads(blocks, hasher.n_blocks - first_block, ns.row_bytes)
        try:
            ttl = self.catalog.ttl(ttl_class or ns.default_class)
            putter = Putter(self.index, self.writer(), self.catalog.seconds_by_number())
        except InputError:
            raise
        except KvfsError as e:
            rest = hasher.n_tokens % ns.block_tokens
            result = PutResult(hasher.n_blocks, 0, 0, 0, rest, False, e)
        else:
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
            first_block = 0
            with contextlib.suppress(IndexFault):  # the put will say so
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

    # following

    def catch_up(self, progress: Progress | None = None) -> Followed:
        """Applies what the journals have and the local index has not.

        Begins with the newest checkpoint where the index is new or journals are gone. Raises
        BackendError, IndexFault.
        """
        begun = self.now_ms()
        follower = Follower(self.backend, self.index, self.uuid, begun)
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
