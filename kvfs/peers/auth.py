"""Who may ask for slots: HMAC-SHA256 over requests and answers, with a secret the hosts share.

A request is bound to its method, target, the address it was sent to, a time, a nonce and what it
carries; an answer to the request's nonce, its status, the instance that gives it and what it
carries. So neither can be made up, sent to another host, or sent twice. No I/O but reading the
secret. Threads: a ReplayWindow belongs to one; the rest is immutable.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import time
from collections import OrderedDict
from collections.abc import Callable

from kvfs.errors import ConfigError

SECRET_VARIABLE = "KVFS_PEER_SECRET"
MIN_SECRET = 16
MAX_SECRET = 4096
WINDOW_SECONDS = 30.0
"""How far the clocks of two hosts may differ, travel included."""
NONCE_BYTES = 16
MAC_BYTES = 32
_MAX_NONCES = 1 << 18


class Secret:
    """What the hosts of a fleet share. Its bytes are never shown."""

    __slots__ = ("_start",)

    def __init__(self, key: bytes) -> None:
        """Raises ConfigError for a secret that is too short."""
        if not MIN_SECRET <= len(key) <= MAX_SECRET:
            raise ConfigError(
                f"the secret has {len(key)} bytes; {MIN_SECRET} to {MAX_SECRET} will do"
            )
        self._start = hmac.new(key, digestmod=hashlib.sha256)

    @classmethod
    def load(cls, path: str | None = None) -> Secret:
        """From a file that its owner alone can read, else from $KVFS_PEER_SECRET.

        White space at the ends does not count. Raises ConfigError.
        """
        if path is not None:
            return cls(_read(path).strip())
        value = os.environ.get(SECRET_VARIABLE, "")
        if not value:
            raise ConfigError(
                f"no secret to talk to other hosts with: give --secret-file or {SECRET_VARIABLE}"
            )
        return cls(os.fsencode(value).strip())

    def of_request(
        self, method: str, target: str, host: str, time_ms: int, nonce: bytes, content: bytes
    ) -> bytes:
        """The MAC of a request. content: the description of the slot it brings, or nothing."""
        return self._mac(
            b"kvfs peer request 1", method.encode(), target.encode("latin-1"),
            host.encode("latin-1"), str(time_ms).encode(), nonce, content,
        )  # fmt: skip

    def of_answer(self, nonce: bytes, status: int, instance: bytes, content: bytes) -> bytes:
        """The MAC of an answer. content: the description of its slot, else its whole body."""
        return self._mac(
            b"kvfs peer answer 1", nonce, str(status).encode(), instance, content
        )  # fmt: skip

    def _mac(self, *fields: bytes) -> bytes:
        mac = self._start.copy()
        for field in fields:
            mac.update(len(field).to_bytes(4, "little"))
            mac.update(field)
        return mac.digest()


def same(a: bytes, b: bytes) -> bool:
    """Compares in a time that does not tell where they differ."""
    return hmac.compare_digest(a, b)


class ReplayWindow:
    """The nonces of the requests whose time is not over: each is good for one."""

    def __init__(
        self, seconds: float = WINDOW_SECONDS, *, most: int = _MAX_NONCES,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """most: requests within two windows; what is beyond is refused, not forgotten."""
        self.window_ms = int(seconds * 1000)
        self._most = most
        self._clock = clock
        self._seen: OrderedDict[bytes, int] = OrderedDict()

    def refusal(self, time_ms: int, nonce: bytes) -> str | None:
        """Why a request whose MAC is right is refused all the same; None: it is not, from now on.

        To be asked once for each request.
        """
        now = int(self._clock() * 1000)
        off = time_ms - now
        if abs(off) > self.window_ms:
            return f"the clocks of the two hosts differ by {abs(off) / 1000:.0f} s"
        self._forget(now)
        if nonce in self._seen:
            return "the request was sent twice"
        if len(self._seen) >= self._most:
            return "too many requests"
        # Until when the same request could come again: its time plus the window, at most two.
        self._seen[nonce] = now + 2 * self.window_ms
        return None

    def _forget(self, now_ms: int) -> None:
        while self._seen:
            nonce, until = next(iter(self._seen.items()))
            if until >= now_ms:
                return
            del self._seen[nonce]


def _read(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as f:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{path}: not a file")
            if found.st_uid not in (0, os.geteuid()):
                raise ConfigError(f"{path}: belongs to another user")
            if found.st_mode & 0o077:
                raise ConfigError(f"{path}: others can read the secret; chmod 600 {path}")
            return f.read(MAX_SECRET + 2)
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from e
