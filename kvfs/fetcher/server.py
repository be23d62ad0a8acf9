"""The fetcher's trio side: sockets, deadlines, and clients that come and go.

One task a client. Nothing here touches the storage: threads do (kvfs.fetcher.workers). A client
whose socket closes, however it died, loses its tickets. A client that breaks the protocol is
disconnected; the others do not notice.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from kvfs.errors import BusyError, InputError, KvfsError
from kvfs.fetcher import wire
from kvfs.fetcher.core import Busy, Core, Ticket
from kvfs.fetcher.wire import Range
from kvfs.layout import Identity
from kvfs.namespace import Namespace
from kvfs.plan import Plan

log = logging.getLogger(__name__)
MAX_CLIENTS = 512
MAX_TICKETS = 128
"""Of one client."""
_RECEIVE = 64 << 10
_MAX_FDS = 16


@dataclass(eq=False)
class _Client:
    """A connection and its tickets."""

    sock: trio.socket.SocketType
    tickets: dict[tuple[int, int], Ticket] = field(default_factory=dict)
    waiters: dict[tuple[int, int], trio.CancelScope] = field(default_factory=dict)
    buffer: bytearray = field(default_factory=bytearray)
    fds: deque[int] = field(default_factory=deque)


class Server:
    """Serves a Core to the clients of one listening socket."""

    def __init__(
        self, core: Core, arena_fd: int, arena_bytes: int,
        stalled: Callable[[], float], stall_seconds: float,
    ) -> None:  # fmt: skip
        """arena_fd: a descriptor clients may have; stalled: for how long no thread has had an
        answer from the storage; when it is more than stall_seconds new requests miss at once."""
        self.core = core
        self.arena_fd = arena_fd
        self.arena_bytes = arena_bytes
        self.stalled = stalled
        self.stall_seconds = stall_seconds
        self._namespaces: dict[bytes, Namespace] = {}
        self._clients = 0

    async def serve(self, listener: trio.socket.SocketType) -> None:
        """Accepts clients until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                sock, _ = await listener.accept()
                if self._clients >= MAX_CLIENTS:
                    sock.close()
                    continue
                self._clients += 1
                nursery.start_soon(self._client, sock, nursery)

    async def _client(self, sock: trio.socket.SocketType, nursery: trio.Nursery) -> None:
        client = _Client(sock)
        try:
            while True:
                kind, body = await self._frame(client)
                await self._handle(client, kind, body, nursery)
        except EOFError:
            pass
        except (InputError, OSError, trio.ClosedResourceError) as e:
            log.info("client disconnected: %s", e)
        except Exception:  # a bug in one request must not end the others
            log.exception("client disconnected by an internal error")
        finally:
            self._clients -= 1
            self._leave(client)

    def _leave(self, client: _Client) -> None:
        for scope in client.waiters.values():
            scope.cancel()
        for ticket in client.tickets.values():
            self.core.release(ticket)
        wire.close_all(list(client.fds))
        client.sock.close()

    async def _frame(self, client: _Client) -> tuple[int, bytes]:
        """The next frame. Raises EOFError, and InputError for one that is too long."""
        buffer = client.buffer
        while True:
            if len(buffer) >= wire.HEAD.size:
                length, kind, _ = wire.HEAD.unpack_from(buffer)
                if length > wire.CLIENT_LIMIT:
                    raise InputError(f"a frame of {length} bytes")
                end = wire.HEAD.size + length
                if len(buffer) >= end:
                    body = bytes(buffer[wire.HEAD.size : end])
                    del buffer[:end]
                    return kind, body
            space = socket.CMSG_SPACE(4 * _MAX_FDS)
            data, ancillary, _, _ = await client.sock.recvmsg(_RECEIVE, space)
            client.fds.extend(wire.take_fds(ancillary))
            if len(client.fds) > _MAX_FDS:
                raise InputError(f"{len(client.fds)} descriptors that no request uses")
            if not data:
                raise EOFError
            buffer += data

    async def _handle(self, client: _Client, kind: int, body: bytes, nursery: trio.Nursery) -> None:
        if kind == wire.FETCH:
            await _send(client.sock, self._fetch(client, body, nursery))
        elif kind == wire.RELEASE:
            self._release(client, wire.parse_release(body))
        elif kind == wire.HELLO:
            wire.parse_hello(body)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, self.arena_fd.to_bytes(4, "little"))]
            await client.sock.sendmsg([wire.welcome(self.arena_bytes)], rights)
        elif kind in (wire.STATS, wire.EVICT):
            if kind == wire.EVICT:
                self.core.evict_idle()
            figures = {**self.core.stats(), "clients": self._clients}
            await _send(client.sock, wire.frame(wire.FIGURES, json.dumps(figures).encode()))
        else:
            raise InputError(f"a frame of unknown type {kind}")

    def _fetch(self, client: _Client, body: bytes, nursery: trio.Nursery) -> bytes:
        """Takes a request in and returns the answer's frame."""
        fields = wire.parse_fetch(body)
        if not client.fds:
            raise InputError("FETCH without a descriptor")
        fd = client.fds.popleft()
        try:
            memory = wire.map_sealed(fd, fields.total)
        finally:
            wire.close_all([fd])
        try:
            return self._admit(client, fields, memory, nursery)
        except Busy as e:
            return wire.refused(BusyError.exit_code, f"busy: {e}")
        except KvfsError as e:
            return wire.refused(e.exit_code, str(e))

    def _admit(
        self, client: _Client, fields: wire.FetchFrame, memory: memoryview, nursery: trio.Nursery
    ) -> bytes:
        stalled = self.stalled()
        if stalled > self.stall_seconds:
            self.core.count("refused_stalled")
            return wire.refused(9, f"backend down: no answer for {stalled:.1f} s")
        if len(client.tickets) >= MAX_TICKETS:
            raise Busy(f"this client has {MAX_TICKETS} tickets")
        plan = Plan.from_json(_json(memory[: fields.plan_bytes]))
        ns = self._namespace(plan.nsid, memory[fields.plan_bytes : fields.total])
        if fields.wanted > plan.stored_blocks:
            raise InputError(f"{fields.wanted} blocks asked for, {plan.stored_blocks} in the plan")
        ticket = Ticket(client, ns, min(fields.priority, 9))
        checksums = not fields.flags & wire.NO_CHECKSUMS
        self.core.admit(ticket, plan, fields.wanted, checksums=checksums)
        key = ticket.slot, ticket.generation
        client.tickets[key] = ticket
        ranges = [
            Range(p.block, p.count, p.stretch.offset + p.index * ns.stride) for p in ticket.parts
        ]
        if not ticket.ended:
            nursery.start_soon(self._expire, client, key, ticket, fields.deadline)
        return wire.ticket(*key, ticket.wanted, ranges[: wire.MAX_RANGES])

    def _namespace(self, nsid: bytes, identity: memoryview) -> Namespace:
        ns = self._namespaces.get(nsid)
        if ns is None:
            ns = Namespace(Identity.from_json(_json(identity)), 0, "")
            if ns.nsid != nsid:
                raise InputError("the plan is of another namespace than the identity")
            self._namespaces[nsid] = ns
        return ns

    def _release(self, client: _Client, key: tuple[int, int]) -> None:
        ticket = client.tickets.pop(key, None)
        scope = client.waiters.pop(key, None)
        if scope is not None:
            scope.cancel()
        if ticket is not None:
            self.core.release(ticket)

    async def _expire(
        self, client: _Client, key: tuple[int, int], ticket: Ticket, deadline: float
    ) -> None:
        """Ends a ticket at its deadline, unless it ends before."""
        seconds = deadline - time.monotonic()
        with trio.CancelScope() as scope:
            client.waiters[key] = scope
            await trio.sleep(max(0.0, seconds))
            self.core.expire(ticket)
        if client.waiters.get(key) is scope:
            del client.waiters[key]


def _json(data: memoryview) -> dict[str, object]:
    try:
        value = json.loads(bytes(data))
    except ValueError as e:
        raise InputError(f"a request that is no JSON: {e}") from e
    if not isinstance(value, dict):
        raise InputError("a request that is no JSON object")
    return value


async def _send(sock: trio.socket.SocketType, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[await sock.send(view) :]
