"""The life of a mount: from the command line to a serving process, and its end.

The process has one job; nothing else may live in it, since pyfuse3 can freeze its interpreter: it
waits for /dev/fuse to be readable and then reads with the GIL held, and if the request was
withdrawn in between, that read blocks until the next one. A timer signal every 50 ms ends it.

In the background a child does everything, and the caller's process waits until it serves or says
in a line why it cannot. When the process dies the mount stays, answering ENOTCONN, on purpose: an
empty directory in its place would be a lie. The next `kvctl mount` replaces it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvfs.errors import ConfigError, KvfsError
from kvfs.index.place import default_root
from kvfs.mount import mountinfo
from kvfs.store import Store
from kvfs.store_path import absolute, path_of
from kvfs.systemd import notify
from kvfs.vfs import Tree

if TYPE_CHECKING:
    from kvfs.mount.threads import Threads

log = logging.getLogger(__name__)

FOLLOW_SECONDS = 2.0
TICK_SECONDS = 0.05
GRACE_SECONDS = 1.0
_FUSE_CONF = "/etc/fuse.conf"
_DEVICE = "/dev/fuse"
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class MountOptions:
    """What to mount, where and how."""

    store: str
    point: str
    index: str | None = None
    writable: bool = False
    allow_other: bool = False
    foreground: bool = False
    log: str | None = None
    """A file, "syslog", or None: standard error in the foreground, else a file by the index."""
    uid: int = field(default_factory=os.getuid)
    gid: int = field(default_factory=os.getgid)
    umask: int = 0


def mount(options: MountOptions, say: Callable[[str], None]) -> None:
    """Mounts a store. In the foreground returns when it is unmounted, else when it serves.

    say: for notes to the user. Raises ConfigError, BusyError, and what Store.open raises.
    """
    _require(options)
    options, point = _absolute(options), mountinfo.real_point(options.point)
    for line in mountinfo.replace_stale(point):
        say(line)
    if not os.path.isdir(point):
        raise ConfigError(f"{point}: not a directory")
    _require_apart(options, point)
    if options.foreground:
        _serve(options, point, lambda: None)
    else:
        _in_background(options, point)


def _require(options: MountOptions) -> None:
    """Raises ConfigError for what is missing on this host."""
    try:
        import pyfuse3  # noqa: F401
        import trio  # noqa: F401
    except ImportError as e:
        raise ConfigError(f"no Python package {e.name}; pip install 'kvfs[fuse]'") from None
    if not os.path.exists(_DEVICE):
        raise ConfigError(
            f"there is no {_DEVICE}: load the module fuse; a container needs --device {_DEVICE} "
            "and the capability SYS_ADMIN"
        )
    if options.allow_other and os.geteuid() != 0 and not _users_may_allow_others():
        raise ConfigError(f"--allow-other needs the line user_allow_other in {_FUSE_CONF}")


def _absolute(options: MountOptions) -> MountOptions:
    """The options with paths that stay right when the process leaves its directory."""
    index = options.index or default_root()
    log = options.log if options.log in (None, "syslog") else os.path.abspath(str(options.log))
    return replace(options, store=absolute(options.store), index=os.path.abspath(index), log=log)


def _require_apart(options: MountOptions, point: str) -> None:
    """Raises ConfigError if the mount would lie over what its process needs: it would wait for
    itself for ever."""
    for path in (path_of(options.store), options.index, options.log):
        if path in (None, "syslog"):
            continue
        real = os.path.realpath(str(path))
        if real == point or real.startswith(point.rstrip("/") + "/"):
            raise ConfigError(f"{point}: the mount would hide {path}; choose another directory")


def _users_may_allow_others() -> bool:
    try:
        with open(_FUSE_CONF, encoding="utf-8", errors="replace") as f:
            return any(line.strip() == "user_allow_other" for line in f)
    except OSError:
        return False


# in the background


def _in_background(options: MountOptions, point: str) -> None:
    """Starts a process that serves. Raises what it could not do."""
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _child(options, point, writer)
    os.close(writer)
    with open(reader, "rb") as f:
        said = f.read()
    if not said:
        _, status = os.waitpid(pid, 0)
        raise KvfsError(f"the mount's process ended with status {status} and no word; see its log")
    answer = json.loads(said)
    if answer["exit_code"]:
        os.waitpid(pid, 0)
        error = KvfsError(answer["message"])
        error.exit_code = answer["exit_code"]
        raise error


def _child(options: MountOptions, point: str, writer: int) -> None:
    """Serves, and ends the process: it must not go on in its parent's program."""
    code = 1

    def answer(exit_code: int, message: str = "") -> None:
        os.write(writer, json.dumps({"exit_code": exit_code, "message": message}).encode())
        os.close(writer)

    def ready() -> None:
        nonlocal code
        code = 0
        _leave_terminal()
        answer(0)

    try:
        os.setsid()
        os.chdir("/")
        _serve(options, point, ready)
    except KvfsError as e:
        if code:
            answer(e.exit_code, str(e))
        code = e.exit_code
    except BaseException:
        code = 1
        log.exception("the mount ended; this is a bug of kvfs")
    finally:
        logging.shutdown()
        os._exit(code)


