"""Empties an index before it is filled anew, in the same write transaction.

What other processes hold on to stays: the numbers of namespaces and classes, the counters that
`stats` prints, and how far numbering has come, so that a number once given never comes to mean
something else. Nothing here reads the store.
"""

from __future__ import annotations

from kvfs.index.apply import Applier
from kvfs.index.schema import (
    CHILDREN,
    CUTS,
    JOURNALS,
    META,
    PLACED,
    RUNS,
    SEGIDS,
    SEGMENTS,
    WAITING,
)

_CONTENT = (SEGIDS, SEGMENTS, RUNS, CHILDREN, PLACED, WAITING, CUTS)
_SUMS = (b"blocks", b"orphans", b"cuts")


def wipe(applier: Applier, *, journals: bool) -> None:
    """Removes all segments, runs and cuts; with `journals` also how far each journal was applied,
    so that they count as unread."""
    for table in (*_CONTENT, *((JOURNALS,) if journals else ())):
        _clear(applier, table)
    for name in _SUMS:
        applier.txn.delete(META + name)
    applier.refresh()


def _clear(applier: Applier, table: bytes) -> None:
    with applier.txn.cursor() as cursor:
        more = cursor.set_range(table)
        while more and bytes(cursor.key()[: len(table)]) == table:
            more = cursor.delete()
