"""A connection of another host, as hypercorn serves it, with less work for each answer.

hypercorn and trio are made for many small answers to slow readers: each write pushes no more than
the network has room for just now, heads and bodies go apart, and every request ends one task and
begins another only to know when its connection was idle. For one large answer that is most of the
time and of the processor. Here the socket takes much at once, a head goes with the first part of
its body, and idle connections are looked for once a second.

Depends on how hypercorn is made inside: pyproject.toml says with which versions. Awaits: on the
loop of kvfs.peers.server.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Any

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import TrioSingleTask, WorkerContext
from hypercorn.typing import ConnectionState

log = logging.getLogger(__name__)
_UNSENT = 512 << 10
"""Bytes of an answer that wait in the socket at most: a few turns of the loop for a slot, and yet
who takes nothing keeps his turn, not the memory for all of it."""
_GOOD_HEAD = b"HTTP/1.1 2"


class Connections:
    """All connections of a server. `serve` is what trio.serve_listeners calls for each."""

    def __init__(self, app: Any, config: Config, most: int) -> None:
        """app: an ASGI application, which is told of requests alone; keep_alive_timeout of the
        config: seconds that a connection may be idle; most: connections at once."""
        self._app = ASGIWrapper(app)
        self._config = config
        self._context = WorkerContext(None)
        self._most = most
        self._open: dict[_Connection, None] = {}  # in the order in which they came

    async def serve(self, stream: trio.SocketStream) -> None:
        """Serves one connection until it is closed. Where there are too many, the one that has
        asked nothing for longest makes room; without such a one the new one is closed."""
        longest = None
        if len(self._open) >= self._most:
            longest = self._longest_idle()
            if longest is None:
                await trio.aclose_forcefully(stream)
                return
            del self._open[longest]
        state = ConnectionState({})
        connection = _Connection(self._app, self._config, self._context, state, stream)
        self._open[connection] = None  # no await since they were counted
        try:
            if longest is not None:
                await trio.aclose_forcefully(longest.stream)
            await connection
        except Exception:
            log.exception("a connection of another host failed; this is a bug of kvfs")
        finally:
            self._open.pop(connection, None)

    async def close_idle(self) -> None:
        """Closes those that have asked nothing, or half a question, for too long."""
        over = trio.current_time() - self._config.keep_alive_timeout
        await self._close(lambda since: since <= over)

    async def leave(self) -> None:
        """Closes those that ask nothing; the others when they have their answer."""
        await self._context.terminated.set()
        await self._close(lambda since: True)

    def _longest_idle(self) -> _Connection | None:
        idle = [(since, c) for c in self._open if (since := c.idle_task.since) is not None]
        return min(idle, key=lambda found: found[0])[1] if idle else None

    async def _close(self, wanted: Callable[[float], bool]) -> None:
        for connection in list(self._open):
            since = connection.idle_task.since
            if since is not None and wanted(since):
                await trio.aclose_forcefully(connection.stream)


class _Idle(TrioSingleTask):
    """Since when a connection is idle, in place of a task that sleeps until it was too long."""

    def __init__(self) -> None:
        self.since: float | None = None
        """Of trio.current_time(); None: it is not."""

    async def restart(self, task_group: Any, action: Callable[..., Any]) -> None:
        self.since = trio.current_time()

    async def stop(self) -> None:
        self.since = None


class _Connection(TCPServer):
    idle_task: _Idle
    stream: Any

    def __init__(
        self, app: ASGIWrapper, config: Config, context: WorkerContext, state: ConnectionState,
        stream: Any,
    ) -> None:  # fmt: skip
        super().__init__(app, config, context, state, stream)
        self.idle_task = _Idle()
        self._head = b""
        # trio's own 16 KiB are for those who may change their mind about what they said.
        with contextlib.suppress(OSError):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)

    async def protocol_send(self, event: Event) -> None:
        if not isinstance(event, RawData):
            await super().protocol_send(event)
        elif not self._head and event.data.startswith(_GOOD_HEAD):
            self._head = event.data  # the body comes next, or its end, which is empty
        elif event.data or self._head:
            head, self._head = self._head, b""
            await self._send(head, event.data)

    async def _send(self, head: bytes, data: bytes) -> None:
        async with self.send_lock:
            try:
                sent = await self.stream.socket.sendmsg((head, data)) if head else 0
                if sent < len(head):
                    head, data = b"", head + data
                left = memoryview(data)[sent - len(head) :]
                if left:
                    await self.stream.send_all(left)
            except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
                await self.protocol.handle(Closed())
