"""The slot pool: sliding-window state in this host's memory, one copy for all its processes.

A fixed number of slots of one size, allocated once (kvfs.state.poolfile). Storing takes an empty
slot or the one that was used longest ago; a slot that nobody used for its time to live is no hit
any more. Generations are never given twice, so that a hint that names one is right or plainly
stale.

Whoever changes the pool holds its lock, so only one does, and where he is killed the next one puts
lists in order (kvfs.state.table). Readers take no lock. They copy, then look whether the slot was
given another generation meanwhile, then verify the checksum: torn bytes are a miss, whoever died
when. Only the owner of a slot decides about it; what other hosts know are hints.

Threads: every method, from any. Fork: a child opens the pool anew at its first use.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from kvfs.errors import BusyError, InputError
from kvfs.layout import Identity
from kvfs.state.inventory import boot_ms, sweep
from kvfs.state.poolfile import DIRECTORY, PoolFile
from kvfs.state.slot import Anchor, SlotMeta
from kvfs.state.table import Fill, SlotTable

TTL_SECONDS = 6 * 3600
LOCK_SECONDS = 1.0
_RETRIES = 3


class Stored(NamedTuple):
    """What storing a slot did."""

    meta: SlotMeta
    new: bool
    """False: there was a slot for this anchor already, and it was kept."""
    evicted: SlotMeta | None
    """The slot that had to go, unless its time was over anyway."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot that was read: what it is, and its verified data of slot_bytes, [layer][place]."""

    meta: SlotMeta
    data: Any


