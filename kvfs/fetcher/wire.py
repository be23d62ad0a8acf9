"""The frames between a client and the fetcher, over a Unix stream socket of one user.

Every frame is 8 bytes of head (u32 body length, u16 type, u16 number) and a body of at most 1 MiB.
An answer has the number of its question, so that one that comes after the client stopped waiting
is known for what it is. Integers little-endian:

  from   type  name       body
  client 1     HELLO      u32 protocol version; the first frame, answered by WELCOME
  client 2     NAMESPACE  an identity, JSON: needed once before the first FETCH in it; no answer
  client 3     FETCH      16 namespace id, f64 deadline on the monotonic clock, u32 pieces,
                          u16 files, u8 priority, u8 flags (1: no checksums); then for each piece
                          u64 offset of its first record in the file, u32 records, u32 number of
                          its file; then for each file u16 length and its path in the store, UTF-8;
                          answered by TICKET or REFUSED
  client 4     RELEASE    u32 slot, u32 generation: also cancels; no answer
  client 5     STATS      empty; answered by FIGURES
  client 6     EVICT      empty: drops the blocks nobody uses; answered by FIGURES
  fetcher 17   WELCOME    u32 version, u32 pid; with the arena's descriptor (SCM_RIGHTS)
  fetcher 18   TICKET     u32 slot, u32 generation, u32 wanted, u32 n, then n times: u32 block of
                          the request, from 0, u32 count, u64 offset in the arena
  fetcher 19   REFUSED    u32 exit code (kvfs.errors), UTF-8 text
  fetcher 20   FIGURES    JSON

The pieces of a FETCH are its blocks in chain order, consecutive records each. Nothing is unpickled
or trusted: lengths and counts are checked before anything is made of them, and a client that breaks
a rule is disconnected. No I/O here.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from typing import NamedTuple

from kvfs.errors import InputError
from kvfs.record import PAGE

VERSION = 1
HEAD = struct.Struct("<IHH")
HELLO, NAMESPACE, FETCH, RELEASE, STATS, EVICT = 1, 2, 3, 4, 5, 6
WELCOME, TICKET, REFUSED, FIGURES = 17, 18, 19, 20
FRAME_LIMIT = 1 << 20
NUMBERS = 1 << 16
NO_CHECKSUMS = 1
WELCOME_BYTES = HEAD.size + 8

_U32 = struct.Struct("<I")
_LENGTH = struct.Struct("<H")
_PAIR = struct.Struct("<II")
_FETCH = struct.Struct("<16sdIHBB")
_PIECE = struct.Struct("<QII")
_TICKET = struct.Struct("<IIII")
_RANGE = struct.Struct("<IIQ")
MAX_RANGES = (FRAME_LIMIT - _TICKET.size) // _RANGE.size
MAX_BLOCKS = 1 << 24
_LARGEST_OFFSET = 1 << 62


class Piece(NamedTuple):
    """Consecutive records of one file: `count` from byte `offset` on."""

    path: str
    offset: int
    count: int  # type: ignore[assignment]  # hides tuple.count


class FetchRequest(NamedTuple):
    """A FETCH. deadline: on the monotonic clock of the host, seconds; priority: 0 comes first."""

    nsid: bytes
    pieces: list[Piece]
    deadline: float
    priority: int = 0
    checksums: bool = True


class Range(NamedTuple):
    """Consecutive blocks of a request and where they land in the arena."""

    block: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    offset: int


def frame(kind: int, body: bytes = b"", number: int = 0) -> bytes:
    """Raises InputError for a body that is too long."""
    if len(body) > FRAME_LIMIT:
        raise InputError(f"a frame of {len(body)} bytes; the limit is {FRAME_LIMIT}")
    return HEAD.pack(len(body), kind, number) + body


def parse_head(data: bytes | bytearray) -> tuple[int, int, int]:
    """(body length, type, number). Raises InputError for a body that is too long."""
    length, kind, number = HEAD.unpack_from(data)
    if length > FRAME_LIMIT:
        raise InputError(f"a frame of {length} bytes; the limit is {FRAME_LIMIT}")
    return length, kind, number


# from the client


def hello() -> bytes:
    return frame(HELLO, _U32.pack(VERSION))


def parse_hello(body: bytes) -> None:
    """Raises InputError for another version."""
    if len(body) != _U32.size or _U32.unpack(body)[0] != VERSION:
        raise InputError(f"a client of another version than {VERSION}")


def fetch(request: FetchRequest, number: int) -> bytes:
    """Raises InputError for more than a frame holds."""
    files: dict[str, int] = {}
    pieces = [
        _PIECE.pack(p.offset, p.count, files.setdefault(p.path, len(files))) for p in request.pieces
    ]
    if len(files) >= 1 << 16:
        raise InputError(f"{len(files)} segments in one request")
    head = _FETCH.pack(
        request.nsid, request.deadline, len(pieces), len(files), min(request.priority, 255),
        0 if request.checksums else NO_CHECKSUMS,
    )  # fmt: skip
    paths = [path.encode() for path in files]
    named = [part for path in paths for part in (_LENGTH.pack(len(path)), path)]
    return frame(FETCH, b"".join((head, *pieces, *named)), number)


def parse_fetch(body: bytes) -> FetchRequest:
    """Raises InputError for a frame that cannot be right."""
    if len(body) < _FETCH.size:
        raise InputError("FETCH is too short")
    nsid, deadline, n_pieces, n_files, priority, flags = _FETCH.unpack_from(body)
    paths_at = _FETCH.size + n_pieces * _PIECE.size
    if paths_at > len(body) or deadline != deadline:
        raise InputError("FETCH does not hold what it says")
    paths = _paths(body, paths_at, n_files)
    try:
        pieces = [
            Piece(paths[file], offset, count)
            for offset, count, file in _PIECE.iter_unpack(body[_FETCH.size : paths_at])
        ]
    except IndexError:
        raise InputError("FETCH names a file it does not hold") from None
    if sum(p.count for p in pieces) > MAX_BLOCKS or not all(map(_possible, pieces)):
        raise InputError("FETCH of records that cannot be")
    return FetchRequest(nsid, pieces, deadline, priority, not flags & NO_CHECKSUMS)


def _possible(piece: Piece) -> bool:
    return piece.count > 0 and not piece.offset % PAGE and piece.offset < _LARGEST_OFFSET


def _paths(body: bytes, at: int, n: int) -> list[str]:
    paths = []
    for _ in range(n):
        if at + _LENGTH.size > len(body):
            raise InputError("FETCH does not hold what it says")
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size
        paths.append(_path(body[at : at + length], length))
        at += length
    if at != len(body):
        raise InputError("FETCH does not hold what it says")
    return paths


def _path(data: bytes, length: int) -> str:
    """A path below the store and nowhere else."""
    try:
        path = data.decode()
    except UnicodeDecodeError:
        path = ""
    if len(data) != length or "\0" in path or not _BELOW.isdisjoint(path.split("/")):
        raise InputError(f"{path!r} is not a path in a store")
    return path


_BELOW = frozenset({"", ".", ".."})


def release(slot: int, generation: int) -> bytes:
    return frame(RELEASE, _PAIR.pack(slot, generation))


def parse_release(body: bytes) -> tuple[int, int]:
    """(slot, generation). Raises InputError."""
    return _pair(body, "RELEASE")


def _pair(body: bytes, what: str) -> tuple[int, int]:
    if len(body) != _PAIR.size:
        raise InputError(f"{what} of a wrong length")
    first, second = _PAIR.unpack(body)
    return first, second


# from the fetcher


def welcome() -> bytes:
    return frame(WELCOME, _PAIR.pack(VERSION, os.getpid()))


def parse_welcome(data: bytes) -> int:
    """A whole WELCOME; returns the fetcher's pid. Raises InputError for another version."""
    version, pid = _pair(data[HEAD.size :], "WELCOME")
    length, kind, _ = parse_head(data)
    if (kind, length) != (WELCOME, _PAIR.size) or version != VERSION:
        raise InputError(f"the fetcher is of another version than {VERSION}")
    return pid


