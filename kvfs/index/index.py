"""A host's index: open it, look things up, apply journal entries.

Thread-safe. After a fork the child's first use opens the index anew. Reads copy what they return,
so no transaction outlives a call.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kvfs import forking
from kvfs.chain import HASH_BYTES, PrefixHasher
from kvfs.errors import IndexFault
from kvfs.index.env import MAP_BYTES, Env, LmdbError, acquire, generation, release, retire
from kvfs.index.guard import Guard
from kvfs.index.lookup import Found, longest_prefix
from kvfs.index.schema import (
    CLASS,
    CLASSES,
    FORMAT,
    JOURNAL,
    JOURNALS,
    META,
    NS,
    PREFIX,
    SEGMENTS,
    U32,
    U64,
    UNLISTED,
    Run,
    Segment,
    child_key,
    run_key,
    scan,
)
from kvfs.index.tally import Tally

if TYPE_CHECKING:
    from kvfs.frames import Entry
    from kvfs.index.apply import Applier
    from kvfs.keys import Chain
    from kvfs.plan import SlotHint

T = TypeVar("T")
_LOOK_SECONDS = 1.0
SEGMENTS_KEPT = 4096
"""Rows of segments in memory: those of hits. A store sees a new segment every few seconds."""
_COUNTER = b"n:"  # prefix in `meta` of counters that change together with rows


class OutOfStep(Exception):
    """The index has not applied the journal up to where these entries begin: read it first."""


class JournalState(NamedTuple):
    """How far a journal was applied."""

    writer_id: bytes
    number: int
    writer: str
    offset: int
    ended: int
    """0: more may come; ENDED: it is sealed, a next one follows; LAST: its writer is gone."""


class Known(NamedTuple):
    """A namespace as the index has it."""

    number: int
    """In this index."""
    listed: bool
    """False: it was removed, and holds nothing that was stored since."""


class Index:
    """The index in one directory, opened for this process."""

    def __init__(self, path: str, store: bytes, *, map_bytes: int = MAP_BYTES) -> None:
        """Opens or makes it. Raises IndexFault; a damaged index is thrown away and made anew.

        store: uuid the index belongs to, 16 bytes.
        """
        self.path = path
        self.store = store
        self._map_bytes = map_bytes
        self._lock = threading.Lock()
        self._closed = False
        self._look_due = monotonic() + _LOOK_SECONDS
        self.on_revival: list[Callable[[], None]] = []
        """Called when the index was begun anew: the numbers in it may be others."""
        self._connect()
        forking.register(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def _connect(self) -> None:
        """Takes an environment and a place in it; where that fails all stays as it is."""
        guard = Guard(self.path)
        try:
            env, _ = acquire(self.path, self._map_bytes)
            try:
                self._check_meta(env, guard)
            except BaseException:
                release(env)
                raise
        except BaseException:
            guard.leave(stamp=False)
            raise
        self._guard, self._env = guard, env
        self._generation = generation()
        self._segments: dict[int, Segment] = {}
        self.discarded = guard.discarded
        """Why an older index was thrown away at open, or None."""

    def _check_meta(self, env: Env, guard: Guard) -> None:
        with env.read() as txn:
            found = (txn.get(META + b"format"), txn.get(META + b"store"))
            format_, store = (None if v is None else bytes(v) for v in found)
        if format_ is None:
            guard.entered()

            def create(txn: Any) -> None:
                txn.put(META + b"format", FORMAT, overwrite=False)
                txn.put(META + b"store", self.store, overwrite=False)

            env.write(create)
        elif format_ != FORMAT or store != self.store:
            raise IndexFault(
                f"{self.path}: an index of format {format_!r} for store "
                f"{(store or b'').hex()}; `kvctl rebuild` makes it anew"
            )

    def env(self) -> Env:
        """The environment, opened anew if this process was forked since."""
        if self._generation != generation():
            with self._lock:
                if self._generation != generation():
                    self._guard.leave(stamp=False)  # our copy of the parent's lock
                    self._connect()
        return self._env

    def revive(self) -> bool:
        """Begins a new index if somebody has deleted the files of this one; says whether.

        Namespaces and classes are taken along, and their numbers unless another process was faster.
        Raises IndexFault.
        """
        if not self.env().deleted():
            return False
        from kvfs.index.kept import take_along, what_others_hold

        with self._lock:
            old, guard = self._env, self._guard
            if self._closed or not old.deleted():
                return False
            kept = what_others_hold(old)
            retire(old)
            self._connect()
            guard.leave(stamp=False)
        self.write(lambda a: take_along(a, kept))
        for renumber in self.on_revival:
            renumber()
        return True

    def _look_at_files(self) -> None:
        """Once in a while: a router that only checks must not go on with deleted files."""
        now = monotonic()
        if now >= self._look_due:
            self._look_due = now + _LOOK_SECONDS
            with contextlib.suppress(OSError, IndexFault):
                self.revive()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._generation != generation():
            self._guard.leave(stamp=False)
            return  # the rest is the parent's
        stamp = self._env.users == 1 and self._guard.needs_stamp()
        if stamp:
            self._env.sync()
        closed = release(self._env)
        self._guard.leave(stamp=stamp and closed)

    # reading

    def check(self, ns: int, chain: Chain, now_ms: int) -> Found:
        """The longest unexpired stored prefix. ns: the index's number of the namespace."""
        return self._find(ns, chain, now_ms, gaps=False)

    def stored(self, ns: int, chain: Chain, now_ms: int) -> Found:
        """As `check`; of blocks that are named by keys also what is stored behind the first gap."""
        return self._find(ns, chain, now_ms, gaps=True)

    def _find(self, ns: int, chain: Chain, now_ms: int, *, gaps: bool) -> Found:
        self._look_at_files()
        env = self.env()
        txn = env.begin_read()
        try:
            if not isinstance(chain, PrefixHasher):
                from kvfs.index import keyed

                return keyed.stored(txn.get, ns, chain.hashes(), now_ms, gaps=gaps)
            return longest_prefix(txn.get, run_key(ns, b""), chain, now_ms)
        except LmdbError as e:
            raise env.fault(e) from e
        finally:
            env.end_read(txn)

    def query(self, work: Callable[[Applier], T]) -> T:
        """Runs work in a read transaction, with Applier's readers at hand; it must copy out."""
        from kvfs.index.apply import Applier

        env = self.env()
        with env.read() as txn:
            return work(Applier(txn))

    def _scan(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        """Copies of all rows with a prefix, the prefix taken off their keys."""
        with self.env().read() as txn:
            return [(bytes(k[len(prefix) :]), bytes(v)) for k, v in scan(txn, prefix)]

    def namespaces(self) -> dict[bytes, tuple[int, str]]:
        """namespace id -> (number in this index, identity as JSON)."""
        return {k: (U32.unpack_from(v)[0], v[4:].decode()) for k, v in self._scan(NS)}

    def namespace(self, nsid: bytes) -> Known | None:
        """What the index knows of one namespace: two gets, however many there are."""
        with self.env().read() as txn:
            row = txn.get(NS + nsid)
            if row is None:
                return None
            number = int(U32.unpack_from(row)[0])
            mark = txn.get(META + f"{UNLISTED}{number}".encode())
            return Known(number, mark is None or not _hides(txn, number, mark))

    def hidden_namespaces(self) -> set[int]:
        """Numbers of the namespaces that were removed and hold nothing that was stored since."""
        prefix = META + UNLISTED.encode()
        with self.env().read() as txn:
            marks = ((int(bytes(key[len(prefix) :])), mark) for key, mark in scan(txn, prefix))
            return {number for number, mark in marks if _hides(txn, number, mark)}

    def classes(self) -> dict[str, int]:
        """TTL class -> seconds."""
        return {k.decode(): CLASS.unpack(v)[1] for k, v in self._scan(CLASSES)}

    def class_names(self) -> dict[int, str]:
        """Class number (as in runs) -> name."""
        return {CLASS.unpack(v)[0]: k.decode() for k, v in self._scan(CLASSES)}

    def segment(self, number: int) -> Segment:
        """A segment by its number. Raises IndexFault if the index does not know it."""
        segment = self._segments.get(number)
        if segment is None:
            with self.env().read() as txn:
                value = txn.get(SEGMENTS + PREFIX.pack(number))
                segment = None if value is None else Segment.decode(number, value)
            if segment is None:
                raise IndexFault(f"{self.path}: run in unknown segment {number}; rebuild the index")
            if len(self._segments) >= SEGMENTS_KEPT:
                self._segments = {}  # those that are hit now come back at once
            self._segments[number] = segment
        return segment

    def segments(self) -> list[Segment]:
        """All segments, dropped ones included, as they are now."""
        rows = self._scan(SEGMENTS)
        return [Segment.decode(PREFIX.unpack(k)[0], v) for k, v in rows]

    def runs_of(self, number: int) -> list[Run]:
        """The visible runs of a segment, in slot order."""
        return self.query(lambda a: list(a.runs_of(number)))

    def run(self, ns: int, head: bytes) -> Run | None:
        return self.query(lambda a: a.run(ns, head))

    def holding(self, ns: int, hash_: bytes) -> tuple[Run | None, int]:
        """The run that holds a block, and the block's place in it; see Applier.holding."""
        return self.query(lambda a: a.holding(ns, hash_))

    def children(self, ns: int, parent: bytes) -> list[bytes]:
        """First hashes of the runs that follow the block with hash `parent`."""
        return [k for k, _ in self._scan(child_key(ns, parent))]

    def runs_with_prefix(self, ns: int, prefix: bytes) -> list[Run]:
        """The runs whose first hash begins with these bytes."""
        with self.env().read() as txn:
            return [Run.decode(k, v) for k, v in scan(txn, run_key(ns, prefix))]

    def all_runs(self, ns: int, batch: int = 1000) -> Iterator[Run]:
        """Yields every run of a namespace; each batch is one short transaction."""
        prefix = after = run_key(ns, b"")
        while True:
            with self.env().read() as txn:
                rows = islice(scan(txn, prefix, after), batch)
                runs = [Run.decode(k, v) for k, v in rows]
            yield from runs
            if len(runs) < batch:
                return
            after = runs[-1].key() + b"\0"

    def counters(self) -> dict[str, int]:
        """The counters kept with `count` and within transactions, and "blocks" and "orphans"."""
        out = Tally(self.path).read()
        for name, value in self._scan(META):
            if name.startswith(_COUNTER):
                key = name[len(_COUNTER) :].decode()
                out[key] = out.get(key, 0) + U64.unpack(value)[0]
            elif name in (b"blocks", b"orphans"):
                out[name.decode()] = U64.unpack(value)[0]
        return out

    def journals(self) -> dict[tuple[bytes, int], JournalState]:
        """How far each journal was applied."""
        states = (_journal_state(k, v) for k, v in self._scan(JOURNALS))
        return {(s.writer_id, s.number): s for s in states}

    def last_journals(self, writer_ids: Iterable[bytes]) -> dict[bytes, JournalState]:
        """How far these writers were followed: the state of the last known journal of each."""
        out = {}
        with self.env().read() as txn, txn.cursor() as cursor:
            for writer_id in writer_ids:
                beyond = JOURNALS + writer_id + b"\xff" * 4
                found = cursor.prev() if cursor.set_range(beyond) else cursor.last()
                key = bytes(cursor.key()) if found else b""
                if key[:-4] == JOURNALS + writer_id:
                    out[writer_id] = _journal_state(key[1:], bytes(cursor.value()))
        return out

    # slots

    def slot_hints(
        self, ns: int, found: Found, blocks: Iterable[int], now_ms: int, here: str
    ) -> list[SlotHint]:
        """Who is said to hold the slots behind the first so many blocks of a prompt.

        found: what `check` said of the prompt; blocks: in the order of the answer; here: this
        host's name.
        """
        from kvfs.index.slots import anchor_hash, holders

        hints: list[SlotHint] = []
        with self.env().read() as txn:
            for n in blocks:
                anchor = anchor_hash(txn, found.runs, n)
                if anchor is not None:
                    hints += holders(txn, ns, anchor, now_ms, here)
        return hints

    def slot_holders(self, ns: int, anchor: bytes, now_ms: int, here: str) -> list[SlotHint]:
        """Who is said to hold the slot of an anchor: this host first, then who holds fewest."""
        from kvfs.index.slots import holders

        with self.env().read() as txn:
            return holders(txn, ns, anchor, now_ms, here)

    # writing

    def write(self, work: Callable[[Applier], T]) -> T:
        """Runs work with an Applier in one write transaction. It may run more than once."""
        from kvfs.index.apply import Applier

        env = self.env()
        self._guard.entered()

        def run(txn: Any) -> T:
            applier = Applier(txn)
            result = work(applier)
            applier.finish()
            return result

        return env.write(run)

    def count(self, deltas: dict[str, int]) -> None:
        """Adds to the counters that every process of this host shares. Raises IndexFault."""
        if deltas:
            try:
                Tally(self.path).add(deltas)
            except OSError as e:
                raise IndexFault(f"{self.path}: counters: {e.strerror}") from e


def _hides(txn: Any, ns: int, mark: Any) -> bool:
    """A namespace is off the list, and nothing was stored in it since."""
    return bool(U64.unpack(mark)[0] & 1) and next(scan(txn, run_key(ns, b"")), None) is None


def _journal_state(key: bytes, value: bytes) -> JournalState:
    offset, ended = JOURNAL.unpack_from(value)
    writer, number = value[JOURNAL.size :].decode(), int.from_bytes(key[12:], "big")
    return JournalState(key[:12], number, writer, offset, ended)


def add_counters(applier: Applier, deltas: dict[str, int]) -> None:
    """Adds to the shared counters within a transaction."""
    for name, n in deltas.items():
        applier.add_meta((_COUNTER + name.encode()).decode(), n)


def apply_journal(
    applier: Applier,
    writer_id: bytes,
    number: int,
    writer: str,
    start: int,
    entries: Iterable[tuple[Entry | None, int]],
) -> None:
    """Applies consecutive entries of a journal, each with the offset behind it, and notes the end.

    start: offset of the first. What was applied before is skipped. Raises OutOfStep if the journal
    was applied only up to some place before `start`.
    """  # fmt: skip
    from kvfs.frames import SealEntry

    key = JOURNALS + writer_id + number.to_bytes(4, "big")
    value = applier.txn.get(key)
    at, ended = (FIRST_FRAME, 0) if value is None else JOURNAL.unpack_from(value)
    if at < start:
        raise OutOfStep(f"{writer}/{number}: applied to {at}, entries begin at {start}")
    for entry, end in entries:
        if end <= at:
            continue
        at = end
        if entry is None:
            applier.count("unknown_entries")
            continue
        applier.apply(entry)
        if isinstance(entry, SealEntry):
            ended = LAST if entry.last else ENDED
    applier.txn.put(key, JOURNAL.pack(at, ended) + writer.encode())


ENDED, LAST = 1, 2
FIRST_FRAME = 64
"""Offset of a journal's first frame: the size of its header."""

assert HASH_BYTES == 16  # RUN and the keys count on it
