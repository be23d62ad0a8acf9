"""The inputs, the same for kvfs and for every peer because they come from the same seeds.

Prompts of 1,000,000 and 131,072 random tokens; 1,022 blocks of DeepSeek-V4.1-Flash as payload, in
memory whose pages are there, beginning on a page.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvfs.bench import check, payload

Tokens = npt.NDArray[np.int32]
BLOCK_TOKENS = 128
PROMPTS = 2
"""Prompts of each length: in turn, so that none is in the processor's cache from before."""


@dataclass(frozen=True, slots=True)
class Size:
    """A length of prompt. runs: in how many puts kvfs is to have got it."""

    name: str
    tokens: int
    runs: int

    @property
    def blocks(self) -> int:
        return self.tokens // BLOCK_TOKENS


def sizes() -> tuple[Size, ...]:
    return tuple(Size(name, tokens, runs) for name, tokens, runs, _ in check.SIZES)


def prompts(size: Size, *, stored: bool = True) -> list[Tokens]:
    """Prompts of one length; those that are to be stored, or others."""
    rng = np.random.default_rng([size.tokens, stored])
    return [rng.integers(0, payload.VOCABULARY, size.tokens, np.int32) for _ in range(PROMPTS)]


class Work:
    """Payload and landing place of put and fetch."""

    def __init__(self, blocks: int, row_bytes: int, align: int = 1) -> None:
        """row_bytes: of a block of the model; align: what the peer's blocks are a multiple of."""
        self.blocks = blocks
        self.row_bytes = row_bytes
        self.block_bytes = -(-row_bytes // align) * align
        self._rng = np.random.default_rng(7)
        self.payload = _pages(self._rng.bytes(self.total))
        self.into = _pages(bytes(self.total))

    @property
    def row_total(self) -> int:
        """Bytes that kvfs moves."""
        return self.blocks * self.row_bytes

    @property
    def total(self) -> int:
        """Bytes that the peer moves."""
        return self.blocks * self.block_bytes

    def part(self, buffer: memoryview, i: int) -> memoryview:
        """Block i of payload or landing place."""
        return buffer[i * self.block_bytes : (i + 1) * self.block_bytes]

    def next_prompt(self) -> Tokens:
        """Tokens of so many whole blocks that were not there before."""
        count = self.blocks * BLOCK_TOKENS
        return self._rng.integers(0, payload.VOCABULARY, count, np.int32)

    def landed(self, size: int) -> bool:
        """Whether the landing place holds the first `size` bytes of the payload."""
        return np.array_equal(_bytes(self.into)[:size], _bytes(self.payload)[:size])


def _bytes(buffer: memoryview) -> npt.NDArray[np.uint8]:
    return np.frombuffer(buffer, np.uint8)


def _pages(content: bytes) -> memoryview:
    """The bytes in memory of their own that begins on a page: O_DIRECT and RDMA want that."""
    area: Any = mmap.mmap(-1, len(content), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area[:] = content
    return memoryview(area)
