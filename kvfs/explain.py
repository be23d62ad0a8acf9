"""Why a prompt is not stored further: the block where it ends, and what is there instead.

For people who look at a hit rate of zero: a router and an engine that tokenise differently, a
beginning-of-sequence token that one of them adds, a time stamp in a system prompt, another
namespace. Reads the index, and of the stored siblings of the first missing block their token ids
from the storage; what cannot be read is left out. Slow, blocking, and never on a serving path.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

from kvfs.chain import PrefixHasher
from kvfs.errors import BackendError, DamageError
from kvfs.index.schema import Run
from kvfs.namespace import Namespace
from kvfs.plan import Plan
from kvfs.store import Store
from kvfs.vfs.file import Place, read_tokens

# A root may have a hundred thousand children: so many of the newest are compared with the prompt.
_COMPARED = 64
_SHOWN = 3
_LOOKED_UP = 4096
_OTHER_NAMESPACES = 64
# How far token ids may be shifted and still be recognised: templates add a few tokens.
_SHIFT = 8


@dataclass(frozen=True, slots=True)
class Sibling:
    """A stored block that follows the same prefix as the prompt's first missing block.

    common_tokens: leading token ids it shares with the prompt's block; ours, theirs: the first ids
    that differ, None where the prompt ends; shift: how many tokens more the prompt has in front of
    the same ids (negative: fewer), 0 if that explains nothing. All None and 0 if it cannot be read.
    """

    hash: bytes
    written_ms: int
    expires_ms: int
    common_tokens: int | None = None
    ours: int | None = None
    theirs: int | None = None
    shift: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "hash": self.hash.hex(), "written_ms": self.written_ms, "expires_ms": self.expires_ms,
            "common_tokens": self.common_tokens, "ours": self.ours, "theirs": self.theirs,
            "shift": self.shift,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where a stored prefix ends and why.

    block: number of the first block that is not stored; hash: its chain hash, b"" if the prompt
    has no such block; parent: that of the block before it; expired_ms: when the stored one
    expired, None if there is none; siblings: the nearest stored ones, the most similar first, of
    sibling_count in all; elsewhere: namespaces of the store that hold more, with stored tokens.
    """

    block: int
    block_tokens: int
    hash: bytes
    parent: bytes
    expired_ms: int | None
    sibling_count: int
    siblings: tuple[Sibling, ...]
    elsewhere: tuple[tuple[str, int], ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "block": self.block, "first_token": self.block * self.block_tokens,
            "hash": self.hash.hex(), "parent": self.parent.hex(), "expired_ms": self.expired_ms,
            "sibling_count": self.sibling_count,
            "siblings": [s.to_json() for s in self.siblings],
            "elsewhere": [{"namespace": n, "stored_tokens": t} for n, t in self.elsewhere],
        }  # fmt: skip


def explain(store: Store, ns: Namespace, hasher: PrefixHasher, plan: Plan) -> Explanation:
    """Explains a plan that `store.check(ns, hasher)` returned. Raises IndexFault."""
    at = plan.stored_blocks
    own = hasher.digest(at + 1) if at < hasher.n_blocks else b""
    run = store.index.run(ns.number, own) if own else None
    now = store.now_ms()
    candidates = [] if run is not None else _siblings(store, ns, hasher, at)
    compared = heapq.nlargest(_COMPARED, candidates, key=lambda c: c[0].written_ms)
    found = [_compare(store, ns, hasher, at, r, i) for r, i in compared]
    found.sort(key=lambda s: (s.common_tokens or 0, abs(s.shift), s.written_ms), reverse=True)
    return Explanation(
        at, ns.block_tokens, own, hasher.digest(at),
        run.expires_ms if run is not None and run.expires_ms <= now else None,
        len(candidates), tuple(found[:_SHOWN]), _elsewhere(store, ns, hasher, plan),
    )  # fmt: skip


def _siblings(store: Store, ns: Namespace, hasher: PrefixHasher, at: int) -> list[tuple[Run, int]]:
    """(run, position in it) of the stored blocks whose parent is the prompt's block `at` - 1."""
    heads = store.index.children(ns.number, hasher.digest(at))[:_LOOKED_UP]
    runs = (store.index.run(ns.number, head) for head in heads)
    out = [(run, 0) for run in runs if run is not None]
    matched = store.index.check(ns.number, hasher, store.now_ms()).runs
    last = store.index.run(ns.number, hasher.digest(matched[-1].block + 1)) if matched else None
    if last is not None and 0 <= at - last.block < last.count:
        out.append((last, at - last.block))
    return out


def _compare(
    store: Store, ns: Namespace, hasher: PrefixHasher, at: int, run: Run, i: int
) -> Sibling:
    segment = store.index.segment(run.seg)
    place = Place(
        at, run.hash(i), hasher.digest(at), segment, run.slot + i, run.written_ms, run.expires_ms,
        run.class_id, run.head, i,
    )  # fmt: skip
    try:
        b = read_tokens(store.backend, ns, [place])[0]
    except (DamageError, BackendError):
        return Sibling(run.hash(i), run.written_ms, run.expires_ms)
    a = tuple(hasher.buffer.cast("I")[at * ns.block_tokens :][: len(b) + _SHIFT])
    n = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return Sibling(
        run.hash(i), run.written_ms, run.expires_ms, n,
        a[n] if n < len(a) else None, b[n] if n < len(b) else None,
        _shift(a, b) if n < len(b) else 0,
    )  # fmt: skip


def _shift(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    """How many tokens were put in front of the same ids (negative: left out), 0 if neither."""
    for n in range(1, _SHIFT + 1):
        if ours[n:] and ours[n : len(theirs)] == theirs[: len(ours) - n][: len(theirs) - n]:
            return n
        if ours and theirs[n : n + len(ours)] == ours[: len(theirs) - n]:
            return -n
    return 0


def _elsewhere(
    store: Store, ns: Namespace, hasher: PrefixHasher, plan: Plan
) -> tuple[tuple[str, int], ...]:
    """Other namespaces that hold more of the same tokens, those with most first."""
    found = []
    for other in store.listed_namespaces()[:_OTHER_NAMESPACES]:
        if other.nsid != ns.nsid and not other.keyed:
            theirs = store.index.check(other.number, other.hasher(hasher.buffer), store.now_ms())
            stored = theirs.blocks * other.block_tokens
            if stored > plan.stored_tokens:
                found.append((other.name, stored))
    return tuple(sorted(found, key=lambda f: -f[1]))
