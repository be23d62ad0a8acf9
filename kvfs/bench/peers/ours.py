"""kvfs and the limits of the hardware, as cases that take turns with a peer's.

Everything here does its work on the same payload and into the same memory as the peer. The limits
know nothing of blocks: one write, one read, one copy of as many bytes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvfs.bench.fetch import read
from kvfs.bench.peers.work import Tokens, Work, prompts, sizes
from kvfs.bench.place import drop_cache, new_store, scratch, segments
from kvfs.bench.put import Plain, write
from kvfs.bench.synthetic import fill, plant
from kvfs.bench.timing import Progress, timed
from kvfs.chain import PrefixHasher
from kvfs.gc.collector import Collector
from kvfs.namespace import Namespace
from kvfs.plan import Plan
from kvfs.store import Store

_AHEAD = 30 * 86400.0
"""So far beyond the time to live that everything has expired."""


class Matching:
    """A store of many blocks that holds the prompts, each in several runs. Index only."""

    def __init__(self, store: Store, ns: Namespace) -> None:
        self._store = store
        self._ns = ns

    @classmethod
    @contextlib.contextmanager
    def open(cls, directory: str, blocks: int, progress: Progress) -> Iterator[Matching]:
        """blocks: how many the index holds beside the prompts'."""
        with new_store(directory, directory) as (store, ns):
            fill(store, ns, blocks, progress)
            for size in sizes():
                for prompt in prompts(size):
                    plant(store, ns, prompt, size.runs)
            yield cls(store, ns)

    def match(self, tokens: Any) -> int:
        """Stored blocks of a prompt: the whole of `check`, from token ids on."""
        return self._store.check(self._ns, tokens).stored_tokens // self._ns.block_tokens

    def keys(self, tokens: Any) -> PrefixHasher:
        """A request's hasher that has hashed all of its blocks."""
        hasher = self._ns.hasher(tokens)
        hasher.hashes()
        return hasher

    def metadata_bytes(self) -> float:
        """Bytes of the index for each of its blocks."""
        index = self._store.index
        return float(index.env().info()["used_bytes"]) / index.counters()["blocks"]


class Storing:
    """A store that puts and fetches the payload."""

    def __init__(self, store: Store, ns: Namespace, work: Work) -> None:
        self._store = store
        self._ns = ns
        self._work = work
        self._payload, self._into = work.payload[: work.row_total], work.into[: work.row_total]
        self._first: Tokens | None = None
        self.stored = 0

    @classmethod
    @contextlib.contextmanager
    def open(
        cls, directory: str, work: Work, durability: str, **settings: Any
    ) -> Iterator[Storing]:
        """settings: as for Store.init."""
        with new_store(directory, directory, durability=durability, **settings) as (store, ns):
            storing = cls(store, ns, work)
            storing.put()  # makes directories and namespace rows; what is fetched
            yield storing

    def put(self) -> float:
        """Stores the payload under a new prompt; its seconds. It is settled afterwards."""
        tokens, results = self._work.next_prompt(), []
        seconds = timed(lambda: results.append(self._store.put(self._ns, tokens, self._payload)))
        if results[0].error is not None:
            raise results[0].error
        if self._first is None:
            self._first = tokens
        self.stored += results[0].stored
        self.drop()
        return seconds

    def drop(self) -> None:
        for path in segments(self._store):
            drop_cache(path)

    def fetch(self, *, verified: bool) -> float:
        """As a request does: its hasher has been through `check`, which is not in the time."""
        hasher, plan = self._asked()
        start = time.perf_counter()
        got = self._store.fetch(
            self._ns, plan, hasher, self._into, blocks=self._work.blocks, payload_checksum=verified
        )
        seconds = time.perf_counter() - start
        if got.reason is not None:
            raise AssertionError(f"a fetch of kvfs ended early: {got.reason}")
        return seconds

    def finish(self) -> str:
        """Closes the store; returns its path."""
        self._store.close()
        return self._store.path

    def _asked(self) -> tuple[PrefixHasher, Plan]:
        hasher = self._ns.hasher(self._first)
        return hasher, self._store.check(self._ns, hasher)


def removal(directory: str, work: Work, puts: int) -> tuple[int, float]:
    """(blocks, seconds): what so many puts stored has expired, and the collector takes it away.

    By another handle, as `kvctl gc` is another process; opening it is not in the time.
    """
    with Storing.open(directory, work, "none", grace_seconds=0.0) as storing:
        for _ in range(puts - 1):
            storing.put()
        path = storing.finish()
        with scratch(directory) as index:
            later = time.time() + _AHEAD
            with Store.open(path, index=str(index), clock=lambda: later) as store:
                collector = Collector(store, force=True, sleep=lambda seconds: None)
                results = []
                seconds = timed(lambda: results.append(collector.run(wait=True)))
                if segments(store):
                    raise AssertionError("expired segments are left")
        return storing.stored, seconds


class Limits:
    """One plain write, read and copy of the payload."""

    def __init__(self, place: Path, work: Work) -> None:
        self._work = work
        self._plain = Plain(place / "limit")
        self._plain.prepare(work.payload)
        self._file = place / "limit.read"
        write(str(self._file), work.payload, os.O_CREAT)

    def copy(self) -> float:
        def once() -> None:
            self._work.into[:] = self._work.payload

        return timed(once)

    def write(self) -> float:
        """To a new file, not synced."""
        return self._plain.new()

    def overwrite(self) -> float:
        """Over a file that is there, synced."""
        return self._plain.over()

    def read(self, *, cold: bool) -> float:
        if cold:
            drop_cache(self._file)
        else:
            read(self._file, self._work.into)
        return timed(lambda: read(self._file, self._work.into))
