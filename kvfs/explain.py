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

from kvfs.backend import read_into
from kvfs.chain import TOKEN_BYTES, PrefixHasher
from kvfs.errors import KvfsError
from kvfs.index.schema import Run
from kvfs.namespace import Namespace
from kvfs.plan import Plan
from kvfs.record import TRAILER_BYTES, Trailer, parse
from kvfs.store import Store

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
    theirs = stored_tokens(store, ns, run, i)
    if theirs is None:
        return Sibling(run.hash(i), run.written_ms, run.expires_ms)
    ours = hasher.buffer[at * hasher.block_bytes :][: len(theirs) + _SHIFT * TOKEN_BYTES]
    a, b = ours.cast("I"), theirs.cast("I")
    n = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return Sibling(
        run.hash(i), run.written_ms, run.expires_ms, n,
        a[n] if n < len(a) else None, b[n] if n < len(b) else None,
        _shift(bytes(ours), bytes(theirs)) if n < len(b) else 0,
    )  # fmt: skip


def _shift(ours: bytes, theirs: bytes) -> int:
    """How many tokens were put in front of the same ids (negative: left out), 0 if neither."""
    for n in range(1, _SHIFT + 1):
        at = n * TOKEN_BYTES
        if len(ours) > at and theirs.startswith(ours[at : at + len(theirs) - at]):
            return n
        if len(theirs) > at and ours and theirs[at:] == ours[: len(theirs) - at]:
            return -n
    return 0


def stored_tokens(store: Store, ns: Namespace, run: Run, i: int) -> memoryview | None:
    """The token ids (u32 little-endian bytes) of the i-th block of a run, from its record.

    None if the record cannot be read, is damaged, or is another one.
    """
    shape = ns.shape
    meta = memoryview(bytearray(shape.tokens_bytes + TRAILER_BYTES))
    try:
        segment = store.index.segment(run.seg)
        file = store.backend.open(segment.path)
        try:
            offset = segment.geometry.offset(run.slot + i) + shape.meta_at
            read = read_into(store.backend, file, [meta], offset)
        finally:
            store.backend.close(file)
    except (OSError, KvfsError):
        return None
    trailer = parse(meta) if read == len(meta) else "short"
    if not isinstance(trailer, Trailer) or trailer.hash != run.hash(i):
        return None
    return meta[: shape.tokens_bytes]


def _elsewhere(
    store: Store, ns: Namespace, hasher: PrefixHasher, plan: Plan
) -> tuple[tuple[str, int], ...]:
    """Other namespaces that hold more of the same tokens, those with most first."""
    found = []
    for other in store.namespaces()[:_OTHER_NAMESPACES]:
        if other.nsid != ns.nsid:
            theirs = store.index.check(other.number, other.hasher(hasher.buffer), store.now_ms())
            stored = theirs.blocks * other.block_tokens
            if stored > plan.stored_tokens:
                found.append((other.name, stored))
    return tuple(sorted(found, key=lambda f: -f[1]))
