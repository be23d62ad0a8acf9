"""The interface of a storage backend, and the two loops that every caller of it needs.

Paths are relative to the store's directory, with "/" between the parts. Calls block; callers that
must not block keep them in a process of their own. Everything raises OSError with a true errno;
nothing here interprets it. Implementations are safe to call from several threads.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Buffer = bytes | bytearray | memoryview

# Linux takes at most IOV_MAX (1024) buffers in one vectored call.
IOV_MAX = 1024


@dataclass(frozen=True, slots=True)
class OpenFile:
    """An open file: the descriptor and the path it was opened by."""

    fd: int
    path: str


class WriteCut(OSError):
    """A write that ended early: `written` bytes are in the file, the rest is not."""

    def __init__(self, code: int, written: int, path: str) -> None:
        super().__init__(code, os.strerror(code), path)
        self.written = written


class ReadCut(OSError):
    """A read that failed: the first `read` bytes of it are there."""

    def __init__(self, code: int, read: int, path: str) -> None:
        super().__init__(code, os.strerror(code), path)
        self.read = read


Pace = Callable[[int], None]
"""Called with how many files are about to be removed; returns when it is time to."""


def at_once(count: int) -> None:
    """A pace that does not wait."""


class Memory(Protocol):
    """Shared memory with a name, as kvfs.arena.Arena."""

    path: str | None
    size: int
    view: memoryview


class Backend(Protocol):
    """One shared directory. See the module docstring for the rules all methods follow."""

    root: str

    def create(self, path: str) -> OpenFile:
        """Makes a new file for writing; the parents are made too. EEXIST if it is there."""
        ...

    def open(self, path: str) -> OpenFile:
        """Opens a file for reading."""
        ...

    def close(self, file: OpenFile) -> None: ...

    def readv(self, file: OpenFile, buffers: Sequence[memoryview], offset: int) -> int:
        """One vectored read; returns the bytes read, which may be fewer than asked."""
        ...

    def readv_cached(self, file: OpenFile, buffers: Sequence[memoryview], offset: int) -> int:
        """Like `readv`, but only what is in memory: does not wait for a device; 0 if unknown."""
        ...

    def writev(self, file: OpenFile, buffers: Sequence[Buffer], offset: int) -> int:
        """One vectored write; returns the bytes written, which may be fewer than given."""
        ...

    def reserve(self, file: OpenFile, size: int) -> None:
        """Takes room for the file's first `size` bytes, if that is cheap here; else does nothing.

        Bytes that were never written read as zeros. ENOSPC if there is no room.
        """
        ...

    def write_behind(self, file: OpenFile, offset: int, length: int) -> None:
        """Starts to make what was written durable, without waiting; `sync` has less to do."""
        ...

    def sync(self, file: OpenFile) -> None:
        """Makes all completed writes to the file durable; of a new one also its name, as far as
        the file system does that by itself (ext4, XFS and file servers do)."""
        ...

    def truncate(self, file: OpenFile, size: int) -> None: ...

    def size(self, path: str) -> int:
        """The file's length as far as this host knows: for rebuild and fsck, never for serving.

        EISDIR for a directory.
        """
        ...

    def names(self, path: str) -> list[str]:
        """The names in a directory, sorted; empty if it does not exist."""
        ...

    def unlink(self, path: str) -> None:
        """Removes a file; one that is gone already is no error."""
        ...

    def remove_empty(self, path: str) -> bool:
        """Removes a directory if it is empty; says whether it did."""
        ...

    def remove_tree(self, path: str, pace: Pace = at_once) -> None:
        """Removes a directory and all that is in it, by as few removals as there can be here.

        One that is gone already is no error. pace: called before each removal. What is made in it
        meanwhile goes too, or is an error (ENOTEMPTY).
        """
        ...

    def load(self, path: str, limit: int) -> bytes:
        """The whole content of a small file. EFBIG if it is larger than limit bytes."""
        ...

    def replace(self, path: str, data: bytes) -> None:
        """Puts a small file in place of an older one in one step; its content is synced before.

        The directory is not: where the storage's machine goes down the older one may be back.
        """
        ...

    def put_new(self, path: str, data: bytes) -> bool:
        """Makes a small file unless it exists, whole or not at all; says whether it did.

        Synced as with `replace`.
        """
        ...

    def free_bytes(self) -> tuple[int, int]:
        """(free, total) bytes of the file system that holds the store."""
        ...

    def probe(self) -> None:
        """Raises OSError unless the storage answers now."""
        ...

    def chunk_bytes(self) -> int | None:
        """The stretch of a file that should be written by one call and never again: an extent.

        None where the size of a write does not matter.
        """
        ...

    def memory_directory(self) -> str | None:
        """Where shared memory must have its file for `lend`; None: it needs none."""
        ...

    def lend(self, memory: Memory) -> None:
        """Tells of shared memory that reads may land in directly; until the backend is released.

        There a hole in a file may be an error, ENODATA, instead of zeros.
        """
        ...

    def release(self) -> None:
        """Gives back what the backend holds beside open files; it may be used again after."""
        ...


def write_all(backend: Backend, file: OpenFile, buffers: Sequence[Buffer], offset: int) -> int:
    """Writes all buffers at offset, however many calls it takes; returns the bytes written.

    A short count is not success: what is left is written again (a full disk gives a
    short count first and an error only on the next call). Raises WriteCut with what got there.
    """
    done = 0
    queue = _queue(buffers)
    while queue:
        batch = queue[: -IOV_MAX - 1 : -1]
        try:
            n = backend.writev(file, batch, offset + done)
        except OSError as e:
            raise WriteCut(e.errno or errno.EIO, done, file.path) from e
        if n <= 0:
            raise WriteCut(errno.ENOSPC, done, file.path)
        done += n
        _consume(queue, n)
    return done


def read_into(backend: Backend, file: OpenFile, buffers: Sequence[memoryview], offset: int) -> int:
    """Fills the buffers from offset on; returns the bytes read, fewer only at the file's end.

    Raises ReadCut with what was read before the error.
    """
    done = 0
    # Nearly always one call brings everything: the queue is made only if something is left.
    queue = None if len(buffers) <= IOV_MAX else _queue(buffers)
    while queue is None or queue:
        batch = buffers if queue is None else queue[: -IOV_MAX - 1 : -1]
        try:
            n = backend.readv(file, batch, offset + done)
        except OSError as e:
            raise ReadCut(e.errno or errno.EIO, done, file.path) from e
        if n <= 0:
            break
        done += n
        if queue is None:
            if n == sum(b.nbytes for b in buffers):
                break
            queue = _queue(buffers)
        _consume(queue, n)
    return done


def _queue(buffers: Sequence[Buffer]) -> list[memoryview]:
    """Views of the buffers' bytes, the first one last."""
    queue = [memoryview(b).cast("B") for b in buffers if len(b)]
    queue.reverse()
    return queue


def _consume(queue: list[memoryview], n: int) -> None:
    """Takes n bytes off the front of a reversed queue of views."""
    while n:
        view = queue.pop()
        if n < len(view):
            queue.append(view[n:])
            return
        n -= len(view)


def first_bytes(buffers: Sequence[memoryview], limit: int) -> list[memoryview]:
    """Views of the first `limit` bytes of the buffers."""
    out = []
    for view in buffers:
        if limit <= 0:
            break
        out.append(view[:limit])
        limit -= len(out[-1])
    return out


def without_first(buffers: Sequence[memoryview], n: int) -> list[memoryview]:
    """Views of the buffers without their first n bytes."""
    queue = list(reversed(buffers))
    _consume(queue, n)
    queue.reverse()
    return queue