def _leave_terminal() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)


# serving


def _serve(options: MountOptions, point: str, ready: Callable[[], None]) -> None:
    """Mounts, calls ready, serves until it is unmounted or told to end, and unmounts."""
    import pyfuse3

    with Store.open(options.store, index=options.index) as store, _logging(options, store):
        operations = _operations(options, store)
        # One that comes before the loop listens would end the process and leave the mount.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        _init(operations, point, _fuse_options(options, store))
        try:
            log.info("%s: mounted at %s", store.path, point)
            ready()
            notify("READY=1")
            with _tick():
                _run(store, operations.threads)
        finally:
            notify("STOPPING=1")
            pyfuse3.close(unmount=True)
            counts = ", ".join(f"{op} {n}" for op, n in sorted(operations.requests.items()))
            log.info("%s: unmounted from %s after: %s", store.path, point, counts or "nothing")


def _operations(options: MountOptions, store: Store) -> Any:
    from kvfs.mount.operations import Owner, ReadOnly
    from kvfs.mount.write import Writable

    kind = Writable if options.writable else ReadOnly
    return kind(Tree(store), Owner(options.uid, options.gid, options.umask))


def _fuse_options(options: MountOptions, store: Store) -> set[str]:
    chosen = {
        "default_permissions", "noexec", "nosuid", "nodev", "subtype=kvfs",
        "rw" if options.writable else "ro", f"fsname=kvfs:{_escaped(store.path)}",
    }  # fmt: skip
    return chosen | ({"allow_other"} if options.allow_other else set())


def _escaped(text: str) -> str:
    """libfuse splits options at commas, reads octal escapes, and pyfuse3 takes ASCII only."""
    data = os.fsencode(text)
    return "".join(chr(b) if 32 < b < 127 and b not in b",\\" else f"\\{b:03o}" for b in data)


def _init(operations: Any, point: str, options: set[str]) -> None:
    """Mounts. Raises ConfigError with what libfuse had to say, which it writes to stderr."""
    import pyfuse3

    sys.stderr.flush()
    kept, said = os.dup(2), os.memfd_create("libfuse")
    os.dup2(said, 2)
    try:
        pyfuse3.init(operations, point, options)
    except RuntimeError as e:
        os.lseek(said, 0, os.SEEK_SET)
        lines = os.read(said, 4096).decode("utf-8", "replace").split("\n")
        why = next((line for line in reversed(lines) if line.strip()), str(e))
        raise ConfigError(f"{point}: cannot mount: {why.strip()}") from None
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(said)


