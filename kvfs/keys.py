"""An engine's own keys in place of tokens: how blocks of an `external` namespace are named.

Some engines hand over neither tokens nor a prompt: only keys of their own chained hash, one block
each, also from the middle of a prefix. Such a key is folded, with the namespace's fingerprint, to
32 bytes of BLAKE2b. The first 16 are the block's chain hash, the others its lineage, and a record
that does not carry both is not the block that was asked for. What the engine's hash leaves out
(model, dtype, rank) is in the fingerprint, so the same key in two namespaces is two hashes.

A KeyChain is to such a namespace what a PrefixHasher is to others: check, fetch and put take
either. Pure: no I/O, no environment. Immutable; may be shared between threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar

from kvfs.chain import HASH_BYTES, TOKEN_BYTES, PrefixHasher, Rooted
from kvfs.errors import InputError

FOLDED_BYTES = 2 * HASH_BYTES
_PERSON = b"kvfs-key"

Key = bytes | str
"""A key as the engine has it: bytes, or text that is taken as UTF-8. Not empty."""


def folding(root: Rooted) -> Callable[[bytes], bytes]:
    """Returns what folds a key of a namespace to its 32 bytes."""
    try:  # hashlib has it from there, and itself loads OpenSSL
        from _blake2 import blake2b
    except ImportError:
        from hashlib import blake2b

    start = blake2b(digest_size=FOLDED_BYTES, key=root.fingerprint, person=_PERSON)

    def fold(key: bytes) -> bytes:
        state = start.copy()
        state.update(key)
        digest: bytes = state.digest()
        return digest

    return fold


def root_of(root: Rooted) -> bytes:
    """The 16-byte parent of blocks whose engine names none: the fold of no bytes, which is no
    key's."""
    return folding(root)(b"")[:HASH_BYTES]


class KeyChain:
    """The keys of consecutive blocks of one chain, folded."""

    __slots__ = ("_hashes", "_lineages", "_parent", "first_block", "n_blocks", "n_tokens", "root")

    keyed: ClassVar[bool] = True
    lazy: ClassVar[bool] = False

    def __init__(
        self, root: Rooted, keys: Iterable[Key], *, parent: Key | None = None, first_block: int = 0
    ) -> None:
        """parent: key of the block before the first, if there is one and it is known; first_block:
        number of the first block in its chain, as far as the caller knows. Raises InputError."""
        fold = folding(root)
        folded = [fold(_as_bytes(key)) for key in keys]
        self.root = root
        self.first_block = first_block
        self.n_blocks = len(folded)
        self.n_tokens = self.n_blocks * root.block_tokens
        self._hashes = b"".join(f[:HASH_BYTES] for f in folded)
        self._lineages = b"".join(f[HASH_BYTES:] for f in folded)
        self._parent = fold(b"" if parent is None else _as_bytes(parent))[:HASH_BYTES]

    def hashes(self, n_blocks: int | None = None, *, first: int = 0) -> bytes:
        """The chain hashes of the blocks first..n_blocks-1 of these, 16 bytes each."""
        n = self._count(self.n_blocks if n_blocks is None else n_blocks)
        return self._hashes[first * HASH_BYTES : n * HASH_BYTES]

    def lineages(self, n_blocks: int, *, first: int = 0) -> bytes:
        """The rest of the folded keys of the same blocks, 16 bytes each."""
        return self._lineages[first * HASH_BYTES : self._count(n_blocks) * HASH_BYTES]

    def digest(self, n_blocks: int) -> bytes:
        """The chain hash of the n-th of these blocks; 0 gives the parent's."""
        if n_blocks == 0:
            return self._parent
        at = (self._count(n_blocks) - 1) * HASH_BYTES
        return self._hashes[at : at + HASH_BYTES]

    def blocks(self, first: int, end: int) -> memoryview:
        """What stands in the records in place of token ids: zeros."""
        return memoryview(bytes((end - first) * self.root.block_tokens * TOKEN_BYTES))

    def _count(self, n_blocks: int) -> int:
        if n_blocks > self.n_blocks:
            raise InputError(f"there are {self.n_blocks} keys, not {n_blocks}")
        return n_blocks


def _as_bytes(key: Key) -> bytes:
    data = key.encode() if isinstance(key, str) else bytes(key)
    if not data:
        raise InputError("a key must not be empty")
    return data


Chain = PrefixHasher | KeyChain
"""What names the blocks of a request: its tokens, or its engine's keys."""
