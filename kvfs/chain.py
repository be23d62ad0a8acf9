"""Tokens to bytes, and bytes to chain hashes: the identity of a block and of all before it.

`h[i]` is the 128-bit digest of the namespace's root followed by all tokens up to the end of block
i, as unsigned 32-bit little-endian integers. The digest is a function of bytes alone: no process
state, no environment. docs/identity.md has the test vectors; `self_test` checks one of them.

A streaming hash keeps the running state, so each block costs one update and one digest, and the
digest at a later block can be taken without those between: that is what makes `check` fast.

This module is the only place that turns tokens into bytes. It imports numpy only for what already
is a numpy array or needs converting. A PrefixHasher belongs to one request and one thread.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import xxhash

from kvfs.errors import ConfigError, InputError

HASH_BYTES = 16
TOKEN_BYTES = 4
_U32_MAX = 0xFFFFFFFF
_FEW = 1024


class Hash(Protocol):
    """A streaming hash: hashlib's interface without the names."""

    def update(self, data: Any, /) -> Any: ...
    def copy(self) -> Hash: ...
    def digest(self) -> bytes: ...


class Rooted(Protocol):
    """What a chain starts from; kvfs.layout.Identity is one."""

    @property
    def hash(self) -> str: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def fingerprint(self) -> bytes: ...
    def canonical(self) -> bytes: ...


class _Blake3:
    """blake3 cut to 16 bytes, behind hashlib's interface."""

    __slots__ = ("_state",)

    def __init__(self, state: Any) -> None:
        self._state = state

    def update(self, data: Any) -> None:
        self._state.update(data)

    def copy(self) -> _Blake3:
        return _Blake3(self._state.copy())

    def digest(self) -> bytes:
        digest: bytes = self._state.digest(HASH_BYTES)
        return digest


def _start_xxh3(root: Rooted) -> Hash:
    # Seeded with the fingerprint: with a secret tenant salt an outsider cannot compute the hash,
    # so cannot search for collisions offline. xxh3 stays non-cryptographic: fetch compares tokens.
    seed = int.from_bytes(root.fingerprint[:8], "little")
    return xxhash.xxh3_128(root.canonical(), seed=seed)


def _start_blake3(root: Rooted) -> Hash:
    try:
        import blake3
    except ImportError as e:
        raise ConfigError(
            "namespace uses the blake3 chain hash and the package is absent: "
            "pip install 'kvfs[blake3]'"
        ) from e
    return _Blake3(blake3.blake3(root.canonical()))


# Name in namespace.json -> maker of the state that has absorbed the root.
HASHES: dict[str, Callable[[Rooted], Hash]] = {
    "xxh3-128": _start_xxh3,
    "blake3": _start_blake3,
}


def start(root: Rooted) -> Hash:
    """Returns a hash state that has absorbed the namespace's root.

    Raises InputError for a hash this version does not have, ConfigError if its package is absent.
    """
    maker = HASHES.get(root.hash)
    if maker is None:
        raise InputError(f"chain hash {root.hash!r} is not known; known are {', '.join(HASHES)}")
    return maker(root)


def root_hash(root: Rooted) -> bytes:
    """Returns the 16-byte parent hash of every block 0 of the namespace."""
    return start(root).digest()


def self_test() -> None:
    """Raises ConfigError if the hash library does not compute the published xxh3-128 vector.

    A library that hashes differently would fill the store with blocks nobody else finds.
    """
    found = xxhash.xxh3_128(bytes(range(256)) * 2, seed=1).hexdigest()
    if found != _SELF_TEST:
        raise ConfigError(
            f"xxhash {xxhash.VERSION} computes {found} where {_SELF_TEST} is right; "
            "install a sound xxhash package"
        )


def as_u32(tokens: Any) -> memoryview:
    """Returns the token ids as bytes: 4 each, unsigned, little-endian; without a copy if it can.

    tokens: a flat sequence of ids in [0, 2**32): numpy or torch integers of any width, array.array,
    list or tuple of int, or a bytes-like object (bytes, bytearray, memoryview, mmap) that already
    holds 4-byte little-endian ids. Raises InputError for anything else: nested, float, negative,
    too large, partial bytes. (A bool in a list is the int it is: to look at each would cost more
    than the conversion.)
    """
    ready = _as_it_is(tokens)
    return _converted(tokens) if ready is None else ready


def _flat(tokens: Any) -> memoryview | None:
    """A contiguous view of one dimension, if the tokens have one."""
    try:
        view = memoryview(tokens)
    except TypeError:
        return None
    return view if view.ndim == 1 and view.c_contiguous else None


