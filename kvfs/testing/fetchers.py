"""A fetcher in a thread of the test, which can put faults into its storage and look inside.

    with FetcherThread(backend, store.uuid) as fetcher:
        client = fetcher.client()

It is the real thing but for its process: kvfs.fetcher.process has what is missing here. Its clients
must not outlive it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading

import trio

from kvfs.arena import Arena, Ranges
from kvfs.backend import Backend
from kvfs.fetcher.client import FetchClient
from kvfs.fetcher.control import CONTROL_BYTES, ControlArea
from kvfs.fetcher.core import Core
from kvfs.fetcher.server import Server
from kvfs.fetcher.workers import LOST_SECONDS, Workers

_JOIN_SECONDS = 10.0


class FetcherThread:
    """A fetcher for one store; a context manager. Its parts may be looked at."""

    def __init__(
        self, backend: Backend, store: bytes, *, arena_bytes: int = 32 << 20, threads: int = 2,
        stall_seconds: float = 5.0, one_by_one: bool = False, lost_seconds: float = LOST_SECONDS,
    ) -> None:  # fmt: skip
        self._directory = tempfile.TemporaryDirectory(prefix="kvfs-")
        self.path = os.path.join(self._directory.name, "s")
        self.arena = Arena.create(arena_bytes + CONTROL_BYTES)
        self._reader_fd = self.arena.reader_fd()
        ranges = Ranges(CONTROL_BYTES, self.arena.size)
        self.core = Core(self.arena.view, ranges, ControlArea(self.arena.view))
        self.workers = Workers(
            self.core, backend, store, threads, one_by_one=one_by_one, lost_seconds=lost_seconds
        )
        self.server = Server(
            self.core, self._reader_fd, self.workers.stalled_seconds, stall_seconds
        )
        self._clients: list[FetchClient] = []
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=trio.run, args=(self._main,), name="kvfs-test-fetcher"
        )

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        with trio.socket.socket(socket.AF_UNIX) as listener:
            await listener.bind(self.path)
            listener.listen(256)
            self._ready.set()
            await self.server.serve(listener)

    def client(self, timeout: float | None = None) -> FetchClient:
        """A new client, closed with the fetcher if it is not before."""
        client = FetchClient(self.path, timeout)
        self._clients.append(client)
        return client

    def __enter__(self) -> FetcherThread:
        self.workers.start()
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *exc: object) -> None:
        for client in self._clients:
            client.close()
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self.server.stop)
        self._thread.join(_JOIN_SECONDS)
        ended = self.workers.stop(_JOIN_SECONDS)
        os.close(self._reader_fd)
        self.arena.close()
        self._directory.cleanup()
        assert ended, "a thread of the fetcher hangs"
