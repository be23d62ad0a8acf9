"""The frames between a client and the fetcher, over a Unix stream socket of one user.

Every frame is 8 bytes of head (u32 body length, u16 type, u16 zeros) and a body of at most 64 KiB
from a client, 1 MiB from the fetcher; integers little-endian:

  from   type  name     body
  client 1     HELLO    u32 protocol version
  client 2     FETCH    u32 plan bytes, u32 identity bytes, u32 wanted blocks, u8 priority,
                        u8 flags (1: no checksums), 2 zeros, f64 deadline on the monotonic clock;
                        with one file descriptor: sealed memory that holds plan and identity (JSON)
  client 3     RELEASE  u32 ticket slot, u32 generation: also cancels
  client 4     STATS    empty
  client 5     EVICT    empty: drop the blocks nobody uses; answered like STATS
  fetcher 17   WELCOME  u32 version, u64 arena bytes, u32 pid; with the arena's descriptor
  fetcher 18   TICKET   u32 slot, u32 generation, u32 wanted, u32 n, then n times: u32 block,
                        u32 count, u64 offset in the arena
  fetcher 19   REFUSED  u32 exit code (kvfs.errors), UTF-8 text
  fetcher 20   FIGURES  JSON

Nothing is unpickled; lengths are checked before anything is read; a client that breaks a rule is
disconnected. Descriptors travel as SCM_RIGHTS with the first byte of their frame.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import os
import socket
import struct
from dataclasses import dataclass
from typing import NamedTuple

from kvfs.errors import InputError

VERSION = 1
HEAD = struct.Struct("<IHH")
HELLO, FETCH, RELEASE, STATS, EVICT = 1, 2, 3, 4, 5
WELCOME, TICKET, REFUSED, FIGURES = 17, 18, 19, 20
CLIENT_LIMIT, SERVER_LIMIT = 64 << 10, 1 << 20
MEMORY_LIMIT = 64 << 20
NO_CHECKSUMS = 1

_U32 = struct.Struct("<I")
_FETCH = struct.Struct("<IIIBB2xd")
_RELEASE = struct.Struct("<II")
_WELCOME = struct.Struct("<IQI")
_TICKET = struct.Struct("<IIII")
_RANGE = struct.Struct("<IIQ")
MAX_RANGES = (SERVER_LIMIT - _TICKET.size) // _RANGE.size
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class FetchFrame(NamedTuple):
    """The fixed part of a FETCH."""

    plan_bytes: int
    identity_bytes: int
    wanted: int
    priority: int
    flags: int
    deadline: float

    @property
    def total(self) -> int:
        return self.plan_bytes + self.identity_bytes


@dataclass(frozen=True, slots=True)
class Range:
    """Consecutive blocks and where they land in the arena."""

    block: int
    count: int
    offset: int


def frame(kind: int, body: bytes) -> bytes:
    return HEAD.pack(len(body), kind, 0) + body


def hello() -> bytes:
    return frame(HELLO, _U32.pack(VERSION))


def fetch(fields: FetchFrame) -> bytes:
    return frame(FETCH, _FETCH.pack(*fields))


def parse_fetch(body: bytes) -> FetchFrame:
    """Raises InputError for a frame that cannot be right."""
    if len(body) != _FETCH.size:
        raise InputError("FETCH of a wrong length")
    fields = FetchFrame(*_FETCH.unpack(body))
    if fields.total > MEMORY_LIMIT or fields.deadline != fields.deadline:
        raise InputError("FETCH beyond the limits")
    return fields


def release(slot: int, generation: int) -> bytes:
    return frame(RELEASE, _RELEASE.pack(slot, generation))


def parse_release(body: bytes) -> tuple[int, int]:
    if len(body) != _RELEASE.size:
        raise InputError("RELEASE of a wrong length")
    slot, generation = _RELEASE.unpack(body)
    return slot, generation


def parse_hello(body: bytes) -> None:
    if len(body) != _U32.size or _U32.unpack(body)[0] != VERSION:
        raise InputError(f"a client of another version than {VERSION}")


def welcome(arena_bytes: int) -> bytes:
    return frame(WELCOME, _WELCOME.pack(VERSION, arena_bytes, os.getpid()))


def parse_welcome(body: bytes) -> int:
    """Returns the fetcher's pid. Raises InputError for another version."""
    version, _, pid = _WELCOME.unpack(body)
    if version != VERSION:
        raise InputError(f"the fetcher speaks version {version}, this client {VERSION}")
    return int(pid)


def ticket(slot: int, generation: int, wanted: int, ranges: list[Range]) -> bytes:
    body = b"".join(_RANGE.pack(r.block, r.count, r.offset) for r in ranges)
    return frame(TICKET, _TICKET.pack(slot, generation, wanted, len(ranges)) + body)


def parse_ticket(body: bytes) -> tuple[int, int, int, list[Range]]:
    slot, generation, wanted, n = _TICKET.unpack_from(body)
    ranges = [Range(*r) for r in _RANGE.iter_unpack(body[_TICKET.size :])]
    if len(ranges) != n:
        raise InputError("TICKET of a wrong length")
    return slot, generation, wanted, ranges


def refused(code: int, text: str) -> bytes:
    return frame(REFUSED, _U32.pack(code) + text.encode()[:4096])


def parse_refused(body: bytes) -> tuple[int, str]:
    return _U32.unpack_from(body)[0], body[4:].decode("utf-8", "replace")


def sealed_memory(parts: list[bytes | memoryview]) -> int:
    """A descriptor of memory that holds the parts and can no longer change its size."""
    fd = os.memfd_create("kvfs-request", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        at = 0
        for part in parts:
            view = memoryview(part).cast("B")
            while len(view):
                n = os.pwrite(fd, view, at)
                at, view = at + n, view[n:]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_sealed(fd: int, size: int) -> memoryview:
    """Maps a client's memory for reading. Raises InputError unless it is sealed and large enough.

    Without the seals the client could shrink it under us, which kills the reader with SIGBUS.
    """
    if not size:
        return memoryview(b"")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if seals & _SEALS != _SEALS or os.fstat(fd).st_size < size:
            raise InputError("request memory is not sealed or too small")
        return memoryview(mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ))
    except (OSError, ValueError) as e:
        raise InputError(f"request memory cannot be mapped: {e}") from e


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
