"""The runs with which the folders of a namespace begin: what stands at the top of its tree.

Where tokens are the keys these are the runs of block 0: what does not build on them can never be
hit. Where an engine keys the blocks any block may be asked for, so at the top stands each run whose
block before is not there: never stored, evicted, expired, or of another number than the run says.
That takes a look at every run of the namespace, some microseconds each.

Functions over one read transaction; nothing is kept between calls.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from kvfs.errors import IndexFault
from kvfs.index.keyed import find
from kvfs.index.schema import run_key, scan
from kvfs.namespace import Namespace
from kvfs.vfs.line import Piece, children, get

log = logging.getLogger(__name__)


def beginnings(txn: Any, ns: Namespace, now_ms: int, prefix: bytes = b"") -> list[Piece]:
    """The unexpired runs at the top, by hash. prefix: only those whose hash begins so."""
    if not ns.keyed:
        return children(txn, ns.number, ns.root, 0, now_ms, prefix)
    return [p for p in _runs(txn, ns, prefix) if p.expires_ms > now_ms and _top(txn, ns, p, now_ms)]


def _runs(txn: Any, ns: Namespace, prefix: bytes) -> Iterator[Piece]:
    for key, value in scan(txn, run_key(ns.number, prefix)):
        try:
            yield Piece.decode(bytes(key[5:]), value)
        except IndexFault as e:
            log.warning("%s", e)


def _top(txn: Any, ns: Namespace, piece: Piece, now_ms: int) -> bool:
    """No block that is there is the one before a run."""
    found = find(txn.get, ns.number, piece.parent)
    before = None if found is None else get(txn, ns.number, found[0])
    if found is None or before is None or before.expires_ms <= now_ms:
        return True
    return before.block + found[1] != piece.block - 1