def _as_it_is(tokens: Any) -> memoryview | None:
    """The tokens as a view, if they are unsigned 32-bit already; else None."""
    view = _flat(tokens)
    if view is None:
        return None
    if view.format in ("B", "c") and not _is_array(tokens):
        if view.nbytes % TOKEN_BYTES:
            raise InputError(
                f"token bytes are 4 little-endian bytes each; got {view.nbytes} bytes, no multiple"
            )
        return view.cast("B")
    if view.format in ("I", "<I", "L") and view.itemsize == 4 and sys.byteorder == "little":
        return view.cast("B")
    return None


def _is_array(tokens: Any) -> bool:
    """Whether one-byte elements are ids, one each, and not the bytes of ids."""
    return isinstance(tokens, array.array) or hasattr(tokens, "dtype")


def _converted(tokens: Any) -> memoryview:
    """Tokens that must be checked or copied first: the slow part of `as_u32`."""
    if isinstance(tokens, list | tuple):
        return _from_sequence(tokens)
    view = _flat(tokens)
    if view is not None and view.format == "i" and sys.byteorder == "little":
        return _from_signed(view)
    return _from_array(_on_host(tokens))


def _on_host(tokens: Any) -> Any:
    """A torch tensor as a numpy array, anything else as it is."""
    detach = getattr(tokens, "detach", None)
    return tokens if detach is None else detach().cpu().numpy()


def _from_sequence(tokens: list[int] | tuple[int, ...]) -> memoryview:
    """A list costs 12 to 41 ms per million ids however it is done; array is among the best."""
    try:
        packed = array.array("I", tokens)
    except OverflowError:
        raise InputError(f"token ids are 0 to {_U32_MAX}; the list has one outside") from None
    except TypeError:
        return _from_array(tokens)
    if packed.itemsize != TOKEN_BYTES or sys.byteorder != "little":
        return _from_array(packed)
    return memoryview(packed).cast("B")


def _from_signed(ids: memoryview) -> memoryview:
    """32-bit ids with a sign: nothing to convert, but none may be negative."""
    data = ids.cast("B")
    if len(ids) <= _FEW:
        # A look at the top byte of each: numpy's calls cost more than that for one block.
        if bytes(data[3::4]).isascii():
            return data
    else:
        import numpy as np

        if int(np.frombuffer(data, "<i4").min()) >= 0:
            return data
    raise InputError(f"token ids are 0 to {_U32_MAX}; got {min(ids)}")


def _from_array(tokens: Any) -> memoryview:
    import numpy as np

    try:
        ids = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError) as e:
        raise InputError(f"tokens must be a flat list of ids: {e}") from None
    if ids.ndim != 1:
        raise InputError(f"tokens must be a flat list of ids; got {ids.ndim} dimensions")
    if ids.size == 0:
        return memoryview(b"")
    kind, size = ids.dtype.kind, ids.dtype.itemsize
    if kind not in "iu":
        raise InputError(f"token ids are integers; got {type(tokens).__name__} of {ids.dtype}")
    if kind == "i" or size > TOKEN_BYTES:
        # One pass finds both faults: a negative id is a huge one when taken as unsigned.
        largest = int(ids.view(ids.dtype.str.replace("i", "u")).max())
        if largest > min(_U32_MAX, int(np.iinfo(ids.dtype).max)):
            raise InputError(
                f"token ids are 0 to {_U32_MAX}; these are {int(ids.min())} to {int(ids.max())}"
            )
    if size == TOKEN_BYTES and ids.dtype.isnative and ids.flags.c_contiguous:
        return _view(ids.view(np.uint8))
    return _view(np.ascontiguousarray(ids, dtype="<u4").view(np.uint8))


def _view(array: Any) -> memoryview:
    return memoryview(array)


