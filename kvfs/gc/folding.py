"""Journals into checkpoints: so that a new host reads minutes of history and not months.

A checkpoint is written when the journals have grown by enough since the last one, of which each is
a copy of the whole index, or are many more; then journals go that nobody needs any more
(kvfs.follow.history). The caller holds the lease and has followed the journals. Blocking; writes
and removes on the shared storage.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvfs.errors import FormatError
from kvfs.follow import checkpoint
from kvfs.follow.history import DEAD_MS, prune
from kvfs.store import Store

FOLD_BYTES = 16 << 20
FOLD_SHARE = 0.25
"""Of the last checkpoint's size: by so much the journals grow at least, however large the index."""
FOLD_JOURNALS = 256
KEEP_MS = 86_400_000
"""How long a host may be away and then go on where it was."""


@dataclass(slots=True)
class Folded:
    """What was done."""

    checkpoint: str | None = None
    """Path of the checkpoint that was written."""
    pruned: list[str] = field(default_factory=list)
    """Paths of journals and checkpoints that were removed."""


def fold(store: Store, now_ms: int, problems: list[str]) -> Folded:
    """Writes a checkpoint if that is worth it, and removes what it makes needless. What the storage
    refuses is noted in `problems`; the next pass tries again."""
    folded = Folded()
    backend = store.backend
    try:
        if _due(store):
            name = store.writer().name
            folded.checkpoint = checkpoint.write(backend, store.index, name, now_ms).path
        if backend.names(checkpoint.DIRECTORY):
            folded.pruned = prune(backend, store.uuid, now_ms, KEEP_MS, DEAD_MS, index=store.index)
    except FormatError as e:
        problems.append(str(e))
    except OSError as e:
        problems.append(f"{checkpoint.DIRECTORY}: {e.strerror or e}")
    return folded


def _due(store: Store) -> bool:
    states = store.index.journals()
    last = checkpoint.newest(store.backend, store.uuid)
    covered = {} if last is None else {(m.writer_id, m.number): m.offset for m in last.marks}
    grown = sum(max(0, s.offset - covered.get(key, 0)) for key, s in states.items())
    enough = max(FOLD_BYTES, 0 if last is None else last.end * FOLD_SHARE)
    return grown >= enough or len(states.keys() - covered.keys()) >= FOLD_JOURNALS
