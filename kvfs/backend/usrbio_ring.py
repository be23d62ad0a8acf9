"""One ring: a batch of I/Os goes in, their results come out, whatever the daemon does meanwhile.

Every I/O has a serial number that is never used again. A completion is believed only if it is
waited for under just that number; what holds its place in the ring is used again only after that.
So what comes late belongs to nobody any more, and cannot be taken for another I/O's result.

Ring is a client of our own; kvfs.backend.usrbio_library has one by 3FS's own library. The caller
sees to it that the memory of an I/O without a result stays its own until `late` is told of it. A
ring belongs to one thread at a time; it does not make or remove shared memory.
"""

from __future__ import annotations

import errno
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvfs.backend import usrbio_layout as layout
from kvfs.backend.semaphores import Semaphore, fence
from kvfs.backend.usrbio_layout import ARGS, COMPLETION, SUBMISSION, RingShape

LOOK_SECONDS = 0.2
"""How long a wait goes on before it asks whether the daemon is alive."""

Results = list[int | None]


class Io(NamedTuple):
    """One read or write: a stretch of a file and one of registered memory, of the same length."""

    memory: bytes
    """The memory's id: 16 bytes."""
    at: int
    """Offset in the memory."""
    file: int
    """The file's inode number; for the library the descriptor that it knows the file by."""
    offset: int
    """Offset in the file."""
    length: int


class DaemonDead(ConnectionError):
    """The daemon is gone, and every I/O under way with it."""


class BaseRing(ABC):
    """What all rings do alike: see the module docstring."""

    def __init__(
        self, alive: Callable[[], bool], limit: Callable[[bytes], int],
        late: Callable[[int], None] = lambda serial: None,
    ) -> None:  # fmt: skip
        """limit: bytes of a registered memory by its id, 0 for one that is not; late: told the
        serial of an I/O that is done after its run ended."""
        self._alive = alive
        self._limit = limit
        self.late = late
        self.serial = 0
        """Of the next I/O."""
        self.foreign = 0
        """Completions that nobody waited for."""

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """I/Os without a result, those of earlier runs included."""

    @property
    @abstractmethod
    def room(self) -> int:
        """I/Os that may be handed over now: fewer than there are slots behind one that hangs."""

    @abstractmethod
    def _send(self, ios: Sequence[Io], first: int) -> int:
        """Hands over as many as there is room for; returns how many. Takes serials for them."""

    @abstractmethod
    def _wait(self, seconds: float) -> bool:
        """Waits until something may be done; False: nothing was for so long."""

    @abstractmethod
    def _reap(self, base: int, results: Results) -> int:
        """Takes what is done, without waiting; returns how many of the run's that began at base."""

    def run(self, ios: Sequence[Io], seconds: float) -> tuple[int, Results]:
        """Does the I/Os, in any order; returns the first one's serial and a result for each.

        A result is what the daemon said: bytes, or an errno below 0; None: not done after so many
        seconds, and it may still happen, until `late` is told the serial. Raises ValueError for an
        I/O outside its memory (nothing is done then) and DaemonDead.
        """
        self._check(ios)
        base, sent, left = self.serial, 0, len(ios)
        results: Results = [None] * left
        until = time.monotonic() + seconds
        while left:
            if sent < len(ios):
                sent += self._send(ios, sent)
            done = self._reap(base, results)
            left -= done
            if not left or done:
                continue
            rest = until - time.monotonic()
            if rest <= 0:
                break
            if not self._wait(min(rest, LOOK_SECONDS)) and not self._alive():
                self.reap()  # what it still finished
                raise DaemonDead
        # Those never handed over have no serial, and will not happen.
        results[sent:] = [-errno.ETIMEDOUT] * (len(ios) - sent)
        return base, results

    def _check(self, ios: Sequence[Io]) -> None:
        """The daemon checks only the first I/O of a batch against its memory: the rest is ours."""
        limits: dict[bytes, int] = {}
        for memory, at, _, offset, length in ios:
            size = limits.get(memory)
            if size is None:
                size = limits[memory] = self._limit(memory)
            if at < 0 or length <= 0 or offset < 0 or at + length > size:
                raise ValueError(f"{length} bytes at {at} of a memory of {size} bytes")

    def _told(self, serial: int, result: int, base: int, results: Results) -> bool:
        """Puts down the result of an I/O that was waited for; says whether it is this run's."""
        if serial >= base:
            results[serial - base] = result
            return True
        self.late(serial)
        return False

    def reap(self) -> None:
        """Takes what came late, if anything did."""
        self._reap(self.serial, [])

    @abstractmethod
    def close(self) -> None:
        """Gives back its memory. Nobody may use it any more."""


