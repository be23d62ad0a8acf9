"""The cleaner: copies what is in use of worn segments into new ones, so that their files can go.

For a batch of segments:

1. live runs are read, in chain order, and every record is verified: a bad one ends its run there
   and is counted, it is not carried on
2. they are written one behind the other by a writer of the cleaner's own, those of a chain as one
   run, in the TTL class they belong to, with their expiry and the time they were written kept
3. the copies are made durable, as the store's policy says
4. in one index transaction and one append to the journal: each run is looked at again and, as far
   as it is still there, moved (MOVE) with the expiry it has by then; a segment in which nothing of
   use is left is dropped (DROP)
5. its file goes after the grace, as that of any dropped segment (kvfs.gc.collector)

A crash before 4 leaves a segment that nothing tells of, which goes when its time is over; behind 4
what the next pass finishes. An error while copying keeps what was copied until then and leaves the
rest where it is: no live block is ever out of sight. Where a block was stored twice and is shown
from the other place here, that is told once more (MOVE without a copy) before its second place
goes: another host may show it from there.

Blocking; one Cleaner belongs to one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from kvfs.chain import HASH_BYTES
from kvfs.errors import KvfsError
from kvfs.frames import DropEntry, Entry, MoveEntry, RunEntry, Source, shortened
from kvfs.gc.expiry import Expiry
from kvfs.gc.merging import Chain, chains
from kvfs.gc.occupancy import Occupied
from kvfs.gc.pace import Ended
from kvfs.gc.restating import restated, unheard
from kvfs.gc.throttle import Bucket
from kvfs.index.apply import Applier
from kvfs.index.schema import LIVE, Run, Segment
from kvfs.index.told import REMEMBER_MS
from kvfs.namespace import Namespace
from kvfs.record import Landing, RunBlocks, Trailer, check_payload, parse
from kvfs.scan.audit import misfit
from kvfs.scan.readahead import RecordReader
from kvfs.segment_writer import Written
from kvfs.store import Store
from kvfs.writer import Writer

BATCH_BYTES = 1 << 30
BATCH_SEGMENTS = 64
STEP_SECONDS = 1.0
"""So often the lease is looked at, and prolonged, while a batch is copied at a slow rate."""


@dataclass(slots=True)
class Cleaned:
    """What a cleaning did."""

    segments: list[Occupied] = field(default_factory=list)
    """Those that were dropped."""
    moved_runs: int = 0
    new_runs: int = 0
    """How many runs they have become."""
    moved_blocks: int = 0
    copied_bytes: int = 0
    bad_blocks: int = 0
    """Blocks that could not be carried on: damaged, or behind a damaged one in their run."""
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Piece:
    """Blocks first..first+count-1 of a run that were copied."""

    run: Run
    source: bytes
    first: int
    count: int


@dataclass(slots=True)
class _Copy:
    """Consecutive copied blocks of one chain, in consecutive slots of one segment."""

    ns: Namespace
    segment: bytes
    slot: int
    heads: bytes
    written_ms: int
    class_id: int
    pieces: list[_Piece] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(p.count for p in self.pieces)

    def add(self, run: Run, source: bytes, first: int, count: int) -> None:
        last = self.pieces[-1] if self.pieces else None
        if last is not None and last.run is run and last.first + last.count == first:
            last.count += count
        else:
            self.pieces.append(_Piece(run, source, first, count))

    def entry(self, kept: int, expires_ms: int, now_ms: int) -> MoveEntry:
        """The entry that moves the first `kept` blocks."""
        sources, hashes, left = [], bytearray(), kept
        for p in self.pieces:
            n = min(left, p.count)
            if n:
                sources.append(Source(p.source, p.run.slot + p.first, n))
                at = p.first * HASH_BYTES
                hashes += p.run.hashes[at : at + n * HASH_BYTES]
                left -= n
        first = self.pieces[0]
        parent = first.run.hash(first.first - 1) if first.first else first.run.parent
        run = RunEntry(
            self.ns.nsid, self.segment, self.slot, first.run.block + first.first, self.written_ms,
            expires_ms, parent, self.heads, bytes(hashes),
        )  # fmt: skip
        return MoveEntry(now_ms, tuple(sources), run)


class Cleaner:
    """Cleans segments of one store."""

    def __init__(
        self, store: Store, writer: Writer, expiry: Expiry, bucket: Bucket,
        step: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """writer: one that nobody else puts through; bucket: of bytes read and written; step:
        called before anything is changed and every second of copying, raises if the lease is lost
        or, if it is ours, the work is to end (Ended)."""
        self.store = store
        self.writer = writer
        self.expiry = expiry
        self.bucket = bucket
        self.step = step
        self._namespaces = {ns.number: ns for ns in store.namespaces()}
        self._seconds = store.catalog.seconds_by_number()
        self._names = store.index.class_names()
        self._stepped = 0.0
        # Of the batch at hand:
        self._copies: list[_Copy] = []
        self._written: list[Written] = []
        self._lost: set[tuple[int, bytes]] = set()
        self._published: dict[bytes, list[RunEntry]] = {}

    def clean(self, victims: Iterable[Occupied]) -> Cleaned:
        """Copies what is live of these segments and drops them. Ends early, with a problem noted,
        where the storage refuses. Raises BusyError if the lease is lost, IndexFault."""
        result = Cleaned()
        for batch in _batches(victims):
            self._step()
            refused = self._copy_all(batch, result)
            self._step_before_publishing()
            try:
                self._publish(batch, result)
            except KvfsError as e:
                refused = str(e)
            if refused is not None:
                result.problems.append(refused)
                break
        return result

    def _step(self) -> None:
        self.step()
        self._stepped = time.monotonic()

    def _step_if_due(self) -> None:
        if time.monotonic() - self._stepped >= STEP_SECONDS:
            self._step()

    def _step_before_publishing(self) -> None:
        try:
            self._step()
        except Ended:
            pass  # the lease is ours still: what was copied is kept
        except KvfsError:
            self.writer.discard(self._written)
            raise

    # copying

    def _copy_all(self, batch: list[Occupied], result: Cleaned) -> str | None:
        """Copies the live runs of a batch; returns why not all of them, if the storage refused.

        What could be copied until then is as good as ever.
        """
        self._copies, self._written, self._lost = [], [], set()
        self._published = {s.segment.segment: self.expiry.published(s.segment) for s in batch}
        live = [run for s in batch for run in s.runs]
        cap_ms = int(self.store.config.renew_cap_seconds * 1000)
        try:
            settled_ms = self.expiry.now_ms - REMEMBER_MS
            ttl_ms = {c: s * 1000 for c, s in self._seconds.items()}
            for chain in chains(live, lambda c: ttl_ms.get(c, 0), cap_ms, settled_ms):
                self._step_if_due()
                self._copy(chain, result)
        except KvfsError as e:
            return str(e)
        return None

    def _copy(self, chain: Chain, result: Cleaned) -> None:
        """Copies runs as one. Raises KvfsError where they cannot be written."""
        written_ms = min(run.written_ms for run in chain)
        copy: _Copy | None = None
        for run in chain:
            segment, done = self.store.index.segment(run.seg), 0
            try:
                for blocks, payloads in self._sound(segment, run):
                    copy = self._write(segment, run, done, blocks, payloads, copy, written_ms)
                    done += len(payloads)
            except OSError as e:  # it stays where it is, and so does its segment
                result.problems.append(f"{segment.path}: {e.strerror or e}")
            else:
                if done < run.count:
                    self._lost.add((run.ns, run.head))
                    result.bad_blocks += run.count - done
            if done < run.count:
                copy = None  # what follows in the chain begins anew

    def _write(
        self, segment: Segment, run: Run, first: int, blocks: RunBlocks,
        payloads: list[memoryview], copy: _Copy | None, written_ms: int,
    ) -> _Copy | None:  # fmt: skip
        """Writes blocks first.. of a run, behind `copy` if that is possible; returns what they
        were added to."""
        ns, at = self._namespaces[run.ns], 0
        name, seconds = self._names[run.class_id], self._seconds[run.class_id]
        while at < len(payloads):
            self._step_if_due()  # at a slow rate a chain takes longer than a lease
            self.bucket.take((len(payloads) - at) * ns.stride)
            part = blocks.part(at, len(payloads))
            w = self.writer.write_run(ns, part, payloads[at:], name, seconds, written_ms)
            self._written.append(w)
            id_ = w.segment.header.segment_id
            if copy is None or (id_, w.slot) != (copy.segment, copy.slot + copy.count):
                before = copy.pieces[0].run.head if copy is not None else run.head
                heads = self._heads(segment, run, before if copy or first + at else b"")
                copy = _Copy(ns, id_, w.slot, heads, written_ms, run.class_id)
                self._copies.append(copy)
            copy.add(run, segment.segment, first + at, w.blocks)
            at += w.blocks
            if w.error is not None:
                raise w.error
        return copy

    def _sound(self, segment: Segment, run: Run) -> Iterator[tuple[RunBlocks, list[memoryview]]]:
        """Yields the blocks of a run, some MiB at a time, up to the first that is bad."""
        shape, done = self._namespaces[run.ns].shape, 0
        with RecordReader(self.store.backend, segment.path, segment.geometry) as reader:
            for _, data in reader.pieces(run.slot, run.count):
                at = Landing.whole(shape, data)
                good = [
                    self._trailer(at, i, run, done + i) for i in range(len(data) // shape.stride)
                ]
                n = good.index(None) if None in good else len(good)
                if n:
                    trailers = [t for t in good[:n] if t is not None]
                    yield _blocks(at, run, done, trailers), [at.payload(i) for i in range(n)]
                done += n
                if n < len(good):
                    return

    def _trailer(self, at: Landing, i: int, run: Run, index: int) -> Trailer | None:
        """The trailer of a record that is what the index says and checks out, else None."""
        trailer = parse(at.meta(i))
        if isinstance(trailer, str) or misfit(trailer, at.shape, run, index) is not None:
            return None
        return trailer if check_payload(at.shape, at.payload(i), trailer) is None else None

    def _heads(self, segment: Segment, run: Run, before: bytes) -> bytes:
        """The path heads that the run was written with, for hosts that cut its chain otherwise, and
        what is in front of it now."""
        heads = b""
        for told in self._published.get(segment.segment, ()):
            if told.slot <= run.slot < told.slot + told.count:
                heads = told.heads + (told.hashes[:HASH_BYTES] if told.slot < run.slot else b"")
        return shortened(heads + before)

    # publishing

    def _publish(self, batch: list[Occupied], result: Cleaned) -> None:
        copies, written = self._copies, self._written
        now_ms = self.store.now_ms()

        def decide(applier: Applier) -> list[Entry]:
            entries: list[Entry] = []
            moved: dict[tuple[int, bytes], int] = {}
            for copy in copies:
                move = self._decide(applier, copy, moved, now_ms)
                if move is not None:
                    entries.append(move)
            waiting = self.expiry.waited_for(applier)
            for s in batch:
                if self._empty(applier, s.segment, moved, waiting):
                    told = self._published.get(s.segment.segment, ())
                    entries += restated(applier, s.segment, told, moved, now_ms)
                    entries.append(DropEntry(s.segment.segment, now_ms))
            return entries

        entries = self.writer.publish_checked(decide, written)
        dropped = {e.segment for e in entries if isinstance(e, DropEntry)}
        new = {c.segment for c in copies}
        for entry in entries:
            if isinstance(entry, MoveEntry) and entry.run.segment in new:
                result.new_runs += 1
                result.moved_runs += len(entry.sources)
                result.moved_blocks += entry.run.count
        result.copied_bytes += sum(w.blocks * w.segment.header.geometry.stride for w in written)
        result.segments += (s for s in batch if s.segment.segment in dropped)

    def _decide(
        self, applier: Applier, copy: _Copy, moved: dict[tuple[int, bytes], int], now_ms: int
    ) -> MoveEntry | None:
        """The entry for what of a copy is still where it was copied from; notes that in `moved`."""
        kept = expires = 0
        for piece in copy.pieces:
            run = applier.run(piece.run.ns, piece.run.head)
            if run is None or (run.seg, run.slot) != (piece.run.seg, piece.run.slot):
                break
            n = min(piece.count, run.count - piece.first)
            if n <= 0 or run.class_id != copy.class_id:
                break
            kept += n
            expires = max(expires, run.expires_ms)
            key = run.ns, run.head
            moved[key] = moved.get(key, 0) + n
            if n < piece.count:
                break
        return copy.entry(kept, expires, now_ms) if kept else None

    def _empty(
        self, applier: Applier, segment: Segment, moved: dict[tuple[int, bytes], int],
        waiting: set[int],
    ) -> bool:  # fmt: skip
        """Nothing of use is left in a segment once what was moved is away."""
        now = applier.segment(segment.number)
        if now is None or now.state != LIVE or segment.number in waiting:
            return False
        limit = self.expiry.limit(segment)
        if unheard(applier, segment, self._published.get(segment.segment, ()), limit):
            return False
        return all(
            run.expires_ms <= limit
            or (run.ns, run.head) in self._lost
            or moved.get((run.ns, run.head), 0) >= run.count
            for run in applier.runs_of(segment.number)
        )


def _blocks(at: Landing, run: Run, first: int, trailers: list[Trailer]) -> RunBlocks:
    """Consecutive verified records as what a writer stores."""
    n, size = len(trailers), at.shape.tokens_bytes
    tokens = b"".join(at.meta(i)[:size] for i in range(n))
    hashes = run.hashes[first * HASH_BYTES : (first + n) * HASH_BYTES]
    lineages = b"".join(t.lineage for t in trailers)
    return RunBlocks(trailers[0].parent, run.block + first, hashes, lineages, memoryview(tokens))


def _batches(victims: Iterable[Occupied]) -> Iterator[list[Occupied]]:
    batch: list[Occupied] = []
    size = 0
    for s in victims:
        if batch and (size + s.live_bytes > BATCH_BYTES or len(batch) >= BATCH_SEGMENTS):
            yield batch
            batch, size = [], 0
        batch.append(s)
        size += s.live_bytes
    if batch:
        yield batch
