"""What kind of file system a path is on, as the kernel tells. Asks /proc, not the file system."""

from __future__ import annotations

import os

LOCAL_DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"})


def filesystem_type(path: str) -> str:
    """The kernel's name of the file system that holds `path` or its nearest existing parent."""
    return mount_of(path)[1]


def mount_of(path: str) -> tuple[str, str]:
    """(mount point, kernel's name) of the file system that holds `path` or its nearest parent."""
    at = os.path.realpath(path)
    best, kind = "", "unknown"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as f:
        for line in f:
            fields, _, rest = line.partition(" - ")
            point = fields.split(" ")[4].encode().decode("unicode_escape")
            inside = at == point or at.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, rest.split(" ", 1)[0]
    return best, kind
