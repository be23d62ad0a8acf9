"""Which journals are still needed: a new host starts from a checkpoint, old journals are removed.

The index notes the newest checkpoint it has considered, so that looking costs one directory listing
where there is nothing new. Blocking; reads and changes the shared storage.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvfs.backend import Backend
from kvfs.checkpoint import DIRECTORY, Checkpoint, Mark, all_whole, load, newest
from kvfs.index import Index
from kvfs.index.apply import Applier
from kvfs.index.index import LAST, JournalState
from kvfs.index.schema import JOURNAL, JOURNALS, META
from kvfs.journal import journal_path

_CONSIDERED = META + b"checkpoint"  # name of the newest checkpoint this index knows of


def adopt(
    backend: Backend, index: Index, store: bytes, *, missing: Sequence[JournalState] = ()
) -> Checkpoint | None:
    """Loads the newest checkpoint if this index cannot get there by journals alone.

    That is so if the index is new, if journals it has not read to their end are `missing`, or if
    the checkpoint covers journals that came and went unseen. Returns what was loaded, or None.
    Raises FormatError, OSError, IndexFault.
    """
    names = backend.names(DIRECTORY)
    if not names:
        return None
    known = index.query(lambda a: bytes(a.txn.get(_CONSIDERED) or b"")).decode()
    if names[-1] == known and not missing:
        return None
    checkpoint = newest(backend, store)
    if checkpoint is None or not (
        _behind(index, checkpoint, missing) or _unseen(backend, index, checkpoint)
    ):
        index.write(lambda a: a.txn.put(_CONSIDERED, names[-1].encode()))
        return None

    def work(applier: Applier) -> None:
        load(backend, applier, checkpoint, store)
        applier.txn.put(_CONSIDERED, names[-1].encode())

    index.write(work)
    return checkpoint


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
    over, since their writers were killed and their files removed."""
    marks = {(m.writer_id, m.number): m for m in checkpoint.marks}
    over = []
    for s in missing:
        mark = marks.get((s.writer_id, s.number))
        if mark is not None and s.offset >= mark.offset:
            over.append(s)

    def note(applier: Applier) -> None:
        for s in over:
            key = JOURNALS + s.writer_id + s.number.to_bytes(4, "big")
            applier.txn.put(key, JOURNAL.pack(s.offset, LAST) + s.writer.encode())

    if over:
        index.write(note)
    return len(over) < len(missing)


def _unseen(backend: Backend, index: Index, checkpoint: Checkpoint) -> bool:
    """Says whether a checkpoint tells of journals that this index can no longer read."""
    states = index.journals()
    if not states:
        return True
    there = set(backend.names("log"))
    return any(
        m.writer not in there and (m.writer_id, m.number) not in states for m in checkpoint.marks
    )


def prune(backend: Backend, store: bytes, now_ms: int, keep_ms: int, dead_ms: int) -> list[str]:
    """Removes journals that nobody needs any more, and old checkpoints; returns their paths.

    A journal goes once a checkpoint older than keep_ms covers it to its end, so that every host
    that followed in that time has read it. Its end is its seal, or that it has not grown for
    dead_ms: its writer was killed. The two newest checkpoints stay, and one older than keep_ms.
    """
    whole = list(all_whole(backend, store))
    old = [c for c in whole if c.created_ms <= now_ms - keep_ms]
    if not old:
        return []
    base = old[-1]
    removed = [path for m in base.marks for path in _remove(backend, m, base, whole, dead_ms)]
    for checkpoint in whole[:-2]:
        if checkpoint.created_ms < base.created_ms:
            backend.unlink(checkpoint.path)
            removed.append(checkpoint.path)
    return removed


def _remove(
    backend: Backend, mark: Mark, base: Checkpoint, whole: list[Checkpoint], dead_ms: int
) -> list[str]:
    """Removes a journal that `base` covers if it is over."""
    path = journal_path(mark.writer, mark.number)
    if not mark.ended:
        # Unchanged from one checkpoint to another at least dead_ms apart. A living writer does not
        # append to a journal that it has left alone for so long: see journal.IDLE_SECONDS.
        newest_ = whole[-1]
        if newest_.created_ms - base.created_ms < dead_ms or mark not in newest_.marks:
            return []
    try:
        if backend.size(path) > mark.offset and mark.ended:
            return []
    except FileNotFoundError:
        return []
    backend.unlink(path)
    backend.remove_empty(f"log/{mark.writer}")
    return [path]
