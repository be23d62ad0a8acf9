"""What the files of the tree hold: blocks and token ids, read from the store and verified.

A block's record is believed only if its trailer's checksum, hash, parent, number and namespace are
those the index has and the payload's checksum is right; then its payload stays in the open file.
What does not verify raises DamageError, and so does storage that fails: never a wrong byte.

`read` blocks on the storage unless `ready`; one thread at a time for each open file.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvfs.backend import Backend, OpenFile, read_into
from kvfs.errors import BackendError, DamageError
from kvfs.fetch import describe
from kvfs.index.schema import Segment
from kvfs.namespace import Namespace
from kvfs.record import Landing, Trailer, check_payload, parse

TOKEN_WIDTH = 11
"""Bytes of a token id in `tokens`: ten digits and a blank, so that the size is known unread."""
KEPT_BYTES = 256 << 20
"""Payloads kept in open files, of one mount; above it the longest unused are read again."""


class Place(NamedTuple):
    """Where a block is stored and what is known of it."""

    number: int
    hash: bytes
    parent: bytes
    segment: Segment
    slot: int
    written_ms: int
    expires_ms: int
    class_id: int
    head: bytes
    """The first hash of its run."""
    at: int
    """Its place in the run."""

    @property
    def offset(self) -> int:
        """Byte offset of the record, which is that of the payload, in the segment."""
        return self.segment.geometry.offset(self.slot)


class Content(Protocol):
    """An open file."""

    @property
    def ready(self) -> bool:
        """`read` will not touch the storage."""
        ...

    def read(self, offset: int, size: int) -> bytes | memoryview: ...

    def close(self) -> None: ...


class TextContent:
    """A generated file."""

    ready = True

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, offset: int, size: int) -> bytes:
        return self._data[offset : offset + size]

    def close(self) -> None:
        """Nothing is held."""


class Shelf:
    """Which open files keep a payload: none that is closed. Thread-safe."""

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self._limit = limit
        self._held: OrderedDict[BlockContent, int] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def put(self, content: BlockContent, payload: memoryview) -> None:
        """Lets a file keep its payload, unless it was closed while that was read."""
        with self._lock:
            if content.closed:
                return
            self._bytes += len(payload) - self._held.pop(content, 0)
            self._held[content] = len(payload)
            content.payload = payload
            while self._bytes > self._limit and len(self._held) > 1:
                oldest, n = self._held.popitem(last=False)
                self._bytes -= n
                oldest.payload = None

    def used(self, content: BlockContent) -> None:
        with self._lock:
            if content in self._held:
                self._held.move_to_end(content)

    def drop(self, content: BlockContent) -> None:
        """For a file that is closed."""
        with self._lock:
            self._bytes -= self._held.pop(content, 0)
            content.payload, content.closed = None, True


class BlockContent:
    """The payload of one block."""

    def __init__(self, backend: Backend, ns: Namespace, place: Place, shelf: Shelf) -> None:
        self._backend = backend
        self._ns = ns
        self._place = place
        self._shelf = shelf
        self.payload: memoryview | None = None
        self.closed = False

    @property
    def ready(self) -> bool:
        return self.payload is not None

    def read(self, offset: int, size: int) -> memoryview:
        payload = self.payload
        if payload is None:
            payload = read_payload(self._backend, self._ns, self._place)
            self._shelf.put(self, payload)
        else:
            self._shelf.used(self)
        return payload[offset : offset + size]

    def close(self) -> None:
        self._shelf.drop(self)


class TokensContent:
    """The token ids of a line: a line of text for a block, of fixed width."""

    ready = False

    def __init__(
        self, backend: Backend, ns: Namespace, blocks: int,
        places: Callable[[int, int], Sequence[Place]],
    ) -> None:  # fmt: skip
        """places: gives those of a range of the line's `blocks` blocks, counted from 0."""
        self._backend = backend
        self._ns = ns
        self._blocks = blocks
        self._places = places
        self._line = ns.block_tokens * TOKEN_WIDTH
        self._format = ("%10d " * ns.block_tokens)[:-1] + "\n"

    def read(self, offset: int, size: int) -> bytes:
        first, skip = divmod(offset, self._line)
        end = min(-(-(offset + size) // self._line), self._blocks)
        if first >= end:
            return b""
        places = self._places(first, end)
        rows = read_tokens(self._backend, self._ns, places)
        text = "".join(self._format % row for row in rows).encode()
        return text[skip : skip + size]

    def close(self) -> None:
        """Nothing is held."""


def read_payload(backend: Backend, ns: Namespace, place: Place) -> memoryview:
    """Reads and verifies a whole record; returns its payload. Raises DamageError, BackendError."""
    record = memoryview(bytearray(ns.stride))
    with _Opened(backend, place.segment.path) as file:
        _fill(backend, file, record, place, place.offset)
    at = Landing.whole(ns.shape, record)
    trailer = _verified(ns, place, at.meta(0))
    reason = check_payload(ns.shape, at.payload(0), trailer)
    if reason is not None:
        raise _damage(place, reason)
    return at.payload(0)


def read_tokens(backend: Backend, ns: Namespace, places: Sequence[Place]) -> list[tuple[int, ...]]:
    """The token ids of blocks. Raises DamageError, BackendError."""
    ids = struct.Struct(f"<{ns.block_tokens}I")
    out: list[tuple[int, ...]] = []
    at = 0
    while at < len(places):
        path, end = places[at].segment.path, at + 1
        while end < len(places) and places[end].segment.path == path:
            end += 1
        with _Opened(backend, path) as file:
            for place in places[at:end]:
                meta = _meta(backend, ns, file, place)
                _verified(ns, place, meta)
                out.append(ids.unpack_from(meta))
        at = end
    return out


def read_trailer(backend: Backend, ns: Namespace, place: Place) -> Trailer:
    """What a record says of itself. Raises DamageError, BackendError."""
    with _Opened(backend, place.segment.path) as file:
        return _verified(ns, place, _meta(backend, ns, file, place))


class _Opened:
    """A segment, open for the length of a `with`; what the storage raises becomes BackendError.

    It is opened anew each time: an inspection reads too little for that to matter, and a
    descriptor kept open would show a removed file for ever.
    """

    def __init__(self, backend: Backend, path: str) -> None:
        self._backend = backend
        self._path = path

    def __enter__(self) -> OpenFile:
        try:
            self._file = self._backend.open(self._path)
        except OSError as e:
            raise BackendError(f"{self._path}: {describe(e)}") from e
        return self._file

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._backend.close(self._file)
        if isinstance(error, OSError):
            raise BackendError(f"{self._path}: {describe(error)}") from error


def _meta(backend: Backend, ns: Namespace, file: OpenFile, place: Place) -> memoryview:
    """Token ids and trailer of a record, unverified."""
    meta = memoryview(bytearray(ns.stride - ns.shape.meta_at))
    _fill(backend, file, meta, place, place.offset + ns.shape.meta_at)
    return meta


def _fill(backend: Backend, file: OpenFile, into: memoryview, place: Place, offset: int) -> None:
    if read_into(backend, file, [into], offset) < len(into):
        raise _damage(place, "short read")


def _verified(ns: Namespace, place: Place, meta: memoryview) -> Trailer:
    """The trailer, if it is that of the block the index says is here."""
    trailer = parse(meta)
    if isinstance(trailer, str):
        raise _damage(place, trailer)
    found = (trailer.nsid, trailer.payload, trailer.hash, trailer.parent, trailer.block)
    wanted = (ns.nsid, ns.row_bytes, place.hash, place.parent, place.number)
    names = ("foreign namespace", "payload length", "another block", "another parent", "number")
    for name, is_, should in zip(names, found, wanted, strict=True):
        if is_ != should:
            raise _damage(place, name)
    return trailer


def _damage(place: Place, what: str) -> DamageError:
    where = f"{place.segment.path} slot {place.slot}"
    return DamageError(f"block {place.number} ({place.hash.hex()}) in {where}: {what}")
