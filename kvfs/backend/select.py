"""Which backend a store uses: what its place says (kvfs.store_path), else what its mount tells.

No I/O but a look at the table of mounts; the backends themselves are loaded when they are needed.
"""

from __future__ import annotations

import os

from kvfs.backend.base import Backend
from kvfs.filesystems import filesystem_type
from kvfs.store_path import POSIX, THREEFS, split

_THREEFS_TYPE = "fuse.hf3fs"


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
