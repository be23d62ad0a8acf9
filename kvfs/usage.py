"""How much room the segment files take, and whether a put may take more.

Usage is what the files themselves say, never a sum that is kept: files that were removed by hand,
writers that were killed and stores that another host filled are all in it. It is looked at again
every few seconds, less often where looking takes long; in between a writer adds what it has written
itself. So a single writer never exceeds a limit by more than the segment it has begun, several by
what the others write within those seconds.

Blocking; looks at the shared storage. Thread-safe.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvfs.backend import Backend
from kvfs.errors import KvfsError, SpaceError
from kvfs.layout import Identity
from kvfs.limits import Limits
from kvfs.namespace import Namespace
from kvfs.scan.segments import segment_paths

REFRESH_SECONDS = 5.0
# Looking may take this share of the time.
_COST_SHARE = 0.02


@dataclass(slots=True)
class Usage:
    """Bytes of the segment files."""

    bytes: int = 0
    files: int = 0
    namespaces: Counter[str] = field(default_factory=Counter)
    """Namespace name -> bytes."""

    def of_tenant(self, digest: str, tenants: dict[str, str]) -> int:
        """Bytes of all namespaces of a tenant; tenants: namespace name -> salt digest."""
        return sum(n for name, n in self.namespaces.items() if tenants.get(name) == digest)


@dataclass(slots=True)
class Taken:
    """What became of room that was taken."""

    written: int = 0
    """Bytes."""


def measure(backend: Backend) -> Usage:
    """Looks at every segment file. Raises OSError."""
    usage = Usage()
    for path in segment_paths(backend):
        try:
            size = backend.size(path)
        except FileNotFoundError:
            continue
        usage.bytes += size
        usage.files += 1
        usage.namespaces[path.split("/")[3]] += size
    return usage


def tenant_of(identity: Identity) -> str:
    """The digest of a tenant's salt, "" for a namespace without one."""
    digest: str = identity.redacted()["salt_digest"]
    return digest


class Space:
    """Says whether there is room for a put."""

    def __init__(
        self, backend: Backend, namespaces: Callable[[], list[Namespace]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """namespaces: all that the store has."""
        self._backend = backend
        self._namespaces = namespaces
        self._clock = clock
        self._lock = threading.Lock()
        self._due = -1.0
        self._looks = 0
        self._limits = Limits()
        self._usage = Usage()
        self._free = 0
        self._tenants: dict[str, str] = {}

    def forget(self) -> None:
        """Looks again at the next put: room may have come back."""
        self._due = -1.0

    @contextlib.contextmanager
    def take(self, ns: Namespace, need: int) -> Iterator[Taken]:
        """`need` bytes are to be written for a namespace within the block, which says how many
        of them were: none if it raises.

        Raises SpaceError saying which limit they would exceed, OSError.
        """
        with self._lock:
            if self._clock() >= self._due:
                self._look()
            self._check(ns, need)
            self._add(ns, need)
            look, taken = self._looks, Taken()
        try:
            yield taken
        finally:
            with self._lock:
                if look == self._looks:  # else what was written has been seen since
                    self._add(ns, taken.written - need)

    def _add(self, ns: Namespace, n: int) -> None:
        self._free -= n
        self._usage.bytes += n
        self._usage.namespaces[ns.name] += n

    def _look(self) -> None:
        began = self._clock()
        with contextlib.suppress(KvfsError):  # of a bad file the housekeeper tells
            self._limits = Limits.load(self._backend)
        self._look_at_disk()
        if self._limits.bounded:
            self._usage = measure(self._backend)
            self._tenants = {ns.name: tenant_of(ns.identity) for ns in self._namespaces()}
        now = self._clock()
        self._due = now + max(REFRESH_SECONDS, (now - began) / _COST_SHARE)

    def _look_at_disk(self) -> None:
        free, total = self._backend.free_bytes()
        self._free = free - self._limits.reserve(total)
        self._looks += 1

    def _check(self, ns: Namespace, need: int) -> None:
        limits = self._limits
        if need > self._free:
            self._look_at_disk()
        if need > self._free:
            raise self._refused("the file system is full but for its reserve")
        if limits.capacity_bytes is not None:
            self._compare("the store's capacity", self._usage.bytes + need, limits.capacity_bytes)
        quota = limits.namespaces.get(ns.name)
        if quota is not None:
            used = self._usage.namespaces[ns.name]
            self._compare(f"the quota of namespace {ns.name}", used + need, quota)
        tenant = self._tenants.get(ns.name, "")
        quota = limits.tenants.get(tenant) if tenant else None
        if quota is not None:
            used = self._usage.of_tenant(tenant, self._tenants)
            self._compare(f"the quota of tenant {tenant}", used + need, quota)

    def _compare(self, what: str, wanted: int, limit: int) -> None:
        if wanted > limit:
            raise self._refused(f"{what} is {limit} bytes, {wanted} would be used")

    def _refused(self, why: str) -> SpaceError:
        # What is refused now may fit in a moment: a housekeeper is at work.
        self._due = min(self._due, self._clock() + 1.0)
        return SpaceError(
            f"{self._backend.root}: no room: {why}; stores are refused until there is some "
            "(kvctl gc)"
        )
