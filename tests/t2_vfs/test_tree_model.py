"""The tree against a plain model: random chains, forks, evictions, whatever runs they made."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.namespace import Namespace
from kvfs.store import Store
from kvfs.testing.chains import Clock, grow, hashes_of, identity, payload, tokens_of
from kvfs.vfs import Entry, Tree
from kvfs.vfs.node import BlockFile, Folder, NamespaceDir, Tokens

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


def walk(tree: Tree, directory: NamespaceDir | Folder) -> Nested:
    """The tree as a reader sees it; on the way, listing, lookup and stat must agree."""
    out: Nested = {}
    for entry in tree.listing(directory).entries():
        assert tree.lookup(directory, entry.name) == entry
        assert tree.stat(entry.node) == entry.stat
        assert entry.name.decode() not in out
        if isinstance(entry.node, Folder):
            assert entry.stat.directory
            out[entry.name.decode()] = walk(tree, entry.node)
        elif isinstance(entry.node, BlockFile | Tokens):
            out[entry.name.decode()] = read(tree, entry)
    return out


def read(tree: Tree, entry: Entry, size: int = 100) -> bytes:
    assert isinstance(entry.node, BlockFile | Tokens)
    content = tree.open(entry.node, entry.stat.ino)
    data = b"".join(bytes(content.read(at, size)) for at in range(0, entry.stat.size, size))
    assert content.read(entry.stat.size, size) == b""
    content.close()
    assert len(data) == entry.stat.size
    return data


def same(found: Nested, expected: Nested) -> None:
    """Compares names in order as well: a listing is in the order of the chain."""
    assert found == expected
    assert [k for k in found if k.endswith(".kv")] == [k for k in expected if k.endswith(".kv")]


chains = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)
steps = st.lists(st.tuples(st.sampled_from(["put", "put", "put", "remove"]), chains), max_size=14)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("model")
    yield path
    shutil.rmtree(path)


@given(steps)
def test_the_tree_is_the_models(place: Path, steps: list[tuple[str, Chain]]) -> None:
    shutil.rmtree(place)
    options = {"index": str(place / "index"), "clock": Clock()}
    with Store.init(place / "store", durability="none", extent=4096, **options) as store:
        ns = store.create_namespace(identity())
        model, tree = Model(ns), Tree(store)
        space = tree.lookup(tree.root, ns.name.encode())
        assert space is not None and isinstance(space.node, NamespaceDir)
        for what, chain in steps:
            if what == "put":
                grow(store, ns, chain)
                model.put(chain)
            else:
                store.remove(ns, tokens_of(chain), from_block=len(chain) - 1)
                model.remove(chain)
            same(walk(tree, space.node), model.tree())
