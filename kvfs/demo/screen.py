"""What the demonstration prints: headings, shell sessions, progress, a table. No kvfs in it.

Colour and a moving progress line only on a terminal (and never with NO_COLOR set); in a pipe a few
plain lines. One thread.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TextIO

_BOLD, _DIM, _GREEN, _PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[32m", "\x1b[0m"
_CLEAR_LINE = "\r\x1b[K"
_REDRAW_SECONDS = 0.1
_BAR = 24


class Screen:
    """Writes to one stream, as suits it."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._out = sys.stdout if stream is None else stream
        self._terminal = self._out.isatty() and os.environ.get("TERM") != "dumb"
        self._colour = self._terminal and not os.environ.get("NO_COLOR")
        utf = "utf" in (self._out.encoding or "").lower()
        self._marks = ("█", "░") if utf else ("#", ".")
        self._drawn = 0.0
        self._quarter = 0

    def heading(self, text: str) -> None:
        self._line("")
        self._line(self._paint(_BOLD, text))

    def say(self, text: str) -> None:
        self._line(f"  {text}")

    def shell(self, command: str, output: str, *, lines: int = 8) -> None:
        """Shows a command and the first lines of what it printed."""
        self._line(f"  {self._paint(_GREEN, '$ ' + command)}")
        shown = output.rstrip("\n").split("\n") if output.strip() else []
        if len(shown) == lines + 1:
            lines += 1
        for line in shown[:lines]:
            self._line(f"    {line}")
        if len(shown) > lines:
            self._line(self._paint(_DIM, f"    ... {len(shown) - lines:,} more lines"))

    def progress(self, share: float, text: str) -> None:
        """Shows how far something is, share being 0 to 1: redrawn in place, or a line a quarter."""
        if not self._terminal:
            if int(share * 4) > self._quarter:
                self._quarter = int(share * 4)
                self._line(f"  {share:4.0%}  {text}")
            return
        now = time.monotonic()
        if now - self._drawn >= _REDRAW_SECONDS or share >= 1:
            self._drawn = now
            full = round(share * _BAR)
            done, rest = self._marks
            bar = self._paint(_GREEN, done * full) + self._paint(_DIM, rest * (_BAR - full))
            self._out.write(f"{_CLEAR_LINE}  {bar}  {text}")
            self._out.flush()

    def progress_done(self) -> None:
        """Leaves the last state of the progress line standing."""
        if self._terminal and self._drawn:
            self._line("")
        self._drawn, self._quarter = 0.0, 0

    def table(self, rows: Iterable[Sequence[str]]) -> None:
        """Prints rows of (what, value, remark) in columns."""
        rows = [tuple(row) for row in rows]
        first = max(len(row[0]) for row in rows)
        second = max(len(row[1]) for row in rows)
        for what, value, remark in rows:
            text = f"{what:<{first}}  {self._paint(_BOLD, value.rjust(second))}  {remark}"
            self._line(f"  {text.rstrip()}")

    def _paint(self, colour: str, text: str) -> str:
        return f"{colour}{text}{_PLAIN}" if self._colour and text else text

    def _line(self, text: str) -> None:
        self._out.write(text + "\n")
        self._out.flush()
