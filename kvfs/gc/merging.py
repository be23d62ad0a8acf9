"""Which runs are copied one behind the other, as one: pure functions over rows of the index.

A run that begins behind the last block of another one continues its chain. Both become one run
where they belong to one class and were written and used at about the same time: a merged run has
one expiry, and must not keep for long what nobody has asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from kvfs.chain import HASH_BYTES
from kvfs.index.schema import NEVER_MS, Run
from kvfs.put import RENEW_SHARE

Chain = list[Run]
_Joint = tuple[int, bytes, int]
"""Namespace, hash of a block, number of the block behind it (of which an engine that keys the
blocks may have told otherwise)."""


def _end(run: Run) -> _Joint:
    return run.ns, run.hashes[-HASH_BYTES:], run.block + run.count


def chains(
    runs: Iterable[Run], ttl_ms: Callable[[int], int], cap_ms: int, settled_ms: int = NEVER_MS
) -> list[Chain]:
    """Puts runs in chain order; each result is to become one run.

    ttl_ms: time to live of a class by its number; cap_ms: of the store, see kvfs.renewal;
    settled_ms: of what was told up to this time everybody has heard. What was written later becomes
    one only with what was written at the very same time: a removal that is still on its way may
    mean the one and not the other (kvfs.index.told).

    Where a chain forks the fork with the most blocks goes on. Chains that belong to one prompt are
    next to each other, the beginning first.
    """
    behind: dict[_Joint, list[Run]] = defaultdict(list)
    lasts = set()
    all_runs = list(runs)
    for run in all_runs:
        behind[run.ns, run.parent, run.block].append(run)
        lasts.add(_end(run))
    length: dict[tuple[int, bytes], int] = {}  # of the longest chain that begins with a run
    for run in sorted(all_runs, key=lambda r: r.block, reverse=True):
        next_ = behind[_end(run)]
        length[run.ns, run.head] = run.count + max((length[r.ns, r.head] for r in next_), default=0)
    done: set[tuple[int, bytes]] = set()
    out: list[Chain] = []
    starts = [r for r in all_runs if (r.ns, r.parent, r.block) not in lasts]
    stack = sorted(starts, key=lambda r: (r.ns, r.block, r.head), reverse=True)
    while stack:
        run = stack.pop()
        if (run.ns, run.head) in done:
            continue
        chain = [run]
        done.add((run.ns, run.head))
        while True:
            next_ = [r for r in behind[_end(chain[-1])] if (r.ns, r.head) not in done]
            next_.sort(key=lambda r: length[r.ns, r.head])
            if not next_:
                break
            stack += next_[:-1]
            if not _alike(chain, next_[-1], ttl_ms(run.class_id), cap_ms, settled_ms):
                stack.append(next_[-1])
                break
            chain.append(next_[-1])
            done.add((next_[-1].ns, next_[-1].head))
        out.append(chain)
    return out


def _alike(chain: Chain, run: Run, ttl_ms: int, cap_ms: int, settled_ms: int) -> bool:
    """A run may be one with those of a chain: to an eighth of the times that matter."""
    both = [*chain, run]
    expires = [r.expires_ms for r in both]
    written = [r.written_ms for r in both]
    apart = cap_ms // RENEW_SHARE if max(written) <= settled_ms else 0
    return (
        run.class_id == chain[0].class_id
        and max(expires) - min(expires) <= ttl_ms // RENEW_SHARE
        and max(written) - min(written) <= apart
    )
