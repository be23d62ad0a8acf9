"""Renewal on hit: what is used stays, a whole time to live from its last use on.

The rule: a hit renews the runs that it used, and nothing else does but put and touch; `check` alone
renews nothing. It only renews what was in sight at that moment, so nothing that had expired comes
back. A run is renewed once an eighth of its time to live has gone by since it was last, so that a
hot prefix costs one journal entry in that time however often it is hit, and hits alone never let a
run live longer than the store's `renew_cap_seconds` after it was written.

Hits are noted in memory, off the critical path, and published in one batch every few seconds by a
daemon thread that starts with the first of them, and at close; what cannot be published stays noted
for the next time. What is lost with a process that is killed is a few seconds of renewals. All
hosts agree, since the journal carries the new expiry.

Thread-safe; a forked child begins with an empty list and a thread of its own.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING

from kvfs import forking
from kvfs.chain_entries import KeepEntry
from kvfs.errors import KvfsError
from kvfs.frames import Entry
from kvfs.keys import Chain
from kvfs.namespace import Namespace
from kvfs.periodic import Periodic
from kvfs.plan import Plan
from kvfs.put import RENEW_SHARE
from kvfs.removal import few

if TYPE_CHECKING:
    from kvfs.store import Store

log = logging.getLogger(__name__)
FLUSH_SECONDS = 5.0
MOST_WAITING = 100_000
"""Runs noted and not yet published; more are left out until then, and counted as
"renewals_left_out"."""


class Renewer(Periodic):
    """Renews what one process hits in one store."""

    def __init__(self, store: Store, flush_seconds: float = FLUSH_SECONDS) -> None:
        self.store = store
        self.flush_seconds = flush_seconds
        self._begin()
        forking.register(self)

    def after_fork(self) -> None:
        """What the parent has noted it publishes itself."""
        self._begin()

    def _begin(self) -> None:
        super().__init__("kvfs-renew", f"renewing what was hit in {self.store.path}", log)
        self._lock = threading.Lock()
        # Namespace id and first hash of a run -> when it was hit, its path heads.
        self._hits: dict[tuple[bytes, bytes], tuple[int, bytes]] = {}
        self._started = False

    def note(self, ns: Namespace, plan: Plan, hasher: Chain, blocks: int) -> None:
        """Notes that the runs which hold the first `blocks` blocks of a plan were hit just now."""
        now = self.store.now_ms()
        hits, path = {}, b""
        for extent in plan.extents:
            head = hasher.digest(extent.block + 1)
            if extent.block < blocks and extent.expires_ms > now:
                hits[ns.nsid, head] = now, path
            path = few(path + head)
        with self._lock:
            left_out = 0
            if len(self._hits) + len(hits) > MOST_WAITING:
                known = {h: hit for h, hit in hits.items() if h in self._hits}
                left_out, hits = len(hits) - len(known), known
            self._hits.update(hits)
            if not self._started:
                with contextlib.suppress(RuntimeError):  # no thread to be had: with the next hit
                    self.start()
                    self._started = True
        self.store._count("renewals_left_out", left_out)

    def turn(self) -> None:
        """Publishes what is hit in the next `flush_seconds`, unless it is stopped before."""
        if not self._stopped.wait(self.flush_seconds):
            with contextlib.suppress(KvfsError):  # they stay noted, for the next time
                self.flush()

    def pause(self) -> float:
        """None: a turn begins by waiting."""
        return 0.0

    def flush(self) -> int:
        """Publishes what is due; returns the number of runs renewed. Raises as Writer.publish."""
        with self._lock:
            hits, self._hits = self._hits, {}
        if not hits:
            return 0
        try:
            entries = self._due(hits)
            if entries:
                self.store.writer().publish([], entries, {"renewed_on_hit": len(entries)})
        except BaseException:
            with self._lock:
                self._hits = {**hits, **self._hits}
            raise
        return len(entries)

    def _due(self, hits: dict[tuple[bytes, bytes], tuple[int, bytes]]) -> list[Entry]:
        index = self.store.index
        numbers = {nsid: number for nsid, (number, _) in index.namespaces().items()}
        names, classes = index.class_names(), self.store.classes()
        cap_ms = int(self.store.config.renew_cap_seconds * 1000)
        entries: dict[tuple[bytes, bytes], Entry] = {}
        for (nsid, block), (when, path) in hits.items():
            number = numbers.get(nsid)
            run = None if number is None else index.holding(number, block)[0]
            if run is None:
                continue
            ttl_ms = classes.get(names.get(run.class_id, ""), 0) * 1000
            expires = min(when + ttl_ms, run.written_ms + cap_ms)
            wanted = max(1, ttl_ms // RENEW_SHARE)
            if when < run.expires_ms and expires - run.expires_ms >= wanted:
                entries[nsid, run.head] = KeepEntry(
                    nsid, expires, max(when, run.written_ms), run.block, "", False, path, run.hashes
                )  # fmt: skip
        return list(entries.values())

    def close(self) -> None:
        """Publishes what is left, if the storage lets it, and ends the thread."""
        self._stopped.set()
        if self._started:
            self.stop()
        with contextlib.suppress(KvfsError):
            self.flush()
