"""Directories of days that are over: which of them can go as a whole, at one call each.

A segment lies in `seg/CLASS/DAY/NAMESPACE`, and no writer makes anything in the directory of a day
that is over, so one in which nothing lies but what is due goes with all that is in it. What is not
known, a segment of a newer kvfs say, keeps its directory. Blocking; no state.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable

from kvfs.backend import Backend
from kvfs.index.schema import Segment
from kvfs.scan.segments import names

_DAY_MS = 86_400_000


def is_past(day: str, now_ms: int) -> bool:
    """A directory's yyyymmdd is before yesterday (UTC)."""
    yesterday = time.strftime("%Y%m%d", time.gmtime((now_ms - _DAY_MS) / 1000))
    return len(day) == 8 and day.isdecimal() and day < yesterday


def whole(backend: Backend, due: Iterable[Segment], now_ms: int) -> dict[str, list[Segment]]:
    """Directories in which nothing lies but segments that are due, each with those of them.

    A day's directory where all of it may go, else the namespaces' in it. Raises OSError.
    """
    days: dict[str, dict[str, list[Segment]]] = defaultdict(lambda: defaultdict(list))
    for segment in due:
        above, _, _ = segment.path.rpartition("/")
        day, _, ns = above.rpartition("/")
        if is_past(day.rpartition("/")[2], now_ms):
            days[day][ns].append(segment)
    found: dict[str, list[Segment]] = {}
    for day, parts in days.items():
        may_go = {ns: _only(backend, f"{day}/{ns}", parts[ns]) for ns in parts}
        here = names(backend, day)
        if here and all(may_go.get(ns) for ns in here):
            found[day] = [s for segments in parts.values() for s in segments]
        else:
            found |= {f"{day}/{ns}": parts[ns] for ns in parts if may_go[ns]}
    return found


def _only(backend: Backend, directory: str, segments: list[Segment]) -> bool:
    """The directory holds some of these files, and no others."""
    here = set(names(backend, directory))
    return bool(here) and here <= {s.path.rpartition("/")[2] for s in segments}


def remove_empty_days(backend: Backend, now_ms: int) -> list[str]:
    """Removes directories in which nothing is left; returns what could not be done.

    Only of days that are over: a writer must not lose the one it just made.
    """
    problems = []
    for ttl_class in names(backend, "seg"):
        for day in names(backend, f"seg/{ttl_class}"):
            if not is_past(day, now_ms):
                continue
            at = f"seg/{ttl_class}/{day}"
            try:
                for ns in names(backend, at):
                    backend.remove_empty(f"{at}/{ns}")
                backend.remove_empty(at)
            except OSError as e:
                problems.append(f"{at}: {e.strerror or e}")
    return problems
