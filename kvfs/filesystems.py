"""What is mounted where, and so what kind of file system a path is on, as the kernel tells.

Asks /proc, not the file systems: one of them may hang. No state, any thread.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

LOCAL_DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"})
FSTYPE = "fuse.kvfs"
"""The kernel's name of our own mounts."""
_TABLE = "/proc/self/mountinfo"
_OCTAL = re.compile(rb"\\([0-7]{3})")


class Mount(NamedTuple):
    """A line of the table."""

    point: str
    fstype: str
    source: str

    @property
    def ours(self) -> bool:
        return self.fstype == FSTYPE


def mounts(table: str = _TABLE) -> list[Mount]:
    """All mounts, an older one before those that lie on top of it."""
    with open(table, "rb") as f:
        return [_parse(line) for line in f.read().splitlines()]


def at(point: str) -> list[Mount]:
    """The mounts at exactly this (real) path; the last one is what is seen."""
    return [m for m in mounts() if m.point == point]


def filesystem_type(path: str) -> str:
    """The kernel's name of the file system that holds `path` or its nearest existing parent."""
    return mount_of(path)[1]


def mount_of(path: str, table: str = _TABLE) -> tuple[str, str]:
    """(mount point, kernel's name) of the file system that holds `path` or its nearest parent."""
    real = os.path.realpath(path)
    best, kind = "", "unknown"
    for point, fstype, _ in mounts(table):
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fstype
    return best, kind


def _parse(line: bytes) -> Mount:
    fields, _, rest = line.partition(b" - ")
    fstype, source = rest.split(b" ")[:2]
    return Mount(_text(fields.split(b" ")[4]), _text(fstype), _text(source))


def _text(field: bytes) -> str:
    return os.fsdecode(_OCTAL.sub(lambda m: bytes([int(m[1], 8)]), field))
