"""One fetcher for each host, user and store: finding it, starting it, being it.

The socket and the lock lie in $XDG_RUNTIME_DIR/kvfs or /run/kvfs (root) or /tmp/kvfs-<uid>, a
directory that only its user may enter. The kernel frees the lock when a fetcher dies, however it
dies; the next one takes over the socket's name.

`python -m kvfs.fetcher.launch STORE` runs one in the foreground.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from dataclasses import dataclass

from kvfs.arena import Arena, Ranges
from kvfs.backend import Backend, PosixBackend
from kvfs.config import load_config
from kvfs.errors import BackendError, BusyError, ConfigError
from kvfs.fetcher.client import FetchClient
from kvfs.fetcher.tickets import CONTROL_BYTES, ControlArea
from kvfs.index.place import filesystem_type

log = logging.getLogger(__name__)
ARENA_BYTES = 2 << 30
START_SECONDS = 20.0
_LOCAL_DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"})


@dataclass(frozen=True, slots=True)
class Options:
    """How a fetcher runs.

    arena_bytes: shared memory for blocks; threads: of reading (None: half the cores for a local
    disk, 8 for shared storage, which answers many at once better than one); shm: directory of a
    named arena (None: anonymous memory); stall_seconds: see Server; parent: end when this process
    does.
    """

    arena_bytes: int = ARENA_BYTES
    threads: int | None = None
    shm: str | None = None
    stall_seconds: float = 5.0
    parent: int | None = None


def runtime_dir() -> str:
    """The user's directory for sockets, made if need be. Raises ConfigError if it is not safe."""
    base = os.environ.get("KVFS_RUNTIME") or os.environ.get("XDG_RUNTIME_DIR")
    if base is None:
        root = os.geteuid() == 0 and os.access("/run", os.W_OK)
        path = "/run/kvfs" if root else f"/tmp/kvfs-{os.geteuid()}"
    else:
        path = os.path.join(base, "kvfs")
    try:
        os.makedirs(path, 0o700, exist_ok=True)
        s = os.lstat(path)
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}; set KVFS_RUNTIME") from e
    if not stat.S_ISDIR(s.st_mode) or s.st_uid != os.geteuid() or s.st_mode & 0o077:
        raise ConfigError(f"{path}: must be a directory of yours that nobody else may enter")
    return path


def socket_path(store: bytes) -> str:
    return os.path.join(runtime_dir(), f"{store.hex()}.sock")


def find(store: bytes) -> FetchClient | None:
    """A client of the fetcher that runs for a store, or None."""
    try:
        return FetchClient(socket_path(store))
    except BackendError:
        return None


def connect(path: str, store: bytes, options: Options | None = None) -> FetchClient:
    """A client of the store's fetcher, which is started if there is none.

    options: for one that is started; by default it outlives this process. Raises ConfigError,
    BackendError.
    """
    client = find(store)
    if client is not None:
        return client
    process = start(path, options or Options())
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        client = find(store)
        if client is not None:
            return client
        if process.poll() is not None and process.returncode != BusyError.exit_code:
            text = (process.stderr.read() if process.stderr else b"").decode().strip()
            kind = ConfigError if process.returncode == ConfigError.exit_code else BackendError
            raise kind(text.removeprefix("kvfs: ") or "the fetcher did not start")
        time.sleep(0.01)
    raise BackendError(f"{path}: the fetcher did not start within {START_SECONDS:.0f} s")


def start(path: str, options: Options) -> subprocess.Popen[bytes]:
    """Starts a fetcher in the background, in a session of its own."""
    command = [sys.executable, "-m", "kvfs.fetcher.launch", path]
    command += ["--arena", str(options.arena_bytes)]
    if options.threads is not None:
        command += ["--threads", str(options.threads)]
    command += ["--stall", str(options.stall_seconds)]
    if options.shm is not None:
        command += ["--shm", options.shm]
    if options.parent is not None:
        command += ["--parent", str(options.parent)]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def run(path: str, options: Options, backend: Backend | None = None) -> None:
    """Is the fetcher of a store until SIGTERM or SIGINT. Raises BusyError if one runs already."""
    import trio

    from kvfs.fetcher.core import Core
    from kvfs.fetcher.server import Server
    from kvfs.fetcher.workers import Workers

    backend = backend or PosixBackend(path)
    name = socket_path(load_config(backend).uuid)
    lock = _lock(name + ".lock")
    try:
        arena = Arena.create(options.arena_bytes + CONTROL_BYTES, directory=options.shm)
        ranges = Ranges(CONTROL_BYTES, arena.size)
        core = Core(arena.view, ranges, ControlArea(arena.view[:CONTROL_BYTES]))
        local = filesystem_type(backend.root) in _LOCAL_DISKS
        threads = options.threads or (max(1, min(4, (os.cpu_count() or 1) // 2)) if local else 8)
        workers = Workers(core, backend, threads, one_by_one=local)
        server = Server(
            core, arena.reader_fd(), arena.size, workers.stalled_seconds, options.stall_seconds
        )
        # A worker that comes back from a read wants the interpreter at once, not in 5 ms.
        sys.setswitchinterval(0.0002)
        workers.start()
        try:
            trio.run(_main, server, name, options.parent)
        finally:
            ended = workers.stop(1.0)
            arena.close()
            if not ended:  # threads that hang in the storage cannot be joined
                os._exit(0)
    finally:
        os.close(lock)


def _lock(path: str) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise BusyError(f"{path}: a fetcher is running for this store already") from None
    return fd


async def _main(server: object, name: str, parent: int | None) -> None:
    import trio

    from kvfs.fetcher.server import Server

    assert isinstance(server, Server)
    listener = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name)  # of a fetcher that is dead: the lock is ours
    await listener.bind(name)
    listener.listen(128)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_until_signal, nursery)
            if parent is not None:
                nursery.start_soon(_until_parent_ends, parent, nursery)
            nursery.start_soon(server.serve, listener)
    finally:
        listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


async def _until_signal(nursery: object) -> None:
    import trio

    assert isinstance(nursery, trio.Nursery)
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            nursery.cancel_scope.cancel()
            return


async def _until_parent_ends(parent: int, nursery: object) -> None:
    import trio

    assert isinstance(nursery, trio.Nursery)
    try:
        fd = os.pidfd_open(parent)
    except ProcessLookupError:
        nursery.cancel_scope.cancel()
        return
    try:
        await trio.lowlevel.wait_readable(fd)
    finally:
        os.close(fd)
    nursery.cancel_scope.cancel()


def main() -> None:
    """The command line of the module: kvctl is for people, this for the processes that need it."""
    import argparse

    from kvfs.errors import KvfsError

    parser = argparse.ArgumentParser(prog="kvfs.fetcher.launch", description=run.__doc__)
    parser.add_argument("store")
    parser.add_argument("--arena", type=int, default=ARENA_BYTES)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--stall", type=float, default=5.0)
    parser.add_argument("--shm")
    parser.add_argument("--parent", type=int)
    a = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="kvfs: %(message)s")
    try:
        run(a.store, Options(a.arena, a.threads, a.shm, a.stall, a.parent))
    except KvfsError as e:
        print(f"kvfs: {e}", file=sys.stderr)
        raise SystemExit(e.exit_code) from None


if __name__ == "__main__":
    main()
