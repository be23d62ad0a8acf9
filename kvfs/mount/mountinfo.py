"""Whether a mount answers, and taking it away again.

Reads the kernel's table (kvfs.filesystems), never os.path.ismount: that says no of a mount whose
process has died. Nothing here waits for a mount that hangs: what may hang is asked of a process
that can be left. Needs neither FUSE nor a store.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from kvfs.errors import BusyError, ConfigError
from kvfs.filesystems import at

PROBE_SECONDS = 5.0
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_MOST_LINKS = 40  # as the kernel has it
_PROBE = """
import os, sys
try:
    sys.stdout.write(os.getxattr(sys.argv[1], "user.kvfs.pid").decode())
except OSError as e:
    sys.exit(e.errno)
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a mount said when it was asked. error: an errno, ETIMEDOUT if it hangs, 0 if well."""

    error: int
    pid: int | None = None
    """The process that serves it."""

    @property
    def dead(self) -> bool:
        return self.error in (errno.ENOTCONN, errno.ECONNABORTED)


def real_point(path: str) -> str:
    """The path as the table has it, without asking what is mounted there: it may be dead."""
    point = os.path.abspath(path)
    for _ in range(_MOST_LINKS):
        parent, name = os.path.split(point)
        parent = os.path.realpath(parent)
        point = os.path.join(parent, name)
        try:
            target = os.readlink(point)  # the kernel knows of a mount's top that it is no link
        except OSError:
            break
        point = os.path.abspath(os.path.join(parent, target))
    return point


def ask(point: str) -> Answer:
    """Asks a mount for a sign of life: an attribute that the kernel never caches and its process
    answers itself. The storage may hang."""
    probe = subprocess.Popen(
        [sys.executable, "-ISc", _PROBE, point],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        out, _ = probe.communicate(timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        probe.kill()  # not waited for: it may sit in the kernel until the mount goes
        assert probe.stdout is not None
        probe.stdout.close()
        return Answer(errno.ETIMEDOUT)
    return Answer(probe.returncode, int(out) if out.isdigit() else None)


def replace_stale(point: str) -> list[str]:
    """Makes room for a new mount: takes away kvfs mounts whose process has died.

    Returns a line for each. Raises BusyError if a living kvfs mount is there, ConfigError if
    somebody else's is.
    """
    said = []
    while found := at(point):
        top = found[-1]
        if not top.ours:
            raise ConfigError(
                f"{point}: {top.source} ({top.fstype}) is mounted there; choose another directory"
            )
        answer = ask(point)
        if not answer.dead:
            how = f"process {answer.pid}" if answer.pid else os.strerror(answer.error)
            raise BusyError(f"{point}: {top.source} is mounted there already ({how})")
        detach(point, lazy=True)
        said.append(f"{point}: removed a mount of {top.source} whose process had died")
    return said


def detach(point: str, *, lazy: bool) -> None:
    """Unmounts. lazy: even if it is in use; who uses it keeps it until then.

    Raises BusyError naming who uses it, ConfigError.
    """
    code = (_umount2 if os.geteuid() == 0 else _fusermount)(point, lazy)
    if code == errno.EBUSY:
        by = ", ".join(f"{name} (process {pid}, {what})" for pid, name, what in users(point))
        raise BusyError(f"{point} is in use by {by or 'somebody'}; or detach it with --lazy")
    if code:
        raise ConfigError(f"{point}: {os.strerror(code)}")


def _umount2(point: str, lazy: bool) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)
    if libc.umount2(os.fsencode(point), flags) == 0:
        return 0
    return ctypes.get_errno()


def _fusermount(point: str, lazy: bool) -> int:
    command = ["fusermount3", "-u", *(["-z"] if lazy else []), "--", point]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError("fusermount3 is not installed (Debian: fuse3)") from None
    if done.returncode == 0:
        return 0
    if "busy" in done.stderr:
        return errno.EBUSY
    raise ConfigError(done.stderr.strip() or f"{point}: fusermount3 failed")


def users(point: str) -> Iterator[tuple[int, str, str]]:
    """(pid, command, what) of processes that stand in a mount or have a file of it open."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) == os.getpid():
            continue
        what = _use(f"/proc/{pid}", point)
        if what is not None:
            try:
                with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as f:
                    yield int(pid), f.read().strip(), what
            except OSError:
                continue


def _use(process: str, point: str) -> str | None:
    try:
        links = ["cwd", "root", *(f"fd/{n}" for n in os.listdir(f"{process}/fd"))]
    except OSError:
        return None
    for link in links:
        try:
            target = os.readlink(f"{process}/{link}")
        except OSError:
            continue
        if target == point or target.startswith(point.rstrip("/") + "/"):
            return "its working directory" if link == "cwd" else target
    return None


def unmount(path: str, *, lazy: bool, seconds: float = 10.0) -> None:
    """`kvctl umount`: unmounts and waits until the process that served it has ended.

    lazy: detaches at once and waits for nobody. Raises BusyError, ConfigError.
    """
    point = real_point(path)
    found = at(point)
    if not found:
        raise ConfigError(f"{point}: nothing is mounted there")
    if not found[-1].ours:
        raise ConfigError(f"{point}: {found[-1].fstype} is mounted there, not kvfs")
    answer = ask(point)
    handle = _open_process(answer.pid)
    try:
        detach(point, lazy=lazy or answer.dead)
        if handle is not None and not lazy and not _ended(handle, seconds):
            raise BusyError(f"{point} is unmounted, but process {answer.pid} has not ended yet")
    finally:
        if handle is not None:
            os.close(handle)


def _open_process(pid: int | None) -> int | None:
    """A handle on a process, which its number alone would not be once it has ended."""
    if pid is None:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _ended(handle: int, seconds: float) -> bool:
    import select

    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
