"""One LMDB environment per index directory and process, and the rules it must be used by.

LMDB breaks when an environment is opened twice in a process, used across fork, resized under a
transaction or by a process that missed a resize. All of that is dealt with here:

- `acquire` hands out one environment per real path, reference-counted;
- a forked child gets an environment of its own; the parent's is never touched by it;
- writers queue up at a lock of the kernel's, not at LMDB's mutex: where a waiting process is killed
  just as it is woken, and another one takes the mutex in that instant, nobody wakes the rest;
- a full map is doubled and the transaction run again; a map that another process grew is adopted;
- slots of dead readers are cleared at open and when the table is full.

Threads: reads may run on any thread, many at once, for milliseconds; one write at a time, begun,
run and committed on the calling thread (LMDB's writer mutex belongs to a thread).

Commits are not synced: the index is derived data. A process that dies loses nothing (the pages are
the kernel's); a machine that dies leaves an index that kvfs.index.guard throws away.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import lmdb

from kvfs.errors import IndexFault

T = TypeVar("T")
LmdbError = lmdb.Error
# A map is address space, not disk: 8 GiB holds some 200 million blocks before the first growth.
MAP_BYTES = 8 << 30
MAX_MAP_BYTES = 1 << 42
MAX_READERS = 1024

_lock = threading.Lock()
_open: dict[str, Env] = {}
_abandoned: list[Any] = []  # of a parent process, or of deleted files: never closed


class Env:
    """An open LMDB environment. Get one with `acquire`, give it back with `release`."""

    def __init__(self, path: str, map_bytes: int) -> None:
        self.path = path
        self._map_bytes = map_bytes
        # The lock is taken by itself on the way of every read: a Condition's own costs more.
        self._gate_lock = threading.Lock()
        self._gate = threading.Condition(self._gate_lock)
        self._active = 0
        self._resizing = False
        self._write_lock = threading.Lock()
        self.users = 0
        self._connect()

    def _connect(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._queue = os.open(os.path.join(self.path, "writer.lock"), flags, 0o600)
        try:
            self._env = lmdb.open(
                os.fsencode(self.path), map_size=self._map_bytes, subdir=True, create=True,
                sync=False, metasync=False, readahead=False, writemap=False,
                max_readers=MAX_READERS, max_spare_txns=8,
            )  # fmt: skip
            self._env.reader_check()
            self._file, self._lock_file = _file_id(self.path), _file_id(self.path, "lock.mdb")
        except lmdb.Error as e:
            os.close(self._queue)
            raise self.fault(e) from e

    def deleted(self) -> bool:
        """Says whether the files are no longer the ones that are open here."""
        return _file_id(self.path) != self._file

    def forget_lock(self) -> None:
        """Removes the lock file if it outlived the data: what it says is of the deleted file."""
        if _file_id(self.path) is None and _file_id(self.path, "lock.mdb") == self._lock_file:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.path, "lock.mdb"))

    def begin_read(self) -> Any:
        """Begins a read transaction; its values are memoryviews. End it with `end_read`."""
        with self._gate_lock:
            while self._resizing:
                self._gate.wait()
            self._active += 1
        try:
            return self._begin(False)
        except BaseException:
            self._leave()
            raise

    def _begin(self, write: bool) -> Any:
        try:
            return self._env.begin(None, None, write, True)  # the last: values as buffers
        except lmdb.ReadersFullError:
            if not self._env.reader_check():
                raise IndexFault(
                    f"{self.path}: {MAX_READERS} live readers, no slot left; stop some"
                ) from None
            return self._env.begin(None, None, write, True)
        except lmdb.MapResizedError:
            pass
        # Adopting the larger map needs all other transactions of this process to be over.
        self._resize(0, own=1)
        return self._env.begin(write=write, buffers=True)

    def end_read(self, txn: Any) -> None:
        txn.abort()
        self._leave()

    def _leave(self) -> None:
        with self._gate_lock:
            self._active -= 1
            if self._resizing:  # nobody waits for anything else
                self._gate.notify_all()

    @contextmanager
    def read(self) -> Iterator[Any]:
        txn = self.begin_read()
        try:
            yield txn
        except lmdb.Error as e:
            raise self.fault(e) from e
        finally:
            self.end_read(txn)

    def fault(self, e: Exception) -> IndexFault:
        return IndexFault(f"{self.path}: {e}; `kvctl rebuild` makes the index anew")

    def write(self, work: Callable[[Any], T]) -> T:
        """Runs work(txn) in a write transaction and commits; grows a full map and runs it again.

        `work` must depend on nothing but the transaction, since it may run more than once; if it
        raises, nothing is written. Raises IndexFault for what LMDB cannot do.
        """
        with self._write_lock, self._turn():
            while True:
                try:
                    return self._write_once(work)
                except lmdb.MapFullError:
                    self._grow()
                except lmdb.Error as e:
                    raise self.fault(e) from e

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Until no other process writes. The lock is the process's, not inherited by a fork."""
        fcntl.lockf(self._queue, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._queue, fcntl.LOCK_UN)

    def _write_once(self, work: Callable[[Any], T]) -> T:
        with self._gate:
            while self._resizing:
                self._gate.wait()
            self._active += 1
        try:
            with self._begin(True) as txn:
                return work(txn)
        finally:
            self._leave()

    def _grow(self) -> None:
        size = self._env.info()["map_size"] * 2
        if size > MAX_MAP_BYTES:
            raise IndexFault(f"{self.path}: the index would outgrow {MAX_MAP_BYTES} bytes")
        self._resize(size, own=0)

    def _resize(self, size: int, own: int) -> None:
        """Sets the map size (0: what the file says) when only `own` transactions are under way."""
        with self._gate:
            while self._resizing:
                if own:  # two readers met a grown map: one resizes, the others step back
                    self._active -= 1
                    self._gate.notify_all()
                    while self._resizing:
                        self._gate.wait()
                    self._active += 1
                    return
                self._gate.wait()
            self._resizing = True
            while self._active > own:
                self._gate.wait()
            try:
                self._env.set_mapsize(size)
            finally:
                self._resizing = False
                self._gate.notify_all()

    def info(self) -> dict[str, int]:
        """LMDB's figures: map_size, last_pgno, num_readers, ... and page counts in bytes."""
        stat = self._env.stat()
        info: dict[str, int] = {k: cast(int, v) for k, v in self._env.info().items()}
        info["used_bytes"] = (info["last_pgno"] + 1) * int(stat["psize"])
        return info

    def reader_check(self) -> int:
        """Clears the slots of dead readers; returns how many there were."""
        return int(self._env.reader_check())

    def sync(self) -> None:
        self._env.sync(True)

    def close(self) -> None:
        self._env.close()
        os.close(self._queue)

    def abandon(self) -> None:
        """Gives up an environment inherited through fork without touching it."""
        _abandoned.append(self._env)
        os.close(self._queue)


