"""Transfers by ring: cut at chunks, through the session's own memory where they must be.

Helpers of kvfs.backend.threefs; no state but a lease of memory.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvfs.backend.usrbio_ring import DaemonDead, Io
from kvfs.backend.usrbio_session import Kind, Session


class Lease:
    """A range of the session's own memory, and the I/O on it."""

    def __init__(self, session: Session, offset: int, seconds: float) -> None:
        self.session = session
        self.offset = offset
        self.seconds = seconds
        self.unfinished = False
        """Some I/O may still use the range: it is kept."""

    def run(self, ios: list[Io], kind: Kind) -> list[int]:
        with self.session.ring(kind) as ring:
            before, self.unfinished = self.unfinished, True  # so it stays where this is broken off
            base, results = ring.run(ios, self.seconds)
            late = [base + i for i, r in enumerate(results) if r is None]
            self.unfinished = before or bool(late)
            if late:
                self.session.bounce.keep(self.offset, ring, late)
        return [-errno.ETIMEDOUT if r is None else r for r in results]


@contextmanager
def as_file_errors(path: str) -> Iterator[None]:
    """What goes wrong below, as errors of a file."""
    try:
        yield
    except DaemonDead as e:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), path) from e
    except TimeoutError as e:
        if e.errno is None:
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), path) from e
        raise
    except OSError as e:
        # An inode that the daemon does not know, though we have it open: another daemon by now.
        if e.errno == errno.EBADF:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), path) from e
        raise


def split_at_chunks(
    places: list[tuple[bytes, int, int]], file: int, offset: int, chunk: int
) -> list[Io]:
    """One I/O for each stretch that lies in one chunk and one place."""
    ios = []
    for key, at, length in places:
        while length:
            n = min(length, chunk - offset % chunk)
            ios.append(Io(key, at, file, offset, n))
            at, offset, length = at + n, offset + n, length - n
    return ios


def gather(views: Sequence[memoryview], into: memoryview) -> None:
    at = 0
    for view in views:
        n = min(len(view), len(into) - at)
        into[at : at + n] = view[:n]
        at += n


def scatter(data: memoryview, views: Sequence[memoryview]) -> None:
    at = 0
    for view in views:
        n = min(len(view), len(data) - at)
        view[:n] = data[at : at + n]
        at += n


def clear(views: Sequence[memoryview], at: int, count: int) -> None:
    """Zeros over `count` bytes of the views taken together, from `at` on."""
    for view in views:
        n = max(0, min(len(view) - at, count))
        if n:
            view[at : at + n] = bytes(n)
            at, count = at + n, count - n
        at -= len(view)
