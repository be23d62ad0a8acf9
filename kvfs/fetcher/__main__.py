"""The command line of a fetcher process: for kvfs.fetcher.launch; people use `kvctl fetcher`."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import logging.handlers
import os
import signal
import sys
from typing import NoReturn

from kvfs.errors import EXIT_INTERNAL, ConfigError, KvfsError
from kvfs.fetcher.launch import ARENA_BYTES, Options

_LOG_BYTES = 1 << 20


def main() -> None:
    """Runs a fetcher and exits with a code of kvfs.errors; a line on stderr says what is wrong."""
    parser = argparse.ArgumentParser(prog="kvfs.fetcher", description=__doc__)
    parser.add_argument("store")
    parser.add_argument("--arena", type=int, default=ARENA_BYTES)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--shm")
    parser.add_argument("--stall", type=float, default=5.0)
    parser.add_argument("--parent", type=int)
    parser.add_argument("--idle", type=float)
    parser.add_argument("--connection", type=int)
    parser.add_argument("--background", action="store_true")
    a = parser.parse_args()
    options = Options(a.arena, a.threads, a.shm, a.stall, a.parent, a.idle)
    logging.basicConfig(level=logging.WARNING, format="kvfs: %(message)s")
    if a.background:
        _in_background(a.store, options)
    sys.exit(_run(a.store, options, a.connection))


def _run(
    store: str, options: Options, connection: int | None = None, said: Said | None = None
) -> int:
    """Runs a fetcher; returns its exit code."""

    def ready(name: str) -> None:
        if said is not None:
            _leave_terminal(f"{name}.log")
            said(0)

    try:
        try:
            from kvfs.fetcher.process import run
        except ImportError as e:
            raise ConfigError(f"no Python package {e.name}; pip install 'kvfs[fetch]'") from None
        run(store, options, connection=connection, ready=ready)
    except KvfsError as e:
        print(f"kvfs: {e}", file=sys.stderr, flush=True)
        return e.exit_code
    return 0


class Said:
    """Tells the process that waits how starting went, once."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __call__(self, code: int) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # it may not wait any more
                os.write(fd, bytes([code]))
            os.close(fd)


def _in_background(store: str, options: Options) -> NoReturn:
    """Runs the fetcher in a child that belongs to nobody; exits once it serves or has failed."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        _child(store, options, Said(writer))
    os.close(writer)
    code = os.read(reader, 1)
    os._exit(code[0] if code else EXIT_INTERNAL)


def _child(store: str, options: Options, said: Said) -> NoReturn:
    os.setsid()
    os.chdir("/")
    code = EXIT_INTERNAL
    try:
        code = _run(store, options, said=said)
    except BaseException:
        logging.exception("the fetcher ended; this is a bug of kvfs")
    finally:
        logging.shutdown()
        said(code)
        os._exit(code)


def _leave_terminal(path: str) -> None:
    """Sends what is logged to a file of bounded size, and thread stacks at SIGUSR1 with it."""
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=_LOG_BYTES, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    faulthandler.register(signal.SIGUSR1, open(path, "a"))  # noqa: SIM115  # for as long as we live


if __name__ == "__main__":
    main()
