"""Hosts of a pretended 3FS cluster, each a stand-in's process with a mount; gone afterwards.

with cluster(tmp_path, hosts=2) as (a, b):
    a.set(delay_ms=20)
    a.kill(); a.start()
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvfs.filesystems import at
from kvfs.mount import mountinfo

_SECONDS = 20.0


def shared_memory() -> set[str]:
    """Names of what this user's rings and registered memory are made of, while they have any."""
    starts = ("hf3fs-iov", *(f"kvfs-{os.geteuid()}-{tag}" for tag in ("iov", "ring")))
    return {name for name in os.listdir("/dev/shm") if name.startswith(starts)}


def may_serve() -> str:
    """Why no stand-in can run here, or ""."""
    if os.geteuid():
        return "the stand-in for 3FS needs root"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "the stand-in for 3FS needs /dev/fuse"
    return "" if os.path.isdir("/dev/shm") else "USRBIO needs /dev/shm"


class Host:
    """One mount of a backing directory."""

    def __init__(self, backing: Path, point: Path, **options: float) -> None:
        """options: chunk, names, seconds, workers as for kvfs.testing.threefs."""
        self.backing = backing
        self.point = point
        self._options = [f"--{name}={value}" for name, value in options.items()]
        self._log = point.with_suffix(".log")
        self._semaphores: list[str] = []
        self.said = ""
        """By a daemon that ended, about what it did."""
        self.process: subprocess.Popen[str] | None = None
        backing.mkdir(parents=True, exist_ok=True)
        point.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        """Returns when it serves."""
        command = [sys.executable, "-m", "kvfs.testing.threefs"]
        with open(self._log, "a") as log:
            self.process = subprocess.Popen(
                [*command, *self._options, str(self.backing), str(self.point)],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == "mounted\n", self._log.read_text()
        for name in ("submit-ios", "submit-ios.ph", "submit-ios.pl"):
            self._semaphores.append(os.readlink(self.point / "3fs-virt/iovs" / name))

    def set(self, **knobs: float) -> None:
        for name, value in knobs.items():
            os.symlink(str(value), self.point / "3fs-virt/set-conf" / f"standin.{name}")

    def links(self) -> list[str]:
        """Names in `iovs`, asked for by a process of its own: a listing ends who lists."""
        done = subprocess.run(
            ["ls", str(self.point / "3fs-virt/iovs")], capture_output=True, text=True, check=True
        )
        return [name for name in done.stdout.split() if not name.startswith("submit-ios")]

    def kill(self) -> None:
        """The daemon dies at once; its mount answers ENOTCONN and is taken away."""
        self.end(signal.SIGKILL)
        self.unmount()

    def end(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(_SECONDS)
            assert self.process.stdout is not None
            self.said = self.process.stdout.read()
            self.process.stdout.close()
            self.process = None

    def unmount(self) -> None:
        while at(str(self.point)):
            mountinfo.detach(str(self.point), lazy=True)
        for path in self._semaphores:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        self._semaphores.clear()

    def close(self) -> None:
        try:
            self.end(signal.SIGTERM)
        finally:
            self.unmount()


_serving: list[Host] = []


def other_mount(path: str) -> str:
    """The same file on the next mount of its cluster; the path itself if it is on none."""
    for host in _serving:
        if path.startswith(f"{host.point}/"):
            same = [h for h in _serving if h.backing == host.backing]
            other = same[(same.index(host) + 1) % len(same)]
            return str(other.point / os.path.relpath(path, host.point))
    return path


@contextmanager
def cluster(root: Path, hosts: int = 1, **options: float) -> Iterator[list[Host]]:
    """So many mounts of one directory, each with caches of its own."""
    made = [Host(root / "3fs", root / f"host{i}", **options) for i in range(hosts)]
    try:
        for host in made:
            host.start()
            _serving.append(host)
        yield made
    finally:
        _serving[:] = [host for host in _serving if host not in made]
        for host in made:
            host.close()
