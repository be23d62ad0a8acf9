"""Blocks by their own key, in namespaces that are keyed by their engine.

Such an engine asks for blocks from the middle of a prefix on, whose beginning may never have been
stored. So each block of every run has a row of its own (`keys`), kept in step with `runs` by
kvfs.index.apply in the same transaction; nothing waits for a parent here.

Functions over one transaction; nothing is kept between calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kvfs.chain import HASH_BYTES
from kvfs.index.lookup import Found, Match
from kvfs.index.schema import KEY, RUN, Run, common, key_key, run_key
from kvfs.layout import EXTERNAL_HASH


def is_keyed(identity: str) -> bool:
    """Whether an identity, as JSON, is of a namespace that is keyed by its engine."""
    try:
        return bool(json.loads(identity)["hash"] == EXTERNAL_HASH)
    except (ValueError, TypeError, KeyError):
        return False  # of a newer kvfs: nothing of it is looked up here


def note(txn: Any, run: Run) -> None:
    """Adds the rows of a run's blocks."""
    for i in range(run.count):
        txn.put(key_key(run.ns, run.hash(i)), KEY.pack(run.head, i))


def forget(txn: Any, run: Run, first: int = 0) -> None:
    """Takes out the rows of a run's blocks from `first` on."""
    for i in range(first, run.count):
        txn.delete(key_key(run.ns, run.hash(i)))


def find(get: Callable[[bytes], Any], ns: int, hash_: bytes) -> tuple[bytes, int] | None:
    """The first hash of the run that holds a block, and the block's place in the run."""
    row = get(key_key(ns, hash_))
    if row is None:
        return None
    head, place = KEY.unpack(row)
    return bytes(head), int(place)


def stored(
    get: Callable[[bytes], Any], ns: int, hashes: bytes, now_ms: int, *, gaps: bool
) -> Found:
    """What is stored and not expired of the blocks with these hashes (16 bytes each).

    get: key -> value buffer or None. gaps: False ends at the first block that is not there. Blocks
    of the result are counted among those asked for, not in their chain; `blocks` of it is the
    length of the leading part. Reasons as for kvfs.index.lookup.
    """
    n, at, runs = len(hashes) // HASH_BYTES, 0, []
    end, reason = n, "hit" if n else "no tokens"
    while at < n:
        found = find(get, ns, hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES])
        value = None if found is None else get(run_key(ns, found[0]))
        match = None if found is None or value is None else _match(value, found[1], hashes, at)
        if match is not None and match.shared and match.expires_ms > now_ms:
            runs.append(match)
            at += match.shared
            continue
        if end == n:
            absent = "diverged" if at else "root unknown"
            end, reason = at, absent if match is None else "expired"
        if not gaps:
            break
        at += 1
    return Found(runs, end, reason)


def _match(value: Any, place: int, hashes: bytes, at: int) -> Match:
    """How the blocks from `at` on and a run from its block `place` on go together."""
    seg, slot, _, _, _, expires, class_id, _ = RUN.unpack_from(value)
    theirs = bytes(value[RUN.size + place * HASH_BYTES :])
    shared = common(theirs, hashes[at * HASH_BYTES :])
    return Match(seg, slot + place, shared, at, expires, class_id)
