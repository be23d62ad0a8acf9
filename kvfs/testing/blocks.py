"""Small identities and blocks whose content is known, for tests that compare what comes back.

The payload of a block is a function of its lineage (the cryptographic digest of all tokens up to
its end), so that bytes of any other block, whatever its chain hash, are seen to be wrong.
No state; nothing here reads or writes storage.
"""

from __future__ import annotations

from typing import Any

from kvfs.chain import HASH_BYTES, PrefixHasher
from kvfs.layout import Identity, Span


def small_identity(*, block_tokens: int = 4, row_bytes: int = 96, **fields: Any) -> Identity:
    """An identity of one layer with a "kv" and, from 16 bytes a row on, an "index" part.

    fields: any other field of Identity. One block takes a page of 4096 bytes in a segment as long
    as row_bytes + 4 * block_tokens <= 3968.
    """
    index = row_bytes // 4 if row_bytes >= 16 else 0
    spans = [Span(0, "kv", index, row_bytes - index)]
    if index:
        spans.insert(0, Span(0, "index", 0, index))
    given = {
        "model": "small", "weights": "w0", "tokenizer": "t0", "record_format": "u8",
        "spans": tuple(spans), "row_bytes": row_bytes, "block_tokens": block_tokens,
    }  # fmt: skip
    return Identity(**{**given, **fields})


def payload(lineage: bytes, row_bytes: int) -> bytes:
    """The row_bytes bytes of the block with a lineage."""
    whole, rest = divmod(row_bytes, HASH_BYTES)
    return lineage * whole + lineage[:rest]


def payloads(hasher: PrefixHasher, row_bytes: int, first: int = 0, end: int | None = None) -> bytes:
    """The payloads of the blocks first..end-1 (default: all whole ones) of a prompt, dense."""
    end = hasher.n_blocks if end is None else end
    lineages = hasher.lineages(end)
    return b"".join(
        payload(lineages[i * HASH_BYTES : (i + 1) * HASH_BYTES], row_bytes)
        for i in range(first, end)
    )


def first_wrong(data: Any, hasher: PrefixHasher, row_bytes: int) -> int | None:
    """The first block in `data` (dense payloads from block 0 on) that is not the prompt's."""
    n = memoryview(data).nbytes // row_bytes
    want = payloads(hasher, row_bytes, 0, n)
    if bytes(data) == want:
        return None
    return next(
        i
        for i in range(n)
        if bytes(data[i * row_bytes : (i + 1) * row_bytes])
        != want[i * row_bytes : (i + 1) * row_bytes]
    )
