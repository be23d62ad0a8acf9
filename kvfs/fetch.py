"""FETCH, the part that reads and verifies: from segments into memory, in chain order.

Verify or miss: every record is checked against the request (tokens, hashes, namespace) and its own
checksums; the first that fails ends the prefix there, with a reason. Nothing here raises for what
it finds in storage. Bytes behind the good prefix in the caller's buffer are undefined.

Blocking. One Reader may be used from several threads.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Any

from kvfs.backend import Backend, ReadCut, read_into
from kvfs.backend.files import FileCache
from kvfs.errors import InputError
from kvfs.keys import Chain
from kvfs.namespace import Namespace
from kvfs.plan import Extent, Plan
from kvfs.record import Landing, RunBlocks, matches, sound

# Read so much at a time that the checksum finds it in the second-level cache; without checksums
# so much that the calls do not count.
PIECE_BYTES = 1 << 20
UNCHECKED_PIECE_BYTES = 16 << 20
# Token ids and trailers of so many blocks are compared in one go: 160 KB of them, which stay in the
# second-level cache between the steps of the comparison.
COMPARED_AT_ONCE = 256
# The storage is away or slow, not the bytes wrong: a miss now, and the index keeps its rows.
_PASSING = frozenset(
    {errno.ENOTCONN, errno.ETIMEDOUT, errno.ENODEV, errno.ENXIO, errno.EHOSTDOWN, errno.EAGAIN,
     errno.EHOSTUNREACH, errno.ECONNREFUSED, errno.ECONNABORTED, errno.ECONNRESET, errno.EINTR,
     errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EREMOTEIO}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The good prefix, and why it ends before what was wanted."""

    blocks: int
    wanted: int
    data: memoryview
    """The payloads of the good blocks, `row_bytes` each, in order."""
    reason: str | None = None
    """None: everything wanted is there."""
    lasting: bool = False
    """The stored block itself is bad or gone (not only out of reach): it should be forgotten."""
    bytes_read: int = 0

    @property
    def complete(self) -> bool:
        return self.blocks == self.wanted


@dataclass(frozen=True, slots=True)
class _Miss:
    """The prefix ends at `block`."""

    block: int
    reason: str
    lasting: bool


