"""Storage that fails on purpose: a backend around another one, for tests of whoever uses a store.

    faults = FaultyBackend(PosixBackend(path), seed=7)
    faults.on("writev", "seg/*", nth=3, do=Fail(errno.EIO))       # the third write to a segment
    faults.on("readv", do=Flip(bits=1), times=None, chance=0.1)   # one read in ten
    with Store.open(path, backend=faults) as store: ...

A rule names an operation of kvfs.backend.Backend ("*": all of them) and a pattern of paths (as for
fnmatch), says which of the matching calls it is for, and what to do with those. What to do is any
callable that takes the Call and returns what the operation would; ready-made ones:

  Fail(error)            raises OSError
  Short(limit)           moves at most `limit` bytes and says so
  CutAt(offset, error)   a disk that ends at a byte of the file: a short count there, then the error
  Lose(keep)             a write that keeps only its first bytes and says that all went well
  Flip(bits)             a read, after which bits of what it returned are turned over
  Delay(seconds)         late, but right
  Hold(after)            moves a share of the bytes, then waits until the test releases it

With `volatile=True` the backend also remembers what every unsynced write replaced, and `crash()`
puts it back, page by page: the machine went down. What survives of the unsynced pages is drawn
with the seed, so a run can be repeated from the seed it prints.

This module must not be used with a store that anybody needs. Thread-safe; a forked child has its
own rules and counts from then on.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvfs import forking
from kvfs.backend import Backend, OpenFile
from kvfs.backend.base import Buffer, Memory, Pace, at_once, first_bytes
from kvfs.testing.unsynced import Unsynced


class Call:
    """One call of a backend method that a rule has picked."""

    def __init__(
        self, op: str, path: str, rng: random.Random, run: Callable[[int | None], Any],
        offset: int = 0, buffers: Sequence[Buffer] = (),
    ) -> None:  # fmt: skip
        self.op = op
        self.path = path
        self.rng = rng
        self.offset = offset
        """Of a read or write: where in the file."""
        self.buffers = buffers
        self._run = run

    @property
    def size(self) -> int:
        """Bytes that a read or write asks for."""
        return sum(memoryview(b).nbytes for b in self.buffers)

    def proceed(self, limit: int | None = None) -> Any:
        """Lets the true operation happen; of a read or write at most `limit` bytes."""
        return self._run(limit)

    def error(self, code: int) -> OSError:
        return OSError(code, os.strerror(code), self.path)


Effect = Callable[[Call], Any]


@dataclass(slots=True)
class Fail:
    """The call fails, nothing having happened."""

    error: int

    def __call__(self, call: Call) -> Any:
        raise call.error(self.error)


@dataclass(slots=True)
class Short:
    """At most `limit` bytes move (0: the end of the file, or a full disk), without an error."""

    limit: int

    def __call__(self, call: Call) -> Any:
        return call.proceed(min(self.limit, call.size)) if self.limit else 0


@dataclass(slots=True)
class CutAt:
    """Bytes of the file from `offset` on cannot be moved: a short count, then `error`."""

    offset: int
    error: int = errno.ENOSPC

    def __call__(self, call: Call) -> Any:
        room = self.offset - call.offset
        if room >= call.size:
            return call.proceed()
        if room <= 0:
            raise call.error(self.error)
        return call.proceed(room)


@dataclass(slots=True)
class Lose:
    """A write of which only the first `keep` bytes reach the file; it reports success."""

    keep: int

    def __call__(self, call: Call) -> Any:
        if self.keep:
            call.proceed(self.keep)
        return call.size


@dataclass(slots=True)
class Flip:
    """A read that returns with `bits` bits turned over, at random places."""

    bits: int = 1

    def __call__(self, call: Call) -> Any:
        got = call.proceed()
        for _ in range(self.bits if got else 0):
            _flip(call.buffers, call.rng.randrange(got * 8))
        return got


@dataclass(slots=True)
class Delay:
    """The call happens, `seconds` later."""

    seconds: float

    def __call__(self, call: Call) -> Any:
        time.sleep(self.seconds)
        return call.proceed()


@dataclass(slots=True)
class Hold:
    """Of a write or read the share `after` happens, then it waits for `release`.

    reached: set when a call waits; on_reach: called at that moment. A short write is what the
    caller sees afterwards, so it goes on with the rest by itself.
    """

    after: float = 0.5
    on_reach: Callable[[], None] | None = None
    reached: threading.Event = field(default_factory=threading.Event)
    _release: threading.Event = field(default_factory=threading.Event)

    def __call__(self, call: Call) -> Any:
        part = int(call.size * self.after)
        done = call.proceed(part) if part else None
        self.reached.set()
        if self.on_reach is not None:
            self.on_reach()
        self._release.wait()
        return call.proceed() if done is None else done

    def release(self) -> None:
        """Lets go of the call that waits, and of all later ones."""
        self._release.set()


@dataclass(slots=True)
class Rule:
    """Which calls, and what happens to them. Made by `FaultyBackend.on`."""

    op: str
    path: str
    do: Effect
    nth: int
    times: int | None
    chance: float
    seen: int = 0
    """Calls that matched operation and path."""
    hits: int = 0
    """Calls that the effect was applied to."""

    def takes(self, op: str, path: str, rng: random.Random) -> bool:
        if self.op not in ("*", op) or not fnmatch.fnmatchcase(path, self.path):
            return False
        self.seen += 1
        if self.seen < self.nth or (self.times is not None and self.hits >= self.times):
            return False
        if self.chance < 1 and rng.random() >= self.chance:
            return False
        self.hits += 1
        return True


class FaultyBackend:
    """A Backend that hands everything to another one, except what its rules say."""

    def __init__(self, inner: Backend, *, seed: int = 0, volatile: bool = False) -> None:
        """seed: for all that is drawn; volatile: keep what `crash` needs (one process only)."""
        self.inner = inner
        self.root = inner.root
        self.seed = seed
        self.rng = random.Random(seed)
        self.calls: dict[str, int] = {}
        """Calls of each operation so far."""
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self._undo: Unsynced | None = Unsynced(inner) if volatile else None
        forking.register(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def on(
        self, op: str, path: str = "*", *, do: Effect, nth: int = 1, times: int | None = 1,
        chance: float = 1.0,
    ) -> Rule:  # fmt: skip
        """Adds a rule, tried after the older ones. Returns it: `seen` and `hits` count.

        nth: the first matching call it is for, from 1; times: how many calls, None for all from
        then on; chance: the probability for each of them.
        """
        rule = Rule(op, path, do, nth, times, chance)
        with self._lock:
            self._rules.append(rule)
        return rule

    def clear(self) -> None:
        """Forgets all rules. Calls that a Hold keeps waiting go on waiting."""
        with self._lock:
            self._rules.clear()

    @contextmanager
    def during(self, op: str, path: str = "*", **rule: Any) -> Any:
        """A rule for the length of a with block; arguments as for `on`."""
        made = self.on(op, path, **rule)
        try:
            yield made
        finally:
            with self._lock:
                self._rules = [r for r in self._rules if r is not made]

    def crash(self, *, survive: float = 0.0) -> None:
        """The machine goes down: unsynced pages are as before, files never synced are gone.

        survive: the share of unsynced pages that had reached the disk by chance, out of order.
        Close whatever uses the backend first, or stop using it: its files change under it.
        """
        if self._undo is None:
            raise ValueError("made without volatile=True: what was not synced is not known")
        self._undo.crash(survive, self.rng)

    def _call(self, op: str, path: str, run: Callable[[int | None], Any], **about: Any) -> Any:
        with self._lock:
            self.calls[op] = self.calls.get(op, 0) + 1
            rule = next((r for r in self._rules if r.takes(op, path, self.rng)), None)
        if rule is None:
            return run(None)
        return rule.do(Call(op, path, self.rng, run, **about))

    # the operations

    def create(self, path: str) -> OpenFile:
        def run(_: int | None) -> OpenFile:
            file = self.inner.create(path)
            if self._undo is not None:
                self._undo.created(path)
            return file

        made: OpenFile = self._call("create", path, run)
        return made

    def open(self, path: str) -> OpenFile:
        opened: OpenFile = self._call("open", path, lambda _: self.inner.open(path))
        return opened

    def close(self, file: OpenFile) -> None:
        self._call("close", file.path, lambda _: self.inner.close(file))

    def readv(self, file: OpenFile, buffers: Sequence[memoryview], offset: int) -> int:
        def run(limit: int | None) -> int:
            return self.inner.readv(file, _first(buffers, limit), offset)

        got: int = self._call("readv", file.path, run, offset=offset, buffers=buffers)
        return got

    def readv_cached(self, file: OpenFile, buffers: Sequence[memoryview], offset: int) -> int:
        return 0  # unknown what is in memory: so all is read by `readv` and its rules

    def writev(self, file: OpenFile, buffers: Sequence[Buffer], offset: int) -> int:
        def run(limit: int | None) -> int:
            views = _first([memoryview(b) for b in buffers], limit)
            if self._undo is not None:
                size = sum(v.nbytes for v in views)
                self._undo.about_to_write(file.path, offset, size)
            return self.inner.writev(file, views, offset)

        done: int = self._call("writev", file.path, run, offset=offset, buffers=buffers)
        return done

    def reserve(self, file: OpenFile, size: int) -> None:
        self._call("reserve", file.path, lambda _: self.inner.reserve(file, size))

    def write_behind(self, file: OpenFile, offset: int, length: int) -> None:
        def run(_: int | None) -> None:
            self.inner.write_behind(file, offset, length)

        self._call("write_behind", file.path, run, offset=offset)

    def sync(self, file: OpenFile) -> None:
        def run(_: int | None) -> None:
            self.inner.sync(file)
            if self._undo is not None:
                self._undo.synced(file.path)

        self._call("sync", file.path, run)

    def truncate(self, file: OpenFile, size: int) -> None:
        self._call("truncate", file.path, lambda _: self.inner.truncate(file, size))

    def size(self, path: str) -> int:
        size: int = self._call("size", path, lambda _: self.inner.size(path))
        return size

    def names(self, path: str) -> list[str]:
        names: list[str] = self._call("names", path, lambda _: self.inner.names(path))
        return names

    def unlink(self, path: str) -> None:
        def run(_: int | None) -> None:
            self.inner.unlink(path)
            if self._undo is not None:
                self._undo.synced(path)

        self._call("unlink", path, run)

    def remove_empty(self, path: str) -> bool:
        done: bool = self._call("remove_empty", path, lambda _: self.inner.remove_empty(path))
        return done

    def remove_tree(self, path: str, pace: Pace = at_once) -> None:
        def run(_: int | None) -> None:
            self.inner.remove_tree(path, pace)
            if self._undo is not None:
                self._undo.removed(path)

        self._call("remove_tree", path, run)

    def load(self, path: str, limit: int) -> bytes:
        data: bytes = self._call("load", path, lambda _: self.inner.load(path, limit))
        return data

    def replace(self, path: str, data: bytes) -> None:
        self._call("replace", path, lambda _: self.inner.replace(path, data))

    def put_new(self, path: str, data: bytes) -> bool:
        made: bool = self._call("put_new", path, lambda _: self.inner.put_new(path, data))
        return made

    def free_bytes(self) -> tuple[int, int]:
        free: tuple[int, int] = self._call("free_bytes", "", lambda _: self.inner.free_bytes())
        return free

    def probe(self) -> None:
        self._call("probe", "", lambda _: self.inner.probe())

    def chunk_bytes(self) -> int | None:
        return self.inner.chunk_bytes()

    def memory_directory(self) -> str | None:
        return self.inner.memory_directory()

    def lend(self, memory: Memory) -> None:
        self.inner.lend(memory)

    def release(self) -> None:
        self.inner.release()


def _first(buffers: Sequence[memoryview], limit: int | None) -> list[memoryview]:
    """Views of the first `limit` bytes of the buffers; None: of all."""
    views = [memoryview(b).cast("B") for b in buffers if memoryview(b).nbytes]
    return views if limit is None else first_bytes(views, limit)


def _flip(buffers: Sequence[Buffer], bit: int) -> None:
    """Turns over one bit, counted over all buffers."""
    at = bit // 8
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        if at < len(view):
            view[at] ^= 1 << bit % 8
            return
        at -= len(view)
