"""CHECK: the longest stored prefix of a prompt, from the index alone.

The work grows with the number of runs in the prefix, not of blocks: one get for the first block of
each run, then the stored hash at the end of a long step is compared with the prompt's, and a step
that differs is searched by halves. Equal hashes at the end of a step mean equal tokens all along
it, so the stored hashes become the prompt's own for free.

Pure Python without numpy: this runs in routers and in `kvctl check`. Never touches the store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kvfs.chain import HASH_BYTES, Hash, PrefixHasher
from kvfs.index.schema import RUN, common

# A run is compared in one step if it is short enough to hash twice without regret, a longer one in
# steps that double: few digests where it is shared to its end, no more than twice the bytes where
# it is not.
FIRST_STEP = 256


class Match(NamedTuple):
    """A stored run and how many of its leading blocks the prompt shares."""

    seg: int
    slot: int
    shared: int
    block: int
    expires_ms: int
    class_id: int


class Found(NamedTuple):
    """What the index holds of a prompt: runs in order, and why the prefix ends there."""

    runs: list[Match]
    blocks: int
    reason: str


def longest_prefix(
    get: Callable[[bytes], Any], prefix: bytes, hasher: PrefixHasher, now_ms: int
) -> Found:
    """Returns the longest unexpired stored prefix.

    get: key -> value buffer of the `runs` table or None; prefix: the namespace's key prefix.
    Reasons: "hit" (every whole block), "no tokens", "short" (less than a block), "root unknown",
    "diverged", "expired". Raises InputError for tokens that a lazy hasher had not looked at.
    """
    n = hasher.n_blocks
    if not n:
        return Found([], 0, "short" if hasher.n_tokens else "no tokens")
    walk = _Walk(hasher)
    found = _follow(get, prefix, walk, n, now_ms)
    if not hasher.lazy:
        hasher.absorb(walk.state, walk.learned)
    return found


def _follow(get: Callable[[bytes], Any], prefix: bytes, walk: _Walk, n: int, now_ms: int) -> Found:
    runs: list[Match] = []
    at = 0
    while at < n:
        value = get(prefix + walk.digest(at))
        if value is None:
            return Found(runs, at, "diverged" if at else "root unknown")
        seg, slot, count, block, _, expires, class_id, _ = RUN.unpack_from(value)
        if expires <= now_ms:
            return Found(runs, at, "expired")
        if block != at:  # another chain's block with the same hash: not ours
            return Found(runs, at, "diverged")
        shared = walk.shared(at, value, min(count, n - at))
        runs.append(Match(seg, slot, shared, block, expires, class_id))
        at += shared
    return Found(runs, n, "hit")


class _Walk:
    """One prompt on its way along the stored runs: a hash state that goes ahead of the hasher's.

    `state` has absorbed the first `hashed` blocks; the hashes of those the hasher did not know
    before are in `learned`, as views into the index that live as long as its transaction.
    """

    __slots__ = ("blocks", "hashed", "known", "learned", "state")

    def __init__(self, hasher: PrefixHasher) -> None:
        self.blocks = hasher.blocks
        self.known = hasher.known
        self.hashed = len(hasher.known) // HASH_BYTES
        self.state = hasher.state.copy()
        self.learned: list[Any] = []

    def digest(self, block: int) -> bytes:
        """The chain hash of a block: one the hasher knew before, or the next one."""
        if block < self.hashed:
            return bytes(self.known[block * HASH_BYTES : (block + 1) * HASH_BYTES])
        self.state.update(self.blocks(block, block + 1))
        digest = self.state.digest()
        self.learned.append(digest)
        self.hashed = block + 1
        return digest

    def shared(self, at: int, value: Any, limit: int) -> int:
        """How many leading blocks of a run are the prompt's blocks from `at` on; the first is."""
        done = min(self.hashed - at, limit)
        if done > 1:  # known before: nothing to hash
            ours = bytes(self.known[at * HASH_BYTES : (at + done) * HASH_BYTES])
            same = common(ours, bytes(value[RUN.size : RUN.size + done * HASH_BYTES]))
            if same < done:
                return same
        step = FIRST_STEP
        while done < limit:
            to = min(done + step, limit)
            ahead = self.state.copy()
            ahead.update(self.blocks(at + done, at + to))
            end = RUN.size + to * HASH_BYTES
            if ahead.digest() != value[end - HASH_BYTES : end]:
                return self._by_halves(at, value, done, to)
            self._advance(ahead, at, value, done, to)
            done, step = to, step * 2
        return done

    def _by_halves(self, at: int, value: Any, low: int, high: int) -> int:
        """The same, given that `low` blocks are the prompt's, and hashed, and `high` are not."""
        while high - low > 1:
            middle = (low + high) // 2
            ahead = self.state.copy()
            ahead.update(self.blocks(at + low, at + middle))
            end = RUN.size + middle * HASH_BYTES
            if ahead.digest() == value[end - HASH_BYTES : end]:
                self._advance(ahead, at, value, low, middle)
                low = middle
            else:
                high = middle
        return low

    def _advance(self, state: Hash, at: int, value: Any, done: int, to: int) -> None:
        self.state, self.hashed = state, at + to
        self.learned.append(value[RUN.size + done * HASH_BYTES : RUN.size + to * HASH_BYTES])
