"""Temporary stores to measure, and what the page cache holds of their files.

Everything made here lies in one directory that is removed at the end, whatever ends it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvfs import presets
from kvfs.errors import ConfigError
from kvfs.index.place import FORCE_ENVIRONMENT
from kvfs.namespace import Namespace
from kvfs.store import Store

PRESET = "deepseek-v4.1-flash"


@contextlib.contextmanager
def scratch(below: str | None) -> Iterator[Path]:
    """A directory of its own below another (None: the temporary directory). Raises ConfigError."""
    try:
        path = Path(tempfile.mkdtemp(prefix="kvfs-bench-", dir=below))
    except OSError as e:
        raise ConfigError(f"{below or tempfile.gettempdir()}: {e.strerror}") from e
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def new_store(
    directory: str | None, index: str | None, preset: str = PRESET, **settings: Any
) -> Iterator[tuple[Store, Namespace]]:
    """A store with one namespace in scratch directories; settings: as for Store.init."""
    # Nobody else will ever see this index, so its directory may be an overlay of a container.
    os.environ[FORCE_ENVIRONMENT] = "1"
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(scratch(directory))
        at = stack.enter_context(scratch(index))
        store = stack.enter_context(Store.init(place / "store", index=str(at), **settings))
        identity = presets.get(preset, weights="bench", tokenizer="bench")
        yield store, store.create_namespace(identity, default_class="agent")


def segments(store: Store) -> list[Path]:
    """The segment files of a store."""
    return sorted(Path(store.path, "seg").rglob("*.seg"))


def settle(path: Path) -> None:
    """Waits until a file is on its device, so that its writing back disturbs nothing later."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)


def drop_cache(path: Path) -> None:
    """Takes a file out of the page cache."""
    settle(path)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
