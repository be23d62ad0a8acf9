"""`kvctl doctor`: what of this machine and of a store matters to kvfs, a line for each fact.

Looks, and changes nothing. A fact is "ok", a "note" that something is absent which may not be
needed, or a "fault": something that will not work.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from kvfs import __version__
from kvfs.cli import common, output
from kvfs.cli.settings import Settings
from kvfs.cli.version import packages
from kvfs.errors import EXIT_OK, ConfigError, IndexFault, InputError, KvfsError

if TYPE_CHECKING:
    from kvfs.backend import Backend
    from kvfs.filesystems import Mount

_FUSE = "/dev/fuse"
_SHM = "/dev/shm"
_SMALL_SHM = 1 << 30
_MIN_FILES = 1024

MANUAL = {
    "JSON output": """
    An object for each fact:

    name -- what it is about
    state -- ok, note (something is absent that may not be needed) or fault
    text -- what was found
    """,
}


class Fact(NamedTuple):
    """One thing that was looked at."""

    name: str
    state: str
    text: str


@common.command("""
    kvctl doctor
    kvctl doctor --store /srv/kvfs --json
""")
@common.options
def command(settings: Settings) -> int:
    """Look at what kvfs needs of this machine and of a store.

    Exits with 7 if something will not work.
    """
    faults = 0
    for fact in _facts(settings):
        faults += fact.state == "fault"
        if settings.as_json:
            output.json_line(fact._asdict())
        else:
            mark = {"ok": " ", "note": "-", "fault": "!"}[fact.state]
            output.line(f"{mark} {fact.name:<11} {fact.text}")
    return ConfigError.exit_code if faults else EXIT_OK


def _facts(settings: Settings) -> Iterator[Fact]:
    looks: tuple[Callable[[Settings], Iterator[Fact]], ...] = (
        _software, _settings, _store, _index, _fuse, _memory, _limits, _gpu,
    )  # fmt: skip
    for look in looks:
        try:
            yield from look(settings)
        except (OSError, KvfsError) as e:
            yield Fact(look.__name__.strip("_"), "fault", str(e))


def _software(settings: Settings) -> Iterator[Fact]:
    from kvfs.chain import self_test

    yield Fact("kvfs", "ok", f"{__version__}, Python {sys.version.split()[0]}")
    for name, version in packages().items():
        needed = {"pyfuse3": "kvctl mount", "trio": "kvctl mount", "blake3": "--hash blake3"}
        if version is not None:
            yield Fact(name, "ok", version)
        elif name in needed:
            yield Fact(name, "note", f"not installed; {needed[name]} needs it")
        else:
            yield Fact(name, "fault", "not installed")
    self_test()
    yield Fact("hash", "ok", "xxh3-128 computes the published vector")


def _settings(settings: Settings) -> Iterator[Fact]:
    from kvfs.cli.settings import files, read

    for path in files():
        keys = ", ".join(read(path)) or "nothing"
        if os.path.exists(path):
            yield Fact("config", "ok", f"{path} sets {keys}")


def _store(settings: Settings) -> Iterator[Fact]:
    from kvfs.backend.select import open_backend
    from kvfs.config import MARKER, load_config
    from kvfs.filesystems import filesystem_type
    from kvfs.store_path import path_of

    try:
        store = settings.store
    except InputError:
        yield Fact("store", "note", "none named; give --store to have it looked at")
        return
    path, backend = path_of(store), open_backend(store)
    config = load_config(backend)
    yield Fact("store", "ok", f"{path}, {config.uuid.hex()}, on {filesystem_type(path)}")
    if (chunk := backend.chunk_bytes()) is not None:
        yield _rings(backend, chunk, config.extent)
    writable = os.access(path, os.W_OK)
    yield Fact("access", "ok" if writable else "note", "writable" if writable else "read-only")
    free, total = backend.free_bytes()
    space = f"{output.size(free)} free of {output.size(total)}"
    yield Fact("space", "ok" if free > config.segment_bytes else "fault", space)
    yield _direct(os.path.join(path, MARKER))
    ahead = os.stat(os.path.join(path, MARKER)).st_mtime - time.time()
    if ahead > 1:
        yield Fact("clock", "fault", f"{ahead:.0f} s behind the time of the store's own files")


def _rings(backend: Backend, chunk: int, extent: int) -> Fact:
    """Whether the client daemon of 3FS serves this process."""
    try:
        backend.probe()
    except OSError as e:
        return Fact("rings", "fault", f"no I/O through the client daemon: {e.strerror}")
    finally:
        backend.release()
    if extent % chunk:
        return Fact("rings", "fault", f"records cross chunks: {extent} is no multiple of {chunk}")
    from kvfs.backend.threefs import LIBRARY

    by = f" {library}" if (library := os.environ.get(LIBRARY)) else ""
    return Fact("rings", "ok", f"the client daemon answers{by}; chunks of {output.size(chunk)}")


def _direct(path: str) -> Fact:
    """Whether the file system reads without the page cache."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError as e:
        return Fact("direct", "note", f"O_DIRECT: {e.strerror}; reads go through the page cache")
    return Fact("direct", "ok", "O_DIRECT can be used")