class Ring(BaseRing):
    """A ring in shared memory as kvfs.backend.usrbio_layout draws it."""

    def __init__(
        self, memory: memoryview, address: int, submit: Semaphore, alive: Callable[[], bool],
        limit: Callable[[bytes], int], late: Callable[[int], None] = lambda serial: None,
    ) -> None:  # fmt: skip
        """memory, address: the ring, registered. The others are as for BaseRing."""
        super().__init__(alive, limit, late)
        shape = RingShape.of_size(len(memory))
        self._memory = memory
        self._marks = memory[: layout.MARKS].cast("i")
        self._n = shape.n
        self._completions = shape.completions
        self._submissions = shape.submissions
        self._done = Semaphore(address + shape.semaphore)
        self._submit = submit
        self._fence = fence()
        self._free = list(range(shape.n - 1))
        self._owner = [-1] * shape.n
        self._submission = [0] * shape.n  # of each slot's I/O
        self._unfinished = bytearray(shape.n)  # by submission
        self._oldest = 0
        """The first submission without a result: the daemon reads it again when it is done."""

    @property
    def in_flight(self) -> int:
        return self._n - 1 - len(self._free)

    @property
    def room(self) -> int:
        # Batches may end in any order, but submissions are used again in theirs: behind one that
        # takes long there is no room for more, though slots are free. The daemon's own mark of
        # what it has taken does not say it: daemons have moved it before they looked for the last
        # time (src/fuse/IoRing.cc of deepseek-ai/3FS copies submissions first since).
        return min(len(self._free), (self._oldest - self._marks[layout.SUBMITTED] - 1) % self._n)

    def _send(self, ios: Sequence[Io], first: int) -> int:
        memory, free, owner, n = self._memory, self._free, self._owner, self._n
        count = min(self.room, len(ios) - first)
        if not count:
            return 0
        head, serial = self._marks[layout.SUBMITTED], self.serial
        for io in ios[first : first + count]:
            slot = free.pop()
            owner[slot] = serial
            self._submission[slot], self._unfinished[head] = head, 1
            ARGS.pack_into(memory, layout.MARKS + ARGS.size * slot, *io, serial)
            SUBMISSION.pack_into(memory, self._submissions + SUBMISSION.size * head, slot, serial)
            head = head + 1 if head + 1 < n else 0
            serial += 1
        self.serial = serial
        if self._fence is not None:
            self._fence()
        self._marks[layout.SUBMITTED] = head
        self._submit.post()
        return count

    def _wait(self, seconds: float) -> bool:
        return self._done.wait(seconds)

    def _reap(self, base: int, results: Results) -> int:
        memory, n, owner, mine = self._memory, self._n, self._owner, 0
        tail, head = self._marks[layout.REAPED], self._marks[layout.COMPLETED] % n
        if self._fence is not None:
            self._fence()
        while tail != head:
            at = self._completions + COMPLETION.size * tail
            slot, _, result, serial = COMPLETION.unpack_from(memory, at)
            tail = tail + 1 if tail + 1 < n else 0
            if not 0 <= slot < n or owner[slot] != serial:
                self.foreign += 1
                continue
            owner[slot] = -1
            self._free.append(slot)
            self._unfinished[self._submission[slot]] = 0
            mine += self._told(serial, result, base, results)
        self._marks[layout.REAPED] = tail
        submitted = self._marks[layout.SUBMITTED]
        while self._oldest != submitted and not self._unfinished[self._oldest]:
            self._oldest = (self._oldest + 1) % n
        return mine

    def close(self) -> None:
        self._marks.release()
        self._memory.release()
