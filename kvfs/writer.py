"""PUT, the part that writes: records into segments, then entries into the journal and the index.

Publish order of a run, and what a crash leaves behind:

1. its records are written into a segment          -> bytes nobody refers to; gone with the segment
2. they are made durable, if the policy says so
3. its entry is appended to the journal            -> followers and the next open apply it
4. (durable too, if the policy says so)
5. it is applied to the local index, together with the journal's offset, in one transaction

An I/O error poisons the segment: what was written whole is kept, the segment is sealed there, and
the next run begins another. A journal that failed is abandoned for a new one in the same way.
Thread-safe; a forked child makes a Writer of its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Sequence

from kvfs.backend import Backend
from kvfs.chain import HASH_BYTES
from kvfs.config import StoreConfig
from kvfs.errors import BackendError, KvfsError, SpaceError
from kvfs.frames import Entry, RunEntry
from kvfs.index import Index
from kvfs.index.apply import Applier
from kvfs.index.guard import boot_id
from kvfs.namespace import Namespace
from kvfs.publisher import Publisher
from kvfs.record import PAGE, RunBlocks
from kvfs.segment import WRITER_BYTES
from kvfs.segment_writer import SegmentWriter, Written
from kvfs.under_way import UnderWay
from kvfs.usage import Space, Taken

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def writer_name(writer_id: bytes) -> str:
    """Host, boot and random id: no two processes ever have the same, whatever their clocks say."""
    return f"{_host()}{writer_id.hex()}"


def _host() -> str:
    host = re.sub(r"[^A-Za-z0-9.]", "-", socket.gethostname())[:40] or "host"
    return f"{host}-{boot_id()[:8]}-"


def of_this_host(path: str) -> bool:
    """Says whether a segment was written by a process of this host, since it was last started."""
    return path.rsplit("/", 1)[-1].startswith(_host())


class Writer:
    """One process's writer on a store. Files are made when first needed."""

    def __init__(
        self, backend: Backend, index: Index, config: StoreConfig,
        clock: Callable[[], float] = time.time, space: Space | None = None,
    ) -> None:  # fmt: skip
        """space: says whether there is room for what is put; None: for copies, which make room."""
        self.backend = backend
        self.config = config
        self.clock = clock
        self.id = secrets.token_bytes(WRITER_BYTES)
        self.name = writer_name(self.id)
        self.pid = os.getpid()
        self.space = space
        self.under_way = UnderWay()
        self.full = False
        """The last store failed for want of space."""
        self._segments = SegmentWriter(
            backend, config, self.name, self.id, self.now_ms, self._failed
        )
        self._publisher = Publisher(
            backend, index, config, self.name, self.id, self.now_ms, self._failed
        )

    def now_ms(self) -> int:
        return int(self.clock() * 1000)

    @property
    def durable(self) -> bool:
        """What is published is on stable storage."""
        return self.config.durability != "none"

    def write_run(
        self, ns: Namespace, run: RunBlocks, payloads: list[memoryview],
        ttl_class: str, ttl_seconds: int, now_ms: int,
    ) -> Written:  # fmt: skip
        """Writes as many of the blocks as one segment takes: see SegmentWriter.write_run.

        The result must be handed to `publish`. Raises SpaceError, BackendError.
        """
        need = len(payloads) * ns.stride
        if self.full:
            self._refuse_while_full(need)
        space = contextlib.nullcontext(Taken()) if self.space is None else self.space.take(ns, need)
        try:
            with space as taken:
                written = self._segments.write_run(
                    ns, run, payloads, ttl_class, ttl_seconds, now_ms
                )
                taken.written = written.blocks * ns.stride
                return written
        except OSError as e:
            raise self._failed(e) from e

    def publish(
        self, runs: list[tuple[Written, RunEntry]], others: Iterable[Entry] = (),
        counters: dict[str, int] | None = None,
    ) -> None:  # fmt: skip
        """Makes runs and other entries visible: see Publisher.publish for what it raises."""
        try:
            self._publisher.publish(runs, others, counters)
        finally:
            for written, _ in runs:
                self._segments.release(written.segment)

    def publish_checked(
        self, decide: Callable[[Applier], list[Entry]], written: Sequence[Written] = ()
    ) -> list[Entry]:
        """Publishes what is decided within the transaction: see Publisher.publish_checked."""
        try:
            return self._publisher.publish_checked(decide, written)
        finally:
            self.discard(written)

    def discard(self, written: Sequence[Written]) -> None:
        """Lets go of runs that were written and will not be published after all."""
        for w in written:
            self._segments.release(w.segment)

    def retire(self, segments: set[bytes]) -> None:
        """Takes no more runs into these of its segments: see SegmentWriter.retire."""
        if self.pid == os.getpid():  # else inherited through fork
            self._segments.retire(segments)

    def _refuse_while_full(self, need: int) -> None:
        try:
            free, _ = self.backend.free_bytes()
        except OSError as e:
            raise self._failed(e) from e
        if free < need + PAGE:
            raise SpaceError(
                f"{self.backend.root}: {free} bytes free, {need} needed; stores are refused "
                "until there is room (kvctl gc)"
            )
        self.full = False

    def _failed(self, e: OSError) -> KvfsError:
        # Names are paths in the store, or whole ones.
        where = os.path.join(self.backend.root, e.filename or "").rstrip("/")
        text = f"{where}: {e.strerror or e}"
        if e.errno in _FULL:
            self.full = True
            return SpaceError(f"{text}; stores are refused until there is room (kvctl gc)")
        return BackendError(text)

    def close(self) -> None:
        """Seals all segments and the journal. Raises nothing: what was published stands."""
        if self.pid == os.getpid():  # else inherited through fork: the files are the parent's
            self._segments.close()
            self._publisher.close()


def run_entry(
    ns: Namespace, written: Written, run: RunBlocks, heads: bytes, now_ms: int, expires_ms: int
) -> RunEntry:
    """The journal entry of the blocks of a run that were written."""
    return RunEntry(
        ns.nsid, written.segment.header.segment_id, written.slot, run.block, now_ms, expires_ms,
        run.parent, heads, run.hashes[: written.blocks * HASH_BYTES],
    )  # fmt: skip
