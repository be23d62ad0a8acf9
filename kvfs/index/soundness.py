"""Are the rows of an index what kvfs.index.schema promises: for fsck, which must not believe them.

One read transaction and no copies: the whole index is walked in the order of its keys, so it takes
a second for a million runs. Says what is wrong and changes nothing: `kvctl rebuild` repairs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvfs.chain import HASH_BYTES
from kvfs.index import Index
from kvfs.index.schema import (
    CHILDREN,
    KEY,
    KEYED,
    KEYS,
    META,
    PLACED,
    PREFIX,
    RUNS,
    SEGMENTS,
    U64,
    WAITING,
    Run,
    child_key,
    key_key,
    place_key,
    scan,
)


def index_faults(index: Index, limit: int = 100) -> list[str]:
    """What is wrong with the rows, a sentence each, at most `limit` of them; empty if sound."""
    found: list[str] = []
    with index.env().read() as txn:
        for fault in faults_in(txn):
            found.append(fault)
            if len(found) >= limit:
                break
    return found


def faults_in(txn: Any) -> Iterator[str]:
    """The faults that one read transaction sees; reads every row of runs and what belongs to it."""
    runs = blocks = of_keys = 0
    keyed = {int(bytes(key[1 + len(KEYED) :])) for key, _ in scan(txn, META + KEYED.encode())}
    for key, value in scan(txn, RUNS):
        run = Run.decode(key, value)
        runs, blocks = runs + 1, blocks + run.count
        yield from _of_run(txn, run)
        if run.ns in keyed:
            of_keys += run.count
            yield from _of_keys(txn, run)
    rows = sum(1 for _ in scan(txn, KEYS))
    if rows != of_keys:
        yield f"{rows} rows in keys for {of_keys} blocks"
    for name, table in (("children", CHILDREN), ("placed", PLACED)):
        rows = sum(1 for _ in scan(txn, table))
        if rows != runs:
            yield f"{rows} rows in {name} for {runs} runs"
    for name, rows in (("blocks", blocks), ("orphans", sum(1 for _ in scan(txn, WAITING)))):
        value = txn.get(META + name.encode())
        counted = 0 if value is None else U64.unpack(value)[0]
        if counted != rows:
            yield f"{counted} {name} counted, {rows} found"


def _of_keys(txn: Any, run: Run) -> Iterator[str]:
    for i in range(run.count):
        row = txn.get(key_key(run.ns, run.hash(i)))
        if row is None or bytes(row) != KEY.pack(run.head, i):
            yield f"run {run.head.hex()}: its block {i} is not in its place among the keys"


def _of_run(txn: Any, run: Run) -> Iterator[str]:
    name = f"run {run.head.hex()}"
    if len(run.hashes) != run.count * HASH_BYTES or not run.count:
        yield f"{name}: {len(run.hashes)} bytes of hashes for {run.count} blocks"
    if run.hashes[:HASH_BYTES] != run.head:
        yield f"{name}: begins with {run.hashes[:HASH_BYTES].hex()}"
    if txn.get(child_key(run.ns, run.parent, run.head)) is None:
        yield f"{name}: not among the children of {run.parent.hex()}"
    place = txn.get(place_key(run.seg, run.slot))
    if place is None or bytes(place) != run.key()[1:]:
        yield f"{name}: not in its place, segment {run.seg} slot {run.slot}"
    if txn.get(SEGMENTS + PREFIX.pack(run.seg)) is None:
        yield f"{name}: in unknown segment {run.seg}"
