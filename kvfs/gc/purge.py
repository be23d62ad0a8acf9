"""Erasing: blocks that were taken out of sight also go from the disk, now, with a receipt.

1. the blocks are removed by their hashes: no check of any host finds any copy of them from the
   moment it has read the journal on
2. every segment of the namespace that was written with one of them is found by its own account,
   also those in which another host or an earlier copy left them, and files that no journal tells
   of: what a killed writer or cleaner left
3. what else is of use in these segments is copied forward, and they are dropped
4. after the grace their files are removed, and looked for once more

A segment that a living writer of another process still has open cannot be copied yet: the receipt
names it as pending, and the same command later finishes. Journals and checkpoints keep hashes, not
contents. Slots of sliding-window state in the memory of hosts go with their blocks where `kvctl
serve` runs (kvfs.peers.announce). Blocking; holds the collector's lease throughout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvfs.catalog import namespace_path
from kvfs.chain import HASH_BYTES
from kvfs.chain_entries import RemoveEntry
from kvfs.errors import FormatError
from kvfs.frames import RunEntry
from kvfs.gc.cleaner import Cleaner
from kvfs.gc.expiry import Expiry
from kvfs.gc.lease import SECONDS, Lease
from kvfs.gc.occupancy import Occupied, occupied
from kvfs.gc.pace import Pace
from kvfs.index.schema import DROPPED, GONE, LIVE, Segment
from kvfs.index.wipe import mark_gone
from kvfs.namespace import Namespace
from kvfs.removal import removals_for
from kvfs.scan.segments import segment_paths
from kvfs.store import Store
from kvfs.writer import Writer

_BATCH = 1000
Heads = Iterable[tuple[bytes, int]]
"""Runs by the hash of their first block, and how many blocks of each stay."""


@dataclass(frozen=True, slots=True)
class Erased:
    """A file that is gone, or why it is not yet."""

    path: str
    bytes: int
    removed_ms: int | None
    """When it was removed; None: pending."""
    pending: str | None = None


@dataclass(slots=True)
class Receipt:
    """What was erased."""

    namespace: str
    blocks: int = 0
    """Blocks that were taken out of sight."""
    started_ms: int = 0
    ended_ms: int = 0
    files: list[Erased] = field(default_factory=list)
    copied_bytes: int = 0
    """Of other blocks, which were in the same files."""
    problems: list[str] = field(default_factory=list)

    @property
    def removed_bytes(self) -> int:
        return sum(f.bytes for f in self.files if f.removed_ms is not None)

    @property
    def complete(self) -> bool:
        """No byte of the blocks is left in the store."""
        return all(f.removed_ms is not None for f in self.files) and not self.problems

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self), "removed_bytes": self.removed_bytes, "complete": self.complete,
        }  # fmt: skip


class Purge:
    """Erases blocks of one namespace. Make the steps of several with `purge`."""

    def __init__(
        self, store: Store, ns: Namespace, sleep: Callable[[float], None] = time.sleep, *,
        whole: bool = False,
    ) -> None:  # fmt: skip
        """whole: where all blocks go, the namespace itself does as well, with its file."""
        self.store = store
        self.ns = ns
        self.sleep = sleep
        self.whole = whole
        self.receipt = Receipt(ns.name, started_ms=store.now_ms())
        self._hashes: set[bytes] | None = set()
        self._found: list[Segment] = []

    def run(self, heads: Heads | None) -> Receipt:
        """Erases runs, by the hash of their first block and how many blocks of each stay, and all
        that follows; None: all of the namespace. Raises BusyError, NoStoreError, BackendError,
        SpaceError, IndexFault."""
        return purge([(self, heads)])[0]

    def cut(self, heads: Heads | None) -> None:
        """Takes the blocks out of sight, on every host, and finds the files that hold them."""
        if heads is None:
            self._hashes = None
            self.receipt.blocks = self.store.remove_all(self.ns, whole=self.whole)
        else:
            self._hashes = self._remove(heads)
            self.receipt.blocks = len(self._hashes)
        self._found = self._holding()

    def _remove(self, heads: Heads) -> set[bytes]:
        store, hashes = self.store, set()
        for head, keep in heads:
            entries, _ = removals_for(store.index, self.ns, head, keep, store.now_ms())
            for entry in entries:
                assert isinstance(entry, RemoveEntry)
                h = entry.hashes
                hashes |= {h[at : at + HASH_BYTES] for at in range(0, len(h), HASH_BYTES)}
            for at in range(0, len(entries), _BATCH):
                store.writer().publish([], entries[at : at + _BATCH])
        return hashes

    def _holding(self) -> list[Segment]:
        """The segments of the namespace that were written with one of the blocks."""
        store = self.store
        store.writer().retire({s.segment for s in store.index.segments()})
        expiry = Expiry(store)
        mine = (s for s in store.index.segments() if s.ns == self.ns.number and s.state != GONE)
        return [s for s in mine if self._holds(expiry, s)]

    def _holds(self, expiry: Expiry, segment: Segment) -> bool:
        if self._hashes is None:
            return True
        try:
            return self._any_of(expiry.told_by(segment.path))
        except FileNotFoundError:
            return False
        except (OSError, FormatError) as e:
            self.receipt.problems.append(f"{segment.path}: {e}")
            return False

    def _any_of(self, runs: Iterable[RunEntry]) -> bool:
        """One of the blocks is in these runs."""
        if self._hashes is None:
            return True
        hashes = (r.hashes[at : at + HASH_BYTES] for r in runs for at in _places(r))
        return not self._hashes.isdisjoint(hashes)

    def clean(self, lease: Lease) -> None:
        """Copies forward what else is in these segments, and drops them."""
        store = self.store
        expiry = Expiry(store)
        live = (s for s in self._found if s.state == LIVE)
        numbers = {s.number for s in live if expiry.quiet(s)}
        victims: list[Occupied] = [s for s in occupied(expiry) if s.segment.number in numbers]
        pace = Pace(store.backend)
        pace.refresh()
        writer = Writer(store.backend, store.index, store.config, store.clock)
        try:
            done = Cleaner(store, writer, expiry, pace.copies, lease.check).clean(victims)
        finally:
            writer.close()
        self.receipt.copied_bytes = done.copied_bytes
        self.receipt.problems += done.problems

    def finish(self) -> None:
        """Removes the files of what is dropped by now; the others are pending."""
        store, now_ms = self.store, self.store.now_ms()
        expiry = Expiry(store)
        for old in self._found:
            size = expiry.size(old.path)
            segment = store.index.query(lambda a, n=old.number: a.segment(n))  # type: ignore[misc]
            if segment is not None and segment.state == LIVE:
                why = "a writer still has it open, or it could not be copied"
                self.receipt.files.append(Erased(old.path, size, None, why))
                continue
            try:
                store.reader().forget(old.path)
                store.backend.unlink(old.path)
            except OSError as e:
                self.receipt.files.append(Erased(old.path, size, None, e.strerror or str(e)))
                continue
            self.receipt.files.append(Erased(old.path, size, now_ms))
            if segment is not None and segment.state == DROPPED:
                store.index.write(lambda a, s=segment: mark_gone(a, s))  # type: ignore[misc]
        self._untold(expiry)
        if self._hashes is None and self.whole and self.receipt.complete:
            self._remove_namespace()
        self.receipt.ended_ms = store.now_ms()

    def _untold(self, expiry: Expiry) -> None:
        """Files of the namespace that no journal tells of: somebody may be writing them."""
        known = {s.path for s in self.store.index.segments() if s.state != GONE}
        known |= {f.path for f in self.receipt.files}
        for path in segment_paths(self.store.backend):
            if path.split("/")[3] != self.ns.name or path in known:
                continue
            why = "no journal tells of it: it is being written, or gc removes it in time"
            try:
                if self._hashes is not None and not self._any_of(expiry.told_by(path)):
                    continue
            except FileNotFoundError:
                continue
            except (OSError, FormatError) as e:
                why = str(e)
            self.receipt.files.append(Erased(path, expiry.size(path), None, why))

    def _remove_namespace(self) -> None:
        path = namespace_path(self.ns.name)
        try:
            self.store.backend.unlink(path)
            self.store.backend.remove_empty(path.rpartition("/")[0])
        except OSError as e:
            self.receipt.problems.append(f"{path}: {e.strerror or e}")


def purge(wanted: Sequence[tuple[Purge, Heads | None]]) -> list[Receipt]:
    """Erases what is wanted of several namespaces of one store, in the time of one."""
    store, sleep = wanted[0][0].store, wanted[0][0].sleep
    with Lease.acquire(store.backend, store.now_ms) as lease:
        store.catch_up()
        for one, heads in wanted:
            one.cut(heads)
        for one, _ in wanted:
            one.clean(lease)
        grace = store.config.grace_seconds
        lease.prolong(grace + SECONDS)
        sleep(grace)
        for one, _ in wanted:
            one.finish()
    return [one.receipt for one, _ in wanted]


def _places(run: RunEntry) -> range:
    return range(0, len(run.hashes), HASH_BYTES)