def ticket(number: int, slot: int, generation: int, wanted: int, ranges: list[Range]) -> bytes:
    head = _TICKET.pack(slot, generation, wanted, len(ranges))
    return frame(TICKET, b"".join((head, *(_RANGE.pack(*r) for r in ranges))), number)


def parse_ticket(body: bytes) -> tuple[int, int, int, list[Range]]:
    """(slot, generation, wanted, ranges). Raises InputError."""
    if len(body) < _TICKET.size or (len(body) - _TICKET.size) % _RANGE.size:
        raise InputError("TICKET of a wrong length")
    slot, generation, wanted, n = _TICKET.unpack_from(body)
    ranges = [Range(*r) for r in _RANGE.iter_unpack(body[_TICKET.size :])]
    if len(ranges) != n:
        raise InputError("TICKET of a wrong length")
    return slot, generation, wanted, ranges


def refused(number: int, code: int, text: str) -> bytes:
    return frame(REFUSED, _U32.pack(code) + text.encode()[:4096], number)


def parse_refused(body: bytes) -> tuple[int, str]:
    """(exit code, text). Raises InputError."""
    if len(body) < _U32.size:
        raise InputError("REFUSED of a wrong length")
    return _U32.unpack_from(body)[0], body[_U32.size :].decode("utf-8", "replace")


# descriptors


def take_fds(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that came with a message."""
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def close_all(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
