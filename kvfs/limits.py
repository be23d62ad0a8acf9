"""How much a store may hold and how fast it is cleaned: `limits.json` at its top.

Other than kvfs.json it may be changed at any time, by replacing it whole (`kvctl limits`); writers
and the housekeeper of every host heed a change within seconds. No file means no limits.

  capacity_bytes     all segment files together may take this; null: what the file system has
  high, low          shares of it: above `high` the housekeeper evicts, until `low` is reached
  reserve_bytes      of the file system, never written by puts, so that there is always room for
                     journals and for cleaning; null: 1 % of it, 1 GiB at most
  clean_share        a segment is copied forward when less than this share of it is in use; null:
                     half of it in a full store, less and less the more room there is
  copy_rate          bytes a second that cleaning copies; left out: COPY_RATE; null: no limit
  remove_rate        files a second that are removed; left out: REMOVE_RATE; null: no limit
  namespaces         name -> bytes its segments may take
  tenants            salt digest (kvctl ns list) -> bytes of all its namespaces

A namespace or tenant that is above `high` of its quota loses its own oldest runs; a put beyond the
whole quota is refused until that has happened. Nobody else's runs go for it.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from kvfs.backend import Backend
from kvfs.errors import BackendError, FormatError, InputError

PATH = "limits.json"
_LIMIT = 1 << 20
_MOST_RESERVED = 1 << 30
_CLEAN_SHARE = 0.5
_LEAST_FULL = 0.2
# A hum: `kvctl bench cleaner` shows what it leaves to requests. Where the storage is that of a
# whole fleet, much more is right.
COPY_RATE = 64 << 20
REMOVE_RATE = 50.0


@dataclass(frozen=True, slots=True)
class Limits:
    """The content of `limits.json`. Raises InputError for values that cannot work together."""

    capacity_bytes: int | None = None
    high: float = 0.92
    low: float = 0.85
    reserve_bytes: int | None = None
    clean_share: float | None = None
    copy_rate: float | None = COPY_RATE
    remove_rate: float | None = REMOVE_RATE
    namespaces: dict[str, int] = field(default_factory=dict)
    tenants: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high < 1:
            raise InputError(
                f"low is {self.low} and high is {self.high}: they must be shares with "
                "0 < low < high < 1"
            )
        if self.clean_share is not None and not 0 <= self.clean_share < 1:
            raise InputError(f"clean_share is {self.clean_share}; it must be at least 0, below 1")
        for name in ("capacity_bytes", "copy_rate", "remove_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:  # JSON knows NaN and Infinity, too
                raise InputError(f"{name} is {value}; it must be above 0, or null for no limit")
        if self.reserve_bytes is not None and not 0 <= self.reserve_bytes < math.inf:
            raise InputError(f"reserve_bytes is {self.reserve_bytes}; it must not be negative")
        for kind, quotas in (("namespace", self.namespaces), ("tenant", self.tenants)):
            for name, quota in quotas.items():
                self._check_quota(f"quota of {kind} {name}", quota)

    def _check_quota(self, what: str, quota: int) -> None:
        if type(quota) is not int or quota <= 0:
            raise InputError(f"{what} is {quota}; it must be above 0 (leave it out for no limit)")
        if self.capacity_bytes is not None and quota > self.capacity_bytes:
            raise InputError(
                f"{what} is {quota} bytes, more than the whole capacity of {self.capacity_bytes}"
            )

    @property
    def bounded(self) -> bool:
        """Some limit needs the size of the segment files to be known."""
        return bool(self.capacity_bytes or self.namespaces or self.tenants)

    def reserve(self, total: int) -> int:
        """Bytes to leave free on a file system of a total size."""
        if self.reserve_bytes is not None:
            return self.reserve_bytes
        return min(_MOST_RESERVED, total // 100)

    def clean_below(self, fullness: float) -> float:
        """The share below which segments are copied forward. fullness: what is taken of `low` of
        the capacity: copies only pay where the room that they win is wanted."""
        if self.clean_share is not None:
            return self.clean_share
        return _CLEAN_SHARE * min(1.0, max(_LEAST_FULL, fullness))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def save(self, backend: Backend) -> None:
        """Puts the file in place of the one before. Raises BackendError."""
        try:
            backend.replace(PATH, (json.dumps(self.to_json(), indent=1) + "\n").encode())
        except OSError as e:
            raise BackendError(f"{backend.root}/{PATH}: {e.strerror or e}") from e

    @classmethod
    def load(cls, backend: Backend) -> Limits:
        """Raises FormatError for a file that is none, BackendError."""
        try:
            data = backend.load(PATH, _LIMIT)
        except FileNotFoundError:
            return cls()
        except OSError as e:
            raise BackendError(f"{backend.root}/{PATH}: {e.strerror or e}") from e
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError, InputError) as e:
            raise FormatError(f"{backend.root}/{PATH}: {e}") from e
