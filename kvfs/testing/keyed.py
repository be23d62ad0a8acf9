"""A small store that is keyed by an engine, whose content is known: as kvfs.testing.stock, by keys.

The payload of a block is a function of its key, so bytes of any other block are seen to be wrong.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import shake_128
from typing import Any

from kvfs.keys import Key
from kvfs.namespace import Namespace
from kvfs.put import PutResult
from kvfs.store import Store
from kvfs.testing.blocks import small_identity
from kvfs.testing.stock import Clock


def payload(key: Key, row_bytes: int) -> bytes:
    """The row_bytes bytes of the block with a key."""
    data = key.encode() if isinstance(key, str) else key
    return shake_128(data).digest(row_bytes)


def keys(chain: int, first: int, end: int) -> list[str]:
    """The keys of blocks first..end-1 of a chain told by a number, as an engine might have them."""
    return [f"{chain:032x}{block:032x}" for block in range(first, end)]


@dataclass
class KeyedStock:
    """An open store and one namespace of it that is keyed by its engine."""

    store: Store
    ns: Namespace
    clock: Clock
    opened: list[Store] = field(default_factory=list)

    @classmethod
    def make(cls, path: str | os.PathLike[str], **settings: Any) -> KeyedStock:
        """Makes a store with a small layout; settings: as for Store.init."""
        clock = Clock()
        given = {"extent": 1 << 16, "segment_bytes": 1 << 20, "durability": "none"}
        store = Store.init(path, clock=clock, **{**given, **settings})
        ns = store.create_namespace(small_identity(hash="external"))
        return cls(store, ns, clock, [store])

    def another(self, **options: Any) -> KeyedStock:
        """Opens the same store once more, beside this one: as another host with `index`."""
        store = Store.open(self.store.path, clock=self.clock, **options)
        self.opened.append(store)
        return KeyedStock(store, store.namespace(self.ns.nsid), self.clock, self.opened)

    def close(self) -> None:
        """Closes this store and all that were opened beside it."""
        for store in self.opened:
            store.close()

    def put(self, keys: Sequence[Key], parent: Key | None = None, **options: Any) -> PutResult:
        rows = [payload(key, self.ns.row_bytes) for key in keys]
        return self.store.put_keys(self.ns, keys, parent, rows, **options)

    def have(self, keys: Sequence[Key]) -> list[bool]:
        return self.store.have_keys(self.ns, keys)

    def good(self, keys: Sequence[Key]) -> int:
        """Leading blocks that are stored and delivered; fails if a byte of them is wrong."""
        got = self.store.fetch_keys(self.ns, keys)
        want = b"".join(payload(key, self.ns.row_bytes) for key in keys[: got.blocks])
        assert bytes(got.data) == want, "other bytes than were put"
        return got.blocks
