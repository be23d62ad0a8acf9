"""The tree against a plain model: random chains, forks, evictions, whatever runs they made."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.store import Store
from kvfs.testing.chains import Clock, grow, identity, tokens_of
from kvfs.testing.forest import Chain, Model, Nested
from kvfs.vfs import Entry, Tree
from kvfs.vfs.node import BlockFile, Folder, NamespaceDir, Tokens


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
