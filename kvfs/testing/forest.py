"""The tree of a namespace as a plain model tells it, with neither index nor storage, for tests.

It knows which chains were put and evicted, in which order, and nothing of hash tables or segments.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvfs.namespace import Namespace
from kvfs.testing.chains import hashes_of, payload, tokens_of

Chain = tuple[int, ...]
Nested = dict[str, object]


@dataclass
class Run:
    """What the model knows of a run: the chain that leads to it, and its blocks' chains."""

    written: int
    blocks: list[Chain]

    @property
    def parent(self) -> Chain:
        return self.blocks[0][:-1]


class Model:
    """Which chains are stored and in which runs, told in a way that needs no index."""

    def __init__(self, ns: Namespace) -> None:
        self.ns = ns
        self.runs: list[Run] = []
        self.time = 0

    def stored(self) -> set[Chain]:
        return {chain for run in self.runs for chain in run.blocks}

    def put(self, chain: Chain) -> None:
        stored = self.stored()
        new = [chain[: i + 1] for i in range(len(chain)) if chain[: i + 1] not in stored]
        self.time += 1
        if new:
            self.runs.append(Run(self.time, new))

    def remove(self, chain: Chain) -> None:
        for run in self.runs:
            kept = [b for b in run.blocks if b[: len(chain)] != chain]
            run.blocks = kept
        self.runs = [run for run in self.runs if run.blocks]

    def hash(self, chain: Chain) -> bytes:
        return hashes_of(self.ns, tokens_of(chain, self.ns.block_tokens))[-1]

    def name(self, run: Run) -> str:
        return f"{len(run.parent):06d}-{self.hash(run.blocks[0]).hex()[:16]}"

    def tree(self) -> Nested:
        return {self.name(run): self.folder(run) for run in self.runs if not run.parent}

    def folder(self, run: Run | None) -> Nested:
        out: Nested = {}
        line: list[Chain] = []
        while run is not None:
            line += run.blocks
            following = [r for r in self.runs if r.parent == run.blocks[-1]]
            run = min(following, key=lambda r: r.written, default=None)
        main = set(line)
        for chain in line:
            out[f"{len(chain) - 1:06d}.kv"] = payload(self.hash(chain), self.ns.row_bytes)
            for fork in self.runs:
                if fork.parent == chain and fork.blocks[0] not in main:
                    out[self.name(fork)] = self.folder(fork)
        rows = [tokens_of(chain[-1:], self.ns.block_tokens) for chain in line]
        out["tokens"] = "".join(" ".join(f"{t:10d}" for t in row) + "\n" for row in rows).encode()
        return out