def _file_id(path: str, name: str = "data.mdb") -> tuple[int, int] | None:
    try:
        found = os.stat(os.path.join(path, name))
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def retire(env: Env) -> None:
    """Gives up an environment whose files were deleted: whoever is in it may finish, and nobody
    else gets it. It stays open, since others may be reading it."""
    with _lock:
        env.forget_lock()
        if env not in _abandoned:  # there was no other to be had, the last time
            _abandoned.append(env)
        if _open.get(env.path) is env:
            del _open[env.path]


def acquire(path: str, map_bytes: int = MAP_BYTES) -> tuple[Env, bool]:
    """Returns the process's one environment for a directory and whether this call opened it."""
    real = os.path.realpath(path)
    with _lock:
        env = _open.get(real)
        fresh = env is None
        if env is None:
            os.makedirs(real, 0o700, exist_ok=True)
            env = _open[real] = Env(real, map_bytes)
        env.users += 1
        return env, fresh


def release(env: Env) -> bool:
    """Gives an environment back; the last user closes it. Says whether it was closed."""
    with _lock:
        env.users -= 1
        if env.users > 0 or _open.get(env.path) is not env:
            return False
        del _open[env.path]
        env.close()
        return True


def generation() -> int:
    """A number that changes in a forked child: handles made before it must be opened again."""
    return _generation


_generation = 0


def _after_fork() -> None:
    global _generation, _lock
    _generation += 1
    _lock = threading.Lock()
    for env in _open.values():
        env.abandon()
    if _open:
        _tell_lmdb_of_fork()
    _open.clear()


def _tell_lmdb_of_fork() -> None:
    """Lets this child open what its parent has open.

    py-lmdb refuses to open the same files twice in a process, and takes its parent's for its own.
    To close them here is no way out: that would take the slots of the parent's readers. So for it
    the files become others, in this process and its children. (py-lmdb 1 looks at nothing, 2 looks
    at paths and cannot be told: see pyproject.toml.)
    """
    try:
        from lmdb import _envid
    except ImportError:
        return
    known, pid = _envid.env_keys, os.getpid()
    _envid.env_keys = lambda path, subdir: tuple((pid, key) for key in known(path, subdir))


os.register_at_fork(after_in_child=_after_fork)
