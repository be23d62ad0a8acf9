"""Two network namespaces with a link between them, to measure and to test what crosses hosts.

They have no names and belong to threads and descriptors of this process alone: when it ends,
however it ends, they are gone. Needs root (CAP_NET_ADMIN, CAP_SYS_ADMIN) and the command ip.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
THREADS = 16


class Unavailable(Exception):
    """This machine does not let us make network namespaces; says why."""


class Side:
    """A network namespace with an address. What runs in it sees no other, nor do its children."""

    def __init__(self, ip: str, device: str) -> None:
        self.ip = ip
        self.device = device
        first = ThreadPoolExecutor(1)
        try:
            self.fd = first.submit(_new_namespace).result()
        finally:
            first.shutdown()
        self._threads = ThreadPoolExecutor(THREADS, initializer=_enter, initargs=(self.fd,))

    def run(self, work: Callable[..., T], *args: Any, **named: Any) -> T:
        """Runs work on a thread in the namespace, and waits for it."""
        return self._threads.submit(work, *args, **named).result()

    def start(self, work: Callable[..., T], *args: Any) -> Any:
        """The same without waiting: a Future."""
        return self._threads.submit(work, *args)

    def ip_command(self, *args: str) -> None:
        """Raises Unavailable."""
        self._command("ip", *args)

    def tc_command(self, *args: str) -> None:
        """Shapes what this side sends. Raises Unavailable."""
        if shutil.which("tc") is None:
            raise Unavailable("no command tc (iproute2)")
        self._command("tc", *args)

    def _command(self, *words: str) -> None:
        def work() -> subprocess.CompletedProcess[str]:
            return subprocess.run(words, capture_output=True, text=True, check=False)

        done = self.run(work)
        if done.returncode:
            raise Unavailable(f"{' '.join(words)}: {done.stderr.strip()}")

    def link(self, up: bool) -> None:
        """Connects this side, or cuts it off."""
        self.ip_command("link", "set", self.device, "up" if up else "down")

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self.fd)


@contextlib.contextmanager
def pair() -> Iterator[tuple[Side, Side]]:
    """Two namespaces with a link between them. Raises Unavailable."""
    if shutil.which("ip") is None:
        raise Unavailable("no command ip (iproute2)")
    with contextlib.ExitStack() as stack:
        sides = []
        for ip, device in (("10.213.7.1", "kvfs-a"), ("10.213.7.2", "kvfs-b")):
            side = Side(ip, device)
            stack.callback(side.close)
            sides.append(side)
        a, b = sides
        there = f"/proc/{os.getpid()}/fd/{b.fd}"
        a.ip_command("link", "add", a.device, "type", "veth", "peer", "name", b.device,
                     "netns", there)  # fmt: skip
        for side in sides:
            side.ip_command("addr", "add", f"{side.ip}/24", "dev", side.device)
            side.ip_command("link", "set", "lo", "up")
            side.link(True)
        yield a, b


def _new_namespace() -> int:
    """On a thread of its own: a descriptor of a new namespace."""
    if _LIBC.unshare(_CLONE_NEWNET):
        raise Unavailable(f"unshare: {os.strerror(ctypes.get_errno())}")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _enter(fd: int) -> None:
    if _LIBC.setns(fd, _CLONE_NEWNET):
        raise Unavailable(f"setns: {os.strerror(ctypes.get_errno())}")
