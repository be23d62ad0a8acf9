"""What a test may leave behind by mistake: mounts, processes, threads, shared memory, open files.

A guard compares two snapshots and removes what is new in the second. It must not touch what other
runs on the same machine own, so everything is attributed: a mount by lying below the run's own
directory, a process by descent or by a variable in its environment (which a daemon inherits
too), a shared-memory file by being used by no process outside the run.

To be called from the main thread only; it reads /proc and holds nothing between calls.
"""

from __future__ import annotations

import fcntl
import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SHM = Path("/dev/shm")
SHM_PREFIX = "kvfs"
FILE_SYSTEMS = ("fuse.kvfs", "fuse", "fuse.hf3fs")
GRACE_SECONDS = 5.0  # a daemon exits a moment after its umount returned


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What existed at one moment: mount points, (pid, start time) pairs, threads, shm names."""

    mounts: frozenset[str]
    processes: frozenset[tuple[int, int]]
    threads: frozenset[threading.Thread]
    shm: frozenset[str]


class LeakGuard:
    """Finds and removes what a run that works below `base` has left.

    The run sets the environment variable `variable` to `marker`, a text that is unique to it.
    """

    variable = "KVFS_TEST_RUN"

    def __init__(self, base: Path, marker: str) -> None:
        self.base = base.resolve()
        self.marker = marker
        self._needle = f"{self.variable}={marker}\0".encode()

    def snapshot(self) -> Snapshot:
        return Snapshot(
            mounts=frozenset(self._mounts()),
            processes=frozenset(self._processes()),
            threads=frozenset(t for t in threading.enumerate() if not t.daemon),
            shm=frozenset(_shm_names()),
        )

    def clean_up(self, before: Snapshot) -> list[str]:
        """Remove what is new since `before`; a line for each thing that had to be removed."""
        left = [_unmount(path) for path in self._mounts() if path not in before.mounts]
        new = [known for known in self._processes() if known not in before.processes]
        left += _end_processes(new)
        left += _join_threads(before.threads)
        left += [_remove_shm(name) for name in self._orphaned_shm(before)]
        return left

    def open_files(self) -> list[str]:
        """Files below `base` that this process still holds open, after a garbage collection."""
        gc.collect()
        return [t for t in _links(os.getpid()) if t.startswith(f"{self.base}/")]

    def _mounts(self) -> list[str]:
        """Mount points of this run, the innermost first."""
        found = []
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields, _, source = line.partition(" - ")
            point = fields.split()[4].encode().decode("unicode_escape")
            if source.split()[0] in FILE_SYSTEMS and point.startswith(f"{self.base}/"):
                found.append(point)
        return sorted(found, key=len, reverse=True)

    def _processes(self) -> list[tuple[int, int]]:
        """(pid, start time in ticks) of the run's live processes, helpers of Python excluded."""
        stats = dict(_stats())
        keep = {os.getpid(), *_python_helpers()}
        found = []
        for pid, (state, parent, start) in stats.items():
            if pid not in keep and state not in "ZX" and (parent == os.getpid() or self._ours(pid)):
                found.append((pid, start))
        return found

    def _ours(self, pid: int) -> bool:
        try:
            return self._needle in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # it has ended, or belongs to another user
            return False

    def _orphaned_shm(self, before: Snapshot) -> list[str]:
        new = [name for name in _shm_names() if name not in before.shm]
        if not new:
            return []
        gc.collect()
        used = {target for pid, _ in _stats() for target in _links(pid)}
        return [name for name in new if str(SHM / name) not in used and not _locked(name)]


def _shm_names() -> list[str]:
    return [name for name in os.listdir(SHM) if name.startswith(SHM_PREFIX)] if SHM.is_dir() else []


def _locked(name: str) -> bool:
    """An arena is made without a name, so that its users do not show it; but its owner locks it."""
    try:
        fd = os.open(SHM / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True  # its owner has taken the name away meanwhile
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _stats() -> Iterator[tuple[int, tuple[str, int, int]]]:
    """pid -> (state, parent, start time) of every process; the name may hold blanks and ')'."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                text = Path(f"/proc/{entry}/stat").read_text(errors="replace")
            except OSError:
                continue
            fields = text.rpartition(")")[2].split()
            yield int(entry), (fields[0], int(fields[1]), int(fields[19]))


def _python_helpers() -> set[int]:
    """Processes that multiprocessing starts once and ends with the interpreter."""
    tracker = getattr(multiprocessing.resource_tracker, "_resource_tracker", None)
    server = getattr(multiprocessing.forkserver, "_forkserver", None)
    pids = (getattr(tracker, "_pid", None), getattr(server, "_forkserver_pid", None))
    return {pid for pid in pids if pid}


def _links(pid: int) -> Iterator[str]:
    """What a process has open or mapped, by path."""
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                yield os.readlink(f"/proc/{pid}/fd/{name}")
            except OSError:
                continue
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            yield line[73:]
    except OSError:
        return


def _unmount(path: str) -> str:
    # Lazy: a mount whose daemon hangs would hold this process too.
    done = subprocess.run(["umount", "-l", path], capture_output=True, check=False)
    if done.returncode:
        subprocess.run(["fusermount3", "-uz", path], capture_output=True, check=False)
    return f"mount {path}"


def _end_processes(processes: list[tuple[int, int]]) -> list[str]:
    """Wait for processes that are on their way out; kill and name those that stay."""
    deadline = time.monotonic() + GRACE_SECONDS
    left = []
    for pid, _ in processes:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            handle = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            if not _ended(handle, deadline - time.monotonic()):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                _ended(handle, GRACE_SECONDS)
                left.append(f"process {pid} ({command.strip()[:200]})")
        except ProcessLookupError:
            pass
        finally:
            os.close(handle)
    return left


def _ended(handle: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def _join_threads(known: frozenset[threading.Thread]) -> list[str]:
    deadline = time.monotonic() + GRACE_SECONDS
    left = []
    for thread in threading.enumerate():
        if thread not in known and not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                left.append(f"thread {thread.name}")
    return left


def _remove_shm(name: str) -> str:
    (SHM / name).unlink(missing_ok=True)
    return f"shared memory {SHM / name}"
