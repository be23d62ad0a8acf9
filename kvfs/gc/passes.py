"""What housekeeping has done: `gc.last` at the top of the store, replaced behind each pass.

Whoever passed writes it, under the lease, so nobody else adds to its sums meanwhile. It lets
`kvctl status` say on any host who passed and what came of it, and lets a housekeeper see that
another host's is at work. Nothing else depends on it: one that is lost, or that cannot be read,
begins anew, and where the storage refuses it the pass stands.

  host, pid          of the process that passed
  token              another one for each pass
  began_ms, ended_ms
  live               segments in use before
  refused            why a guard let nothing be dropped, or null
  problems           how many things could not be read or removed
  last, total        objects with the sums below, of this pass and of all
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvfs.backend import Backend

if TYPE_CHECKING:
    from kvfs.gc.collector import GcResult

PATH = "gc.last"
_LIMIT = 1 << 16


@dataclass(frozen=True, slots=True)
class Sums:
    """What passes did."""

    passes: int = 0
    dropped_segments: int = 0
    """Taken out of use, since nothing in them was of use."""
    cleaned_segments: int = 0
    """Taken out of use, since what was of use in them was copied forward."""
    copied_bytes: int = 0
    evicted_bytes: int = 0
    removed_files: int = 0
    freed_bytes: int = 0
    bad_blocks: int = 0

    @classmethod
    def of(cls, result: GcResult) -> Sums:
        done = result.reclaimed
        return cls(
            1, len(result.dropped), len(done.cleaned), done.moved.copied_bytes,
            sum(e.bytes for e in done.evicted), len(result.removed), result.freed_bytes,
            done.moved.bad_blocks,
        )  # fmt: skip

    def plus(self, other: Sums) -> Sums:
        mine, theirs = asdict(self), asdict(other)
        return Sums(**{name: mine[name] + theirs[name] for name in mine})


@dataclass(frozen=True, slots=True)
class Passed:
    """The content of `gc.last`."""

    host: str
    pid: int
    token: str
    began_ms: int
    ended_ms: int
    live: int
    refused: str | None
    problems: int
    last: Sums
    total: Sums

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def load(cls, backend: Backend) -> Passed | None:
        """The last pass; None if none was noted, or the file is none of these. Raises OSError."""
        try:
            fields: dict[str, Any] = json.loads(backend.load(PATH, _LIMIT))
            last, total = Sums(**fields.pop("last")), Sums(**fields.pop("total"))
            return cls(**fields, last=last, total=total)
        except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
            return None


def note(backend: Backend, result: GcResult, began_ms: int, ended_ms: int) -> str:
    """Puts a pass on record; returns its token. Raises nothing: it is no more than a report."""
    token, sums = secrets.token_hex(8), Sums.of(result)
    with contextlib.suppress(OSError):
        before = Passed.load(backend)
        passed = Passed(
            socket.gethostname(), os.getpid(), token, began_ms, ended_ms, result.live,
            result.refused, len(result.problems), sums,
            sums if before is None else before.total.plus(sums),
        )  # fmt: skip
        backend.replace(PATH, (json.dumps(passed.to_json()) + "\n").encode())
    return token
