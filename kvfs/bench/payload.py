"""Prompts of 128 K tokens and the bytes of their blocks, for `put` and `fetch`.

131,072 tokens have 1,022 blocks that may be hit: the ring of 134 tokens is left to compute.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvfs.namespace import Namespace

TOKENS = 131_072
LONG_TOKENS = 1_000_000
VOCABULARY = 129_280


def hit_blocks(ns: Namespace) -> int:
    """The blocks of a prompt that may be hit: 1,022 of 131,072 tokens of DeepSeek-V4.1-Flash."""
    return ns.identity.hit_cap(TOKENS) // ns.block_tokens


class Prompts:
    """Random prompts of so many whole blocks; the same payload stands for all of them."""

    def __init__(self, ns: Namespace, blocks: int) -> None:
        self._rng = np.random.default_rng(7)
        self.blocks = blocks
        self._row, self._tokens = ns.row_bytes, blocks * ns.block_tokens
        self._block_tokens = ns.block_tokens
        self.payload = memoryview(self._rng.bytes(blocks * ns.row_bytes))

    def next(self) -> npt.NDArray[np.int32]:
        """The tokens of a prompt that was not there before."""
        return self._rng.integers(0, VOCABULARY, self._tokens, np.int32)

    def long(self, blocks: int) -> npt.NDArray[np.int32]:
        """The tokens of a new prompt of another length."""
        return self._rng.integers(0, VOCABULARY, blocks * self._block_tokens, np.int32)

    def cycle(self, blocks: int) -> list[memoryview]:
        """The payload of so many blocks: that of the short prompts over and over."""
        starts = [i % self.blocks * self._row for i in range(blocks)]
        return [self.payload[at : at + self._row] for at in starts]


def touched(size: int) -> memoryview:
    """A writable buffer whose pages are all there: first touch costs ten times a read."""
    buffer: Any = np.ones(size, np.uint8)
    return memoryview(buffer)
