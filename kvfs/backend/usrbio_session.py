"""What a process has with one 3FS client daemon: rings, registered memory, and a look at its life.

A thread of its own opens `iovs`, makes all links in it and asks the daemon every half second
whether it lives: the daemon drops what a thread has made when that thread's handle of `iovs` goes,
however the process ends, and knows it by the number of the thread. Nobody may ever list that
directory: the daemon would take the end of the listing for the end of the process.

Rings have no names of their own after they are made, so a client that is killed leaves nothing.
A session ends with its daemon; whoever needs one then makes another. Thread-safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import queue
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfs.arena import Arena, Ranges
from kvfs.backend import usrbio_layout as layout
from kvfs.backend.base import Memory
from kvfs.backend.semaphores import Semaphore
from kvfs.backend.usrbio_layout import RingShape, ring_name
from kvfs.backend.usrbio_ring import BaseRing, DaemonDead, Io, Ring

if TYPE_CHECKING:
    from kvfs.backend.usrbio_library import Iov, Library, LibraryRing

PROBE_SECONDS = 0.5
CALL_SECONDS = 5.0
"""How long the daemon may take to map memory, or to answer that it is there."""
BOUNCE_BYTES = 16 << 20
# What a mount without a daemon answers; anything else may pass.
_GONE = frozenset({errno.ENOTCONN, errno.ECONNABORTED, errno.ENODEV, errno.ESHUTDOWN})


class Kind(NamedTuple):
    """What a ring is for: how many I/Os it takes, in batches of what size, with which flags."""

    read: bool
    entries: int
    depth: int
    flags: int


# Reads are done in pieces, so that the first blocks are there before the last. In memory that is
# lent a hole is an error: what is served was written, and a removed chunk looks like a hole.
DIRECT = Kind(True, 255, -16, layout.READ_UNCOMMITTED | layout.FORBID_HOLES)
READ = Kind(True, 255, -16, layout.READ_UNCOMMITTED)
WRITE = Kind(False, 63, 0, 0)


def address_of(view: memoryview) -> int:
    """Where the bytes of a writable view are in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class Session:
    """See the module docstring. Raises OSError if there is no daemon, or it does not answer."""

    def __init__(
        self, mount: str, bounce_bytes: int = BOUNCE_BYTES, library: Library | None = None
    ) -> None:
        """mount: of the file system; bounce_bytes: of memory for I/O to where it cannot go
        directly; library: 3FS's own, to make the rings, None: we do."""
        self.mount = mount
        self.library = library
        self.pid = os.getpid()
        self.dead = False
        """The daemon does not exist any more: proven, not guessed from its silence."""
        self.worn = False
        """Too much of it waits for completions that do not come: to be replaced."""
        self._sizes: dict[bytes, int] = {}
        self._lent: tuple[tuple[int, int, bytes], ...] = ()
        self._links: list[str] = []
        self._arenas: list[Arena] = []
        self._iovs: dict[bytes, Iov] = {}
        self._idle: dict[Kind, deque[BaseRing]] = {kind: deque() for kind in (DIRECT, READ, WRITE)}
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._jobs = queue.SimpleQueue()
        self._handle = -1
        self._submit: Semaphore | None = None
        self._lock = threading.Lock()
        self._users = 0
        self._retired = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvfs-3fs", daemon=True)
        self._thread.start()
        try:
            self._call(self._open)
            self.bounce = Bounce(*self._call(lambda: self._add("iov", bounce_bytes)))
        except BaseException:
            self.close()
            raise

    @property
    def usable(self) -> bool:
        return not (self.dead or self.worn) and self.pid == os.getpid()

    # the thread

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=PROBE_SECONDS)
            except queue.Empty:
                self._probe()
                self._reap_idle()
                continue
            if job is None:
                break
            work, future = job
            try:
                future.set_result(work())
            except BaseException as e:
                future.set_exception(e)
        self._end()

    def _call(self, work: Callable[[], Any]) -> Any:
        """Has the thread do something. Raises TimeoutError (an OSError) if the daemon hangs."""
        future: Future[Any] = Future()
        self._jobs.put((work, future))
        return future.result(CALL_SECONDS)

    def _open(self) -> None:
        directory = os.path.join(self.mount, layout.IOVS)
        self._handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._submit = Semaphore.open(os.readlink("submit-ios", dir_fd=self._handle))

    def _probe(self) -> None:
        if self._handle >= 0 and not self.dead:
            try:
                fcntl.ioctl(self._handle, layout.IOCTL_VERSION, bytes(4))
            except OSError as e:
                self.dead = e.errno in _GONE

    def _reap_idle(self) -> None:
        """Takes what came late from rings that nobody uses: memory waits for it."""
        for idle in self._idle.values():
            for _ in range(len(idle)):
                with contextlib.suppress(IndexError, OSError):
                    ring = idle.popleft()
                    ring.reap()
                    idle.append(ring)

    def _end(self) -> None:
        for link in self._links:
            with contextlib.suppress(OSError):
                os.unlink(link, dir_fd=self._handle)
        self._closed.set()
        self._close_idle()
        for arena in self._arenas:
            arena.close()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _close_idle(self) -> None:
        """Unmaps rings; one that is in use when the session ends goes when it comes back."""
        for idle in self._idle.values():
            while idle:
                with contextlib.suppress(IndexError):
                    idle.popleft().close()

    def alive(self) -> bool:
        """Whether the daemon lived half a second ago."""
        return not self.dead

    def probe(self) -> bool:
        """Asks the daemon now. Raises TimeoutError if it hangs."""
        self._call(self._probe)
        return not self.dead

    # memory and rings

    def _link(self, arena: Memory, name: str) -> None:
        assert arena.path is not None
        os.symlink(arena.path, name, dir_fd=self._handle)
        self._links.append(name)

    def _add(self, tag: str, size: int) -> tuple[Arena, bytes]:
        key = uuid.uuid4()
        arena = Arena.create(size, directory=layout.SHM, tag=tag)
        self._arenas.append(arena)
        try:
            self._link(arena, str(key))
        finally:
            arena.unname()
        self._know(key.bytes, arena)
        return arena, key.bytes

    def _know(self, key: bytes, memory: Memory) -> None:
        if self.library is not None:
            at = address_of(memory.view)
            self._iovs[key] = self.library.wrap(at, key, self.mount, memory.size)
        self._sizes[key] = memory.size

    def lend(self, memory: Memory) -> None:
        """Makes named memory one that I/O may go to. It keeps its name."""
        key = uuid.uuid4()
        self._call(lambda: self._link(memory, str(key)))
        self._know(key.bytes, memory)
        start = address_of(memory.view)
        self._lent = (*self._lent, (start, start + memory.size, key.bytes))

    def places(self, views: Sequence[memoryview]) -> list[tuple[bytes, int, int]] | None:
        """(memory's id, offset in it, length) of each view, if all lie in memory that was lent."""
        if not self._lent or any(v.readonly for v in views):
            return None
        out = []
        for view in views:
            at, size = address_of(view), view.nbytes
            for start, end, key in self._lent:
                if start <= at and at + size <= end:
                    out.append((key, at - start, size))
                    break
            else:
                return None
        return out

    def _make_ring(self, kind: Kind) -> BaseRing:
        ring = self._own_ring(kind) if self.library is None else self._library_ring(kind)
        ring.late = lambda serial: self.bounce.late(ring, serial)
        return ring

    def _library_ring(self, kind: Kind) -> LibraryRing:
        from kvfs.backend.usrbio_library import LibraryRing

        assert self.library is not None
        ring = LibraryRing(
            self.library, self.mount, self._iovs.__getitem__, self.alive,
            lambda key: self._sizes.get(key, 0), **kind._asdict(),
        )  # fmt: skip
        self._links.append(ring.link)
        return ring

    def _own_ring(self, kind: Kind) -> Ring:
        name = ring_name(uuid.uuid4(), read=kind.read, depth=kind.depth, flags=kind.flags)
        size = RingShape.size_for(kind.entries)
        arena = Arena.create(size, directory=layout.SHM, tag="ring")
        self._arenas.append(arena)
        try:
            self._link(arena, name)
        finally:
            arena.unname()
        assert self._submit is not None
        return Ring(
            arena.view[:], address_of(arena.view), self._submit, self.alive,
            lambda key: self._sizes.get(key, 0),
        )  # fmt: skip

    @contextmanager
    def ring(self, kind: Kind) -> Iterator[BaseRing]:
        """A ring for one thread, within the block."""
        with self._lock:
            self._users += 1
        try:
            try:
                ring = self._idle[kind].pop()
            except IndexError:
                ring = self._call(lambda: self._make_ring(kind))
            yield ring
            self._idle[kind].append(ring)
            if ring.in_flight and ring.room < kind.entries // 2:
                self.worn = True  # half of it waits for what does not come, or is behind that
        finally:
            if self._closed.is_set():
                self._close_idle()
            with self._lock:
                self._users -= 1
                if self._retired and not self._users:
                    self._jobs.put(None)

    def retire(self) -> None:
        """Closes it once nobody uses it: I/O that is under way goes on."""
        with self._lock:
            self._retired = True
            if not self._users:
                self._jobs.put(None)

    def run(self, ios: list[Io]) -> list[int]:
        """Reads into memory that was lent, however long it takes. Raises DaemonDead."""
        with self.ring(DIRECT) as ring:
            _, results = ring.run(ios, float("inf"))
        return [r for r in results if r is not None]

    def after_fork(self) -> None:
        """In the child: while it had the handle open too, the daemon would take a dead parent for
        alive."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def close(self) -> None:
        """Takes everything back. May be called twice; I/O that is under way is not waited for."""
        if self.pid != os.getpid():
            return
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._closed.wait(CALL_SECONDS)


class Bounce:
    """Registered memory for I/O that cannot go to where its bytes are wanted. Thread-safe.

    A range whose I/O got no result is kept until that I/O is done after all.
    """

    def __init__(self, arena: Arena, key: bytes) -> None:
        self.view = arena.view[:]  # a view of its own: the arena's is released when it is closed
        self.key = key
        self._ranges = Ranges(0, arena.size)
        self._room = threading.Condition()
        self._late: dict[tuple[int, int], int] = {}
        self._held: dict[int, int] = {}
        self.kept = 0
        """Ranges that wait for late completions."""

    def take(self, size: int, seconds: float) -> int:
        """The offset of a range. Raises TimeoutError if none comes free."""
        with self._room:
            got: list[int] = []

            def found() -> bool:
                offset = self._ranges.take(size)
                got.extend([] if offset is None else [offset])
                return offset is not None

            if not self._room.wait_for(found, seconds):
                raise TimeoutError
            return got[0]

    def give(self, offset: int) -> None:
        with self._room:
            self._ranges.give(offset)
            self._room.notify_all()

    def keep(self, offset: int, ring: BaseRing, serials: list[int]) -> None:
        """Instead of `give`: these I/Os may still use the range."""
        with self._room:
            self._held[offset] = len(serials)
            self._late.update({(id(ring), serial): offset for serial in serials})
            self.kept += 1

    def late(self, ring: BaseRing, serial: int) -> None:
        """One of them is done."""
        with self._room:
            offset = self._late.pop((id(ring), serial), -1)
            if offset < 0:
                return
            self._held[offset] -= 1
            if not self._held[offset]:
                del self._held[offset]
                self.kept -= 1
                self._ranges.give(offset)
                self._room.notify_all()

    @property
    def total(self) -> int:
        return self._ranges.total

    @property
    def free(self) -> int:
        return self._ranges.free_bytes


__all__ = ["Bounce", "DaemonDead", "Io", "Session", "address_of"]
