"""The directory: what this host tells the others about its slots.

Who holds which slot goes through the store's journals like everything else, so that every router
knows it and a restart forgets nothing. An entry is a hint with an expiry: the host that is asked
looks into its pool, and decides. So all of this may be late, lost, or told twice, and costs a
replay at most.

`check` names the holders in its plan; kvfs.store.Store.slot_holders does for any anchor.

Blocking: writes the journal on the shared storage; call it behind a request, not within. Threads:
every method, from any.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvfs.errors import InputError
from kvfs.slot_entries import MAX_TEXT, WHOLE_POOL, SlotEntry, SlotGoneEntry
from kvfs.state.slot import Anchor, SlotMeta
from kvfs.state.slots import SlotPool, Stored
from kvfs.store import Store


class Directory:
    """Publishes the slots of one pool of this host."""

    def __init__(
        self, store: Store, pool: SlotPool, *, address: str = "", host: str | None = None
    ) -> None:
        """address: where this host answers for the pool, "" if it does not, or if another process
        of it does (kvctl serve) and says so itself; host: default the name of this machine. Raises
        InputError for texts that are too long.
        """
        self.store = store
        self.pool = pool
        self.address = address
        self.host = store.host if host is None else host
        for text in (self.address, self.host):
            if "\0" in text or len(text.encode()) > MAX_TEXT:
                raise InputError(f"{text!r}: a host or address has {MAX_TEXT} bytes at most")

    def announce(self, metas: Iterable[SlotMeta]) -> int:
        """Tells that these slots are here, for as long as each has to live. Returns how many.

        Those that are gone already are left out. Raises BackendError, SpaceError, IndexFault.
        """
        entries = [entry for meta in metas if (entry := self._entry(meta)) is not None]
        self.store.publish_slots(entries)
        return len(entries)

    def announce_all(self) -> int:
        """Tells all that the pool holds: at the start of a host's service, and from time to time,
        since slots that are in use live longer than was told. Returns how many."""
        return self.announce(self.pool.metas())

    def stored(self, stored: Stored) -> None:
        """Tells what SlotPool.write did: the slot that is new, and the one that had to go."""
        entries: list[SlotEntry | SlotGoneEntry] = []
        if stored.evicted is not None:
            entries.append(self._gone(stored.evicted))
        entry = self._entry(stored.meta)
        if entry is not None:
            entries.append(entry)
        self.store.publish_slots(entries)

    def withdraw(self, metas: Iterable[SlotMeta]) -> None:
        """Tells that these slots are here no longer."""
        self.store.publish_slots([self._gone(meta) for meta in metas])

    def withdraw_all(self) -> None:
        """Tells that nothing which the pool holds now is here any longer."""
        newest = max((meta.generation for meta in self.pool.metas()), default=0)
        if newest:
            now = self.store.now_ms()
            nsid, pool = self.pool.identity.nsid, self.pool.pool_id
            self.store.publish_slots([SlotGoneEntry(nsid, pool, WHOLE_POOL, newest, now)])

    def _entry(self, meta: SlotMeta) -> SlotEntry | None:
        left = self.pool.left_ms(Anchor(meta.anchor, meta.position, meta.lineage))
        if not left:
            return None
        now = self.store.now_ms()
        return SlotEntry(
            meta.nsid, meta.pool, meta.anchor, meta.position, meta.generation, now + left, now,
            self.host, self.address,
        )  # fmt: skip

    def _gone(self, meta: SlotMeta) -> SlotGoneEntry:
        now = self.store.now_ms()
        return SlotGoneEntry(meta.nsid, meta.pool, meta.anchor, meta.generation, now)
