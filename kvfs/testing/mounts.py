"""A store mounted by `kvctl` in a process of its own, for tests; gone afterwards, whatever happens.

Needs root or fusermount3, and /dev/fuse.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvfs.filesystems import at
from kvfs.mount import mountinfo
from kvfs.namespace import Namespace
from kvfs.store import Store
from kvfs.testing.chains import grow, identity

SECONDS = 20.0
# Runs as a mount whose storage is slow, or does not answer while a file exists.
_SLOW = """
import os, sys, time
from kvfs.backend.posix import PosixBackend
from kvfs.mount.process import MountOptions, mount
seconds, gate, store, index, point = sys.argv[1:]
read, free = PosixBackend.readv, PosixBackend.free_bytes
def wait():
    time.sleep(float(seconds))
    while os.path.exists(gate):
        time.sleep(0.02)
def slow(self, file, buffers, offset):
    if file.path.startswith("seg/"):
        wait()
    return read(self, file, buffers, offset)
PosixBackend.readv, PosixBackend.free_bytes = slow, lambda self: (wait(), free(self))[1]
mount(MountOptions(store=store, index=index, point=point, foreground=True), print)
"""


def may_mount() -> bool:
    return os.path.exists("/dev/fuse") and os.access("/dev/fuse", os.R_OK | os.W_OK)


class Mounted:
    """A store in a directory, with an index, a mount point and a log beside it."""

    def __init__(
        self, root: Path, *, name: str = "store", row_bytes: int = 300_000,
        block_tokens: int = 128, clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """name: of the store."""
        self.root = root
        self.point = root / "mnt"
        self.index = root / "index"
        self.log_file = root / "mount.log"
        self.point.mkdir(parents=True)
        self.store = Store.init(
            root / name, index=str(self.index), durability="none", grace_seconds=0.0,
            clock=clock,
        )  # fmt: skip
        self.ns: Namespace = self.store.create_namespace(identity(row_bytes, block_tokens))
        self.process: subprocess.Popen[str] | None = None

    def put(self, *blocks: int, ttl_class: str | None = None) -> None:
        grow(self.store, self.ns, blocks, ttl_class=ttl_class)

    @property
    def space(self) -> Path:
        return self.point / self.ns.name

    # kvctl

    def command(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "kvfs", *args]

    def kvctl(self, *args: str, **options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*args), capture_output=True, text=True, timeout=SECONDS, check=False,
            stdin=subprocess.DEVNULL, env={**os.environ, **options},
        )  # fmt: skip

    def arguments(self, *args: str) -> list[str]:
        store, index = str(self.store.path), str(self.index)
        options = ["--store", store, "--index", index, "--log", str(self.log_file)]
        return ["mount", *options, *args, str(self.point)]

    def try_mount(self, *args: str, **options: str) -> subprocess.CompletedProcess[str]:
        return self.kvctl(*self.arguments(*args), **options)

    def mount(self, *args: str) -> None:
        """In the background, as a user would."""
        done = self.try_mount(*args)
        assert done.returncode == 0, done.stderr

    def mount_foreground(self, *args: str) -> subprocess.Popen[str]:
        """As a service manager would; returns when it serves."""
        return self._start(self.command(*self.arguments("--foreground", *args)))

    def mount_slowly(self, seconds: float) -> Path:
        """On slow storage, which hangs while the returned file exists."""
        gate = self.root / "gate"
        self._start([
            sys.executable, "-c", _SLOW, str(seconds), str(gate), str(self.store.path),
            str(self.index), str(self.point),
        ])  # fmt: skip
        return gate

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        # To a file: a pipe that nobody reads would block the mount's log in the end.
        with open(self.root / "output", "w") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, text=True
            )
        until(lambda: self.is_mounted() or self.process.poll() is not None)
        assert self.is_mounted(), (self.root / "output").read_text()
        return self.process

    def umount(self, *args: str) -> subprocess.CompletedProcess[str]:
        return self.kvctl("umount", *args, str(self.point))

    # looking at it

    def is_mounted(self) -> bool:
        return bool(at(str(self.point)))

    @property
    def pid(self) -> int:
        return int(os.getxattr(self.point, "user.kvfs.pid"))

    def requests(self) -> Counter[str]:
        """How many requests of each kind the mount has had; asking is one getxattr or two."""
        text = os.getxattr(self.point, "user.kvfs.requests").decode()
        return Counter({k: int(v) for k, _, v in (item.partition("=") for item in text.split())})

    def log(self) -> str:
        return self.log_file.read_text() if self.log_file.exists() else ""

    def close(self) -> None:
        """Takes everything away by force."""
        pids = {self.process.pid} if self.process is not None else set()
        while self.is_mounted():
            answer = mountinfo.ask(str(self.point))
            pids |= {answer.pid} if answer.pid else set()
            mountinfo.detach(str(self.point), lazy=True)
        for pid in pids:
            end(pid)
        if self.process is not None:
            self.process.wait(SECONDS)
        self.store.close()


@contextlib.contextmanager
def mounted(root: Path, **options: Any) -> Iterator[Mounted]:
    place = Mounted(root, **options)
    try:
        yield place
    finally:
        place.close()


def end(pid: int) -> None:
    """Kills a process that need not be a child, and waits for it to be gone."""
    with contextlib.suppress(ProcessLookupError, OSError):
        handle = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            wait_handle(handle, SECONDS)
        finally:
            os.close(handle)


def wait_ended(pid: int, seconds: float) -> bool:
    """Waits for a process that need not be a child."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return wait_handle(handle, seconds)
    finally:
        os.close(handle)


def wait_handle(handle: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def until(condition: object, seconds: float = SECONDS) -> None:
    """Waits for what announces itself in no other way; raises AssertionError if it never comes."""
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def in_uninterruptible_sleep(pids: set[int]) -> set[int]:
    """Which of these processes have a thread in state D."""
    stuck = set()
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):
                if task.read_text().rpartition(")")[2].split()[0] == "D":
                    stuck.add(pid)
    return stuck
