"""Small namespaces and chains whose payloads can be told from their hashes, for tests.

A payload is a function of its chain hash, so whatever a test reads anywhere it can compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import shake_128

from kvfs.chain import HASH_BYTES
from kvfs.layout import Identity, Span
from kvfs.namespace import Namespace
from kvfs.put import PutResult
from kvfs.store import Store


class Clock:
    """A clock in seconds that moves by a millisecond with every look at it, and by hand."""

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self.now = start

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def identity(
    row_bytes: int = 64, block_tokens: int = 4, model: str = "test/model", salt: str = ""
) -> Identity:
    """An identity of one layer."""
    span = Span(0, "kv", 0, row_bytes)
    return Identity(
        model=model, weights="w", tokenizer="t", spans=(span,), row_bytes=row_bytes,
        record_format="opaque", block_tokens=block_tokens, salt=salt,
    )  # fmt: skip


def payload(hash_: bytes, row_bytes: int) -> bytes:
    """The payload that `grow` stores for a block."""
    if row_bytes <= 4096:
        return shake_128(hash_).digest(row_bytes)
    page = shake_128(hash_).digest(4096)
    return (page * (-(-row_bytes // 4096)))[:row_bytes]


def tokens_of(blocks: Sequence[int], block_tokens: int = 4) -> list[int]:
    """Tokens of a prompt whose i-th block is told by one number."""
    return [b * block_tokens + i for b in blocks for i in range(block_tokens)]


def hashes_of(ns: Namespace, tokens: Sequence[int]) -> list[bytes]:
    """The chain hash of every block of a prompt."""
    return list(_pieces(bytes(ns.hasher(tokens).hashes())))


def _pieces(hashes: bytes) -> Iterator[bytes]:
    for at in range(0, len(hashes), HASH_BYTES):
        yield hashes[at : at + HASH_BYTES]


def grow(
    store: Store, ns: Namespace, blocks: Sequence[int], *, ttl_class: str | None = None
) -> PutResult:
    """Puts the chain of these blocks. Returns what became of it."""
    tokens = tokens_of(blocks, ns.block_tokens)
    data = [payload(h, ns.row_bytes) for h in hashes_of(ns, tokens)]
    result = store.put(ns, tokens, data, ttl_class=ttl_class)
    if result.error is not None:
        raise result.error
    return result
