"""Which journals are still needed: a new host starts from a checkpoint, old journals are removed.

The rule that keeps hosts from missing anything: a journal is removed only when the oldest
checkpoint there is covers it, and that one is older than the time hosts may be away. So an index
that has read all journals at some time since the oldest checkpoint was written has read every
journal that is gone; any other begins anew with the newest checkpoint. When that was, the index
notes itself.

A checkpoint that turns out to be damaged is passed over for the one before.

Blocking; reads and changes the shared storage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvfs.backend import Backend
from kvfs.errors import FormatError
from kvfs.follow.checkpoint import DIRECTORY, Checkpoint, Mark, all_whole, load, newer, written_ms
from kvfs.follow.follower import FOLLOWED
from kvfs.follow.torn import unchanged_since
from kvfs.index import Index, slots
from kvfs.index.apply import CLOCKS_MS, Applier
from kvfs.index.index import ENDED, LAST, JournalState
from kvfs.index.schema import JOURNAL, JOURNALS, META, U64, scan
from kvfs.index.told import REMEMBER_MS, forget_before
from kvfs.journal import IDLE_SECONDS, journal_path

T = TypeVar("T")
log = logging.getLogger(__name__)
_ADOPTED = b"adopted"
_AWAY = META + b"away:"  # and a writer's id: since when its journals are known to be removed
FORGET_MS = 30 * 86_400_000
"""A writer that was killed is remembered for so long after its journals were removed."""
_AHEAD_MS = 3_600_000  # a note from further ahead was made by a clock that was wrong
THIN_MS = 3_600_000
"""Between the oldest checkpoint and the newest two they are so far apart at least."""
DEAD_MS = 2 * IDLE_SECONDS * 1000
"""A journal that has not grown for so long is over: its writer would go on in another one."""


def followed_ms(index: Index) -> int:
    """When this index had last read all journals, 0: never."""
    return index.query(lambda a: a.meta_int(FOLLOWED))


def note_followed(index: Index, begun_ms: int) -> None:
    """Notes that all journals were read as they were at some time, if not lately noted."""
    if abs(begun_ms - followed_ms(index)) >= CLOCKS_MS // 2:
        index.write(lambda a: _note_followed(a, begun_ms))


def _note_followed(applier: Applier, ms: int) -> None:
    _put_followed(applier, ms)
    forget_before(applier, ms - REMEMBER_MS)


def _put_followed(applier: Applier, ms: int) -> None:
    applier.txn.put(META + FOLLOWED.encode(), U64.pack(max(0, ms)))


def adopt(
    backend: Backend, index: Index, store: bytes, now_ms: int, *,
    missing: Sequence[JournalState] = (),
) -> Checkpoint | None:  # fmt: skip
    """Loads the newest checkpoint if this index cannot get there by journals alone.

    That is so if it has not read all journals since the oldest checkpoint was written, or if
    journals it has not read to their end are `missing`. Returns what was loaded, or None. Raises
    FormatError, OSError, IndexFault.
    """
    names = backend.names(DIRECTORY)
    last = followed_ms(index)
    if not names or (not missing and written_ms(names[-1]) + CLOCKS_MS <= last <= now_ms):
        return None
    whole = list(all_whole(backend, store))
    if not whole:
        return None
    newest = whole[-1]
    if _adopted(index) == newest.path and not missing:
        return None
    if not (_away(last, whole[0].created_ms, now_ms) or _behind(index, newest, missing)):
        return None

    def begin(checkpoint: Checkpoint | None) -> Checkpoint | None:
        if checkpoint is not None:
            index.write(lambda a: _load(backend, a, checkpoint, store))
        return checkpoint

    passed: list[str] = []
    begun = begin_with(backend, whole, now_ms, begin, passed)
    for problem in passed:
        log.warning("%s: passed over", problem)
    return begun


def _load(backend: Backend, applier: Applier, checkpoint: Checkpoint, store: bytes) -> None:
    load(backend, applier, checkpoint, store)
    # Nothing it covers can be missed any more; what came later is still in the journals.
    _put_followed(applier, checkpoint.created_ms + CLOCKS_MS)
    applier.txn.put(META + _ADOPTED, checkpoint.path.encode())


def begin_with(
    backend: Backend, whole: Sequence[Checkpoint], now_ms: int,
    begin: Callable[[Checkpoint | None], T], passed: list[str],
) -> T:  # fmt: skip
    """Calls `begin` with the newest of these checkpoints that it can read; with None if there is
    none, or none is sound and the journals tell everything.

    begin: changes nothing where it raises; passed: gets why some were passed over. Raises what
    `begin` raised for the newest if there is nothing to begin with.
    """
    first: FormatError | OSError | None = None
    for checkpoint in reversed(whole):
        try:
            return begin(checkpoint)
        except (FormatError, OSError) as e:
            first = first or e
            passed.append(str(e))
    if first is not None and not _all_journals(backend, now_ms):
        raise first
    return begin(None)


def _all_journals(backend: Backend, now_ms: int) -> bool:
    """No journal was removed yet: for the sake of what is younger than DEAD_MS none is."""
    return all(now_ms - written_ms(n) < DEAD_MS for n in backend.names(DIRECTORY))


def _adopted(index: Index) -> str:
    """Path of the checkpoint that this index began with, if any."""
    return index.query(lambda a: bytes(a.txn.get(META + _ADOPTED) or b"")).decode()


def _away(last: int, written: int, now_ms: int) -> bool:
    """Says whether journals may have come and gone unseen since an index had read all of them, if
    those that are covered by a checkpoint of this time may be removed."""
    if not last or last > now_ms + _AHEAD_MS:
        return True
    # Nothing is removed for the sake of a checkpoint that is younger than DEAD_MS.
    return last < written + CLOCKS_MS and written < now_ms - DEAD_MS // 2


def lost(backend: Backend, index: Index) -> bool:
    """Says whether there are segments, but nothing is left to tell this new index of them.

    Two or three directory listings, and only as long as the index has never known a segment.
    """
    if index.query(_has_known_segments) or backend.names("log") or backend.names(DIRECTORY):
        return False
    return bool(backend.names("seg"))


def _has_known_segments(applier: Applier) -> bool:
    return applier.meta_int("last_segment") > 0


def _behind(index: Index, checkpoint: Checkpoint, missing: Sequence[JournalState]) -> bool:
    """Says whether missing journals held something this index has not read; notes the others as
    ended, since nothing was added to them for so long that they were removed."""
    marks = {(m.writer_id, m.number): m for m in checkpoint.marks}
    over = []
    for s in missing:
        mark = marks.get((s.writer_id, s.number))
        if mark is not None and s.offset >= mark.offset:
            over.append(s)

    def note(applier: Applier) -> None:
        for s in over:
            key = JOURNALS + s.writer_id + s.number.to_bytes(4, "big")
            applier.txn.put(key, JOURNAL.pack(s.offset, ENDED) + s.writer.encode())

    if over:
        index.write(note)
    return len(over) < len(missing)


def prune(
    backend: Backend, store: bytes, now_ms: int, keep_ms: int, dead_ms: int, *,
    index: Index | None = None,
) -> list[str]:  # fmt: skip
    """Removes journals that nobody needs any more, and old checkpoints; returns their paths.

    keep_ms: how long a host may be away and then go on where it was, DEAD_MS at least. A journal
    goes once a checkpoint older than that covers it to its end, which is its seal, or that it has
    not grown for dead_ms (between DEAD_MS and keep_ms): its writer was killed. index: where it is
    noted whether a journal grows that cannot be read to its end; None: such a one stays. The two
    newest checkpoints stay, the newest that is old enough, and in between one an hour. Raises
    OSError.
    """
    keep_ms = max(keep_ms, DEAD_MS)
    dead_ms = min(max(dead_ms, DEAD_MS), keep_ms)
    whole = list(all_whole(backend, store))
    old = [c for c in whole if c.created_ms <= now_ms - keep_ms]
    if not whole:
        return []
    first = max(0, min(len(old) - 1, len(whole) - 2))
    kept, base = whole[first:], whole[first]
    removed = list(_too_close(kept))
    if old:
        # Checkpoints first: what is older than `base`, whole or not, must not speak for a journal.
        older = [n for n in backend.names(DIRECTORY) if written_ms(n) < base.created_ms]
        removed += (p for name in older if not newer(backend, p := f"{DIRECTORY}/{name}"))
    for path in removed:
        backend.unlink(path)
    if not old:
        return removed
    there = set(backend.names("log"))
    last = {m.writer_id: m.number for m in sorted(base.marks, key=lambda m: m.number)}
    for mark in base.marks:
        if mark.writer not in there:
            continue
        over = bool(mark.ended)
        if not over and _dead(mark, base, kept[-1], dead_ms):
            followed = mark.number < last[mark.writer_id]  # its writer went on in another one
            over = followed or _still(backend, index, mark, now_ms - dead_ms)
        if over and _remove(backend, mark):
            removed.append(journal_path(mark.writer, mark.number))
    return removed


def _too_close(kept: Sequence[Checkpoint]) -> Iterator[str]:
    """Paths of those between the first and the last two that are less than THIN_MS behind one that
    stays."""
    last_ms = kept[0].created_ms
    for checkpoint in kept[1:-2]:
        if checkpoint.created_ms - last_ms < THIN_MS:
            yield checkpoint.path
        else:
            last_ms = checkpoint.created_ms


def _dead(mark: Mark, base: Checkpoint, newest: Checkpoint, dead_ms: int) -> bool:
    """Unchanged from one checkpoint to another that was written so much later."""
    return newest.created_ms - base.created_ms >= dead_ms and mark in newest.marks


def _still(backend: Backend, index: Index | None, mark: Mark, since_ms: int) -> bool:
    """Nothing has come in behind what was read of a journal, for so long."""
    try:
        size = backend.size(journal_path(mark.writer, mark.number))
    except FileNotFoundError:
        return True
    if size <= mark.offset:
        return True
    noted = None if index is None else unchanged_since(index, mark.writer_id, mark.number, size)
    return noted is not None and noted <= since_ms


def _remove(backend: Backend, mark: Mark) -> bool:
    """Removes a journal that is over and covered, and its writer's directory if that was the last.

    Says whether it was there.
    """
    path = journal_path(mark.writer, mark.number)
    try:
        size, found = backend.size(path), True
    except FileNotFoundError:
        size, found = 0, False
    if mark.ended and size > mark.offset:
        return False  # there is more behind its seal than its writer can have put there
    backend.unlink(path)
    backend.remove_empty(f"log/{mark.writer}")
    return found


def tidy(backend: Backend, index: Index, store: bytes, now_ms: int) -> int:
    """Forgets writers whose journals are removed: a store sees thousands of them; and pools of
    which nothing is known any more. Returns the number of journals forgotten.

    One that said it is gone is forgotten once no checkpoint mentions it. One that was killed might
    only be idle, and go on in its next journal: it is forgotten FORGET_MS after its journals were
    first found to be removed, which they are only when checkpoints cover them. Should it live after
    all, its next journal is read a little late (kvfs.follow.follower).
    """
    idle, any_idle = index.query(lambda a: slots.idle_pools(a.txn))
    if any_idle:
        index.write(lambda a: slots.forget_pools(a, idle, now_ms))
    whole = list(all_whole(backend, store))
    if not whole:
        return 0
    mentioned = {m.writer_id for c in whole for m in c.marks}
    there = set(backend.names("log"))
    states = index.journals()
    newest = {writer_id: states[writer_id, number] for writer_id, number in sorted(states)}
    away = {s.writer_id for s in newest.values() if s.writer not in there}
    over = {w for w in away if newest[w].ended == LAST and w not in mentioned}
    silent = {w for w in away if newest[w].ended != LAST}

    def forget(applier: Applier) -> int:
        gone = over | set(_long_away(applier, silent, now_ms))
        rows = [key for key in states if key[0] in gone]
        for writer_id, number in rows:
            applier.txn.delete(JOURNALS + writer_id + number.to_bytes(4, "big"))
        return len(rows)

    known = index.query(lambda a: {bytes(k[len(_AWAY) :]) for k, _ in scan(a.txn, _AWAY)})
    return index.write(forget) if over or silent or known else 0


def _long_away(applier: Applier, silent: set[bytes], now_ms: int) -> Iterator[bytes]:
    """Those of some writers that have been away for long; notes since when the others are."""
    since = {bytes(k[len(_AWAY) :]): U64.unpack(v)[0] for k, v in scan(applier.txn, _AWAY)}
    for writer_id in silent - since.keys():
        applier.txn.put(_AWAY + writer_id, U64.pack(now_ms))
    for writer_id, ms in since.items():
        over = writer_id in silent and now_ms - ms >= FORGET_MS
        if over or writer_id not in silent:
            applier.txn.delete(_AWAY + writer_id)
        if over:
            yield writer_id
