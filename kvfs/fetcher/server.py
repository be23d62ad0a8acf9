"""The fetcher's trio side: sockets, deadlines, and clients that come and go.

One task a client. Nothing here touches the storage: threads do (kvfs.fetcher.workers). A client
that dies, however, loses its tickets at once; one that breaks the protocol is disconnected; the
others do not notice. When the server ends, tickets are left as they are: nothing will be written
over their blocks any more, so clients can finish with them.
"""

from __future__ import annotations

import errno
import json
import logging
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from kvfs.errors import BusyError, InputError, KvfsError
from kvfs.fetcher import wire
from kvfs.fetcher.core import Core, Ticket
from kvfs.fetcher.watches import Deadlines, Deaths
from kvfs.fetcher.wire import Range
from kvfs.layout import Identity
from kvfs.namespace import Namespace

log = logging.getLogger(__name__)
MAX_CLIENTS = 384
MAX_TICKETS = 128
MAX_NAMESPACES = 64
"""Of one client, both."""
MAX_SECONDS = 600.0
"""No request is worked on for longer, whatever its deadline."""
FRAME_SECONDS = 5.0
"""A client that has begun a frame must have sent it in this time."""
_RECEIVE, _RECEIVE_MORE = 4 << 10, 64 << 10
_MAX_FDS = 16
_OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@dataclass(eq=False)
class _Client:
    """A connection and its tickets."""

    sock: trio.socket.SocketType
    tickets: dict[tuple[int, int], Ticket] = field(default_factory=dict)
    namespaces: dict[bytes, Namespace] = field(default_factory=dict)
    buffer: bytearray = field(default_factory=bytearray)
    end: trio.CancelScope = field(default_factory=trio.CancelScope)
    greeted: bool = False
    problem: str = ""
    """What was wrong with the last namespace it told."""


