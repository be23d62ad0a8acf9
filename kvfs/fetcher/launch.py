"""Finding the fetcher of a store on this host, and starting one.

The socket and the lock of a shared fetcher lie in $KVFS_RUNTIME/kvfs or $XDG_RUNTIME_DIR/kvfs, else
in /run/kvfs (root) or /tmp/kvfs-<uid>: a directory that only its user may enter. What a fetcher in
the background has to say goes to a log beside them.

Blocking: starting one takes a second and more for a large arena. Nothing here loads trio.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from kvfs.errors import BackendError, BusyError, ConfigError, KvfsError, NoStoreError
from kvfs.fetcher.client import FetchClient
from kvfs.store_path import split

ARENA_BYTES = 2 << 30
START_SECONDS = 20.0
"""And one more for each GiB of the arena."""
_LOOK_SECONDS = 0.02
_KINDS = (BusyError, ConfigError, NoStoreError, BackendError)


@dataclass(frozen=True, slots=True)
class Options:
    """How a fetcher runs.

    arena_bytes: shared memory for blocks; threads: of reading (None: half the cores for a local
    disk, 8 for shared storage, which answers many at once better than one); shm: directory of a
    named arena (None: anonymous memory); stall_seconds: storage that gives no answer for so long
    is not asked any more, until it does; parent: end when this process does; idle_seconds: end
    when there was no client for so long (None: never).
    """

    arena_bytes: int = ARENA_BYTES
    threads: int | None = None
    shm: str | None = None
    stall_seconds: float = 5.0
    parent: int | None = None
    idle_seconds: float | None = 600.0

    def arguments(self) -> list[str]:
        """The command line of `python -m kvfs.fetcher` that means these options."""
        given = {
            "--arena": self.arena_bytes, "--threads": self.threads, "--shm": self.shm,
            "--stall": self.stall_seconds, "--parent": self.parent, "--idle": self.idle_seconds,
        }  # fmt: skip
        return [f"{name}={value}" for name, value in given.items() if value is not None]

    @property
    def start_seconds(self) -> float:
        return START_SECONDS + self.arena_bytes / (1 << 30)


def default_threads(local: bool) -> int:
    """How many threads read at once, on a local disk or shared storage. See Options."""
    return max(1, min(4, (os.cpu_count() or 1) // 2)) if local else 8


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
    """Where the shared fetcher of a store (by its uuid) listens."""
    # Shortened: the path of a socket has 107 bytes at most.
    return os.path.join(runtime_dir(), f"{store.hex()[:16]}.sock")


def find(store: bytes, *, timeout: float | None = None) -> FetchClient | None:
    """A client of the fetcher that runs for a store, or None. timeout: seconds, see FetchClient."""
    with contextlib.suppress(BackendError):
        return FetchClient(socket_path(store), timeout)
    return None


def connect(path: str, store: bytes, options: Options | None = None) -> FetchClient:
    """A client of the store's shared fetcher, which is started if there is none.

    options: for one that is started; it outlives this process unless they say otherwise. Raises
    ConfigError, NoStoreError, BackendError.
    """
    options = options or Options()
    until = time.monotonic() + options.start_seconds
    while True:
        with _turn(store) as ours, contextlib.suppress(BusyError):
            client = find(store)
            if client is not None:
                return client
            if ours:
                start(path, options)
                continue
        # Somebody else is starting one, or one is there that does not answer.
        if time.monotonic() > until:
            raise BackendError(f"{path}: its fetcher does not answer")
        time.sleep(_LOOK_SECONDS)


@contextlib.contextmanager
def _turn(store: bytes) -> Iterator[bool]:
    """Says whether it is the caller's turn to start a fetcher: dozens may miss it at once."""
    fd = os.open(f"{socket_path(store)}.start", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    ours = False
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = True
        yield ours
    finally:
        os.close(fd)


def start(path: str, options: Options) -> None:
    """Starts a shared fetcher in the background and waits until it serves.

    Raises BusyError if one runs already, ConfigError, NoStoreError, BackendError.
    """
    try:
        done = subprocess.run(
            _command(path, options, "--background"), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=options.start_seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise BackendError(f"{path}: the fetcher did not start in time") from None
    if done.returncode:
        raise _why(done.returncode, done.stderr)


def private(path: str, options: Options, *, timeout: float | None = None) -> FetchClient:
    """A client of a fetcher of its own, which ends when the client is closed or its process ends.

    timeout: seconds it may take to start. Raises ConfigError, NoStoreError, BackendError.
    """
    ours, theirs = socket.socketpair()
    said = os.memfd_create("kvfs-said", os.MFD_CLOEXEC)  # not a pipe: nobody reads along
    try:
        with theirs:
            process = subprocess.Popen(
                _command(path, options, f"--connection={theirs.fileno()}"),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said,
                pass_fds=[theirs.fileno()],
            )  # fmt: skip
        try:
            return FetchClient(ours, timeout or options.start_seconds, process)
        except KvfsError:
            process.kill()
            code = process.wait()
            text = os.pread(said, 1 << 16, 0)
            if code > 0:
                raise _why(code, text) from None
            raise
    finally:
        os.close(said)


def _command(path: str, options: Options, *more: str) -> list[str]:
    module = [sys.executable, "-m", "kvfs.fetcher"]
    kind, absolute = split(path)
    place = absolute if kind is None else f"{kind}:{absolute}"
    return [*module, place, *options.arguments(), *more]


def _why(code: int, said: bytes) -> KvfsError:
    """The error that a fetcher ended with."""
    kind = next((k for k in _KINDS if k.exit_code == code), BackendError)
    lines = said.decode("utf-8", "replace").strip().splitlines()
    return kind(lines[-1].removeprefix("kvfs: ") if lines else "the fetcher did not start")
