"""Where a host keeps its indexes, and which file systems are refused.

<root>/<store uuid>/        one index, found by the store's uuid
<root>/paths/<digest>       which uuid was last seen at a store path: lets `check` start without
                            a single system call on the shared file system

The root is $KVFS_INDEX, or /var/cache/kvfs for root and ~/.cache/kvfs for others. LMDB needs a
local file system: two hosts writing one map over a shared one lose data without an error.
"""

from __future__ import annotations

import contextlib
import os

import xxhash

from kvfs.errors import ConfigError
from kvfs.filesystems import filesystem_type

ENVIRONMENT = "KVFS_INDEX"
FORCE_ENVIRONMENT = "KVFS_INDEX_FORCE"

_SHARED = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs",
     "glusterfs", "ocfs2", "gfs2", "virtiofs", "fuse", "fuseblk", "overlay"}
)  # fmt: skip
_NEVER = "fuse.hf3fs"


def default_root() -> str:
    """The directory that holds this host's indexes (absolute)."""
    chosen = os.environ.get(ENVIRONMENT)
    if chosen:
        return os.path.abspath(chosen)
    if os.geteuid() == 0:
        return "/var/cache/kvfs"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "kvfs")


def require_local(path: str, *, force: bool = False) -> None:
    """Raises ConfigError if an index must not lie at `path`.

    force (or KVFS_INDEX_FORCE=1): the caller answers for it, as in a container on overlayfs whose
    upper directory is a local disk.
    """
    kind = filesystem_type(path)
    if kind not in _SHARED and not kind.startswith("fuse."):
        return
    if kind == _NEVER:
        raise ConfigError(f"{path} is on 3FS, where two hosts that write one index lose half of it")
    if force or os.environ.get(FORCE_ENVIRONMENT) == "1":
        return
    raise ConfigError(
        f"{path} is on a {kind} file system; the index needs a local disk (ext4, xfs, tmpfs). "
        f"Set {ENVIRONMENT} to a local directory, or {FORCE_ENVIRONMENT}=1 if you know it is one"
    )


def _pointer(root: str, store_path: str) -> str:
    # abspath, not realpath: resolving links would ask the shared file system.
    digest = xxhash.xxh3_128_hexdigest(
        os.path.abspath(store_path).encode("utf-8", "surrogateescape")
    )
    return os.path.join(root, "paths", digest)


def remember(root: str, store_path: str, uuid: str) -> None:
    """Notes which store is at a path, for the next `recall`."""
    if recall(root, store_path) == uuid:
        return
    pointer = _pointer(root, store_path)
    os.makedirs(os.path.dirname(pointer), 0o700, exist_ok=True)
    temporary = f"{pointer}.{os.urandom(4).hex()}"
    with open(temporary, "w", encoding="ascii") as f:
        f.write(uuid)
    os.replace(temporary, pointer)


def recall(root: str, store_path: str) -> str | None:
    """The uuid of the store last seen at a path, or None."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        with open(_pointer(root, store_path), encoding="ascii") as f:
            uuid = f.read(64)
        if len(uuid) == 32 and not uuid.strip("0123456789abcdef"):
            return uuid
    return None
