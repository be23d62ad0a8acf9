"""The state of one sequence as bytes: sliding windows at a block's end, bound to all tokens before.

Layout, integers little-endian:

  offset  size  field
  0       8     magic "KVFSHFS1", which is the version too
  8       16    namespace id: first 16 bytes of the fingerprint
  24      16    lineage: blake2b-128 of the root and all tokens up to the state's position
  40      8     position in tokens, a multiple of the block
  48      8     P
  56      8     xxh3-64 of bytes 0..55 and the payload
  64      P     payload: the pieces of the state (kvfs.connectors.hf_layout)

A state is used only for the tokens, model and layout it was taken with: everything is compared, and
what does not fit is a miss with a reason. No I/O, no state of its own.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import xxhash

from kvfs.chain import HASH_BYTES, PrefixHasher
from kvfs.namespace import Namespace

MAGIC = b"KVFSHFS1"
_HEAD = struct.Struct("<8s16s16sQQ")
_SUM = struct.Struct("<Q")
HEADER_BYTES = _HEAD.size + _SUM.size


@dataclass(frozen=True, slots=True)
class Opened:
    """A state that fits. tokens: its position; payload: its bytes, a view."""

    tokens: int
    payload: memoryview


def seal(ns: Namespace, hasher: PrefixHasher, tokens: int, payload: Any) -> bytes:
    """The state at a block's end as bytes. payload: a buffer."""
    view = memoryview(payload).cast("B")
    head = _HEAD.pack(MAGIC, ns.nsid, _lineage(hasher, tokens), tokens, len(view))
    return b"".join((head, _SUM.pack(_checksum(head, view)), view))


def unseal(ns: Namespace, hasher: PrefixHasher, data: Any, size: int) -> Opened | str:
    """The state, if it is of this namespace and of a prefix of these tokens; else why not.

    data: a buffer; size: bytes the payload must have. Nothing is raised for what is in it.
    """
    view = memoryview(data).cast("B")
    if len(view) < HEADER_BYTES:
        return "state too short"
    magic, nsid, lineage, tokens, length = _HEAD.unpack_from(view)
    if magic != MAGIC:
        return "state of an unknown format"
    payload = view[HEADER_BYTES:]
    (want,) = _SUM.unpack_from(view, _HEAD.size)
    if length != len(payload) or want != _checksum(view[: _HEAD.size], payload):
        return "state damaged"
    if nsid != ns.nsid or length != size:
        return "state of another model"
    block, rest = divmod(tokens, ns.block_tokens)
    if not block or rest or block > hasher.n_blocks or lineage != _lineage(hasher, tokens):
        return "state of other tokens"
    return Opened(tokens, payload)


def _lineage(hasher: PrefixHasher, tokens: int) -> bytes:
    block = tokens // (hasher.block_bytes // 4)
    return hasher.lineages(block)[-HASH_BYTES:]


def _checksum(head: Any, payload: memoryview) -> int:
    state = xxhash.xxh3_64(head)
    state.update(payload)
    return state.intdigest()
