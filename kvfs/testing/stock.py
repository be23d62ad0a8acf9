"""A small store whose content is known, for tests that look at what becomes of it.

    stock = Stock.make(path)
    stock.put(tokens(1, 40))
    stock.clock.now += 86400
    assert stock.good(tokens(1, 40)) == 10      # blocks that check finds and fetch proves

Times are told by a clock that only the test moves. Nothing here is for stores that anybody needs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from kvfs.backend.usrbio_layout import FILE_SYSTEM
from kvfs.chain import PrefixHasher
from kvfs.fetch import FetchResult
from kvfs.filesystems import filesystem_type
from kvfs.index.place import default_root
from kvfs.index.schema import Run
from kvfs.namespace import Namespace
from kvfs.put import PutResult
from kvfs.store import Store
from kvfs.testing.blocks import first_wrong, payloads, small_identity
from kvfs.testing.threefs.host import other_mount

START = 1_800_000_000.0  # some time on a day, in seconds since 1970


class Clock:
    """Seconds since 1970, moved by hand."""

    def __init__(self, now: float = START) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def tokens(seed: int, n: int, after: list[int] | None = None) -> list[int]:
    """A prompt of n tokens that differs from other seeds' in its first block; or n more tokens
    behind another prompt."""
    return [*(after or []), *((seed * 1_000_003 + i * 7919) % 100_000 for i in range(n))]


@dataclass
class Stock:
    """An open store, one namespace of it, and the prompts that were put."""

    store: Store
    ns: Namespace
    clock: Clock
    prompts: list[list[int]] = field(default_factory=list)
    opened: list[Store] = field(default_factory=list)
    """All stores opened through this one, for `close`."""

    @classmethod
    def make(
        cls, path: str | os.PathLike[str], *, clock: Clock | None = None,
        identity: dict[str, Any] | None = None, **settings: Any,
    ) -> Stock:  # fmt: skip
        """Makes a store with a small layout, on 3FS of its chunks; settings: as for Store.init."""
        clock = clock or Clock()
        extent = None if filesystem_type(os.fspath(path)) == FILE_SYSTEM else 1 << 16
        given = {"extent": extent, "segment_bytes": 1 << 20, "durability": "none"}
        store = Store.init(path, clock=clock, **{**given, **settings})
        ns = store.create_namespace(small_identity(**(identity or {})))
        return cls(store, ns, clock, opened=[store])

    def again(self, **options: Any) -> Stock:
        """Closes the store and opens it as a new process would, with a new writer."""
        self.store.close()
        return self.another(**options)

    def elsewhere(self, name: str = "elsewhere", **options: Any) -> Stock:
        """Opens the same store as the host of a name does: with an index of its own."""
        return self.another(index=f"{default_root()}.{name}", **options)

    def another(self, **options: Any) -> Stock:
        """Opens the same store once more, beside this one; with an index that is not this host's,
        by the other mount of a pretended 3FS, on which no index may lie: it goes beside ours."""
        index, path = options.get("index"), self.store.path
        if index is not None:
            path = other_mount(path)
            if filesystem_type(index) == FILE_SYSTEM:
                options["index"] = f"{default_root()}.{os.path.basename(index)}"
        store = Store.open(path, clock=self.clock, **options)
        self.opened.append(store)
        ns = store.namespace(self.ns.nsid)
        return Stock(store, ns, self.clock, list(self.prompts), self.opened)

    def close(self) -> None:
        """Closes this store and all that were opened beside or after it."""
        for store in self.opened:
            store.close()

    def put(self, prompt: list[int], *, ttl_class: str | None = None) -> PutResult:
        hasher = self.ns.hasher(prompt)
        if prompt not in self.prompts:
            self.prompts.append(prompt)
        data = payloads(hasher, self.ns.row_bytes)
        return self.store.put(self.ns, hasher, data, ttl_class=ttl_class)

    def stored(self, prompt: list[int]) -> int:
        """Blocks of a prompt that check finds."""
        return self.store.check(self.ns, prompt).stored_blocks

    def sound(self, prompt: list[int]) -> int:
        """Blocks that check finds and that can be read; fails if a byte of them is wrong.

        Only looks: it neither renews what it reads nor forgets what is bad, as a fetch does.
        """
        hasher = self.ns.hasher(prompt)
        plan = self.store.check(self.ns, hasher)
        got = self.store.reader().fetch(self.ns, plan, hasher, blocks=plan.stored_blocks)
        return self._proven(got, hasher)

    def good(self, prompt: list[int]) -> int:
        """Blocks that check finds and fetch delivers; fails if a byte of them is wrong."""
        return self.fetch(prompt)[0]

    def fetch(self, prompt: list[int]) -> tuple[int, str | None]:
        """As `good`, with the reason why the prefix ends."""
        hasher = self.ns.hasher(prompt)
        plan = self.store.check(self.ns, hasher)
        got = self.store.fetch(self.ns, plan, hasher, blocks=plan.stored_blocks)
        return self._proven(got, hasher), got.reason

    def _proven(self, got: FetchResult, hasher: PrefixHasher) -> int:
        wrong = first_wrong(got.data, hasher, self.ns.row_bytes)
        assert wrong is None, f"block {wrong} is not what was put"
        return got.blocks

    def lookups(self) -> list[int]:
        """Blocks found of every prompt that was ever put."""
        return [self.stored(prompt) for prompt in self.prompts]

    def runs(self) -> set[tuple[Any, ...]]:
        """Everything the index says of visible runs, free of its own numbers."""
        return {self._told(run) for run in self.store.index.all_runs(self.ns.number)}

    def _told(self, run: Run) -> tuple[Any, ...]:
        index = self.store.index
        return (
            run.head, index.segment(run.seg).segment, run.slot, run.count, run.block,
            run.written_ms, run.expires_ms, index.class_names()[run.class_id], run.parent,
            run.hashes,
        )  # fmt: skip

    def paths(self) -> list[str]:
        """Full paths of the segments the index knows."""
        return [self.full(s.path) for s in self.store.index.segments()]

    def full(self, path: str) -> str:
        return os.path.join(self.store.path, path)


def flip(path: str, offset: int, bit: int = 0) -> None:
    """Turns over one bit of a file."""
    with open(path, "r+b", buffering=0) as f:
        f.seek(offset)
        (byte,) = f.read(1)
        f.seek(offset)
        f.write(bytes([byte ^ 1 << bit]))


def overwrite(path: str, offset: int, data: bytes) -> None:
    """Puts bytes over those of a file."""
    with open(path, "r+b", buffering=0) as f:
        f.seek(offset)
        f.write(data)
