"""The daemon's side of USRBIO: shared memory that clients registered, rings, faults on demand.

Layout and names are those of kvfs.backend.usrbio_layout, which a test against the genuine library
holds to be the true ones. Thread-safe.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvfs.backend import usrbio_layout as layout
from kvfs.backend.semaphores import Semaphore
from kvfs.backend.usrbio_layout import ARGS, COMPLETION, SUBMISSION, RingShape
from kvfs.testing.threefs.fusewire import Errno

_JOBS_AT_ONCE = 32
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sem_open.restype = ctypes.c_void_p
_libc.sem_open.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_uint]
_libc.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]

File = Callable[[int], "tuple[int, float | None] | None"]
"""inode -> (descriptor, when its last name went or None), or None for one that is not known."""


class Shared:
    """Memory a client registered, by the link it made."""

    def __init__(self, path: str, name: str, pid: int, uid: int) -> None:
        """pid: of the thread that made the link. Raises Errno, OSError."""
        st = os.stat(path)
        if not stat.S_ISREG(st.st_mode) or os.path.dirname(path) != layout.SHM:
            raise Errno(errno.EINVAL)
        self.path, self.name, self.pid, self.uid, self.size = path, name, pid, uid, st.st_size
        key, *options = name.split(".")
        self.key = uuid.UUID(key).bytes
        self.block, self.depth, self.flags, self.priority = st.st_size, 0, 0, 1
        self.is_ring, self.read = False, True
        for option in options:
            self._take(option[:1], option[1:])
        if not 0 < self.block <= self.size:
            raise Errno(errno.EINVAL)
        fd = os.open(path, os.O_RDWR)
        try:
            self.map = mmap.mmap(fd, self.size)
        finally:
            os.close(fd)
        self.view = memoryview(self.map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def _take(self, letter: str, value: str) -> None:
        if letter == "b":
            self.block = int(value)
        elif letter in ("r", "w"):
            self.is_ring, self.read, self.depth = True, letter == "r", int(value)
        elif letter == "f":
            self.flags = int(value, 2)
        elif letter == "p":
            self.priority = {"h": 0, "l": 2}.get(value[:1], 1)


class ServedRing:
    """A ring as the daemon sees it: jobs out, results in."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.shape = RingShape.of_size(shared.size)
        if shared.depth > self.shape.n - 1:
            raise Errno(errno.EINVAL)
        self._marks = shared.view[: layout.MARKS].cast("i")
        address = shared.address + self.shape.semaphore
        _libc.sem_init(address, 1, 0)
        self._done = Semaphore(address)
        self._lock = threading.Lock()
        self._next = self._busy = 0
        self._ends: list[int] = []
        self._finished: set[int] = set()

    def jobs(self) -> list[tuple[int, int]]:
        """(first submission, count) of the batches that may begin now."""
        out: list[tuple[int, int]] = []
        n, depth = self.shape.n, self.shared.depth
        with self._lock:
            waiting = (self._marks[layout.SUBMITTED] + n - self._next) % n
            unread = (self._marks[layout.COMPLETED] + n - self._marks[layout.REAPED]) % n
            room = n - 1 - self._busy - unread
            while waiting and len(out) < _JOBS_AT_ONCE:
                count = min(waiting, room, -depth) if depth < 0 else min(waiting, room)
                if depth > 0:
                    count = depth if count >= depth else 0
                if count <= 0:
                    break
                out.append((self._next, count))
                self._next = (self._next + count) % n
                self._ends.append(self._next)
                self._busy += count
                waiting, room = waiting - count, room - count
        return out

    def submission(self, at: int) -> tuple[int, int]:
        """(slot, serial) of a submission."""
        place = self.shape.submissions + SUBMISSION.size * (at % self.shape.n)
        slot, serial = SUBMISSION.unpack_from(self.shared.view, place)
        return int(slot), int(serial)

    def arguments(self, slot: int) -> tuple[bytes, int, int, int, int, int]:
        place = layout.MARKS + ARGS.size * slot
        return ARGS.unpack_from(self.shared.view, place)

    def finish(self, first: int, results: list[int]) -> None:
        """Shows the results of a whole batch."""
        n = self.shape.n
        with self._lock:
            # Before they are given back: the client writes over them.
            submissions = [self.submission(first + i) for i in range(len(results))]
            self._end((first + len(results)) % n)
            for (slot, serial), result in zip(submissions, results, strict=True):
                head = self._marks[layout.COMPLETED]
                place = self.shape.completions + COMPLETION.size * head
                COMPLETION.pack_into(self.shared.view, place, slot, 0, result, serial)
                self._marks[layout.COMPLETED] = (head + 1) % n
            self._busy -= len(results)
        self._done.post()

    def _end(self, end: int) -> None:
        """Submissions are given back in their order, whichever batch is done first."""
        self._finished.add(end)
        while self._ends and self._ends[0] in self._finished:
            self._finished.discard(self._ends[0])
            self._marks[layout.TAKEN] = self._ends.pop(0)


