"""Extended attributes of the tree: what `getfattr -d` says of a block, so that it can be located.

All names begin with user.kvfs.; whatever else is asked for is not there, without a look-up:
`ls -l` asks for security and ACL attributes of every file. Reads the local index; only
user.kvfs.checksum reads the block's record in the store.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime

from kvfs.vfs.file import Place, read_trailer
from kvfs.vfs.node import BlockFile, Folder, NamespaceDir, Node, Root, Tokens
from kvfs.vfs.tree import Tree

PREFIX = b"user.kvfs."
CHECKSUM = b"user.kvfs.checksum"
TTL_CLASS = b"user.kvfs.ttl_class"

_BLOCK = ("namespace", "block", "hash", "parent", "ttl_class", "expires", "segment", "offset",
          "length", "checksum")  # fmt: skip
_FOLDER = ("namespace", "block", "hash", "parent", "ttl_class", "expires")


def names(node: Node) -> list[bytes]:
    """The names of all attributes a node has."""
    return [PREFIX + key.encode() for key in _keys(node)]


def _keys(node: Node) -> tuple[str, ...]:
    if isinstance(node, BlockFile):
        return _BLOCK
    if isinstance(node, Folder):
        return _FOLDER
    if isinstance(node, Root):
        return ("store", "uuid")
    return ("namespace",) if isinstance(node, NamespaceDir | Tokens) else ()


def value(tree: Tree, node: Node, name: bytes, ino: int | None = None) -> bytes | None:
    """An attribute's value, or None if the node has none of that name.

    ino: of a block, the number the caller knows it by; None: whichever is there. Raises
    OSError(ESTALE) if the node is gone; for the checksum also DamageError, BackendError.
    """
    key = name.removeprefix(PREFIX).decode("ascii", "replace")
    if not name.startswith(PREFIX) or key not in _keys(node):
        return None
    return os.fsencode(_value(tree, node, key, ino))


def _value(tree: Tree, node: Node, key: str, ino: int | None) -> str:
    if isinstance(node, Root):
        return tree.store.path if key == "store" else tree.store.uuid.hex()
    if key == "namespace":
        folder = node.folder if isinstance(node, BlockFile | Tokens) else node
        assert isinstance(folder, NamespaceDir | Folder)
        return folder.ns.name
    if isinstance(node, Folder):
        node, ino = BlockFile(node, node.block), None
    assert isinstance(node, BlockFile)
    place = tree.where.present(node) if ino is None else tree.block(node, ino)
    if key == "checksum":
        ns = node.folder.ns
        return f"{read_trailer(tree.store.backend, ns, place).checksum:016x}"
    if key == "length":
        return str(node.folder.ns.row_bytes)
    if key == "ttl_class":
        return tree.store.index.class_names().get(place.class_id, "")
    return _PLACE[key](place)


def time_text(ms: int) -> str:
    """A time in ms since 1970 as people and programs both read it: UTC, to the millisecond."""
    text = datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


_PLACE: dict[str, Callable[[Place], str]] = {
    "block": lambda p: str(p.number),
    "hash": lambda p: p.hash.hex(),
    "parent": lambda p: p.parent.hex(),
    "expires": lambda p: time_text(p.expires_ms),
    "segment": lambda p: p.segment.path,
    "offset": lambda p: str(p.offset),
}
