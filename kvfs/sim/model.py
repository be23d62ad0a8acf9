"""What a perfect cache would hit: a dictionary model, the oracle that replays are compared with.

It knows nothing of chain hashes, runs or indexes and imports no other code of kvfs: a trie over
real blocks of tokens, each node a number, each edge the block's bytes. Unlimited and for ever.
"""

from __future__ import annotations

from typing import Any


class PrefixModel:
    """Remembers prompts; tells how long a prefix of a new one it has seen, in whole blocks."""

    def __init__(self, block_tokens: int = 128) -> None:
        self.block_tokens = block_tokens
        self._edges: dict[tuple[int, bytes], int] = {}

    @property
    def blocks(self) -> int:
        """Blocks held; equal blocks behind different prefixes count as different."""
        return len(self._edges)

    def step(self, tokens: Any) -> int:
        """Returns how many leading tokens were stored before, and stores the prompt.

        tokens: a one-dimensional buffer of 4-byte token ids. Only whole blocks count.
        """
        data = bytes(memoryview(tokens).cast("B"))
        size = 4 * self.block_tokens
        node, stored, whole = 0, 0, True
        for at in range(0, len(data) - size + 1, size):
            edge = (node, data[at : at + size])
            child = self._edges.get(edge)
            if child is None:
                whole = False
                child = self._edges[edge] = len(self._edges) + 1
            stored += whole
            node = child
        return stored * self.block_tokens
