"""What the bodies of journal entries share: how strings stand in them, and what they may say.

A frame says of itself that it is whole, not that its writer was right. One number that no index can
hold would end the reading of all journals on every host, and a path may lead out of the store, so
what cannot be is refused where it is decoded: the journal it is in is reported, the others go on.
No I/O here.
"""

from __future__ import annotations

import struct

from kvfs.geometry import Geometry

_LENGTH = struct.Struct("<H")
MAX_NAME = 255
"""Bytes of the name of a TTL class, which stands in keys."""
_SLOTS = 1 << 32
_TIMES_MS = 1 << 62
"""Times are below: two of them can be added, or one doubled."""
_EXTENT = 1 << 33


def string(text: str) -> bytes:
    """A string in a body: a u16 length and UTF-8."""
    data = text.encode()
    return _LENGTH.pack(len(data)) + data


def take_string(body: memoryview, at: int, most: int = 0xFFFF) -> tuple[str, int]:
    """The string at an offset, and the offset behind it. Raises struct.error, ValueError."""
    (n,) = _LENGTH.unpack_from(body, at)
    at += _LENGTH.size
    if n > most:
        raise ValueError(f"a string of {n} bytes, more than {most}")
    if at + n > len(body):
        raise ValueError("string beyond the body")
    return bytes(body[at : at + n]).decode(), at + n


def check_ms(*times: int) -> None:
    """Raises ValueError for a time, in milliseconds, that nothing can be told by."""
    if max(times) >= _TIMES_MS:
        raise ValueError(f"a time of {max(times)} ms")


def check_path(path: str) -> None:
    """Raises ValueError for a segment's path that is none: collectors remove what it names."""
    if not path.startswith("seg/") or ".." in path.split("/") or "\0" in path:
        raise ValueError(f"a segment at {path!r}")


def check_class_name(name: str) -> None:
    """Raises ValueError for a TTL class that could not be a directory's name."""
    if name in (".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"a TTL class {name!r}")


def check_seconds(seconds: int) -> None:
    """As `check_ms`, of a time to live."""
    check_ms(seconds * 1000)


def check_slots(first: int, count: int) -> None:
    """Raises ValueError for slots of a segment, or blocks of a chain, that have no numbers."""
    if first + count > _SLOTS:
        raise ValueError(f"{count} from {first} on")


def check_geometry(geometry: Geometry) -> None:
    """Raises ValueError for a geometry in which no record has a place."""
    g = geometry
    if not (0 < g.stride <= g.extent <= _EXTENT and g.first <= g.extent):
        raise ValueError(f"records of {g.stride} bytes from {g.first} on in extents of {g.extent}")
