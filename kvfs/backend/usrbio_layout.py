"""USRBIO as it lies in shared memory: what 3FS's client daemon and its clients agree on.

A client makes a file in /dev/shm and a symbolic link to it in `3fs-virt/iovs` of the mount; the
daemon maps the file before the link is there, so its name may go then. The link's name says what
it is: `UUID` for memory that I/O goes to or comes from, for a ring
`UUID.{r|w}DEPTH.tTIMEOUT.fFLAGS`. Both sides derive the number n of a ring's slots from its size:

  offset        size    field
  0             4*4     heads and tails: submitted, taken; completed, reaped (each modulo n)
  16            56*n    arguments: memory's id, offset in it, inode, file offset, length, serial
  16 + 56*n     24*n    completions: slot, 0, result (bytes, or an errno below 0), serial
  16 + 80*n     16*n    submissions: slot, padding, serial
  16 + 96*n     32      semaphore, made by the daemon, posted once for each batch that is done
  then          4096    slack

A ring that is full and one that is empty would look the same: n - 1 slots are used. After
submitting, the client posts the semaphore that `iovs/submit-ios` names. Arithmetic only: no I/O, no
state. x86-64 and 64-bit ARM with glibc.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from uuid import UUID

VIRTUAL = "3fs-virt"
IOVS = f"{VIRTUAL}/iovs"
REMOVE = f"{VIRTUAL}/rm-rf"
"""A link made in it takes what it leads to away, with all below."""
SHM = "/dev/shm"
FILE_SYSTEM = "fuse.hf3fs"

MARKS = 16
SUBMITTED, TAKEN, COMPLETED, REAPED = range(4)
ARGS = struct.Struct("<16sQQQQQ")
COMPLETION = struct.Struct("<iiqQ")
SUBMISSION = struct.Struct("<i4xQ")
SEMAPHORE_BYTES = 32
SLACK = 4096
_SLOT = ARGS.size + COMPLETION.size + SUBMISSION.size

READ_UNCOMMITTED = 1
"""Do not wait (5 s) for a write of the same chunk that is under way: what we read has checksums."""
FORBID_HOLES = 2

# Ioctls of any file or directory of the mount, and of the daemon alone: they fail when it is dead.
IOCTL_VERSION = 0x80046803
IOCTL_FORCE_SYNC = 0x8004680B
IOCTL_REMOVE = 0x4110680F
"""Of the directory above what is to go."""
REMOVAL = struct.Struct("<Q256s?7x")
"""Its argument: inode of that directory, name in it, whether with all below."""


@dataclass(frozen=True, slots=True)
class RingShape:
    """Where the parts of a ring of n slots lie, in bytes from its beginning."""

    n: int

    @classmethod
    def of_size(cls, size: int) -> RingShape:
        """As both sides see a file of this size."""
        return cls((size - SLACK - MARKS - SEMAPHORE_BYTES) // _SLOT)

    @staticmethod
    def size_for(entries: int) -> int:
        """Bytes of a ring that takes so many I/Os at once."""
        return MARKS + SEMAPHORE_BYTES + _SLOT * (entries + 1) + SLACK

    @property
    def completions(self) -> int:
        return MARKS + ARGS.size * self.n

    @property
    def submissions(self) -> int:
        return self.completions + COMPLETION.size * self.n

    @property
    def semaphore(self) -> int:
        return self.submissions + SUBMISSION.size * self.n


def ring_name(key: UUID, *, read: bool, depth: int, flags: int) -> str:
    """The link's name of a ring.

    depth: 0, all that is there is one batch; -k: batches of at most k, done in pieces. The timeout
    is always 0: with another one the daemon never begins a batch that is not full.
    """
    name = f"{key}.{'r' if read else 'w'}{depth}.t0"
    return f"{name}.f{flags:b}" if flags else name