class SlotPool:
    """The slots of one namespace on this host. Make one with `open`; a context manager."""

    def __init__(
        self, identity: Identity, directory: str, file: PoolFile, ttl_seconds: float,
        clock: Callable[[], int],
    ) -> None:  # fmt: skip
        """For `open`."""
        self.identity = identity
        self.directory = directory
        self.ttl_ms = int(ttl_seconds * 1000)
        self.clock = clock
        self._closed = False
        self._use(file)

    @classmethod
    def open(
        cls, identity: Identity, budget: int | None = None, *, directory: str = DIRECTORY,
        ttl_seconds: float = TTL_SECONDS, clock: Callable[[], int] = boot_ms,
    ) -> SlotPool:  # fmt: skip
        """Opens the pool of a namespace on this host, with all slots that are in it.

        budget: bytes of host memory for it, reserved at once; a pool of another size is made anew
        if nobody uses it, and pools that nobody uses and whose slots have all expired are
        removed. None: the one that is there. ttl_seconds: how long a slot lives after
        its last use; clock: milliseconds that never go back, the same for all processes. Raises
        ConfigError (no room, no window, in use with another budget), BusyError.
        """
        if budget is not None:
            sweep(
                directory, clock=clock
            )  # a namespace that is out of use must not hold memory for ever
        file = PoolFile.attach(identity, directory, budget, LOCK_SECONDS)
        return cls(identity, directory, file, ttl_seconds, clock)

    def _use(self, file: PoolFile) -> None:
        self._file = file
        self._table = SlotTable(file.map, file.header)
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def _mine(self) -> SlotTable:
        """The table, opened anew if this process was forked since."""
        if self._pid != os.getpid():
            # The parent's descriptor shares its locks with us: it would not keep us apart.
            old = self._file
            self._use(PoolFile.attach(self.identity, self.directory, None, LOCK_SECONDS))
            os.close(old.fd)
            old.fd = -1
        return self._table

    @property
    def path(self) -> str:
        return self._file.path

    @property
    def pool_id(self) -> bytes:
        """16 bytes: another one once the host was started anew, or the pool made anew."""
        return self._file.header.pool

    @property
    def slots(self) -> int:
        """How many there are."""
        return self._table.slots

    @property
    def slot_bytes(self) -> int:
        """Bytes of the data of one."""
        return self._file.header.geometry.slot_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of host memory it takes, all of them, always."""
        return self._file.header.geometry.file_bytes

    def close(self) -> None:
        """Leaves the pool; its slots stay. May be called twice."""
        if not self._closed:
            self._closed = True
            self._table.close()
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # reading: no lock

    def read(self, anchor: Anchor, into: Any = None) -> Slot | None:
        """A copy of the anchor's slot, verified; None if there is none.

        into: a writable buffer of slot_bytes for the data, else they are new bytes. A slot that
        turns out to be damaged is emptied.
        """
        table, now = self._mine(), self.clock()
        for _ in range(_RETRIES):
            held = table.held(anchor)
            if held is None or table.expires_ms(held[0]) <= now:
                break
            slot, meta = held
            data = _copied(table.data(slot), into)
            if table.sequence(slot) != meta.generation:
                table.count("torn")
                continue  # given to another anchor meanwhile
            if not meta.accepts(data):
                self._spoilt(slot, meta)
                break
            self._used(slot, meta, now)
            table.count("hits")
            return Slot(meta, data)
        table.count("misses")
        return None

    def lookup(self, anchor: Anchor) -> SlotMeta | None:
        """What is known of the anchor's slot, without its data; None if there is none."""
        table = self._mine()
        held = table.held(anchor)
        live = held is not None and table.expires_ms(held[0]) > self.clock()
        return held[1] if held is not None and live else None

    def left_ms(self, anchor: Anchor) -> int:
        """Milliseconds until the anchor's slot expires if nobody uses it; 0: there is none."""
        table = self._mine()
        held = table.held(anchor)
        return 0 if held is None else max(0, table.expires_ms(held[0]) - self.clock())

    def metas(self) -> list[SlotMeta]:
        """What is known of every slot that has not expired, in no order."""
        table, now = self._mine(), self.clock()
        found = [(slot, table.meta(slot)) for slot in range(table.slots)]
        return [m for slot, m in found if m is not None and table.expires_ms(slot) > now]

    def stats(self) -> dict[str, Any]:
        """Figures of the pool, and counters of all processes since it was made."""
        table = self._mine()
        return {
            "pool": self.pool_id.hex(), "slots": table.slots, "used": table.used,
            "slot_bytes": self.slot_bytes, "file_bytes": self.file_bytes, **table.counters(),
        }  # fmt: skip

    # changing: under the lock

    def write(
        self, anchor: Anchor, data: Any, *, rotation: int = 0, overshoot: int = 0,
        wait: float = LOCK_SECONDS,
    ) -> Stored:  # fmt: skip
        """Stores the slot of an anchor. One that is there already is kept, and counts as used.

        data: a buffer of slot_bytes, or a function that fills the buffer it is given (a copy from
        a GPU); rotation, overshoot: see kvfs.state.ring. wait: seconds for others who are
        changing the pool. Raises InputError, BusyError, and what the function raises; then
        nothing is stored.
        """
        self._check(anchor, rotation, overshoot)
        fill = data if callable(data) else self._copier(data)
        failure: Exception | None = None
        with self._changing(wait) as (table, now):
            found = table.find(anchor.hash)
            meta = None if found is None else table.meta(found)
            live = found is not None and table.expires_ms(found) > now
            if found is not None and meta is not None and live and meta.is_for(anchor):
                self._renew(table, found, now)
                table.count("kept")
                return Stored(meta, False, None)
            slot = table.oldest if found is None else found
            expired = table.expires_ms(slot) <= now
            evicted = table.empty(slot)
            if evicted is not None:
                table.count("expired" if expired else "evicted")
            try:
                meta = table.fill(slot, anchor, fill, rotation, overshoot)
            except Exception as e:
                table.empty(slot)
                failure = e
            else:
                self._renew(table, slot, now)
                table.count("stored")
        if failure is not None:
            raise failure
        assert meta is not None
        return Stored(meta, True, None if expired else evicted)

    def remove(self, anchor: Anchor, *, wait: float = LOCK_SECONDS) -> SlotMeta | None:
        """Empties the anchor's slot; returns what it was. Raises BusyError."""
        with self._changing(wait) as (table, _):
            held = table.held(anchor)
            if held is None:
                return None
            table.count("removed")
            return table.empty(held[0])

    def expire(self, *, wait: float = LOCK_SECONDS) -> list[SlotMeta]:
        """Empties the slots whose time is over; returns what they were. Raises BusyError.

        Nothing has to call it: they are no hits any more, and the first to be used again.
        """
        with self._changing(wait) as (table, now):
            over = []
            for slot in table.by_age():
                if not table.sequence(slot):
                    continue
                if table.expires_ms(slot) > now:
                    break
                over.append(slot)
            gone = [table.empty(slot) for slot in over]
            for _ in gone:
                table.count("expired")
        return [meta for meta in gone if meta is not None]

    def clear(self, *, wait: float = LOCK_SECONDS) -> list[SlotMeta]:
        """Empties all slots; returns what they were. Raises BusyError."""
        with self._changing(wait) as (table, _):
            gone = [m for slot in range(table.slots) if (m := table.empty(slot)) is not None]
            for _ in gone:
                table.count("removed")
        return gone

    def _check(self, anchor: Anchor, rotation: int, overshoot: int) -> None:
        layout, block = self._file.header.layout, self.identity.block_tokens
        if anchor.position < block or anchor.position % block:
            raise InputError(f"{anchor.position} is no boundary between blocks of {block} tokens")
        if len(anchor.hash) != 16 or len(anchor.lineage) != 16:
            raise InputError("a slot needs the chain hash and the lineage of its prefix")
        if not 0 <= rotation < layout.ring:
            raise InputError(f"rotation is {rotation}, outside 0..{layout.ring - 1}")
        if not 0 <= overshoot <= layout.backtrack:
            raise InputError(f"overshoot is {overshoot}, outside 0..{layout.backtrack}")

    def _copier(self, data: Any) -> Fill:
        view = memoryview(data).cast("B")
        if len(view) != self.slot_bytes:
            raise InputError(f"a slot has {self.slot_bytes} bytes, not {len(view)}")

        def copy(into: memoryview) -> None:
            into[:] = view

        return copy

    def _renew(self, table: SlotTable, slot: int, now: int) -> None:
        table.renew(slot, now, now + self.ttl_ms)

    def _used(self, slot: int, meta: SlotMeta, now: int) -> None:
        """Notes a use, if nobody is changing the pool just now; else the next use is noted."""
        with contextlib.suppress(BusyError), self._changing(0) as (table, _):
            if table.sequence(slot) == meta.generation:
                self._renew(table, slot, now)

    def _spoilt(self, slot: int, meta: SlotMeta) -> None:
        """Empties a slot whose data are not what was stored, unless it was filled anew since. If
        somebody is changing the pool just now, the next reader does: reading waits for nobody."""
        with contextlib.suppress(BusyError), self._changing(0) as (table, _):
            if table.sequence(slot) == meta.generation:
                table.count("damaged")
                table.empty(slot)

    @contextlib.contextmanager
    def _changing(self, wait: float) -> Iterator[tuple[SlotTable, int]]:
        """The right to change the pool: the table, and the time. Raises BusyError."""
        table = self._mine()
        if not self._lock.acquire(timeout=wait):
            raise BusyError(f"{self.path}: another thread is changing the slot pool")
        try:
            with self._file.locked(wait):
                table.begin()
                yield table, self.clock()
                # Not reached where something was raised: the next change begins with a repair.
                table.end()
        finally:
            self._lock.release()


def _copied(data: memoryview, into: Any) -> Any:
    if into is None:
        return bytes(data)
    view = memoryview(into).cast("B")
    view[:] = data
    return view
