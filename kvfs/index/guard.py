"""Tells a sound index from one that a crash of the machine, or a hand, has spoilt.

LMDB trusts its file: reading a garbled page can kill the process. So whoever opens an index with
nobody else in it looks at a stamp first:

  stamp present and equal to the file (inode, size, mtime)   closed in order, nothing to do
  present and not equal                                      something else wrote into the file:
                                                             the index is thrown away
  absent, same boot                                          its last user was killed; a child
                                                             process walks the whole tree first
  absent, other boot                                         the machine went down with unsynced
                                                             pages: the index is thrown away

Whoever writes to the index removes the stamp first; the last one to leave writes it.

Users hold a shared lock on `users.lock` for as long as they have the index open, so the kernel
counts them; it is always on a local file system. Throwing an index away loses nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys

from kvfs.errors import BusyError

_DATA, _STAMP, _USERS = "data.mdb", "clean.stamp", "users.lock"
_WALK_SECONDS = 600.0


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
        return f.read().strip()


class Guard:
    """One process's presence in an index directory. Make it before opening the environment."""

    def __init__(self, path: str) -> None:
        """Enters; if nobody else is inside, removes an index that is not sound."""
        os.makedirs(path, 0o700, exist_ok=True)
        self.path = path
        self.discarded: str | None = None
        """Why the index that was here was thrown away, if it was."""
        self._entered = False
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(os.path.join(path, _USERS), flags, 0o600)
        try:
            if self._alone():
                self._examine()
            fcntl.flock(self._fd, fcntl.LOCK_SH)
        except BaseException:
            os.close(self._fd)
            raise
        self._pid = os.getpid()

    def _in_place(self) -> bool:
        """Says whether the directory is still the one that was entered, and not a later one."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._fd), os.stat(os.path.join(self.path, _USERS)))
        return False

    def _alone(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _examine(self) -> None:
        if not os.path.exists(os.path.join(self.path, _DATA)):
            return
        stamp = self._read_stamp()
        if stamp == self._fingerprint():
            return
        if stamp:
            self._discard("its file was changed by something else")
        elif os.pread(self._fd, 64, 0).decode("ascii", "replace") != boot_id():
            self._discard("the machine went down while it was in use")
        elif not self._walk():
            self._discard("it is damaged")
        else:
            self._write_stamp()

    def _walk(self) -> bool:
        """Reads every page in a child process, which may die of it."""
        import subprocess

        package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        command = [sys.executable, "-m", "kvfs.index.guard", self.path]
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        try:
            done = subprocess.run(
                command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, timeout=_WALK_SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def _discard(self, why: str) -> None:
        self.discarded = why
        _remove(self.path)

    def _fingerprint(self) -> str:
        s = os.stat(os.path.join(self.path, _DATA))
        return f"{s.st_ino} {s.st_size} {s.st_mtime_ns}"

    def _read_stamp(self) -> str:
        try:
            with open(os.path.join(self.path, _STAMP), encoding="ascii") as f:
                return f.read(200)
        except (OSError, UnicodeDecodeError):
            return ""

    def _write_stamp(self) -> None:
        with open(os.path.join(self.path, _STAMP), "w", encoding="ascii") as f:
            f.write(self._fingerprint())
            f.flush()
            os.fsync(f.fileno())

    def entered(self) -> None:
        """Notes that pages may be written from now on, in this boot; call before the first."""
        if self._entered:
            return
        if os.pread(self._fd, 64, 0).decode("ascii", "replace") != boot_id():
            os.pwrite(self._fd, boot_id().encode(), 0)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.path, _STAMP))
        self._entered = True  # nobody writes a stamp as long as we are inside

    def needs_stamp(self) -> bool:
        """Says whether this process is the last inside and the index changed since its stamp.

        If so the caller syncs and closes the environment, then calls `leave(stamp=True)`.
        """
        return (
            os.getpid() == self._pid
            and self._in_place()
            and self._alone()
            and os.path.exists(os.path.join(self.path, _DATA))
            and self._read_stamp() != self._fingerprint()
        )

    def leave(self, *, stamp: bool) -> None:
        """Leaves, noting first that the index was closed in order if told so. Once is enough."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            if stamp:
                self._write_stamp()
        finally:
            # A forked child has a copy of the descriptor, and the lock is theirs together: the
            # parent lets go of it for both, the child only closes its copy.
            if os.getpid() == self._pid:
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


def throw_away(path: str) -> None:
    """Removes an index that cannot be opened. Raises BusyError if a process has it open."""
    fd = os.open(os.path.join(path, _USERS), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path)
    except BlockingIOError:
        raise BusyError(f"{path}: a process has this index open; end it first") from None
    finally:
        os.close(fd)


def _remove(path: str) -> None:
    for name in (_DATA, "lock.mdb", _STAMP):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(path, name))


def _walk_tree(path: str) -> None:
    """Visits every key and value and what they say of each other; dies or raises if it cannot."""
    import lmdb

    from kvfs.index.soundness import faults_in

    env = lmdb.open(path, readonly=True, lock=False, create=False)
    with env.begin(buffers=True) as txn:
        entries, found = txn.stat()["entries"], 0
        with txn.cursor() as cursor:
            for key, value in cursor:
                found += bool(len(key)) and len(value) >= 0
        if found != entries:
            raise SystemExit(f"{found} entries where {entries} are counted")
        for fault in faults_in(txn):
            raise SystemExit(fault)
    env.close()


if __name__ == "__main__":
    _walk_tree(sys.argv[1])
