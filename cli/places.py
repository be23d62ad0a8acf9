"""How a command names a node or a block: by hash, by the beginning of one, or by its tree path.

What the tree is, kvfs.vfs says; here paths are walked down it, as the kernel does for the mount.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvfs.errors import InputError

if TYPE_CHECKING:
    from kvfs.index.schema import Run
    from kvfs.namespace import Namespace
    from kvfs.store import Store
    from kvfs.vfs import Entry, Tree
    from kvfs.vfs.node import BlockFile, Folder

_HEX = frozenset("0123456789abcdef")
MIN_DIGITS = 4


def walk(tree: Tree, path: str, ns: Namespace | None = None) -> Entry | None:
    """The entry at a path of the tree, or None. The root itself for "".

    ns: where paths begin that do not begin with the name of a namespace.
    """
    from kvfs.vfs import Entry
    from kvfs.vfs.node import BlockFile, NamespaceDir, Text, Tokens

    names = [os.fsencode(part) for part in path.split("/") if part not in ("", ".")]
    entry = Entry(b"", tree.root, tree.stat(tree.root))
    if ns is not None and names and tree.lookup(tree.root, names[0]) is None:
        entry = Entry(ns.name.encode(), NamespaceDir(ns), tree.stat(NamespaceDir(ns)))
    for name in names:
        if isinstance(entry.node, BlockFile | Text | Tokens):
            return None
        found = tree.lookup(entry.node, name)
        if found is None:
            return None
        entry = found
    return entry


def find(store: Store, ns: Namespace, name: str) -> tuple[Run, int]:
    """The run that holds a block and the block's position in it. Raises InputError.

    name: 4 or more hex digits of the block's hash, or the path of a node or a block in the tree.
    """
    digits = name.rpartition("/")[2].rpartition("-")[2].lower()
    if "/" in name or name.endswith(".kv") or "-" in name:
        found = _by_path(store, ns, name)
        if found is not None:
            return found
        if "/" in name or not _is_hash(digits):
            raise InputError(f"{name}: no such node or block in {ns.name}")
    if not _is_hash(digits):
        raise InputError(f"{name}: name a block by 4 to 32 hex digits of its hash, or by its path")
    return _by_hash(store, ns, digits)


def _is_hash(text: str) -> bool:
    return MIN_DIGITS <= len(text) <= 32 and _HEX.issuperset(text)


def _by_path(store: Store, ns: Namespace, path: str) -> tuple[Run, int] | None:
    from kvfs.vfs import Tree
    from kvfs.vfs.node import BlockFile, Folder

    tree = Tree(store)
    entry = walk(tree, path, ns)
    if entry is None or not isinstance(entry.node, BlockFile | Folder):
        return None
    return locate(store, tree, entry.node)


def locate(store: Store, tree: Tree, node: BlockFile | Folder) -> tuple[Run, int] | None:
    """The run and the position in it of a node's first block, or of a block."""
    from kvfs.vfs.node import Folder

    if isinstance(node, Folder):
        run, at = store.index.run(node.ns.number, node.head), 0
    else:
        place = tree.where.present(node)
        run, at = store.index.run(node.folder.ns.number, place.head), place.at
    return None if run is None else (run, at)


def _by_hash(store: Store, ns: Namespace, digits: str) -> tuple[Run, int]:
    """By the hash of a run's first block, else by that of any: the latter looks at every run."""
    whole = bytes.fromhex(digits[: len(digits) // 2 * 2])
    runs = store.index.runs_with_prefix(ns.number, whole)
    found = [(run, 0) for run in runs if run.head.hex().startswith(digits)]
    if not found:
        found = [
            (run, i)
            for run in store.index.all_runs(ns.number)
            for i in range(1, run.count)
            if run.hash(i).startswith(whole) and run.hash(i).hex().startswith(digits)
        ]
    if len(found) != 1:
        what = "no block" if not found else f"{len(found)} blocks"
        raise InputError(f"{digits}: {what} in {ns.name} with a hash that begins so")
    return found[0]
