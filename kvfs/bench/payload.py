"""Prompts of 128 K tokens and the bytes of their blocks, for `put` and `fetch`.

131,072 tokens have 1,022 blocks that may be hit: the ring of 134 tokens is left to compute.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvfs.namespace import Namespace

TOKENS = 131_072
VOCABULARY = 129_280


def hit_blocks(ns: Namespace) -> int:
    """The blocks of a prompt that may be hit: 1,022 of 131,072 tokens of DeepSeek-V4.1-Flash."""
    return ns.identity.hit_cap(TOKENS) // ns.block_tokens


class Prompts:
    """Random prompts of so many whole blocks; the same payload stands for all of them."""

    def __init__(self, ns: Namespace, blocks: int) -> None:
        self._rng = np.random.default_rng(7)
        self._tokens = blocks * ns.block_tokens
        self.payload = memoryview(self._rng.bytes(blocks * ns.row_bytes))

    def next(self) -> npt.NDArray[np.int32]:
        """The tokens of a prompt that was not there before."""
        return self._rng.integers(0, VOCABULARY, self._tokens, np.int32)


def touched(size: int) -> memoryview:
    """A writable buffer whose pages are all there: first touch costs ten times a read."""
    buffer: Any = np.ones(size, np.uint8)
    return memoryview(buffer)
