"""The tree of a namespace that is keyed by its engine: every block is somewhere in it, once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.testing.keyed import KeyedStock, keys, payload
from kvfs.vfs import Tree
from kvfs.vfs.change import Changes
from kvfs.vfs.node import BlockFile, Directory, Folder, NamespaceDir

DAY = 86_400.0
A = keys(1, 0, 10)


@pytest.fixture
def stock(tmp_path: Path) -> Iterator[KeyedStock]:
    made = KeyedStock.make(tmp_path / "store", index=str(tmp_path / "index"))
    yield made
    made.close()


def names(tree: Tree, directory: Directory) -> list[str]:
    return [e.name.decode() for e in tree.listing(directory).entries()]


def folder(tree: Tree, directory: Directory, number: int) -> Folder:
    """The folder that begins with this block."""
    entries = tree.listing(directory).entries()
    (entry,) = [e for e in entries if e.name.startswith(b"%06d-" % number)]
    looked_up = tree.lookup(directory, entry.name)
    assert looked_up == entry and isinstance(entry.node, Folder)
    return entry.node


def blocks(tree: Tree, directory: Directory) -> Iterator[bytes]:
    """The payload of every block below a directory, read as a mount would."""
    for entry in tree.listing(directory).entries():
        if isinstance(entry.node, BlockFile):
            content = tree.open(entry.node, entry.stat.ino)
            yield bytes(content.read(0, entry.stat.size))
            content.close()
        elif isinstance(entry.node, Folder):
            yield from blocks(tree, entry.node)


def wanted(stock: KeyedStock, some: list[str]) -> list[bytes]:
    return sorted(payload(key, stock.ns.row_bytes) for key in some)


def test_a_chain_is_one_line_and_its_fork_a_folder(stock: KeyedStock) -> None:
    stock.put(A[:4])
    stock.put(A[4:6], A[3])
    stock.put(keys(2, 0, 1), A[1])
    tree, top = Tree(stock.store), NamespaceDir(stock.ns)
    line = folder(tree, top, 0)
    assert names(tree, top) == ["namespace.json", names(tree, top)[1]]
    assert [n for n in names(tree, line) if n.endswith(".kv")] == [f"{i:06d}.kv" for i in range(6)]
    assert "tokens" not in names(tree, line) and tree.lookup(line, b"tokens") is None
    fork = folder(tree, line, 2)
    assert names(tree, fork) == ["000002.kv"]
    assert sorted(blocks(tree, top)) == wanted(stock, [*A[:6], *keys(2, 0, 1)])


def test_what_has_no_beginning_stands_at_the_top(stock: KeyedStock) -> None:
    stock.put(A[5:7], A[4], first_block=5)
    stock.put(A[8:9], A[7])  # nobody knows its number
    tree, top = Tree(stock.store), NamespaceDir(stock.ns)
    assert names(tree, folder(tree, top, 5)) == ["000005.kv", "000006.kv"]
    assert names(tree, folder(tree, top, 0)) == ["000000.kv"]
    stock.put(A[:5])  # the beginning comes later, and takes in what goes on from it
    assert len(names(tree, top)) == 3
    assert sorted(blocks(tree, top)) == wanted(stock, [*A[:7], A[8]])


def test_an_expired_beginning_does_not_hide_what_follows(stock: KeyedStock) -> None:
    stock.put(A[:3], ttl_class="agent")
    stock.put(A[3:6], A[2], ttl_class="chatbot")
    tree, top = Tree(stock.store), NamespaceDir(stock.ns)
    assert len(names(tree, top)) == 2
    stock.clock.now += 4 * DAY
    rest = folder(tree, top, 3)
    assert names(tree, rest) == ["000003.kv", "000004.kv", "000005.kv"]
    assert sorted(blocks(tree, top)) == wanted(stock, A[3:6])


def test_numbers_that_contradict_each_other_lose_nothing(stock: KeyedStock) -> None:
    stock.put(A[:3])
    stock.put(A[3:5], A[2], first_block=0)
    stock.put(A[5:6], A[4], first_block=77)
    stock.put(keys(2, 0, 1), keys(2, 1, 2)[0])  # each says that the other is before it
    stock.put(keys(2, 1, 2), keys(2, 0, 1)[0])
    tree, top = Tree(stock.store), NamespaceDir(stock.ns)
    assert sorted(blocks(tree, top)) == wanted(stock, [*A[:6], *keys(2, 0, 2)])


def test_rm_and_touch(stock: KeyedStock) -> None:
    stock.put(A[4:8], A[3], first_block=4)
    tree, top = Tree(stock.store), NamespaceDir(stock.ns)
    changes = Changes(tree)
    line = folder(tree, top, 4)
    (before,) = [r.expires_ms for r in stock.store.index.all_runs(stock.ns.number)]
    stock.clock.now += DAY
    entry = tree.lookup(line, b"000005.kv")
    assert entry is not None
    changes.renew(entry.node, entry.stat.ino)
    (after,) = [r.expires_ms for r in stock.store.index.all_runs(stock.ns.number)]
    assert after == before + int(DAY * 1000)
    changes.unlink(line, b"000006.kv")
    assert stock.have(A) == [i in (4, 5) for i in range(10)]
