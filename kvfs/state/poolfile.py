"""The file of a slot pool: its layout, how it comes to be, and who may use it.

One file for each namespace and user in a directory of host memory (/dev/shm), reserved to its last
byte when it is made, so that nobody is ever killed by SIGBUS for memory that was promised and is
not there. It outlives the processes that use it and ends with the host. Little-endian:

  offset  size  field
  0       8     magic "KVFSPOOL"
  8       4     version, 1
  12      4     tokens of a block
  16      16    namespace id
  32      16    pool id, random: another one each time the pool is made
  48      16    boot id of the host
  64      8     slots
  72      8     bytes of a slot's data
  80      8     bytes from one slot's data to the next, a multiple of 64
  88      8     buckets, a power of two
  96      8     where the entries begin: 192 bytes a slot (kvfs.state.slots)
  104     8     where the buckets begin: 4 bytes each
  112     8     where the data begin
  120     8     bytes of the file
  128     16    window, backtrack, layers, token bytes: 4 bytes each
  144     8     when it was made, milliseconds since 1970
  152     8     xxh3-64 of bytes 0..151, written last
  1024          what changes (kvfs.state.slots)

Locks, all freed by the kernel when their holder dies: an exclusive flock of the file makes it and
changes it; a shared OFD lock of byte 0 says "in use" for as long as a process has it open. A file
that does not fit (another size, boot or version, or not whole) is made anew if nobody uses it.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from kvfs.errors import BusyError, ConfigError
from kvfs.index.guard import boot_id
from kvfs.layout import Identity, StateLayout

DIRECTORY = "/dev/shm"
PREFIX = "kvfs-"
SUFFIX = ".slots"
MAGIC = b"KVFSPOOL"
VERSION = 1
ENTRY_BYTES = 192
STATE_AT = 1024
_PAGE = 4096
_LINE = 64
_HEADER = struct.Struct("<8sII16s16s16sQQQQQQQQIIIIQ")
_SUM = struct.Struct("<Q")
assert _HEADER.size == 152


def align(size: int, unit: int) -> int:
    return -(-size // unit) * unit


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where everything is in the file of a pool of so many slots."""

    slots: int
    slot_bytes: int

    @classmethod
    def within(cls, budget: int, slot_bytes: int) -> Geometry:
        """As many slots as the budget of bytes has room for. Raises ConfigError if that is none."""
        most = max(0, (budget - _PAGE) // (align(slot_bytes, _LINE) + ENTRY_BYTES))
        sizes = range(1, most + 1)
        slots = bisect.bisect_right(sizes, budget, key=lambda n: cls(n, slot_bytes).file_bytes)
        if not slots:
            raise ConfigError(
                f"a slot pool of {budget} bytes has no room for a slot; it needs at least "
                f"{cls(1, slot_bytes).file_bytes}"
            )
        return cls(slots, slot_bytes)

    @property
    def stride(self) -> int:
        return align(self.slot_bytes, _LINE)

    @property
    def buckets(self) -> int:
        return 1 << max(4, (self.slots - 1).bit_length())

    @property
    def entries_at(self) -> int:
        return _PAGE

    @property
    def buckets_at(self) -> int:
        return self.entries_at + self.slots * ENTRY_BYTES

    @property
    def data_at(self) -> int:
        return align(self.buckets_at + 4 * self.buckets, _LINE)

    @property
    def file_bytes(self) -> int:
        return align(self.data_at + self.slots * self.stride, 8)


@dataclass(frozen=True, slots=True)
class Header:
    """The part of the file that never changes."""

    nsid: bytes
    pool: bytes
    boot: bytes
    block_tokens: int
    geometry: Geometry
    layout: StateLayout
    created_ms: int

    def encode(self) -> bytes:
        g, s = self.geometry, self.layout
        fixed = _HEADER.pack(
            MAGIC, VERSION, self.block_tokens, self.nsid, self.pool, self.boot, g.slots,
            g.slot_bytes, g.stride, g.buckets, g.entries_at, g.buckets_at, g.data_at,
            g.file_bytes, s.window, s.backtrack, s.layers, s.token_bytes, self.created_ms,
        )  # fmt: skip
        return fixed + _SUM.pack(xxhash.xxh3_64_intdigest(fixed))

    @classmethod
    def decode(cls, data: bytes) -> Header | None:
        """None if it is not a whole header that this code reads."""
        if len(data) < _HEADER.size + _SUM.size:
            return None
        if _SUM.unpack_from(data, _HEADER.size)[0] != xxhash.xxh3_64_intdigest(
            data[: _HEADER.size]
        ):
            return None
        (magic, version, block, nsid, pool, boot, slots, slot_bytes, *_, window, backtrack, layers,
         token_bytes, created) = _HEADER.unpack_from(data)  # fmt: skip
        if magic != MAGIC or version != VERSION:
            return None
        layout = StateLayout(window, backtrack, layers, token_bytes)
        return cls(nsid, pool, boot, block, Geometry(slots, slot_bytes), layout, created)


def this_boot() -> bytes:
    return bytes.fromhex(boot_id().replace("-", ""))


def pool_path(identity: Identity, directory: str) -> str:
    """Where the pool of a namespace is, for this user."""
    return os.path.join(directory, f"{PREFIX}{os.geteuid()}-{identity.name}{SUFFIX}")


class PoolFile:
    """An open pool file, mapped. The caller serialises `locked` between its threads."""

    def __init__(self, path: str, fd: int, header: Header) -> None:
        """For `attach`. Takes over the descriptor, which holds the lock "in use"."""
        self.path = path
        self.fd = fd
        self.header = header
        self.map = mmap.mmap(fd, header.geometry.file_bytes, mmap.MAP_SHARED)

    @classmethod
    def attach(
        cls, identity: Identity, directory: str, budget: int | None, wait: float
    ) -> PoolFile:
        """Opens the pool of a namespace; makes it if it is not there or does not fit.

        budget: bytes of the file at most; None: as it is there. wait: seconds for somebody else
        who is making it. Raises ConfigError, BusyError.
        """
        state = identity.state
        if state is None:
            raise ConfigError(f"{identity.name}: no sliding window, so there are no slots")
        wanted = None if budget is None else Geometry.within(budget, state.slot_bytes)
        path = pool_path(identity, directory)
        while True:
            fd = _open(path, make=wanted is not None)
            try:
                with flocked(fd, wait, path):
                    # Removed between the two: what we have opened is nobody's any more.
                    if os.fstat(fd).st_nlink:
                        header = _fitting(fd, path, identity, wanted)
                        if header is None:
                            assert wanted is not None
                            header = _make(fd, path, identity, wanted)
                        ofd_lock(fd, fcntl.F_RDLCK)
                        return cls(path, fd, header)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def locked(self, wait: float) -> contextlib.AbstractContextManager[None]:
        """The right to change the pool. wait: seconds; 0: now or never. Raises BusyError."""
        return flocked(self.fd, wait, self.path)

    def close(self) -> None:
        # Views that callers still hold keep the mapping alive; it goes with the last of them.
        with contextlib.suppress(BufferError):
            self.map.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _open(path: str, *, make: bool) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if make else 0)
    try:
        fd = os.open(path, flags, 0o600)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no slot pool here, and no budget to make one") from None
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from e
    if os.fstat(fd).st_uid != os.geteuid():
        os.close(fd)
        raise ConfigError(f"{path}: belongs to another user")
    return fd