class Server:
    """Serves a Core to the clients of one listening socket."""

    def __init__(
        self, core: Core, arena_fd: int, stalled: Callable[[], float], stall_seconds: float
    ) -> None:
        """arena_fd: a descriptor clients may have; stalled: for how long no thread has had an
        answer from the storage; when that is more than stall_seconds, nothing is asked of it."""
        self.core = core
        self.arena_fd = arena_fd
        self.stalled = stalled
        self.stall_seconds = stall_seconds
        self.idle_since = time.monotonic()
        """When the last client left; means nothing while there is one."""
        self._clients: dict[_Client, None] = {}
        self._deadlines = Deadlines(core.expire)
        self._deaths = Deaths()
        self._scope = trio.CancelScope()
        self._stopping = False

    @property
    def clients(self) -> int:
        return len(self._clients)

    async def serve(self, listener: trio.socket.SocketType) -> None:
        """Accepts clients until `stop`."""
        async with self._running() as nursery:
            while True:
                sock = await _accept(listener)
                if len(self._clients) >= MAX_CLIENTS and not self._make_room():
                    log.warning("refused a client: there are %d", len(self._clients))
                    sock.close()
                    continue
                nursery.start_soon(self._serve, self._welcome(sock))

    async def serve_one(self, sock: trio.socket.SocketType) -> None:
        """Serves one client until it leaves, or `stop`."""
        async with self._running():
            await self._serve(self._welcome(sock))
            self.stop()

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[trio.Nursery]:
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._deadlines.run)
                nursery.start_soon(self._deaths.run)
                yield nursery

    def _welcome(self, sock: trio.socket.SocketType) -> _Client:
        client = _Client(sock)
        self._clients[client] = None
        return client

    def stop(self) -> None:
        """Lets go of the clients, but not of what they hold."""
        self._stopping = True
        self._scope.cancel()

    def _make_room(self) -> bool:
        """Ends the oldest connection that has said nothing yet; says whether there was one."""
        stranger = next((c for c in self._clients if not c.greeted), None)
        if stranger is not None:
            stranger.end.cancel()
            del self._clients[stranger]
        return stranger is not None

    async def _serve(self, client: _Client) -> None:
        handle = self._deaths.watch(_pid_of_peer(client.sock), client.end)
        try:
            with client.end:
                while True:
                    await self._handle(client, *await self._frame(client))
        except EOFError:
            pass
        except (InputError, OSError) as e:
            self.core.count("clients_disconnected")
            log.info("client disconnected: %s", e)
        except Exception:  # a bug in one request must not end the others
            log.exception("client disconnected by an internal error")
        finally:
            self._deaths.forget(handle)
            self._leave(client)

    def _leave(self, client: _Client) -> None:
        self._clients.pop(client, None)
        self.idle_since = time.monotonic()
        client.sock.close()
        if not self._stopping:
            for ticket in client.tickets.values():
                self.core.release(ticket)

    # frames

    async def _frame(self, client: _Client) -> tuple[int, bytes, int]:
        """(type, body, number). Raises EOFError, and InputError for one that cannot be right."""
        buffer = client.buffer
        if client.greeted and not buffer:
            await self._receive(client)  # which may take as long as it likes
        if not _whole(buffer):
            with trio.move_on_after(FRAME_SECONDS):
                while not _whole(buffer):
                    await self._receive(client)
        if not _whole(buffer):
            raise InputError(f"a frame that was not sent within {FRAME_SECONDS:.0f} s")
        length, kind, number = wire.parse_head(buffer)
        end = wire.HEAD.size + length
        body = bytes(buffer[wire.HEAD.size : end])
        del buffer[:end]
        return kind, body, number

    async def _receive(self, client: _Client) -> None:
        space = socket.CMSG_SPACE(4 * _MAX_FDS)
        most = _RECEIVE_MORE if client.buffer else _RECEIVE
        data, ancillary, flags, _ = await client.sock.recvmsg(most, space)
        fds = wire.take_fds(ancillary)
        if fds or flags & socket.MSG_CTRUNC:
            wire.close_all(fds)
            raise InputError("descriptors nobody asked for")
        if not data:
            raise EOFError
        client.buffer += data

    async def _handle(self, client: _Client, kind: int, body: bytes, number: int) -> None:
        if kind == wire.HELLO:
            wire.parse_hello(body)
            client.greeted = True
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", self.arena_fd))]
            await client.sock.sendmsg([wire.welcome()], rights)
        elif not client.greeted:
            raise InputError("no HELLO")
        elif kind == wire.FETCH:
            try:
                await _send(client.sock, self._fetch(client, body, number))
            finally:
                self.core.work_on()
        elif kind == wire.RELEASE:
            ticket = client.tickets.pop(wire.parse_release(body), None)
            if ticket is not None:
                self.core.release(ticket)
        elif kind == wire.NAMESPACE:
            self._learn(client, body)
        elif kind in (wire.STATS, wire.EVICT):
            if kind == wire.EVICT:
                self.core.evict_idle()
            figures = json.dumps({**self.core.stats(), "clients": self.clients}).encode()
            await _send(client.sock, wire.frame(wire.FIGURES, figures, number))
        else:
            raise InputError(f"a frame of unknown type {kind}")

    # requests

    def _learn(self, client: _Client, body: bytes) -> None:
        """Takes in a namespace. Raises InputError for what is none."""
        try:
            ns = Namespace(Identity.from_json(json.loads(body)), 0, "")
        except (ValueError, RecursionError) as e:
            raise InputError(f"not the JSON of a namespace: {e}") from None
        except KvfsError as e:  # said when something is to be fetched in it
            client.problem = str(e)
            return
        if len(client.namespaces) >= MAX_NAMESPACES:
            raise InputError(f"{MAX_NAMESPACES} namespaces")
        client.namespaces[ns.nsid] = ns

    def _fetch(self, client: _Client, body: bytes, number: int) -> bytes:
        """Takes a request in and returns the answer's frame."""
        request = wire.parse_fetch(body)
        try:
            return self._admit(client, request, number)
        except KvfsError as e:
            return wire.refused(number, e.exit_code, str(e))

    def _admit(self, client: _Client, request: wire.FetchRequest, number: int) -> bytes:
        ns = client.namespaces.get(request.nsid)
        if ns is None:
            raise InputError(client.problem or "FETCH in a namespace that was not told")
        if len(client.tickets) >= MAX_TICKETS:
            raise BusyError(f"this client has {MAX_TICKETS} tickets")
        stalled = self.stalled()
        down = ""
        if stalled > self.stall_seconds:
            down = f"backend down: no answer for {stalled:.1f} s"
        ticket = Ticket(ns, request.priority)
        self.core.admit(ticket, request.pieces, checksums=request.checksums, down=down)
        key = ticket.slot, ticket.generation
        client.tickets[key] = ticket
        ranges = _ranges(ticket)  # before it may expire and let parts go
        if not ticket.ended:
            self._deadlines.add(min(request.deadline, time.monotonic() + MAX_SECONDS), ticket)
        return wire.ticket(number, *key, ticket.wanted, ranges)


def _whole(buffer: bytearray) -> bool:
    """Says whether a frame is here. Raises InputError for one that cannot be right."""
    have = len(buffer) - wire.HEAD.size
    return have >= 0 and have >= wire.parse_head(buffer)[0]


def _ranges(ticket: Ticket) -> list[Range]:
    """Where a ticket's blocks lie; what lies in one piece is one range."""
    stride = ticket.ns.stride
    ranges: list[Range] = []
    block = count = offset = 0
    for stretch, index, n, first in ticket.parts:
        at = stretch.offset + index * stride
        if count and at == offset + count * stride:
            count += n
            continue
        if count:
            ranges.append(Range(block, count, offset))
        block, count, offset = first, n, at
    if count:
        ranges.append(Range(block, count, offset))
    return ranges


async def _accept(listener: trio.socket.SocketType) -> trio.socket.SocketType:
    while True:
        try:
            sock, _ = await listener.accept()
            return sock
        except OSError as e:
            if e.errno not in _OUT_OF_FILES:
                continue  # that client is gone already
            log.warning("cannot accept a client: %s", e)
            await trio.sleep(0.1)


def _pid_of_peer(sock: trio.socket.SocketType) -> int:
    """0 if it is of another pid namespace."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", credentials)[0])


async def _send(sock: trio.socket.SocketType, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[await sock.send(view) :]
