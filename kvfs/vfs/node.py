"""The nodes of the tree: what each one is, its name and its inode number. Pure data, no I/O.

  Root                  <mnt>
  Text                  README, namespace.json: generated, never changing
  NamespaceDir          <namespace>
  Folder                000000-<hash>: a stretch of the chain, its main line as files
  BlockFile             000000.kv: the payload of one block
  Tokens                tokens: the token ids of a folder's main line

An inode number is a 64-bit function of what the node holds: for a block its chain hash *and* the
place of its record, since the same tokens stored a second time may have other payload bytes; for
`tokens` the hash of the last block, which stands for all tokens up to there. So a number never
comes back with other content, and what the kernel has cached under it stays right.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from kvfs.namespace import Namespace

ROOT_INO = 1
NAME_MAX = 255
_BLOCK = re.compile(rb"(\d{6,10})\.kv\Z")
_FOLDER = re.compile(rb"(\d{6,10})-([0-9a-f]{16}|[0-9a-f]{32})\Z")
SHORT_HASH = 8
"""Bytes of the hash in a folder's name; all 16 where two siblings share these."""


@dataclass(frozen=True, slots=True)
class Root:
    """The mount point."""


@dataclass(frozen=True, slots=True)
class NamespaceDir:
    """All chains of one namespace."""

    ns: Namespace


@dataclass(frozen=True, slots=True)
class Text:
    """A generated file; ns: whose it is, None for the root's."""

    name: bytes
    ns: Namespace | None


@dataclass(frozen=True, slots=True)
class Folder:
    """A node of the chain: the run with hash `head` and what continues it."""

    ns: Namespace
    head: bytes
    block: int
    """Number of its first block in the chain."""
    parent: Folder | None
    """The folder it forks off from; None: it stands at the top, see kvfs.vfs.beginning."""


@dataclass(frozen=True, slots=True)
class BlockFile:
    """A block of a folder's main line, by its number in the chain."""

    folder: Folder
    number: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """The token ids of a folder's main line."""

    folder: Folder


Directory = Root | NamespaceDir | Folder
File = Text | BlockFile | Tokens
Node = Directory | File


class Stat(NamedTuple):
    """What `stat` says of a node, without what the mount decides (owner, mode)."""

    ino: int
    directory: bool
    size: int
    written_ms: int
    used_ms: int
    """Last stored or renewed."""


class Entry(NamedTuple):
    """A name in a directory and what is behind it."""

    name: bytes
    node: Node
    stat: Stat


def block_name(number: int) -> bytes:
    return b"%06d.kv" % number


def parse_block(name: bytes) -> int | None:
    """The number in a block's file name, or None if it is not one."""
    match = _BLOCK.match(name)
    number = -1 if match is None else int(match[1])
    return number if number >= 0 and block_name(number) == name else None


def folder_name(block: int, head: bytes, *, whole: bool = False) -> bytes:
    """whole: with all of the hash, for a sibling whose short name is taken."""
    return b"%06d-%s" % (block, (head if whole else head[:SHORT_HASH]).hex().encode())


def parse_folder(name: bytes) -> tuple[int, bytes] | None:
    """(number of the first block, beginning of its hash) of a folder's name, or None."""
    match = _FOLDER.match(name)
    if match is None:
        return None
    number, part = int(match[1]), bytes.fromhex(match[2].decode())
    named = b"%06d-%s" % (number, match[2])
    return (number, part) if named == name else None


def _number(kind: bytes, *parts: bytes) -> int:
    ino: int = xxhash.xxh3_64_intdigest(b"\0".join((kind, *parts)))
    return ino if ino > ROOT_INO else ino | 1 << 63  # 0 is no inode, 1 the root


def block_ino(nsid: bytes, hash_: bytes, segment: bytes, slot: int) -> int:
    return _number(b"block", nsid, hash_, segment, slot.to_bytes(4, "little"))


def folder_ino(nsid: bytes, head: bytes) -> int:
    return _number(b"folder", nsid, head)


def tokens_ino(nsid: bytes, head: bytes, last: bytes) -> int:
    return _number(b"tokens", nsid, head, last)


def namespace_ino(nsid: bytes) -> int:
    return _number(b"namespace", nsid)


def gone_ino(nsid: bytes, head: bytes, name: bytes) -> int:
    """Of a block that was evicted a moment ago and is about to be removed by name."""
    return _number(b"gone", nsid, head, name)


def text_ino(name: bytes, nsid: bytes, content: bytes) -> int:
    return _number(b"text", name, nsid, content)


def directory_ino(node: Directory) -> int:
    """The number of a directory, which is its own whether it is there or not."""
    if isinstance(node, Root):
        return ROOT_INO
    if isinstance(node, NamespaceDir):
        return namespace_ino(node.ns.nsid)
    return folder_ino(node.ns.nsid, node.head)
