"""A lease on the store: who holds `gc.lease` may collect, the others are told who it is.

The file is made whole or not at all, names its holder and says until when it counts. It is taken
over from a holder that is dead, as far as this host can see, or whose time is over. Taking over is
not atomic on a shared file system: a holder looks again before each step and stops once the file is
another's. What two collectors would do at once is harmless; the lease saves the work.

One Lease belongs to one thread.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvfs.backend import Backend
from kvfs.errors import BackendError, BusyError
from kvfs.index.guard import boot_id

PATH = "gc.lease"
SECONDS = 600.0
_LIMIT = 1 << 16
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Holder:
    """The content of a lease. started: of the process, in clock ticks since the host booted."""

    host: str
    pid: int
    boot_id: str
    pid_namespace: str
    started: int
    token: str
    expires_ms: int

    @classmethod
    def me(cls, expires_ms: int) -> Holder:
        pid = os.getpid()
        return cls(
            socket.gethostname(), pid, boot_id(), _pid_namespace(), _started(pid) or 0,
            secrets.token_hex(8), expires_ms,
        )  # fmt: skip

    def encode(self) -> bytes:
        return (json.dumps(asdict(self)) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes) -> Holder | None:
        """None for a file that is not a lease of ours."""
        try:
            fields: dict[str, Any] = json.loads(data)
            return cls(**{**fields, "expires_ms": int(fields["expires_ms"])})
        except (ValueError, TypeError, KeyError):
            return None

    def dead(self) -> bool:
        """The process is gone; only of processes that this one could see is that known."""
        if (self.boot_id, self.pid_namespace) != (boot_id(), _pid_namespace()):
            return False
        return _started(self.pid) != self.started


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _started(pid: int) -> int | None:
    """When a process began (a number is given again to others), or None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return int(f.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


class Lease:
    """The lease, held by this process. Get it with `acquire`; it is a context manager."""

    def __init__(
        self, backend: Backend, holder: Holder, now_ms: Callable[[], int], seconds: float
    ) -> None:
        self._backend = backend
        self._holder = holder
        self._now_ms = now_ms
        self._seconds = seconds

    @classmethod
    def acquire(
        cls, backend: Backend, now_ms: Callable[[], int], *, seconds: float = SECONDS
    ) -> Lease:
        """Takes the lease for some seconds. Raises BusyError naming the holder, BackendError."""
        try:
            for _ in range(_TRIES):
                me = Holder.me(now_ms() + int(seconds * 1000))
                if backend.put_new(PATH, me.encode()):
                    lease = cls(backend, me, now_ms, seconds)
                    lease.check()
                    return lease
                _remove_if_over(backend, now_ms())
        except OSError as e:
            raise BackendError(f"{backend.root}/{PATH}: {e.strerror or e}") from e
        raise BusyError(f"{backend.root}/{PATH}: others take the lease again and again")

    def check(self) -> None:
        """Raises BusyError if the lease is another's by now; prolongs it when half is over."""
        try:
            found = holder(self._backend)
            if found is None or found.token != self._holder.token:
                raise BusyError(f"the lease {PATH} was taken over{_by(found)}")
        except OSError as e:
            raise BackendError(f"{self._backend.root}/{PATH}: {e.strerror or e}") from e
        left = self._holder.expires_ms - self._now_ms()
        if left < self._seconds * 500:
            self.prolong(self._seconds)

    def prolong(self, seconds: float) -> None:
        """Holds the lease for so many seconds from now. Raises BackendError."""
        self._holder = replace(self._holder, expires_ms=self._now_ms() + int(seconds * 1000))
        try:
            self._backend.replace(PATH, self._holder.encode())
        except OSError as e:
            raise BackendError(f"{self._backend.root}/{PATH}: {e.strerror or e}") from e

    def release(self) -> None:
        """Gives the lease back, if it is still ours. Raises nothing: it ends by itself."""
        try:
            found = holder(self._backend)
            if found is not None and found.token == self._holder.token:
                self._backend.unlink(PATH)
        except OSError:
            pass

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def holder(backend: Backend) -> Holder | None:
    """Who holds the lease as far as its file says, None if nobody does. Raises OSError."""
    try:
        return Holder.decode(backend.load(PATH, _LIMIT))
    except FileNotFoundError:
        return None


def _remove_if_over(backend: Backend, now_ms: int) -> None:
    """Removes a lease whose holder is dead or late. Raises BusyError if it counts."""
    found = holder(backend)
    if found is None or found.expires_ms <= now_ms or found.dead():
        backend.unlink(PATH)
        return
    seconds = (found.expires_ms - now_ms) // 1000
    raise BusyError(
        f"already running{_by(found)}; its lease ({backend.root}/{PATH}) counts for another "
        f"{seconds} s unless it is prolonged"
    )


def _by(holder: Holder | None) -> str:
    return "" if holder is None else f": process {holder.pid} on {holder.host}"