class Rings:
    """All shared memory of one daemon, and the threads that serve the rings."""

    def __init__(self, file: File, workers: int = 4) -> None:
        self.file = file
        self.knobs: dict[str, float] = {
            "delay_ms": 0, "fail_every": 0, "fail_errno": errno.EIO, "short_every": 0,
            "drop_every": 0, "late_ms": 0, "gc_delay_s": 300, "old": 0,
        }  # fmt: skip
        self.totals = {
            "batches": 0, "reads": 0, "writes": 0, "bytes": 0, "read_cpu": 0.0, "removals": 0,
        }  # fmt: skip
        self._count = 0
        self._memories: dict[bytes, Shared] = {}
        self._rings: dict[str, ServedRing] = {}
        self._pool = ThreadPoolExecutor(workers)
        self.names = [f"hf3fs-submit-ios.{uuid.uuid4()}" for _ in range(3)]
        self._submitted = [self._semaphore(name) for name in self.names]
        for priority in range(3):
            threading.Thread(target=self._watch, args=(priority,), daemon=True).start()

    @staticmethod
    def _semaphore(name: str) -> Semaphore:
        address = _libc.sem_open(f"/{name}".encode(), os.O_CREAT, 0o666, 0)
        if not address:
            raise OSError(ctypes.get_errno(), "sem_open", name)
        os.chmod(f"{layout.SHM}/sem.{name}", 0o666)
        return Semaphore(address)

    def close(self) -> None:
        for name in self.names:
            _libc.sem_unlink(f"/{name}".encode())

    def add(self, shared: Shared) -> None:
        if shared.is_ring:
            self._rings[shared.name] = ServedRing(shared)
        self._memories[shared.key] = shared

    def remove(self, shared: Shared) -> None:
        self._rings.pop(shared.name, None)
        self._memories.pop(shared.key, None)

    def _watch(self, priority: int) -> None:
        """As the true daemon: it looks at the rings when it is told to, and never else."""
        while True:
            if not self._submitted[priority].wait(1.0):
                continue
            again = True
            while again:
                again = False
                for ring in list(self._rings.values()):
                    if ring.shared.priority == priority:
                        for job in ring.jobs():
                            again = True
                            self._pool.submit(self._process, ring, *job)

    def _process(self, ring: ServedRing, first: int, count: int) -> None:
        try:
            if self.knobs["delay_ms"]:
                time.sleep(self.knobs["delay_ms"] / 1e3)
            began = time.thread_time()
            results = [self._one(ring, ring.submission(first + i)[0]) for i in range(count)]
            self._add_up(ring, count, time.thread_time() - began)
            if None in results:  # one that is lost holds up its whole batch
                if not self.knobs["late_ms"]:
                    return
                time.sleep(self.knobs["late_ms"] / 1e3)
                results = [self._io(ring, ring.submission(first + i)[0]) for i in range(count)]
            ring.finish(first, [r for r in results if r is not None])
            self._submitted[ring.shared.priority].post()  # more may have been queued meanwhile
        except Exception as e:
            print("ring:", repr(e), file=sys.stderr, flush=True)

    def _add_up(self, ring: ServedRing, count: int, seconds: float) -> None:
        self.totals["batches"] += 1
        self.totals["reads" if ring.shared.read else "writes"] += count
        if ring.shared.read:
            self.totals["read_cpu"] += seconds

    def _every(self, knob: str) -> bool:
        return bool(self.knobs[knob]) and self._count % int(self.knobs[knob]) == 0

    def _one(self, ring: ServedRing, slot: int) -> int | None:
        self._count += 1
        if self._every("drop_every"):
            return None
        if self._every("fail_every"):
            return -int(self.knobs["fail_errno"])
        return self._io(ring, slot, short=ring.shared.read and self._every("short_every"))

    def _io(self, ring: ServedRing, slot: int, *, short: bool = False) -> int:
        key, at, inode, offset, length, _ = ring.arguments(slot)
        memory, read = self._memories.get(key), ring.shared.read
        try:
            found = self.file(inode)
        except OSError as e:  # a directory
            return -(e.errno or errno.EIO)
        if found is None:
            return -errno.EBADF
        fd, gone = found
        if memory is None or at + length > memory.size:
            return -errno.EINVAL
        if length and at // memory.block != (at + length - 1) // memory.block:
            return -errno.EINVAL
        if gone is not None and time.time() - gone > self.knobs["gc_delay_s"]:
            return 0 if read else length
        length = length // 2 if short else length
        try:
            if read and ring.shared.flags & layout.FORBID_HOLES and _has_hole(fd, offset, length):
                return -errno.ENODATA
            view = memory.view[at : at + length]
            n = os.preadv(fd, [view], offset) if read else os.pwritev(fd, [view], offset)
        except OSError as e:
            return -(e.errno or errno.EIO)
        self.totals["bytes"] += n
        return n


def _has_hole(fd: int, offset: int, length: int) -> bool:
    end = os.fstat(fd).st_size
    if not length or offset >= end:
        return False
    try:
        return os.lseek(fd, offset, os.SEEK_HOLE) < min(end, offset + length)
    except OSError:
        return False
