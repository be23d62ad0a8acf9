"""The backend for DeepSeek's 3FS: data by USRBIO, small files by system calls on its mount.

The rings are our own, or those of 3FS's own library where KVFS_HF3FS_LIB names its file.

What is made by `create` is written and read through rings only, journals too: a result means that
every replica has it, and any host's ring reads it at once, whatever lengths say. So `sync` has
nothing to do, and `close` settles the length for those who look at it. Small files are written by
system calls and read past the page cache, which may be 30 seconds old.

Reads go directly to memory that was lent, else through the session's own. A direct read is waited
for as long as the daemon lives, since until then it may write there; other I/O ends after
`seconds` with ETIMEDOUT, and its memory is kept until it is done.

When the daemon dies, I/O ends with ENOTCONN, and so does all on files opened before, until they are
opened anew; rings and memory are made again at the first use after it returned. A hole reads as
zeros, as in any file, but is an error (ENODATA) in memory that was lent: there only what was
written is served. Thread-safe; a forked child gets rings of its own.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvfs.backend import usrbio_layout as layout
from kvfs.backend.base import Buffer, Memory, OpenFile
from kvfs.backend.posix import size_of_file
from kvfs.backend.threefs_mount import ThreefsMount
from kvfs.backend.usrbio_io import Lease, as_file_errors, clear, gather, scatter, split_at_chunks
from kvfs.backend.usrbio_ring import DaemonDead, Io
from kvfs.backend.usrbio_session import BOUNCE_BYTES, READ, WRITE, Session
from kvfs.filesystems import mount_of

if TYPE_CHECKING:
    from kvfs.backend.usrbio_library import Library

log = logging.getLogger(__name__)
LIBRARY = "KVFS_HF3FS_LIB"
IO_SECONDS = 75.0
"""Longer than the daemon itself tries: 60 s."""
_PIECE_BYTES = 4 << 20
_SETTLE_SECONDS = 1.0
_RETRY_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class _Handle:
    """What I/O needs of an open file."""

    file: int
    """What rings know it by: the inode number, or what the library has made of it."""
    chunk: int
    epoch: int
    """Of the daemon it was opened with."""
    made: bool


class ThreefsBackend(ThreefsMount):
    """See the module docstring."""

    def __init__(
        self, root: str, *, seconds: float = IO_SECONDS, bounce_bytes: int = BOUNCE_BYTES,
        library: str | None = None,
    ) -> None:  # fmt: skip
        """root: a directory on the mount; bounce_bytes: of shared memory, in /dev/shm; library: the
        path of 3FS's own, "": our own rings, None: as KVFS_HF3FS_LIB says. Makes no I/O: that 3FS
        is away shows at the first use. Raises ConfigError for a library that cannot be used."""
        super().__init__(root)
        self.seconds = seconds
        self._bounce_bytes = bounce_bytes
        self._library = _load(os.environ.get(LIBRARY, "") if library is None else library)
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._failed_at = float("-inf")
        self._epoch = 0
        self._files: dict[int, _Handle] = {}
        self._memories: list[Memory] = []
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        weakref.finalize(self, _close_all, self._sessions)
        _backends.add(self)

    def after_fork(self) -> None:
        """In the child: locks and rings are the parent's."""
        self._lock = threading.Lock()
        session, self._session = self._session, None
        if session is not None:
            session.after_fork()

    # the session

    def session(self) -> Session:
        """The session with the daemon that serves the mount now. Raises OSError: there is none."""
        session = self._session
        if session is not None and session.usable:
            return session
        with self._lock:
            return self._renew()

    def _renew(self) -> Session:
        old = self._session
        if old is not None and old.usable:
            return old  # somebody else was faster
        if old is not None:
            self._session = None
            self._epoch += old.dead
            old.close() if old.dead else old.retire()
        if time.monotonic() < self._failed_at + _RETRY_SECONDS:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), self.root)
        try:
            self._session = self._make()
        except OSError as e:
            self._failed_at = time.monotonic()
            raise OSError(errno.ENOTCONN, f"no 3FS client daemon: {e.strerror or e}") from e
        return self._session

    def _make(self) -> Session:
        mount, kind = mount_of(self.root)
        if kind != layout.FILE_SYSTEM:
            raise OSError(errno.ENODEV, f"{self.root} is on {kind}, not {layout.FILE_SYSTEM}")
        bounce = max(self._bounce_bytes, 2 * (self.chunk_bytes() or 0))
        session = Session(mount, bounce, self._library)
        self._sessions.add(session)
        try:
            for memory in self._memories:
                _lend(session, memory)
        except BaseException:
            session.close()
            raise
        return session

    def probe(self) -> None:
        """Raises OSError unless the daemon answers now."""
        if not self.session().probe():
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), self.root)

    def release(self) -> None:
        with self._lock:
            session, self._session = self._session, None
            self._memories.clear()
        if session is not None:
            session.close()

    def chunk_bytes(self) -> int | None:
        path = self.root
        while not os.path.isdir(path) and path != os.path.dirname(path):
            path = os.path.dirname(path)  # the store's directory inherits its parent's
        return os.stat(path).st_blksize

    def memory_directory(self) -> str | None:
        return layout.SHM

    def lend(self, memory: Memory) -> None:
        with self._lock:
            self._memories.append(memory)
            if self._session is not None and self._session.usable:
                _lend(self._session, memory)

    # open files

    def create(self, path: str) -> OpenFile:
        epoch = self._epoch
        return self._opened(self._posix.create(path), epoch, made=True)

    def open(self, path: str) -> OpenFile:
        epoch = self._epoch
        return self._opened(self._posix.open(path), epoch, made=False)

    def _opened(self, file: OpenFile, epoch: int, *, made: bool) -> OpenFile:
        try:
            st = os.fstat(file.fd)
            size_of_file(st, file.path)  # what a ring says of a directory is not for us to find out
            known = st.st_ino if self._library is None else self._library.register(file.fd)
        except OSError:
            self._posix.close(file)
            raise
        self._files[file.fd] = _Handle(known, st.st_blksize, epoch, made)
        return file

    def close(self, file: OpenFile) -> None:
        handle = self._files.pop(file.fd, None)
        try:
            if handle is not None and handle.made:
                with contextlib.suppress(OSError):  # the bytes are safe; this is for lengths
                    os.fsync(file.fd)
        finally:
            if self._library is not None:
                self._library.deregister(file.fd)
            self._posix.close(file)

    def _using(self, file: OpenFile) -> tuple[Session, _Handle]:
        handle, session = self._files[file.fd], self.session()
        if handle.epoch != self._epoch:
            # Opened with a daemon that is gone: nobody knows the inode any more.
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), file.path)
        return session, handle

    # data

    def readv(self, file: OpenFile, buffers: Sequence[memoryview], offset: int) -> int:
        session, handle = self._using(file)
        views = [memoryview(b).cast("B") for b in buffers if memoryview(b).nbytes]
        if not views:
            return 0
        places = session.places(views)
        with as_file_errors(file.path):
            if places is not None:
                ios = split_at_chunks(places, handle.file, offset, handle.chunk)
                got = self._direct(session, ios)
                return self._told(file, offset, ios, got, views)
            return self._read_bounced(session, file, handle, views, offset)

    def _direct(self, session: Session, ios: list[Io]) -> list[int]:
        try:
            return session.run(ios)
        except DaemonDead:
            # Its end is known before the last of its threads has stopped, should somebody have
            # taken the mount from it: what it still writes must not meet the next owner's bytes.
            time.sleep(_SETTLE_SECONDS)
            raise

    def _read_bounced(
        self, session: Session, file: OpenFile, handle: _Handle,
        views: Sequence[memoryview], offset: int,
    ) -> int:  # fmt: skip
        size = self._share(session, sum(v.nbytes for v in views), offset, handle.chunk)
        with self._bounced(session, size) as lease:
            place = [(session.bounce.key, lease.offset, size)]
            ios = split_at_chunks(place, handle.file, offset, handle.chunk)
            results = lease.run(ios, READ)
            memory = session.bounce.view[lease.offset : lease.offset + size]
            got = self._told(file, offset, ios, results, [memory])
            scatter(memory[:got], views)
            return got

    def _told(
        self, file: OpenFile, offset: int, ios: list[Io], results: list[int],
        views: Sequence[memoryview],
    ) -> int:  # fmt: skip
        """Bytes that were read, up to the first I/O that was not whole. Raises OSError.

        A hole, and a chunk shorter than what follows it in the file, read as zeros.
        """
        done = 0
        for io, result in zip(ios, results, strict=True):
            if result == io.length:
                done += result
                continue
            if result > io.length:
                raise OSError(errno.EIO, f"{result} bytes for {io.length}", file.path)
            if result < 0:
                if done:
                    break
                raise OSError(-result, os.strerror(-result), file.path)
            hole = max(0, min(io.length, self.length(file) - io.offset) - result)
            clear(views, done + result, hole)
            done += result + hole
            if result + hole < io.length:
                break
        return done

    def readv_cached(self, file: OpenFile, buffers: Sequence[memoryview], offset: int) -> int:
        return 0

    def writev(self, file: OpenFile, buffers: Sequence[Buffer], offset: int) -> int:
        session, handle = self._using(file)
        views = [memoryview(b).cast("B") for b in buffers]
        size = self._share(session, sum(v.nbytes for v in views), offset, handle.chunk)
        if not size:
            return 0
        with as_file_errors(file.path), self._bounced(session, size) as lease:
            gather(views, session.bounce.view[lease.offset : lease.offset + size])
            place = [(session.bounce.key, lease.offset, size)]
            ios = split_at_chunks(place, handle.file, offset, handle.chunk)
            done = 0
            for io, result in zip(ios, lease.run(ios, WRITE), strict=True):
                if result < 0 and not done:
                    raise OSError(-result, os.strerror(-result), file.path)
                done += max(result, 0)
                if result != io.length:
                    break
            return done

    def _share(self, session: Session, size: int, offset: int, chunk: int) -> int:
        """How much of a transfer one call takes: to a chunk's end, if not all of it."""
        most = max(chunk, min(_PIECE_BYTES, session.bounce.total // 4))
        if size <= most:
            return size
        return most - (offset + most) % chunk or min(size, chunk)

    @contextmanager
    def _bounced(self, session: Session, size: int) -> Iterator[Lease]:
        lease = Lease(session, session.bounce.take(size, self.seconds), self.seconds)
        try:
            yield lease
        finally:
            if lease.unfinished:
                if session.bounce.free < session.bounce.total // 2:
                    session.worn = True
            else:
                session.bounce.give(lease.offset)

    def reserve(self, file: OpenFile, size: int) -> None:
        """Room is taken as it is written."""

    def write_behind(self, file: OpenFile, offset: int, length: int) -> None:
        """What is written is durable."""

    def sync(self, file: OpenFile) -> None:
        """What is written is durable."""


def _load(path: str) -> Library | None:
    if not path:
        return None
    from kvfs.backend.usrbio_library import load

    return load(path)


def _lend(session: Session, memory: Memory) -> None:
    """Without it reads are copied, which is slower and no more."""
    try:
        session.lend(memory)
    except OSError as e:
        log.warning("%s cannot be lent to the 3FS client daemon: %s", memory.path, e)


_backends: weakref.WeakSet[ThreefsBackend] = weakref.WeakSet()


def _in_child() -> None:
    for backend in list(_backends):
        backend.after_fork()


os.register_at_fork(after_in_child=_in_child)


def _close_all(sessions: weakref.WeakSet[Session]) -> None:
    for session in list(sessions):
        if session.pid == os.getpid():
            session.close()
