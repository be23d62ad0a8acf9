"""The fetcher process: arena, core, threads and server put together, and its life.

A shared fetcher is the one of its host, user and store: it listens at a socket and holds a lock,
which the kernel frees when it dies, however it dies; the next one takes over the socket's name. A
private one serves the one connection it was started with and ends with it.

`run` blocks; it belongs in the main thread of a process that does nothing else.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator

import trio

from kvfs.arena import Arena, Ranges
from kvfs.backend import Backend
from kvfs.backend.select import open_backend
from kvfs.config import load_config
from kvfs.errors import BusyError, ConfigError
from kvfs.fetcher.control import CONTROL_BYTES, ControlArea
from kvfs.fetcher.core import Core
from kvfs.fetcher.launch import Options, default_threads, socket_path
from kvfs.fetcher.server import Server
from kvfs.fetcher.workers import Workers
from kvfs.filesystems import LOCAL_DISKS, filesystem_type

log = logging.getLogger(__name__)
_STOP_SECONDS = 1.0
_LOOK_SECONDS = 5.0
Ready = Callable[[str], None]


def run(
    path: str, options: Options, *, backend: Backend | None = None,
    connection: int | None = None, ready: Ready = lambda name: None,
) -> None:  # fmt: skip
    """Is a fetcher for a store, until it is told to end.

    connection: descriptor of a connected socket, for a private one; backend: for fault injection
    and other storage; ready: called once it serves, with the path of its socket or "". Raises
    BusyError if a shared one runs already, ConfigError, NoStoreError, BackendError.
    """
    backend = backend or open_backend(path)
    store = load_config(backend).uuid
    directory = backend.memory_directory() if options.shm is None else options.shm
    with _name(store, connection) as name:
        size = options.arena_bytes + CONTROL_BYTES
        arena = Arena.create(size, directory=directory, tag=store.hex()[:12])
        try:
            with contextlib.suppress(OSError):  # storage that is away is met again at each read
                backend.lend(arena)
            _serve(arena, backend, store, options, name, connection, ready)
        finally:
            backend.release()
            arena.close()


@contextlib.contextmanager
def _name(store: bytes, connection: int | None) -> Iterator[str]:
    """The path of the socket, which is ours alone within the block. Raises BusyError."""
    if connection is not None:
        yield ""
        return
    name = socket_path(store)
    lock = os.open(f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(f"{name}: a fetcher is running for this store already") from None
        yield name
    finally:
        os.close(lock)


def _serve(
    arena: Arena, backend: Backend, store: bytes, options: Options, name: str,
    connection: int | None, ready: Ready,
) -> None:  # fmt: skip
    core = Core(arena.view, Ranges(CONTROL_BYTES, arena.size), ControlArea(arena.view))
    local = filesystem_type(backend.root) in LOCAL_DISKS
    workers = Workers(
        core, backend, store, options.threads or default_threads(local), one_by_one=local
    )
    server = Server(core, arena.reader_fd(), workers.stalled_seconds, options.stall_seconds)
    sock = _listen(name) if connection is None else socket.socket(fileno=connection)
    inode = _inode(name)
    # A worker that comes back from a read wants the interpreter at once, not in 5 ms, and not after
    # a look at everything that was ever imported.
    sys.setswitchinterval(0.0001)
    gc.freeze()
    workers.start()
    try:
        trio.run(_main, server, options, name, sock, ready)
    finally:
        sock.close()
        if name and _inode(name) == inode:
            os.unlink(name)
        if not workers.stop(_STOP_SECONDS):
            # Threads that hang in the storage cannot be joined, and may still write to the arena.
            log.warning("the storage does not answer; leaving its readers to the kernel")
            if arena.path is not None:
                os.unlink(arena.path)
            logging.shutdown()
            os._exit(0)


def _listen(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name)  # of a fetcher that is dead: the lock is ours
    try:
        sock.bind(name)
    except OSError as e:
        sock.close()
        raise ConfigError(f"{name}: {e.strerror or e}; set KVFS_RUNTIME") from e
    sock.listen(128)
    return sock


def _inode(name: str) -> int:
    """Of the socket at a path, or 0: the directory may be removed, or be another's by now."""
    try:
        return os.stat(name).st_ino
    except OSError:
        return 0


async def _main(
    server: Server, options: Options, name: str, sock: socket.socket, ready: Ready
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_until_signal, server)
        if options.parent is not None:
            nursery.start_soon(_until_end_of, options.parent, server)
        ready(name)
        if name:
            nursery.start_soon(_until_unused, server, name, options.idle_seconds)
            await server.serve(trio.socket.from_stdlib_socket(sock))
        else:
            await server.serve_one(trio.socket.from_stdlib_socket(sock))
        nursery.cancel_scope.cancel()


# what ends it


async def _until_signal(server: Server) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async for number in signals:
            log.info("ending at %s", signal.Signals(number).name)
            server.stop()
            return


async def _until_end_of(parent: int, server: Server) -> None:
    with contextlib.suppress(ProcessLookupError), _pidfd(parent) as handle:
        await trio.lowlevel.wait_readable(handle)
    server.stop()


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    handle = os.pidfd_open(pid)
    try:
        yield handle
    finally:
        os.close(handle)


async def _until_unused(server: Server, name: str, seconds: float | None) -> None:
    """Waits until nobody has used the fetcher for so long, or can find it any more."""
    known = _inode(name)
    while True:
        await trio.sleep(_LOOK_SECONDS if seconds is None else min(_LOOK_SECONDS, seconds))
        if server.clients:
            continue
        idle = time.monotonic() - server.idle_since
        if _inode(name) != known or (seconds is not None and idle >= seconds):
            log.info("ending: no client for %.0f s", idle)
            server.stop()
