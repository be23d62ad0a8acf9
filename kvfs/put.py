"""PUT, the part that decides: what of a prompt is new, and in which runs it is stored.

Blocks that are stored already are not written again; their lease is renewed instead, so that a
caller who was told "stored" has them for the class's whole time. Nor are those that another put of
this process is writing just now (kvfs.under_way). Nothing here raises for what the storage does:
the result says what was stored and why not more.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from kvfs.catalog import TtlClass
from kvfs.chain import HASH_BYTES
from kvfs.chain_entries import KeepEntry
from kvfs.errors import BusyError, IndexFault, InputError, KvfsError
from kvfs.frames import Entry, RunEntry, shortened
from kvfs.index import Index
from kvfs.index.lookup import Match
from kvfs.index.told import latest
from kvfs.keys import Chain
from kvfs.namespace import Namespace
from kvfs.record import RunBlocks
from kvfs.removal import few, heard_ms
from kvfs.segment_writer import Written
from kvfs.under_way import WAIT_SECONDS
from kvfs.writer import Writer, run_entry

# A renewal that moves the expiry by less than this share of the time to live is not worth it.
RENEW_SHARE = 8
_TRIES = 3


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of a put.

    blocks: whole blocks of the prompt; stored: newly written ones; existing: ones that were there;
    bytes: payload bytes written; remainder_tokens: tokens behind the last whole block, never
    stored; durable: the new blocks are on stable storage; error: why not all of them are stored.
    """

    blocks: int
    stored: int
    existing: int
    bytes: int
    remainder_tokens: int
    durable: bool
    error: KvfsError | None = None

    @property
    def complete(self) -> bool:
        """Every whole block of the prompt is stored."""
        return self.stored + self.existing >= self.blocks


class Putter:
    """Puts prompts through one writer."""

    def __init__(self, index: Index, writer: Writer, class_seconds: dict[int, int]) -> None:
        """class_seconds: class number of the index -> seconds, to compare classes."""
        self.index = index
        self.writer = writer
        self.class_seconds = class_seconds

    def put(
        self, ns: Namespace, hasher: Chain, payloads: Sequence[memoryview],
        first_block: int, ttl: TtlClass,
    ) -> PutResult:  # fmt: skip
        """Stores what is new of blocks first_block.. of the prompt.

        payloads: one view of row_bytes a block, for blocks first_block.. up to the last whole one.
        """
        try:
            with self.writer.under_way.put():
                return self._put(ns, hasher, payloads, first_block, ttl)
        except BusyError as e:
            return self._result(ns, hasher, 0, 0, e)

    def _result(
        self, ns: Namespace, hasher: Chain, stored: int, existing: int, error: KvfsError | None
    ) -> PutResult:
        n = hasher.n_blocks
        return PutResult(
            n, stored, existing, stored * ns.row_bytes, hasher.n_tokens - n * ns.block_tokens,
            self.writer.durable, error,
        )  # fmt: skip

    def _put(
        self, ns: Namespace, hasher: Chain, payloads: Sequence[memoryview],
        first_block: int, ttl: TtlClass,
    ) -> PutResult:  # fmt: skip
        stored = 0
        error: KvfsError | None = None
        existing: int | None = None
        for _ in range(_TRIES):
            try:
                with self._turn(ns, hasher) as (found, now):
                    if existing is None:
                        existing = sum(m.shared for m in found)
                    renewals = self._renewals(ns, hasher, found, ttl, now)
                    new, error = self._store(
                        ns, hasher, payloads, first_block, ttl, found, renewals, now
                    )
            except IndexFault as e:
                error = e
                break
            stored += new
            # A collector may have dropped what we were about to renew: then look again.
            if error is not None or not renewals:
                break
        existing = min(existing or 0, hasher.n_blocks - stored)
        return self._result(ns, hasher, stored, existing, error)

    @contextmanager
    def _turn(self, ns: Namespace, hasher: Chain) -> Iterator[tuple[list[Match], int]]:
        """(the runs that are stored, as of when), once nobody in this process is storing the first
        of those that are missing; nobody else begins to within the block."""
        under_way, key = self.writer.under_way, None
        until = time.monotonic() + WAIT_SECONDS
        while True:
            turn, now = under_way.turn, self.writer.now_ms()
            found = self.index.stored(ns.number, hasher, now).runs
            gap = next(iter(_missing(found, hasher.n_blocks)), None)
            if gap is None:
                break
            key = ns.nsid, hasher.digest(gap[0] + 1)
            if under_way.claim(key, turn, until):
                break
        try:
            yield found, now
        finally:
            if gap is not None and key is not None:
                under_way.release(key)

    def _store(
        self, ns: Namespace, hasher: Chain, payloads: Sequence[memoryview],
        first_block: int, ttl: TtlClass, found: list[Match], renewals: list[Entry], now: int,
    ) -> tuple[int, KvfsError | None]:  # fmt: skip
        missing = _missing(found, hasher.n_blocks)
        if not missing and not renewals:
            return 0, None
        # What was removed, here or by a host whose clock is ahead, is stored anew, and stays.
        # That lifts its time and not its expiry: it lives by the clock of this host.
        expires = now + ttl.seconds * 1000
        now = max(now, self.index.query(lambda a: latest(a, ns.number)) + 1)
        runs: list[tuple[Written, RunEntry]] = []
        error: KvfsError | None = None
        heads = bytearray(b"" if hasher.keyed else _heads(hasher, found))
        for at, end in missing:
            if at < first_block:
                error = InputError(
                    f"blocks {at} to {first_block - 1} are not stored and were not given; "
                    "put from the first missing block on"
                )
                break
            while at < end and error is None:
                run = RunBlocks.of(hasher, at, end)
                given = list(payloads[at - first_block : end - first_block])
                try:
                    written = self.writer.write_run(ns, run, given, ttl.name, ttl.seconds, now)
                except KvfsError as e:
                    error = e
                    break
                runs.append((written, run_entry(ns, written, run, bytes(heads), now, expires)))
                heads += b"" if hasher.keyed else run.hashes[:HASH_BYTES]
                at, error = at + written.blocks, written.error
            if error is not None:
                break
        stored = sum(written.blocks for written, _ in runs)
        if not runs and not renewals:
            return 0, error
        counters = {
            "put_blocks": stored, "put_bytes": stored * ns.row_bytes,
            "put_existing": sum(m.shared for m in found),
        }  # fmt: skip
        try:
            self.writer.publish(runs, renewals, counters)
        except KvfsError as e:
            return 0, e
        return stored, error

    def _renewals(
        self, ns: Namespace, hasher: Chain, found: list[Match], ttl: TtlClass, now: int
    ) -> list[Entry]:
        """Renewals of the stored part; a shared block takes the longer class."""
        expires, margin = now + ttl.seconds * 1000, ttl.seconds * 1000 // RENEW_SHARE
        due = [(i, m) for i, m in enumerate(found) if expires - m.expires_ms > margin]
        if not due:
            return []
        when, paths = heard_ms(self.index, self.writer.now_ms()), _paths(hasher, found)
        out: list[Entry] = []
        for i, match in due:
            longer = ttl.seconds > self.class_seconds.get(match.class_id, 0)
            first, end = match.block, match.block + match.shared
            entry = KeepEntry(
                ns.nsid, expires, when, first, ttl.name if longer else "", False, paths[i],
                hasher.hashes(end, first=first),
            )  # fmt: skip
            out.append(entry)
        return out


