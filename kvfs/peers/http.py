"""Just as much HTTP/1.1 as the client needs: one deadline over everything, no copies.

General clients limit each wait, not the whole: a peer that sends a byte now and then holds them for
as long as it likes. And a body of a megabyte costs them more than the network. Here a body goes
straight into memory of the caller, chunk by chunk, as long as its length was announced; anything
that kvfs's own server would not send is an error.

Threads: a connection belongs to one request at a time. Blocking, until the deadline and no longer.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from kvfs.peers.wire import MAX_HEAD, join_address

CHUNK = 256 << 10
_MAX_SMALL = 64 << 20
_TICKS = 0.02
"""Seconds by which the kernel's timeout may be late where it counts a hundred ticks a second."""


class PeerError(Exception):
    """An answer that is none, or none in time; says why. Never leaves kvfs.peers.client."""


class Late(PeerError):
    """The time was over before there was an answer."""


class Head(NamedTuple):
    """The first part of an answer. headers: lower-case names."""

    status: int
    headers: dict[str, str]
    length: int
    """Bytes of the body."""


class Connection:
    """A connection to a peer."""

    def __init__(self, host: str, port: int, deadline: float) -> None:
        """host: an IP address; deadline: of time.monotonic. Raises PeerError."""
        self.address = join_address(host, port)
        self.used = False
        """Whether a request has been answered on it."""
        self._ahead = b""
        try:
            self._socket = socket.create_connection((host, port), _left(deadline))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as e:
            raise _failed("no connection", e) from None
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def close(self) -> None:
        self._socket.close()

    def request(
        self, method: str, target: str, headers: dict[str, str], body: Any, deadline: float
    ) -> Head:
        """Sends a request and reads the head of its answer. body: a buffer. Raises PeerError."""
        lines = [f"{method} {target} HTTP/1.1", f"Host: {self.address}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if method == "PUT":
            lines.append(f"Content-Length: {len(body)}")
        try:
            self._socket.settimeout(_left(deadline))
            self._socket.sendall("\r\n".join((*lines, "", "")).encode("latin-1"))
            if len(body):
                self._socket.settimeout(_left(deadline))
                self._socket.sendall(body)
        except OSError as e:
            # It may have been refused before all of it was read: the answer says why.
            if not isinstance(e, BrokenPipeError | ConnectionResetError):
                raise _failed("could not ask", e) from None
        return self._head(deadline)

    def read(self, into: memoryview, deadline: float, seen: Callable[[memoryview], object]) -> None:
        """Fills `into` from the body. seen: gets each part that has come. Raises PeerError."""
        ahead = self._ahead[: len(into)]
        self._ahead = self._ahead[len(ahead) :]
        into[: len(ahead)] = ahead
        seen(into[: len(ahead)])
        done = looked = len(ahead)
        while done < len(into):
            n = self._receive(into[done : looked + CHUNK], deadline, socket.MSG_WAITALL)
            done += n
            if done - looked == CHUNK or done == len(into):
                seen(into[looked:done])
                looked = done

    def read_all(self, length: int, deadline: float) -> bytes:
        """A small body. Raises PeerError."""
        if length > _MAX_SMALL:
            raise PeerError(f"an answer of {length} bytes")
        data = bytearray(length)
        self.read(memoryview(data), deadline, lambda _: None)
        self.used = True
        return bytes(data)

    def _head(self, deadline: float) -> Head:
        data = bytearray(self._ahead)
        while (end := data.find(b"\r\n\r\n")) < 0:
            if len(data) >= MAX_HEAD:
                raise PeerError("the answer has no end of its head")
            part = bytearray(MAX_HEAD)
            n = self._receive(memoryview(part), deadline)
            data += part[:n]
        self._ahead = bytes(data[end + 4 :])
        return parse_head(bytes(data[:end]))

    def _receive(self, into: memoryview, deadline: float, flags: int = 0) -> int:
        # The kernel's own timeout: with Python's, each call is two, and none waits for all of it.
        # It counts in ticks of the clock, so the last of them are waited for otherwise.
        left = _left(deadline)
        try:
            if left > _TICKS:
                timeout = _timeval(left - _TICKS)
                self._socket.setblocking(True)
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
                with contextlib.suppress(BlockingIOError):
                    return self._some(self._socket.recv_into(into, 0, flags))
            while not self._poll.poll(_left(deadline) * 1000):
                pass
            return self._some(self._socket.recv_into(into, 0, socket.MSG_DONTWAIT))
        except OSError as e:
            raise _failed("no answer", e) from None

    def _some(self, n: int) -> int:
        if not n:
            raise PeerError("the peer closed the connection")
        return n


def parse_head(data: bytes) -> Head:
    """The head of an answer. Raises PeerError for what kvfs's server does not send."""
    first, *rest = data.decode("latin-1").split("\r\n")
    version, _, status = first.partition(" ")
    code = status[:3]
    if version != "HTTP/1.1" or not (code.isascii() and code.isdecimal() and len(code) == 3):
        raise PeerError("the answer is not HTTP/1.1")
    headers = {}
    for line in rest:
        name, colon, value = line.partition(":")
        if not colon or name.lower() in headers:
            raise PeerError("the head of the answer is damaged")
        headers[name.lower()] = value.strip()
    length = headers.get("content-length", "")
    if not (length.isascii() and length.isdecimal() and len(length) < 19):
        raise PeerError("the answer does not say how long it is")
    if "transfer-encoding" in headers:
        raise PeerError("the answer comes in chunks")
    return Head(int(code), headers, int(length))


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise Late("not in time")
    return left


def _timeval(seconds: float) -> bytes:
    """At least a microsecond: zero would mean for ever."""
    whole, part = divmod(max(1, int(seconds * 1e6)), 1_000_000)
    return struct.pack("@ll", whole, part)


def _failed(what: str, error: OSError) -> PeerError:
    if isinstance(error, TimeoutError):
        return Late(f"{what}: not in time")
    return PeerError(f"{what}: {error.strerror or error}")
