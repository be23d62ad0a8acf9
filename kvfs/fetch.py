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
from kvfs.chain import PrefixHasher
from kvfs.errors import InputError
from kvfs.namespace import Namespace
from kvfs.plan import Extent, Plan
from kvfs.record import Landing, RunBlocks, verify

# Read so much at a time that the checksum finds it in the second-level cache.
PIECE_BYTES = 1 << 20
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


class _Miss(Exception):
    """The prefix ends at `blocks`."""

    def __init__(self, blocks: int, reason: str, lasting: bool) -> None:
        super().__init__(reason)
        self.blocks = blocks
        self.reason = reason
        self.lasting = lasting


class Reader:
    """Reads blocks by plan through a backend, keeping some segments open."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._files = FileCache(backend)

    def fetch(
        self, ns: Namespace, plan: Plan, hasher: PrefixHasher, into: Any = None,
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
        read = 0
        try:
            for extent in plan.extents:
                if extent.block >= wanted:
                    break
                for slot, first, count in _pieces(extent, wanted):
                    part = dense[first * ns.row_bytes : (first + count) * ns.row_bytes]
                    self._piece(ns, extent, slot, first, part, hasher, payload_checksum)
                    read += count * ns.stride
        except _Miss as miss:
            good = dense[: miss.blocks * ns.row_bytes]
            return FetchResult(miss.blocks, wanted, good, miss.reason, miss.lasting, read)
        return FetchResult(wanted, wanted, dense, None, False, read)

    def _piece(
        self, ns: Namespace, extent: Extent, slot: int, first: int, part: memoryview,
        hasher: PrefixHasher, payload_checksum: bool,
    ) -> None:  # fmt: skip
        """Reads and verifies consecutive records that lie in one stretch. Raises _Miss."""
        shape, count = ns.shape, len(part) // ns.row_bytes
        rest = shape.stride - shape.payload
        rests = memoryview(bytearray(count * rest))
        buffers = []
        for i in range(count):
            buffers.append(part[i * shape.payload : (i + 1) * shape.payload])
            buffers.append(rests[i * rest : (i + 1) * rest])
        whole, failure = self._read(extent, slot, buffers, count, shape.stride)
        if whole:
            want = RunBlocks.of(hasher, first, first + whole)
            at = Landing.split(shape, part, rests)
            good, reason = verify(at, want, payloads=payload_checksum)
            if reason is not None:
                raise _Miss(first + good, reason, True)
        if failure is not None:
            failure.blocks = first + whole
            raise failure

    def _read(
        self, extent: Extent, slot: int, buffers: list[memoryview], count: int, stride: int
    ) -> tuple[int, _Miss | None]:
        """Returns how many whole records were read, and why not all."""
        try:
            with self._files.use(extent.segment) as file:
                n = read_into(self.backend, file, buffers, extent.geometry.offset(slot))
        except ReadCut as e:
            return e.read // stride, _Miss(0, describe(e), lasting(e))
        except OSError as e:
            return 0, _Miss(0, describe(e), lasting(e))
        if n == count * stride:
            return count, None
        self._files.forget(extent.segment)
        return n // stride, _Miss(0, "short read", True)

    def close(self) -> None:
        self._files.close()


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


def _pieces(extent: Extent, wanted: int) -> list[tuple[int, int, int]]:
    """(slot, block number, records) of each contiguous stretch, cut at the wanted block."""
    out = []
    slot, block = extent.slot, extent.block
    for _, n in extent.geometry.pieces(slot, min(extent.count, wanted - extent.block), PIECE_BYTES):
        out.append((slot, block, n))
        slot, block = slot + n, block + n
    return out
