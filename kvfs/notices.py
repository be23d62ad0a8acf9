"""What a store tells all hosts besides blocks: namespaces, classes, renewals, removals, slots.

Each is an entry of this process's journal, by the writer that stores blocks too, and counts
everywhere once it is read there. kvfs.store.Store builds on it. Threads and fork as for the store.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from typing import Any

from kvfs.backend import Backend
from kvfs.catalog import TtlClass, namespace_path
from kvfs.chain_entries import NOTHING
from kvfs.config import StoreConfig, check_alive, check_class
from kvfs.errors import BackendError
from kvfs.follow.follower import Progress
from kvfs.frames import ClassEntry, Entry, NamespaceEntry
from kvfs.index import Index
from kvfs.layout import Identity
from kvfs.local import LocalStore
from kvfs.namespace import Namespace
from kvfs.record import Shape
from kvfs.removal import (
    heard_ms,
    of_namespace,
    removals_for,
    removals_for_all,
    renewals_for,
)
from kvfs.slot_entries import SlotEntry, SlotGoneEntry
from kvfs.usage import Space
from kvfs.writer import Writer


class NoticeStore(LocalStore):
    """A store with a journal to write to; see kvfs.store.Store."""

    def __init__(
        self, path: str, backend: Backend, config: StoreConfig, index: Index,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        super().__init__(path, index, clock)
        self.backend = backend
        self.config = config
        self._writer: Writer | None = None

    def writer(self) -> Writer:
        """This process's writer, made when first needed. Raises NoStoreError, BackendError."""
        with self._lock:
            if self._writer is None or self._writer.pid != os.getpid():
                check_alive(self.backend, self.uuid)
                space = Space(self.backend, self.namespaces)
                self._writer = Writer(self.backend, self.index, self.config, self.clock, space)
            return self._writer

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
            if self.index.namespace(identity.nsid):  # it was removed
                when_ms = heard_ms(self.index, self.now_ms())
                entries.append(of_namespace(self.index, identity.nsid, NOTHING, when_ms))
            self.writer().publish([], entries)
        return self.catalog.get(identity, default_class)

    def define_class(self, name: str, seconds: int) -> None:
        """Defines or changes a TTL class, for what is stored or renewed from now on."""
        check_class(name, seconds)
        self.writer().publish([], [ClassEntry(name, seconds, self.now_ms())])

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
