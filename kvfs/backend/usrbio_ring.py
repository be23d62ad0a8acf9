"""One ring: a batch of I/Os goes in, their results come out, whatever the daemon does meanwhile.

Every I/O has a serial number that is never used again. A completion is believed only if its slot
is waiting for just that number; a slot is used again only after that. So what comes late belongs
to nobody any more, and cannot be taken for another I/O's result.

The caller sees to it that the memory of an I/O without a result stays its own until `late` is told
of it. A Ring belongs to one thread at a time; it does not make or remove shared memory.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvfs.backend import usrbio_layout as layout
from kvfs.backend.semaphores import Semaphore, fence
from kvfs.backend.usrbio_layout import ARGS, COMPLETION, SUBMISSION, RingShape

LOOK_SECONDS = 0.2
"""How long a wait goes on before it asks whether the daemon is alive."""


class Io(NamedTuple):
    """One read or write: a stretch of a file and one of registered memory, of the same length."""

    memory: bytes
    """The memory's id: 16 bytes."""
    at: int
    """Offset in the memory."""
    inode: int
    offset: int
    """Offset in the file."""
    length: int


class DaemonDead(ConnectionError):
    """The daemon is gone, and every I/O under way with it."""


class Ring:
    """See the module docstring."""

    def __init__(
        self, memory: memoryview, address: int, submit: Semaphore, alive: Callable[[], bool],
        limit: Callable[[bytes], int], late: Callable[[int], None] = lambda serial: None,
    ) -> None:  # fmt: skip
        """memory, address: the ring, registered; limit: bytes of a registered memory by its id, 0
        for one that is not; late: told the serial of an I/O that is done after its run ended."""
        shape = RingShape.of_size(len(memory))
        self._memory = memory
        self._marks = memory[: layout.MARKS].cast("i")
        self._n = shape.n
        self._completions = shape.completions
        self._submissions = shape.submissions
        self._done = Semaphore(address + shape.semaphore)
        self._submit = submit
        self._alive = alive
        self._limit = limit
        self.late = late
        self._fence = fence()
        self._free = list(range(shape.n - 1))
        self._owner = [-1] * shape.n
        self.serial = 0
        """Of the next I/O."""
        self.foreign = 0
        """Completions that nobody waited for."""

    @property
    def in_flight(self) -> int:
        """I/Os without a result, those of earlier runs included."""
        return self._n - 1 - len(self._free)

    def run(self, ios: Sequence[Io], seconds: float) -> tuple[int, list[int | None]]:
        """Does the I/Os, in any order; returns the first one's serial and a result for each.

        A result is what the daemon said: bytes, or an errno below 0; None: not done after so many
        seconds, and it may still happen, until `late` is told the serial. Raises ValueError for an
        I/O outside its memory (nothing is done then) and DaemonDead.
        """
        self._check(ios)
        base, sent, left = self.serial, 0, len(ios)
        results: list[int | None] = [None] * left
        until = time.monotonic() + seconds
        while left:
            if sent < len(ios) and self._free:
                sent += self._send(ios, sent)
            done = self._reap(base, results)
            left -= done
            if not left or done:
                continue
            rest = until - time.monotonic()
            if rest <= 0:
                break
            if not self._done.wait(min(rest, LOOK_SECONDS)) and not self._alive():
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

    def _send(self, ios: Sequence[Io], first: int) -> int:
        """Hands over as many as there are slots for; returns how many."""
        memory, free, owner, n = self._memory, self._free, self._owner, self._n
        count = min(len(free), len(ios) - first)
        head, serial = self._marks[layout.SUBMITTED], self.serial
        for io in ios[first : first + count]:
            slot = free.pop()
            owner[slot] = serial
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

    def _reap(self, base: int, results: list[int | None]) -> int:
        """Takes what is done; returns how many of this run's."""
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
            if serial >= base:
                results[serial - base] = result
                mine += 1
            else:
                self.late(serial)
        self._marks[layout.REAPED] = tail
        return mine

    def reap(self) -> None:
        """Takes what came late, if anything did."""
        self._reap(self.serial, [])
