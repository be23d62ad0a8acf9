"""What the tree of a store is: names, what they stand for, sizes and times.

Here and only here: the mount (kvfs.mount.operations) and `kvctl ls` translate. Nothing in this
module changes the store; kvfs.vfs.change does. Lookups, listings and stat read the local index
alone; opened files read the store. Thread-safe.

A node may be gone by the time it is used (evicted, expired): then OSError(ESTALE), at which the
kernel looks the name up again. A name that is not there is None. KvfsError for what is damaged.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator

from kvfs.errors import IndexFault
from kvfs.namespace import Namespace
from kvfs.store import Store
from kvfs.vfs import text
from kvfs.vfs.beginning import beginnings
from kvfs.vfs.file import (
    TOKEN_WIDTH,
    BlockContent,
    Content,
    Place,
    Shelf,
    TextContent,
    TokensContent,
)
from kvfs.vfs.line import Line, Piece, Stretch, children
from kvfs.vfs.listing import Blocks, Listing, Single
from kvfs.vfs.node import (
    ROOT_INO,
    SHORT_HASH,
    BlockFile,
    Directory,
    Entry,
    File,
    Folder,
    NamespaceDir,
    Node,
    Root,
    Stat,
    Text,
    Tokens,
    block_ino,
    folder_ino,
    folder_name,
    namespace_ino,
    parse_block,
    parse_folder,
    text_ino,
    tokens_ino,
)
from kvfs.vfs.where import Where, stale

log = logging.getLogger(__name__)

README = b"README"
NAMESPACE_JSON = b"namespace.json"
TOKENS = b"tokens"


class Tree:
    """The tree of one store."""

    root = Root()

    def __init__(self, store: Store) -> None:
        self.store = store
        self.where = Where(store)
        self._shelf = Shelf()
        self._began_ms = store.now_ms()
        self._lock = threading.Lock()
        self._namespaces: dict[bytes, Namespace] = {}
        self._nsids: frozenset[bytes] = frozenset()

    # names

    def lookup(self, directory: Directory, name: bytes) -> Entry | None:
        """The entry of that name, or None."""
        if isinstance(directory, Folder):
            return self._lookup_in_folder(directory, name)
        if isinstance(directory, NamespaceDir):
            if name == NAMESPACE_JSON:
                return self._text_entry(name, directory.ns)
            return self._lookup_folder(directory.ns, None, name)
        if name == README:
            return self._text_entry(name, None)
        ns = self.namespaces().get(name)
        return None if ns is None else self._namespace_entry(ns)

    def _lookup_in_folder(self, folder: Folder, name: bytes) -> Entry | None:
        if name == TOKENS and not folder.ns.keyed:
            line = self.where.line(folder, fresh=True)
            return None if line is None else self._tokens_entry(folder, line)
        number = parse_block(name)
        if number is None:
            return self._lookup_folder(folder.ns, folder, name)
        place = self.where.place(folder, number)
        if place is None:
            return None
        return Entry(name, BlockFile(folder, number), self._block_stat(folder.ns, place))

    def _lookup_folder(self, ns: Namespace, parent: Folder | None, name: bytes) -> Entry | None:
        named = parse_folder(name)
        if named is None:
            return None
        block, short = named[0], named[1][:SHORT_HASH]  # which name is taken, these alone say
        if parent is None:
            siblings = [p for p in self._beginnings(ns, short) if p.block == block]
        else:
            line = self.where.line(parent)
            before = None if line is None else line.hash_before(block)
            if line is None or before is None:
                return None
            siblings = self._children(ns, before, block, line.hash_before(block + 1), short)
        return next((e for e in self._folders(ns, parent, siblings) if e.name == name), None)

    def _beginnings(self, ns: Namespace, prefix: bytes = b"") -> list[Piece]:
        """The runs at the top of a namespace. prefix: only those whose hash begins so."""
        with self.store.index.env().read() as txn:
            return beginnings(txn, ns, self.store.now_ms(), prefix)

    def _children(
        self, ns: Namespace, before: bytes, block: int, onward: bytes | None, prefix: bytes
    ) -> list[Piece]:
        """The same of those that follow a block; onward: the hash that is the main line."""
        with self.store.index.env().read() as txn:
            found = children(txn, ns.number, before, block, self.store.now_ms(), prefix)
        return [p for p in found if p.head != onward]

    def _folders(self, ns: Namespace, parent: Folder | None, forks: list[Piece]) -> Iterator[Entry]:
        """Entries of sibling forks, which come sorted by hash."""
        taken = b""
        for piece in forks:
            short = piece.head[:SHORT_HASH]
            name = folder_name(piece.block, piece.head, whole=short == taken)
            taken = short
            node = Folder(ns, piece.head, piece.block, parent)
            yield Entry(name, node, self._folder_stat(ns, piece))

    def namespaces(self) -> dict[bytes, Namespace]:
        """By name, in order of names."""
        hidden = self.store.index.hidden_namespaces()
        known = self.store.index.namespaces().items()
        nsids = frozenset(nsid for nsid, (number, _) in known if number not in hidden)
        with self._lock:
            if nsids != self._nsids:
                listed = self.store.listed_namespaces()
                self._namespaces = {os.fsencode(ns.name): ns for ns in listed}
                self._nsids = nsids
            return self._namespaces

    def is_quick(self, directory: Directory) -> bool:
        """A lookup in this directory reads a few rows of the index only, not a whole line."""
        return not isinstance(directory, Folder) or self.where.lines.is_cached(
            directory.ns.number, directory.head
        )

    # listings

    def listing(self, directory: Directory) -> Listing:
        """What the directory holds now."""
        if isinstance(directory, Folder):
            return self._folder_listing(directory)
        if isinstance(directory, NamespaceDir):
            ns = directory.ns
            heads = self._beginnings(ns)
            text_entry = self._text_entry(NAMESPACE_JSON, ns)
            return Listing([Single(text_entry), *map(Single, self._folders(ns, None, heads))])
        spaces = map(self._namespace_entry, self.namespaces().values())
        return Listing([Single(self._text_entry(README, None)), *map(Single, spaces)])

    def _folder_listing(self, folder: Folder) -> Listing:
        line, forks = self.where.with_forks(folder)
        parts: list[Blocks | Single] = []
        ahead = iter(forks)
        number, pieces = next(ahead, (line.end + 1, []))
        for stretch in line.stretches:
            at, first, count = 0, stretch.piece.block, stretch.piece.blocks
            while number <= first + count:
                parts += self._blocks(folder, stretch, at, number - first)
                parts += map(Single, self._folders(folder.ns, folder, pieces))
                at = number - first
                number, pieces = next(ahead, (line.end + 1, []))
            parts += self._blocks(folder, stretch, at, count)
        if not folder.ns.keyed:  # else nobody knows them
            parts.append(Single(self._tokens_entry(folder, line)))
        return Listing(parts)

    def _blocks(self, folder: Folder, stretch: Stretch, at: int, end: int) -> list[Blocks]:
        if at >= end:
            return []
        try:
            segment = self.store.index.segment(stretch.piece.seg).segment
        except IndexFault as e:  # one bad row does not hide the others
            log.warning("%s", e)
            return []
        used = self.where.used_ms(stretch.piece)
        return [Blocks(folder, stretch, at, end - at, segment, used)]

    # stat

    def stat(self, node: Node) -> Stat:
        """Raises OSError(ESTALE) if the node is gone, IndexFault."""
        if isinstance(node, Root):
            return Stat(ROOT_INO, True, 0, self._began_ms, self._began_ms)
        if isinstance(node, NamespaceDir):
            return self._namespace_entry(node.ns).stat
        if isinstance(node, Text):
            return self._text_entry(node.name, node.ns).stat
        if isinstance(node, Folder):
            return self._folder_stat(node.ns, self.where.piece(node))
        if isinstance(node, BlockFile):
            return self._block_stat(node.folder.ns, self.where.present(node))
        return self._tokens_entry(node.folder, self._line(node.folder)).stat

    def _line(self, folder: Folder) -> Line:
        line = self.where.line(folder, fresh=True)
        if line is None:
            raise stale()
        return line

    def _text_entry(self, name: bytes, ns: Namespace | None) -> Entry:
        data = self._text(ns)
        ino = text_ino(name, b"" if ns is None else ns.nsid, data)
        stat = Stat(ino, False, len(data), self._began_ms, self._began_ms)
        return Entry(name, Text(name, ns), stat)

    def _text(self, ns: Namespace | None) -> bytes:
        if ns is None:
            uuid = self.store.uuid.hex()
            return os.fsencode(text.README.format(store=self.store.path, uuid=uuid))
        return (json.dumps(ns.identity.redacted(), indent=1) + "\n").encode()

    def _namespace_entry(self, ns: Namespace) -> Entry:
        stat = Stat(namespace_ino(ns.nsid), True, 0, self._began_ms, self._began_ms)
        return Entry(os.fsencode(ns.name), NamespaceDir(ns), stat)

    def _folder_stat(self, ns: Namespace, piece: Piece) -> Stat:
        ino = folder_ino(ns.nsid, piece.head)
        return Stat(ino, True, 0, piece.written_ms, self.where.used_ms(piece))

    def _block_stat(self, ns: Namespace, place: Place) -> Stat:
        ino = block_ino(ns.nsid, place.hash, place.segment.segment, place.slot)
        return Stat(ino, False, ns.row_bytes, place.written_ms, self.where.used_ms(place))

    def _tokens_entry(self, folder: Folder, line: Line) -> Entry:
        size = (line.end - line.first) * folder.ns.block_tokens * TOKEN_WIDTH
        last = line.stretches[-1].piece
        ino = tokens_ino(folder.ns.nsid, folder.head, line.last_hash)
        stat = Stat(ino, False, size, last.written_ms, self.where.used_ms(last))
        return Entry(TOKENS, Tokens(folder), stat)

    # contents

    def open(self, node: File, ino: int) -> Content:
        """Opens a file for reading. ino: the number the caller knows it by.

        Raises OSError(ESTALE) if the node is gone or holds something else by now.
        """
        if isinstance(node, Text):
            return TextContent(self._text(node.ns))
        ns = node.folder.ns
        if isinstance(node, Tokens):
            line = self._line(node.folder)
            if tokens_ino(ns.nsid, node.folder.head, line.last_hash) != ino:
                raise stale()
            return TokensContent(
                self.store.backend, ns, line.end - line.first,
                lambda first, end: self.where.places(line, line.first + first, line.first + end),
            )  # fmt: skip
        return BlockContent(self.store.backend, ns, self.block(node, ino), self._shelf)

    def block(self, node: BlockFile, ino: int) -> Place:
        """The place of the block that has this inode number.

        Raises OSError(ESTALE) if there is another one by now where the node says.
        """
        place = self.where.present(node)
        if block_ino(node.folder.ns.nsid, place.hash, place.segment.segment, place.slot) != ino:
            raise stale()
        return place
