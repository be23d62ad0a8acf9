"""Which backend a store uses: `posix:/path`, `3fs:/path`, or a path, whose mount then tells.

No I/O but a look at the table of mounts; the backends themselves are loaded when they are needed.
"""

from __future__ import annotations

import os

from kvfs.backend.base import Backend
from kvfs.filesystems import filesystem_type

POSIX, THREEFS = "posix", "3fs"
KINDS = (POSIX, THREEFS)
_THREEFS_TYPE = "fuse.hf3fs"


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


def open_backend(place: str | os.PathLike[str]) -> Backend:
    """The backend of a store. That its storage is away shows at the first use."""
    kind, path = split(place)
    if kind is None:
        kind = THREEFS if filesystem_type(path) == _THREEFS_TYPE else POSIX
    if kind == THREEFS:
        from kvfs.backend.threefs import ThreefsBackend

        return ThreefsBackend(path)
    from kvfs.backend.posix import PosixBackend

    return PosixBackend(path)