class Reader:
    """Reads blocks by plan through a backend, keeping some segments open."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._files = FileCache(backend)

    def fetch(
        self, ns: Namespace, plan: Plan, hasher: Chain, into: Any = None,
        *, blocks: int | None = None, payload_checksum: bool = True,
    ) -> FetchResult:  # fmt: skip
        """Reads the first `blocks` blocks of a plan (default: what may be hit) and verifies them.

        into: a writable buffer of at least blocks * row_bytes bytes; None: one is made.
        Raises InputError if the arguments do not fit together, nothing else.
        """
        wanted = plan.hit_blocks if blocks is None else blocks
        if not 0 <= wanted <= min(plan.stored_blocks, hasher.n_blocks):
            raise InputError(f"the plan has {plan.stored_blocks} blocks; asked for {wanted}")
        if plan.nsid != ns.nsid:
            raise InputError(f"the plan is of namespace {plan.namespace}, not {ns.name}")
        dense = _buffer(into, wanted * ns.row_bytes)
        rests = memoryview(bytearray(wanted * (ns.stride - ns.row_bytes)))
        at = Landing.split(ns.shape, dense, rests)
        landed, miss = self._land(plan, at, rests, wanted, payload_checksum)
        other = _mismatch(at, hasher, landed)
        if other is not None and (miss is None or other.block <= miss.block):
            miss = other
        read = landed * ns.stride
        if miss is None:
            return FetchResult(wanted, wanted, dense, None, False, read)
        good = dense[: miss.block * ns.row_bytes]
        return FetchResult(miss.block, wanted, good, miss.reason, miss.lasting, read)

    def _land(
        self, plan: Plan, at: Landing, rests: memoryview, wanted: int, payloads: bool
    ) -> tuple[int, _Miss | None]:
        """Reads records into their places and checks that they are sound, up to the first bad one.

        Returns how many whole records are in their places, and why it went no further.
        """
        for extent in plan.extents:
            if extent.block >= wanted:
                break
            landed, miss = self._land_extent(extent, at, rests, wanted, payloads)
            if miss is not None:
                return landed, miss
        return wanted, None

    def _land_extent(
        self, extent: Extent, at: Landing, rests: memoryview, wanted: int, payloads: bool
    ) -> tuple[int, _Miss | None]:
        """The same for one extent. Its file is taken once: for every piece it would cost as much
        as a tenth of the checksums."""
        size = PIECE_BYTES if payloads else UNCHECKED_PIECE_BYTES
        stride, first = at.shape.stride, extent.block
        try:
            with self._files.use(extent.segment) as file:
                for slot, first, count in _pieces(extent, wanted, size):
                    buffers = _buffers(at, rests, first, count)
                    n = read_into(self.backend, file, buffers, extent.geometry.offset(slot))
                    end, damage = _sound(at, first, n // stride, payloads)
                    if damage is not None:
                        return end, damage
                    if n < count * stride:
                        self._files.forget(extent.segment)
                        return end, _Miss(end, "short read", True)
        except OSError as e:
            whole = e.read // stride if isinstance(e, ReadCut) else 0
            end, damage = _sound(at, first, whole, payloads)
            return end, damage or _Miss(end, describe(e), lasting(e))
        return min(wanted, extent.block + extent.count), None

    def forget(self, path: str) -> None:
        """Closes a segment that is about to be removed, as soon as nobody reads it."""
        self._files.forget(path)

    def close_idle(self) -> None:
        """Closes segments that were not read for a while."""
        self._files.close_idle()

    def close(self) -> None:
        self._files.close()


def _buffers(at: Landing, rests: memoryview, first: int, count: int) -> list[memoryview]:
    """Where records first.. belong, byte for byte: each payload, then what follows it."""
    row, rest = at.shape.payload, at.meta_step
    out = []
    for i in range(first, first + count):
        out.append(at.payloads[i * row : (i + 1) * row])
        out.append(rests[i * rest : (i + 1) * rest])
    return out


def _sound(at: Landing, first: int, whole: int, payloads: bool) -> tuple[int, _Miss | None]:
    """(the end of so many whole records from `first` on, what is wrong with the first bad one)."""
    good, damage = sound(at, first, first + whole, payloads=payloads)
    return first + whole, None if damage is None else _Miss(good, damage, True)


def _mismatch(at: Landing, hasher: Chain, n: int) -> _Miss | None:
    """The first of n records that is not the one asked for.

    Many at once, and only here: a look at each piece as it comes costs a fifth of a warm read.
    """
    want = RunBlocks.of(hasher, 0, n)
    for first in range(0, n, COMPARED_AT_ONCE):
        part = want.part(first, min(n, first + COMPARED_AT_ONCE))
        good, reason = matches(at, part, first)
        if reason is not None:
            return _Miss(first + good, reason, True)
    return None


def lasting(e: OSError) -> bool:
    """Says whether an I/O error means that the bytes are bad or gone, not only out of reach."""
    return e.errno not in _PASSING


def describe(e: OSError) -> str:
    """A short reason for an I/O error, the same for the same errno: it names a counter."""
    name = errno.errorcode.get(e.errno or 0, "EIO")
    if e.errno in (errno.ENOENT, errno.ENOTDIR):
        return f"segment missing ({name})"
    return f"I/O error ({name})"


def _buffer(into: Any, size: int) -> memoryview:
    if into is None:
        import numpy as np

        into = np.empty(size, np.uint8)  # not zeroed: its pages are touched by the read
    view = memoryview(into).cast("B")
    if view.readonly or len(view) < size:
        raise InputError(f"`into` must be writable and hold {size} bytes; it holds {len(view)}")
    return view[:size]


def _pieces(extent: Extent, wanted: int, size: int) -> list[tuple[int, int, int]]:
    """(slot, block number, records) of contiguous stretches of at most `size` bytes, cut at the
    wanted block."""
    out = []
    slot, block = extent.slot, extent.block
    for _, n in extent.geometry.pieces(slot, min(extent.count, wanted - extent.block), size):
        out.append((slot, block, n))
        slot, block = slot + n, block + n
    return out