@contextlib.contextmanager
def _tick() -> Iterator[None]:
    """The signal that bounds pyfuse3's blocking reads; off again before the process ends."""
    signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, TICK_SECONDS, TICK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _run(store: Store, threads: Threads) -> None:
    """Serves requests; follows the journals beside. Threads that the storage holds are left
    alone at the end."""
    import pyfuse3
    import trio

    async def end_at_signal(nursery: Any) -> None:
        with trio.open_signal_receiver(*_ENDING) as signals:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
            async for number in signals:
                log.info("ending at %s", signal.Signals(number).name)
                pyfuse3.terminate()
                await trio.sleep(GRACE_SECONDS)  # for requests that are being answered
                nursery.cancel_scope.cancel()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_follow, store, threads)
            nursery.start_soon(end_at_signal, nursery)
            await pyfuse3.main()
            nursery.cancel_scope.cancel()

    trio.run(main)
    if not threads.end(GRACE_SECONDS):
        # A thread sits in the storage with the index open: closing that under it would crash.
        log.warning("the storage does not answer; leaving the index to the kernel")
        logging.shutdown()
        pyfuse3.close(unmount=True)
        os._exit(0)


async def _follow(store: Store, threads: Threads) -> None:
    """Applies what other hosts write, again and again, and logs what is wrong when that changes."""
    import trio

    limiter, last = trio.CapacityLimiter(1), ""
    while True:
        await trio.sleep(FOLLOW_SECONDS)
        bug: Exception | None = None
        try:
            problem = await threads.run(_catch_up, store, limiter=limiter)
        except Exception as e:  # a bug, or no thread to be had: no reason to end the mount
            problem, bug = repr(e), e
        if problem and problem != last:
            log.warning("following the journals: %s", problem, exc_info=bug)
        last = problem


def _catch_up(store: Store) -> str:
    """Applies what other hosts wrote; returns what is wrong, or ""."""
    try:
        problems = store.catch_up().problems
    except (KvfsError, OSError) as e:
        return str(e)
    return "; ".join(problems[:3])


# logging


@contextlib.contextmanager
def _logging(options: MountOptions, store: Store) -> Iterator[None]:
    """Sends the log where the options say, and thread stacks at SIGUSR1 with it."""
    path = options.log
    if path is None and not options.foreground:
        path = os.path.join(store.index.path, "mount.log")
    handler = _handler(path)
    logger = logging.getLogger("kvfs")
    logger.addHandler(handler)
    logger.setLevel(min(logging.INFO, logger.level or logging.INFO))
    logger.propagate = False  # -v has set up a log of its own, on the same terminal
    stacks = open(path, "a") if path not in (None, "syslog") else None  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, stacks or sys.stderr)
    try:
        yield
    finally:
        faulthandler.unregister(signal.SIGUSR1)
        logger.removeHandler(handler)
        logger.propagate = True
        handler.close()
        if stacks is not None:
            stacks.close()


def _handler(path: str | None) -> logging.Handler:
    """Raises ConfigError if the log cannot be written."""
    from logging import handlers

    handler: logging.Handler
    try:
        if path == "syslog":
            handler = handlers.SysLogHandler("/dev/log", handlers.SysLogHandler.LOG_DAEMON)
        elif path is not None:
            handler = handlers.WatchedFileHandler(path, encoding="utf-8")
        else:
            handler = logging.StreamHandler()
    except OSError as e:
        raise ConfigError(f"cannot log to {path}: {e.strerror}") from e
    handler.setFormatter(_formatter(path))
    return handler


def _formatter(path: str | None) -> logging.Formatter:
    if path == "syslog":
        return _Formatter("kvfs-mount[%(process)d]: %(message)s")
    if path is None and os.environ.get("JOURNAL_STREAM"):
        return _JournalFormatter("%(message)s")
    return _Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")


class _Formatter(logging.Formatter):
    """Writes paths out that are no UTF-8, which the handlers could not."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).encode(errors="backslashreplace").decode()


class _JournalFormatter(_Formatter):
    """Puts the priority in front that systemd's journal reads from a service's output."""

    def format(self, record: logging.LogRecord) -> str:
        priority = 3 if record.levelno >= logging.ERROR else 4
        if record.levelno < logging.WARNING:
            priority = 6
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).split("\n"))