def _index(settings: Settings) -> Iterator[Fact]:
    from kvfs.filesystems import filesystem_type
    from kvfs.index.place import default_root, require_local

    place = settings.index or default_root()
    kind = filesystem_type(place)
    try:
        require_local(place)
    except ConfigError as e:
        yield Fact("index", "fault", str(e))
        return
    yield Fact("index", "ok", f"{place}, on {kind}")
    if settings.get("store") is not None:
        yield _opened_index(settings)


def _opened_index(settings: Settings) -> Fact:
    try:
        store = common.open_index(settings)
    except IndexFault as e:
        return Fact("blocks", "fault", str(e))
    if store is None:
        return Fact("blocks", "note", "this host has no index of the store yet")
    with store:
        stats = store.stats()
    used = output.size(stats["index_bytes"])
    return Fact("blocks", "ok", f"{output.many(stats.get('blocks', 0), 'block')} in {used}")


def _fuse(settings: Settings) -> Iterator[Fact]:
    from kvfs.filesystems import mounts

    if not os.path.exists(_FUSE):
        yield Fact("fuse", "note", f"there is no {_FUSE}: no mounts here")
    elif not os.access(_FUSE, os.R_OK | os.W_OK):
        yield Fact("fuse", "note", f"{_FUSE} may not be used: no mounts here")
    elif os.geteuid() and shutil.which("fusermount3") is None:
        yield Fact("fuse", "note", "fusermount3 is absent, which all but root need to mount")
    else:
        yield Fact("fuse", "ok", _FUSE)
    yield from (_mount(mount) for mount in mounts() if mount.ours)


def _mount(mount: Mount) -> Fact:
    from kvfs.mount.mountinfo import ask

    shows, answer = f"{mount.point} shows {mount.source}", ask(mount.point)
    if answer.dead:
        return Fact("mount", "fault", f"{shows}: its process has died; kvctl mount replaces it")
    if answer.error == errno.ETIMEDOUT:
        return Fact("mount", "fault", f"{shows}: its process does not answer")
    return Fact("mount", "ok", shows)


def _memory(settings: Settings) -> Iterator[Fact]:
    if not os.path.isdir(_SHM):
        yield Fact("shm", "note", f"there is no {_SHM}")
        return
    v = os.statvfs(_SHM)
    free = v.f_bavail * v.f_frsize
    small = free < _SMALL_SHM
    more = "; containers get more with --shm-size" if small else ""
    yield Fact("shm", "note" if small else "ok", f"{output.size(free)} free in {_SHM}{more}")


def _limits(settings: Settings) -> Iterator[Fact]:
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = files >= _MIN_FILES or files == resource.RLIM_INFINITY
    yield Fact("files", "ok" if enough else "note", f"{files} may be open at once (ulimit -n)")


def _gpu(settings: Settings) -> Iterator[Fact]:
    """What swap-in may use: nothing of it is needed to store, fetch or mount."""
    from kvfs.gpu.found import look

    for found in look():
        yield Fact(found.name, "ok" if found.there else "note", found.text)