def _missing(found: Sequence[Match], n: int) -> list[tuple[int, int]]:
    """The stretches (first, end) of n blocks that are not stored, in order."""
    out, at = [], 0
    for match in found:
        if match.block > at:
            out.append((at, match.block))
        at = match.block + match.shared
    return [*out, (at, n)] if at < n else out


def _heads(hasher: Chain, runs: Sequence[Match]) -> bytes:
    """First hashes of the runs that lead to a new one."""
    return shortened(b"".join(hasher.digest(m.block + 1) for m in runs))


def _paths(hasher: Chain, runs: Sequence[Match]) -> list[bytes]:
    """For each of consecutive runs a few of the first hashes of those before it."""
    if hasher.keyed:
        return [b""] * len(runs)
    heads = (hasher.digest(m.block + 1) for m in runs[:-1])
    return list(accumulate(heads, lambda path, head: few(path + head), initial=b""))


def as_payloads(blocks: Any, count: int, row_bytes: int) -> list[memoryview]:
    """One view of row_bytes a block, without a copy.

    blocks: one contiguous buffer of at least count * row_bytes bytes, or a sequence of at least
    `count` buffers of row_bytes each; what is beyond is left out. Raises InputError.
    """
    if isinstance(blocks, list | tuple):
        if len(blocks) < count:
            raise InputError(f"{count} blocks are to be stored; {len(blocks)} buffers were given")
        views = [_bytes_view(b) for b in blocks[:count]]
        for i, view in enumerate(views):
            if len(view) != row_bytes:
                raise InputError(
                    f"block {i} has {len(view)} bytes; the layout's row is {row_bytes}"
                )
        return views
    view = _bytes_view(blocks)
    if len(view) < count * row_bytes:
        raise InputError(
            f"{count} blocks of {row_bytes} bytes are {count * row_bytes}; got {len(view)} bytes"
        )
    return [view[i * row_bytes : (i + 1) * row_bytes] for i in range(count)]


def _bytes_view(buffer: Any) -> memoryview:
    detach = getattr(buffer, "detach", None)
    if detach is not None:  # a torch tensor, of any dtype
        # numpy has no bfloat16 or float8: go through bytes. Whoever has a tensor has torch loaded.
        buffer = detach().cpu().contiguous().view(sys.modules["torch"].uint8).numpy()
    try:
        return memoryview(buffer).cast("B")
    except (TypeError, ValueError) as e:
        raise InputError(f"a block is a contiguous buffer of bytes: {e}") from None
