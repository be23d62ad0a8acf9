"""Reading request traces: kvtrace files, JSON lines, gzipped or not.

Line 1 is a header `{"kvtrace": 1, "name", "source", "licence", "block_tokens", "requests", ...}`,
every other line a request `{"t": seconds, "in": input tokens, "r": [[first_id, count], ...]}`. `r`
holds chain ids, run-length coded: an id stands for `block_tokens` tokens *and for all before them*.
A line `{"session": true, "s": name, "blocks": n}` starts a session; behind it ids are local to the
session (0..n-1) and `t` counts from the session's start. The file does not say when sessions start:
here session k starts k * session_gap seconds after the first, in file order, and requests come out
in the order of time. Unknown keys are ignored.

A file is read once, line by line; what is held in memory are the requests of sessions that overlap.
Anything malformed is an InputError that names file and line. A Trace belongs to one thread.
"""

from __future__ import annotations

import gzip
import heapq
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from kvfs.errors import InputError

VERSION = 1
SESSION_GAP = 600.0
MAX_REQUEST_TOKENS = 1 << 28
MAX_SECONDS = 1e12
MAX_LINE_CHARS = 1 << 26
_MAX_ID = 1 << 48
_GZIP_MAGIC = b"\x1f\x8b"
_DATA = Path(__file__).parent / "data"
_SUFFIXES = (".jsonl.gz", ".jsonl")


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    t: seconds since the trace began; session: name, "" where the trace has none;
    runs: (first id, count) pairs, ids unique in the whole trace; tokens: input tokens, which may be
    a little more or less than the ids stand for; line: where it stands in the file.
    """

    t: float
    session: str
    runs: tuple[tuple[int, int], ...]
    tokens: int
    block_tokens: int
    line: int

    @property
    def n_ids(self) -> int:
        return sum(count for _, count in self.runs)


@dataclass(frozen=True, slots=True)
class Header:
    """What the first line says. requests: how many follow, None where the header leaves it out."""

    name: str
    source: str
    licence: str
    block_tokens: int
    requests: int | None


class Trace:
    """A trace file: its header, and its requests as often as they are asked for."""

    def __init__(self, path: str | Path) -> None:
        """Opens and closes the file to read the header. Raises InputError."""
        self.path = Path(path)
        with _open(self.path) as lines:
            self.header = _header(_Place(self.path, 1), lines.line())

    def requests(self, session_gap: float = SESSION_GAP) -> Iterator[Request]:
        """Yields the requests in the order of time, of equal times in that of the file.

        session_gap: seconds between the starts of consecutive sessions. A trace without sessions
        must be in the order of time already. Raises InputError, also halfway.
        """
        if not 0 <= session_gap <= MAX_SECONDS:
            raise InputError(f"session gap must be 0 to {MAX_SECONDS:.0f} s, not {session_gap}")
        with _open(self.path) as lines:
            lines.line()
            yield from _Reader(self.header.block_tokens, session_gap).read(lines)


def builtin() -> dict[str, Path]:
    """The traces that come with kvfs, by name."""
    return {
        path.name.removesuffix(suffix): path
        for suffix in _SUFFIXES
        for path in sorted(_DATA.glob(f"*{suffix}"))
    }


def find(name: str) -> Trace:
    """Opens a trace by path, or by the name of one that comes with kvfs. Raises InputError."""
    path = Path(name)
    if not path.exists():
        known = builtin()
        if name not in known:
            raise InputError(
                f"there is no trace file {name!r}; traces that come with kvfs: {', '.join(known)}"
            )
        path = known[name]
    return Trace(path)


@dataclass(slots=True)
class _Place:
    """Where reading stands, for messages."""

    path: Path
    line: int

    def error(self, what: str) -> InputError:
        return InputError(f"{self.path}, line {self.line}: {what}")


class _Lines:
    """The lines of an open file; every way in which reading can fail becomes an InputError."""

    def __init__(self, path: Path, stream: IO[str]) -> None:
        self._stream = stream
        self.place = _Place(path, 0)

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stream.close()

    def line(self) -> str:
        """Returns the next line, "" at the end."""
        self.place.line += 1
        try:
            text = self._stream.readline(MAX_LINE_CHARS)
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as e:
            raise self.place.error(f"cannot be read: {e}") from None
        if len(text) >= MAX_LINE_CHARS:
            raise self.place.error(f"a line of more than {MAX_LINE_CHARS} characters")
        return text


def _open(path: Path) -> _Lines:
    stream: IO[str]
    try:
        with open(path, "rb") as f:
            packed = f.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        opener: Any = gzip.open if packed else open
        stream = opener(path, "rt", encoding="utf-8")
    except OSError as e:
        raise InputError(f"trace {path}: {e.strerror or e}") from None
    return _Lines(path, stream)


def _object(place: _Place, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise place.error(f"not JSON: {e}") from None
    if not isinstance(value, dict):
        raise place.error("not a JSON object")
    return value


def _text(place: _Place, obj: dict[str, Any], key: str) -> str:
    value = obj.get(key, "")
    if not isinstance(value, str):
        raise place.error(f"{key!r} must be a string")
    return value


def _whole(place: _Place, obj: dict[str, Any], key: str, high: int) -> int:
    value = obj.get(key)
    if type(value) is not int or not 0 <= value <= high:
        raise place.error(f"{key!r} must be an integer of 0 to {high}, not {value!r}")
    return value


def _header(place: _Place, text: str) -> Header:
    if not text.strip():
        raise place.error("no header")
    obj = _object(place, text)
    if "kvtrace" not in obj:
        raise place.error('not a kvtrace file: its first line lacks "kvtrace"')
    if obj["kvtrace"] != VERSION:
        raise place.error(f"kvtrace version {obj['kvtrace']!r} is not known, only {VERSION}")
    if obj.get("block_tokens") is None:
        raise place.error("the trace has no chain ids (no block_tokens), so no prefix to replay")
    block_tokens = _whole(place, obj, "block_tokens", 1 << 20)
    if not block_tokens:
        raise place.error("'block_tokens' must not be 0")
    requests = _whole(place, obj, "requests", _MAX_ID) if "requests" in obj else None
    name, source, licence = (_text(place, obj, key) for key in ("name", "source", "licence"))
    return Header(name, source, licence, block_tokens, requests)


@dataclass
class _Reader:
    """Turns lines into requests: adds up session starts and id offsets, and sorts by time."""

    block_tokens: int
    gap: float
    sessions: int = 0
    session: str = ""
    start: float = 0.0
    offset: int = 0
    blocks: int | None = None
    last: float = -1.0  # time of the last request that belongs to no session; -1 before any
    waiting: list[tuple[float, int, Request]] = field(default_factory=list)

    def read(self, lines: _Lines) -> Iterator[Request]:
        while text := lines.line():
            if not text.strip():
                continue
            obj = _object(lines.place, text)
            if obj.get("session") is True:
                self._enter_session(lines.place, obj)
                # All that is still to be read starts no earlier than this session.
                yield from self._due(self.start)
                continue
            request = self._request(lines.place, obj)
            if self.sessions:
                heapq.heappush(self.waiting, (request.t, request.line, request))
            else:
                self._must_ascend(lines.place, request.t)
                yield request
        yield from self._due(math.inf)

    def _due(self, until: float) -> Iterator[Request]:
        while self.waiting and self.waiting[0][0] <= until:
            yield heapq.heappop(self.waiting)[2]

    def _enter_session(self, place: _Place, obj: dict[str, Any]) -> None:
        if not self.sessions and self.last >= 0:
            raise place.error("a session behind requests that belong to none")
        self.offset += self.blocks or 0
        self.blocks = _whole(place, obj, "blocks", _MAX_ID)
        if self.offset + self.blocks > _MAX_ID:
            raise place.error("too many ids in all")
        self.session = _text(place, obj, "s")
        self.start = self.sessions * self.gap
        self.sessions += 1

    def _must_ascend(self, place: _Place, t: float) -> None:
        if t < self.last:
            raise place.error(f"time goes back, from {self.last} to {t}")
        self.last = t

    def _request(self, place: _Place, obj: dict[str, Any]) -> Request:
        t: Any = obj.get("t")
        if type(t) not in (int, float) or not 0 <= t <= MAX_SECONDS:
            raise place.error(f"'t' must be seconds, 0 to {MAX_SECONDS:.0f}, not {t!r}")
        tokens = _whole(place, obj, "in", MAX_REQUEST_TOKENS)
        limit = _MAX_ID if self.blocks is None else self.blocks
        runs = tuple(
            (self.offset + first, count) for first, count in _runs(place, obj.get("r"), limit)
        )
        return Request(self.start + t, self.session, runs, tokens, self.block_tokens, place.line)


def _runs(place: _Place, value: Any, limit: int) -> Iterator[tuple[int, int]]:
    if not isinstance(value, list):
        raise place.error("'r' must be a list of [first id, count]")
    for run in value:
        if not (isinstance(run, list) and len(run) == 2 and all(type(n) is int for n in run)):
            raise place.error(f"'r' must hold pairs of integers, not {run!r}")
        first, count = run
        if first < 0 or count < 1 or first + count > limit:
            raise place.error(f"ids {first} and {count - 1} more are outside 0..{limit - 1}")
        yield first, count
