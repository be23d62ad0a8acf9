"""Made-up but reproducible contents: token ids for a trace's chain ids, and payloads for blocks.

A trace says which requests share which prefix, not what stands in them. Here every chain id gets
tokens of its own, such that two requests have equal tokens exactly as far as their ids are equal,
and every block a payload that is a function of its chain hash, so that what a store returns can be
compared with what must have been stored. Both run at about the speed of a memory copy: they are cut
from a small pool of random numbers, and what makes them differ for certain is stamped on top.

Nothing here depends on the machine, the process or numpy's own random generators. Objects may be
shared between threads, except that PayloadSynth.first_difference has a scratch buffer.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from kvfs.chain import HASH_BYTES
from kvfs.errors import InputError
from kvfs.sim.trace import Request

Tokens = npt.NDArray[np.uint32]
_U64 = npt.NDArray[np.uint64]

VOCABULARY = 129_280
GRAIN = 128
PAGE = 4096

# Four digits to the base of the vocabulary tell more than 2**64 units apart; a fifth tells traces.
_DIGITS = 4
_STAMP = _DIGITS + 1
_POOL_TOKENS = 1 << 17
_POOL_BYTES = 1 << 20
_POOL_STEP = 64
_CHUNK_BYTES = 4 << 20
# Rows this long are copied one by one; gathering shorter ones in one call beats a loop.
_LONG_ROW = 16 << 10
# Units of tokens that no id stands for; far beyond those of ids.
_TAIL = 1 << 62
_TAIL_UNITS_BITS = 28
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _random(n: int, seed: int) -> _U64:
    """n 64-bit numbers: splitmix64, which is eight lines and the same everywhere."""
    z = (np.arange(1, n + 1, dtype=np.uint64) + np.uint64(seed << 32)) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class TokenSynth:
    """Token ids for the requests of one trace.

    Every id's tokens fall into units of 128 (or one unit, if block_tokens is no multiple of that).
    A unit begins with its own number in four digits to the base of the vocabulary and one that
    stands for the trace; the rest is a piece of the pool. So units of different ids differ for
    certain, and those of two traces replayed into one store do too, but for one pair in 129,280.
    """

    def __init__(self, block_tokens: int, trace: str = "") -> None:
        """block_tokens: what an id stands for, 5 at least, else InputError; trace: its name."""
        if block_tokens < _STAMP:
            raise InputError(f"ids of {block_tokens} tokens are too short to be told apart")
        self._family = crc32(trace.encode()) % VOCABULARY
        self.unit = GRAIN if block_tokens % GRAIN == 0 else block_tokens
        self._per_id = block_tokens // self.unit
        pool = (_random(_POOL_TOKENS + self.unit, 1) % np.uint64(VOCABULARY)).astype(np.uint32)
        self._pieces = np.lib.stride_tricks.sliding_window_view(pool, self.unit)

    def tokens(self, request: Request) -> Tokens:
        """Returns the request's `tokens` token ids, uint32, each below VOCABULARY.

        They are those of its ids, cut at the end. Where the ids stand for fewer tokens (a trace
        whose ids cover whole blocks only), the rest is tokens no other request has: nothing says
        that they are shared, so no hit may come of them.
        """
        units = self._units(request)
        out: Tokens = self._pieces[(units * _GOLDEN) >> np.uint64(64 - 17)]
        base = np.uint64(VOCABULARY)
        for digit in range(_DIGITS):
            out[:, digit] = units % base
            units = units // base
        out[:, _DIGITS] = self._family
        flat: Tokens = out.reshape(-1)
        return flat[: request.tokens]

    def _units(self, request: Request) -> _U64:
        """The numbers of the units that cover the request's tokens."""
        want = -(-request.tokens // self.unit)
        pieces: list[Any] = []
        have = 0
        for first, count in request.runs:
            if have >= want:
                break
            n = min(count * self._per_id, want - have)
            pieces.append(np.arange(n, dtype=np.uint64) + np.uint64(first * self._per_id))
            have += n
        if have < want:
            tail = _TAIL + (request.line << _TAIL_UNITS_BITS)
            pieces.append(np.arange(want - have, dtype=np.uint64) + np.uint64(tail))
        return np.concatenate(pieces) if pieces else np.empty(0, np.uint64)


class PayloadSynth:
    """Payloads for blocks of row_bytes bytes, each a function of the block's chain hash.

    A payload is a piece of the pool that the hash picks, with the hash itself stamped at the start
    of every 4 KiB page, so that no page of one block can pass for a page of another.
    """

    def __init__(self, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        words = (_POOL_BYTES + row_bytes + 7) // 8
        pool = _random(words, 2).view(np.uint8)
        windows = np.lib.stride_tricks.sliding_window_view(pool, row_bytes)
        self._pieces = windows[:_POOL_BYTES:_POOL_STEP]
        self._chunk = max(1, _CHUNK_BYTES // row_bytes)
        self._scratch: npt.NDArray[np.uint8] | None = None

    def fill(self, hashes: Any, out: Any) -> None:
        """Writes the payloads of the blocks into out.

        hashes: 16 bytes a block, bytes-like; out: writable buffer of row_bytes bytes a block.
        Raises InputError if the two do not match.
        """
        keys = np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES)
        flat = np.frombuffer(out, np.uint8)
        if len(flat) != len(keys) * self.row_bytes:
            raise InputError(
                f"{len(keys)} blocks are {len(keys) * self.row_bytes} bytes, got {len(flat)}"
            )
        rows = flat.reshape(len(keys), self.row_bytes)
        for at in range(0, len(keys), self._chunk):
            self._rows(keys[at : at + self._chunk], rows[at : at + self._chunk])

    def make(self, hashes: Any) -> bytearray:
        """Returns the payloads of the blocks, one after the other."""
        out = bytearray(len(memoryview(hashes).cast("B")) // HASH_BYTES * self.row_bytes)
        self.fill(hashes, out)
        return out

    def first_difference(self, hashes: Any, data: Any) -> int | None:
        """Returns the number of the first block whose payload is not the right one, else None.

        hashes: 16 bytes a block; data: row_bytes bytes a block. Missing data is a difference.
        """
        view = memoryview(data).cast("B")
        keys = np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES)
        if self._scratch is None:
            self._scratch = np.empty((self._chunk, self.row_bytes), np.uint8)
        for at in range(0, len(keys), self._chunk):
            part = keys[at : at + self._chunk]
            right = self._scratch[: len(part)]
            self._rows(part, right)
            found = view[at * self.row_bytes : (at + len(part)) * self.row_bytes]
            if len(found) != right.size:
                return at + len(found) // self.row_bytes
            rows = np.frombuffer(found, np.uint8).reshape(right.shape)
            if not np.array_equal(rows, right):
                return at + int((rows != right).any(axis=1).argmax())
        return None

    def _rows(self, keys: npt.NDArray[np.uint8], rows: npt.NDArray[np.uint8]) -> None:
        picks = np.ascontiguousarray(keys[:, :8]).view("<u8")[:, 0] % len(self._pieces)
        if self.row_bytes < _LONG_ROW:
            rows[:] = self._pieces[picks]
        else:
            for row, pick in zip(rows, picks.tolist(), strict=True):
                row[:] = self._pieces[pick]
        for page in range(0, self.row_bytes, PAGE):
            n = min(HASH_BYTES, self.row_bytes - page)
            rows[:, page : page + n] = keys[:, :n]