def _fitting(fd: int, path: str, identity: Identity, wanted: Geometry | None) -> Header | None:
    """The header, if the file can be used; None if it has to be made. Raises ConfigError."""
    header = Header.decode(os.pread(fd, _PAGE, 0))
    size = os.fstat(fd).st_size
    if header is None or size != header.geometry.file_bytes:
        unfit = "is not whole, or of another version"
    elif header.boot != this_boot():
        unfit = "is from before the host was started"
    elif (header.nsid, header.layout) != (identity.nsid, identity.state):
        unfit = "is of another namespace"
    elif wanted is not None and header.geometry != wanted:
        unfit = f"has {header.geometry.slots} slots, not {wanted.slots}"
    else:
        return header
    if wanted is None:
        raise ConfigError(f"{path}: the slot pool {unfit}")
    if not ofd_lock(fd, fcntl.F_WRLCK):
        raise ConfigError(f"{path}: the slot pool {unfit}, and is in use")
    return None


def _make(fd: int, path: str, identity: Identity, geometry: Geometry) -> Header:
    """Reserves the file and writes its header last: killed before, it is made anew."""
    assert identity.state is not None
    os.ftruncate(fd, 0)
    try:
        os.posix_fallocate(fd, 0, geometry.file_bytes)
    except OSError as e:
        os.ftruncate(fd, 0)
        if e.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise ConfigError(f"{path}: cannot reserve the slot pool: {e.strerror}") from e
        v = os.statvfs(os.path.dirname(path))
        raise ConfigError(
            f"{path}: the slot pool needs {geometry.file_bytes} bytes and there are "
            f"{v.f_bavail * v.f_frsize} free of {v.f_blocks * v.f_frsize}; make the budget "
            "smaller or the file system larger (--shm-size in containers)"
        ) from e
    header = Header(
        identity.nsid, secrets.token_bytes(16), this_boot(), identity.block_tokens, geometry,
        identity.state, int(time.time() * 1000),
    )  # fmt: skip
    os.pwrite(fd, header.encode(), 0)
    return header


# locks

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0001, 0.005


@contextlib.contextmanager
def flocked(fd: int, wait: float, path: str) -> Iterator[None]:
    """Holds the exclusive flock. Raises BusyError if it is not free within `wait` seconds."""
    deadline, pause = time.monotonic() + wait, _FIRST_PAUSE
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise BusyError(f"{path}: somebody else is changing the slot pool") from None
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def ofd_lock(fd: int, kind: int) -> bool:
    """Sets the lock of byte 0 that belongs to the open file; False if somebody else's prevents."""
    # struct flock: l_type, l_whence, l_start, l_len, l_pid; the last must be 0.
    request = struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 1, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
    except BlockingIOError:
        return False
    return True
