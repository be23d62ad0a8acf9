"""Which visible run holds a block that is not the first of one: found from its path heads.

There is no table of all blocks: it would be as large as all else. Whoever names a block in a
journal says with which blocks the runs begin that lead to it in its own index. An index that cut
the chain into other runs knows one of them at least, the first block of the prompt; from the last
one it knows, a search through the forks finds the block, or at last a look at every run.

Functions over one transaction; nothing is kept between calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfs.chain import HASH_BYTES
from kvfs.index.schema import RUN, Run, run_key, scan

if TYPE_CHECKING:
    from kvfs.index.apply import Applier

# Lookups along the forks before all runs are looked at instead, which takes some 50 ms a million.
SEARCH_LIMIT = 500


def holder(
    applier: Applier, ns: int, block: int, hash_: bytes, heads: bytes, *, thorough: bool = False
) -> Run | None:
    """The run that holds block number `block`, of this hash, expired or not; None: it is not there.

    heads: path heads, 16 bytes each; thorough: looks at all runs where a search by these fails, for
    a block that cannot be reached from them because what is between was removed.
    """
    run = applier.run(ns, hash_)
    if run is not None:
        return run
    left = SEARCH_LIMIT
    queue = _last_known(applier, ns, heads)
    while queue and left > 0:
        run = queue.pop()
        at = block - run.block
        if 0 <= at < run.count and run.hash(at) == hash_:
            return run
        for i in range(min(at, run.count)):
            if left <= 0:
                break
            children = applier.children(run.ns, run.hash(i), left)
            left -= 1 + len(children)
            queue += children
    return _among_all(applier, ns, block, hash_) if left <= 0 or thorough else None


def _last_known(applier: Applier, ns: int, heads: bytes) -> list[Run]:
    for at in range(len(heads) - HASH_BYTES, -1, -HASH_BYTES):
        run = applier.run(ns, heads[at : at + HASH_BYTES])
        if run is not None:
            return [run]
    return []


def _among_all(applier: Applier, ns: int, block: int, hash_: bytes) -> Run | None:
    for key, value in scan(applier.txn, run_key(ns, b"")):
        _, _, count, first, *_ = RUN.unpack_from(value)
        at = block - first
        if 0 <= at < count and hash_at(value, at) == hash_:
            return Run.decode(key, value)
    return None


def hash_at(value: Any, i: int) -> Any:
    """The hash of a run's i-th block, of its row's value."""
    return value[RUN.size + i * HASH_BYTES : RUN.size + (i + 1) * HASH_BYTES]