class PrefixHasher:
    """The tokens of one request and the running chain hash over them.

    Kept for as long as the request lives and extended as tokens arrive, so that no token is
    converted or hashed twice. Invariant: `state` has absorbed exactly the blocks whose digests
    are in `known`.
    """

    __slots__ = (
        "_buffer", "_later", "_lineage", "_lineages", "_owned", "block_bytes", "known", "lazy",
        "n_blocks", "n_tokens", "root", "state",
    )  # fmt: skip

    keyed: ClassVar[bool] = False
    first_block: ClassVar[int] = 0
    n_tokens: int
    n_blocks: int
    """Whole blocks; a remainder is not addressable."""

    def __init__(
        self, root: Rooted, tokens: Any = b"", *, state: Hash | None = None, lazy: bool = False
    ) -> None:
        """root: the namespace's identity; tokens: as for `as_u32`. Raises InputError.

        state: a hash that has absorbed the root, if the caller keeps one; it is copied.
        lazy: for a hasher that lives no longer than one check. Tokens that need converting are
        converted when something behind the first block is first asked for, and only then is
        InputError raised for them; what a check learns is not kept.
        """
        self.root = root
        self.block_bytes = root.block_tokens * TOKEN_BYTES
        self.state = start(root) if state is None else state.copy()
        self.known = bytearray()  # 16 bytes for each leading block hashed so far
        self.lazy = lazy
        self._later: Any = None
        self._owned: bytearray | None = None
        self._lineage: Hash | None = None
        self._lineages = bytearray()
        ready = _as_it_is(tokens)
        if ready is None and lazy and len(tokens) > root.block_tokens:
            self._later = tokens
            self._buffer = _converted(tokens[: root.block_tokens])
            self.n_tokens = len(tokens)
            self.n_blocks = self.n_tokens // root.block_tokens
        else:
            self._hold(_converted(tokens) if ready is None else ready)

    def _hold(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self.n_tokens = len(buffer) // TOKEN_BYTES
        self.n_blocks = len(buffer) // self.block_bytes

    @property
    def buffer(self) -> memoryview:
        """All tokens as u32 little-endian bytes. Raises InputError only if made `lazy`."""
        if self._later is not None:
            self._hold(_converted(self._later))
            self._later = None
        return self._buffer

    def blocks(self, first: int, end: int) -> memoryview:
        """The tokens of blocks first..end-1 as u32 little-endian bytes; otherwise like `buffer`."""
        later = self._later
        if later is not None and end > 1 and getattr(later, "itemsize", 0) != TOKEN_BYTES:
            # Converted piece by piece each time it is asked for: a piece stays in cache, the whole
            # would be fresh memory whose page faults cost more than everything else.
            self._later = later = _on_host(later)
            n = self.root.block_tokens
            return _converted(later[first * n : end * n])
        buffer = self._buffer if end <= 1 else self.buffer
        return buffer[first * self.block_bytes : end * self.block_bytes]

    def absorb(self, state: Hash, hashes: Sequence[Any]) -> None:
        """Takes over a state that has absorbed the next blocks, whose hashes are given (buffers,
        16 bytes a block, one or more blocks each)."""
        self.state = state
        self.known += b"".join(hashes)

    def extend(self, tokens: Any) -> None:
        """Appends tokens (as for `as_u32`). Raises InputError; then nothing was appended."""
        more, buffer = as_u32(tokens), self.buffer
        grown = bytearray(buffer) if self._owned is None else self._owned
        if self._owned is not None:
            # A bytearray cannot grow while a view of it is alive; ours is the only one kept.
            buffer.release()
        try:
            grown += more
        except BufferError:
            # A caller still holds a view of the old buffer: leave it whole, go on with a copy.
            grown = bytearray(grown) + more
        self._owned = grown
        self._hold(memoryview(grown))

    def hashes(self, n_blocks: int | None = None, *, first: int = 0) -> bytes:
        """Returns the chain hashes of the first n_blocks blocks (default: all whole ones), or of
        those from block `first` on.

        16 bytes each, in order. Raises InputError if the prompt has fewer blocks.
        """
        n = self.n_blocks if n_blocks is None else n_blocks
        if n > self.n_blocks:
            raise InputError(f"the prompt has {self.n_blocks} whole blocks, not {n}")
        update, digest = self.state.update, self.state.digest
        size, buffer, known = self.block_bytes, self.buffer, self.known
        for at in range(len(known) // HASH_BYTES * size, n * size, size):
            update(buffer[at : at + size])
            known += digest()
        return bytes(known[first * HASH_BYTES : n * HASH_BYTES])

    def digest(self, n_blocks: int) -> bytes:
        """Returns the 16-byte chain hash of the first n_blocks blocks; 0 gives the root's."""
        if n_blocks == 0:
            return root_hash(self.root)
        if n_blocks * HASH_BYTES > len(self.known):
            self.hashes(n_blocks)
        return bytes(self.known[(n_blocks - 1) * HASH_BYTES : n_blocks * HASH_BYTES])

    def lineages(self, n_blocks: int, *, first: int = 0) -> bytes:
        """Returns the blake2b-128 digests of root and tokens up to the end of each block.

        16 bytes a block, for the blocks first..n_blocks-1. Only put and fetch need them, check does
        not.
        """
        if self._lineage is None:
            from hashlib import blake2b

            self._lineage = blake2b(self.root.canonical(), digest_size=HASH_BYTES)
        update, digest = self._lineage.update, self._lineage.digest
        size, buffer, out = self.block_bytes, self.buffer, self._lineages
        for at in range(len(out) // HASH_BYTES * size, n_blocks * size, size):
            update(buffer[at : at + size])
            out += digest()
        return bytes(out[first * HASH_BYTES : n_blocks * HASH_BYTES])


_SELF_TEST = "54bfad3ecef685a10f3b8d192b389272"
