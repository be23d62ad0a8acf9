"""What commands print: tables for people, JSON lines for programs, progress for a terminal.

Results go to the standard output, everything else to the standard error output. A failure to write
a result is an OutputFailed, whoever writes, so that it never looks like a miss or a bug; a failure
to write a message is nothing. One thread.
"""

from __future__ import annotations

import contextlib
import errno as _errno
import io
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import IO, Any, TextIO, cast

from kvfs.errors import InputError

_REDRAW_SECONDS = 0.1
_CLEAR_LINE = "\r\x1b[K"


class OutputFailed(Exception):
    """A result could not be written; errno says why, path where: "" is the standard output."""

    def __init__(self, errno: int, path: str = "") -> None:
        super().__init__(f"{path or 'standard output'}: {os.strerror(errno)}")
        self.errno = errno
        self.path = path


class _Output(io.FileIO):
    """File descriptor 1. Its errors are told from those of any other file."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as e:
            raise OutputFailed(e.errno or _errno.EIO) from None


def guard_streams() -> None:
    """Makes errors of the standard output OutputFailed; occupies closed standard descriptors.

    A closed descriptor 1 would otherwise be the next file that is opened: the index, perhaps.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDONLY)  # takes the lowest free number; writes fail on it
    if sys.stdout is sys.__stdout__:  # not replaced by a test
        sys.stdout = _open_output(sys.stdout)


def _open_output(old: TextIO | None) -> TextIO:
    raw = _Output(1, "w", closefd=False)
    buffered = io.BufferedWriter(raw)
    encoding = "utf-8" if old is None else old.encoding
    return io.TextIOWrapper(
        buffered, encoding, errors="backslashreplace", line_buffering=raw.isatty()
    )


def flush() -> None:
    """Writes what is buffered. Raises OutputFailed."""
    if sys.stdout is not None:
        sys.stdout.flush()


def give_up() -> None:
    """Throws away what could not be written, so that the interpreter does not try once more."""
    if sys.stdout is not None and sys.__stdout__ is not sys.stdout and _is_ours(sys.stdout):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)


def _is_ours(stream: TextIO) -> bool:
    buffer = getattr(stream, "buffer", None)
    return isinstance(getattr(buffer, "raw", None), _Output)


def message(text: str, *, one_line: bool = True) -> None:
    """A line for a person on the standard error output."""
    if one_line:
        text = " ".join(text.split())
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def line(text: str = "") -> None:
    """A line of a result. Raises OutputFailed."""
    sys.stdout.write(f"{text}\n")


def json_line(value: Any) -> None:
    """One JSON object on one line, written at once. Raises OutputFailed.

    Raises ValueError for a number that is not finite: JSON has none, and other readers would choke.
    """
    import json

    sys.stdout.write(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")
    flush()


def opened(path: str, mode: str) -> IO[bytes]:
    """A file the user named, opened in a binary mode without a buffer. Raises InputError."""
    try:
        return cast("IO[bytes]", open(path, mode, buffering=0))
    except OSError as e:
        raise InputError(f"{path}: {e.strerror}") from None


def data(buffer: memoryview) -> None:
    """Bytes of a result. Raises OutputFailed."""
    flush()
    sys.stdout.buffer.write(buffer)
    sys.stdout.buffer.flush()


def pairs(rows: Iterable[tuple[str, str]]) -> None:
    """`what  value` lines; rows without a value are left out."""
    listed = [(what, value) for what, value in rows if value != ""]
    width = max((len(what) for what, _ in listed), default=0)
    for what, value in listed:
        line(f"{what.ljust(width)}  {value}")


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: str = "") -> None:
    """Columns under headings. right: a letter for each column, "r" for those set to the right."""
    listed = [header, *rows]
    widths = [max(len(row[i]) for row in listed) for i in range(len(header))]
    marks = right.ljust(len(header), "l")
    for row in listed:
        cells = (
            c.rjust(w) if m == "r" else c.ljust(w)
            for c, w, m in zip(row, widths, marks, strict=True)
        )
        line("  ".join(cells).rstrip())


# values for people


def many(n: int, what: str) -> str:
    """`1 block`, `2,000 blocks`."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def size(n: float) -> str:
    """Bytes in powers of 1024, as du -h and ls -h show them, with the unit in full."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if n < 1024 or unit == "TiB":
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError


def duration(seconds: float) -> str:
    """Seconds as `7 d`, `36 h`, `90 s`: the largest unit that is exact."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds // length:.0f} {unit}"
    if seconds >= 1:
        return f"{seconds:.0f} s" if seconds == int(seconds) else f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def when(ms: int) -> str:
    """Milliseconds since 1970 as a local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ms / 1000))


def left(ms: int, now_ms: int) -> str:
    """How long from now until a time, roughly."""
    seconds = (ms - now_ms) / 1000
    sign, seconds = ("-", -seconds) if seconds < 0 else ("", seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{sign}{seconds / length:.0f} {unit}"
    return f"{sign}{seconds:.0f} s"


class Progress:
    """A line on a terminal that is drawn over and over; nothing where nobody looks."""

    def __init__(self, what: str, total: int | None = None) -> None:
        self._what, self._total = what, total
        self._done, self._drawn = 0, time.monotonic()
        self._shown = False
        self._terminal = False
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def __call__(self, n: int = 1) -> None:
        """Counts n more, and shows it if the last time is long enough ago."""
        self._done += n
        total = "" if self._total is None else f" of {self._total:,}"
        self.draw(f"{self._what}: {self._done:,}{total}")

    def draw(self, text: str) -> None:
        """Draws any text in place of the line, if the last time is long enough ago."""
        if self._terminal and time.monotonic() - self._drawn >= _REDRAW_SECONDS:
            self.show(text)

    def show(self, text: str) -> None:
        """Draws any text in place of the line."""
        if self._terminal:
            self._drawn, self._shown = time.monotonic(), True
            self._write(_CLEAR_LINE + text)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._shown:
            self._write(_CLEAR_LINE)

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()
