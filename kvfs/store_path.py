"""How people write where a store is: `posix:/path`, `3fs:/path`, or a path. No I/O."""

from __future__ import annotations

import os

POSIX, THREEFS = "posix", "3fs"
KINDS = (POSIX, THREEFS)


def split(place: str | os.PathLike[str]) -> tuple[str | None, str]:
    """(kind or None, absolute path) of a store as people write it."""
    text = os.fspath(place)
    kind, colon, path = text.partition(":")
    if colon and kind in KINDS:
        return kind, os.path.abspath(path)
    return None, os.path.abspath(text)


def path_of(place: str | os.PathLike[str]) -> str:
    """The absolute path alone."""
    return split(place)[1]


def absolute(place: str | os.PathLike[str]) -> str:
    """The same in words that stay right when the process leaves its directory."""
    kind, path = split(place)
    return path if kind is None else f"{kind}:{path}"
