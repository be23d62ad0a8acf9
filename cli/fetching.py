"""How `kvctl fetch` gets its blocks: through a fetcher, or by reading them in this process.

Blocks are handed to a sink in order, as soon as they are good. What is larger than the fetcher's
arena comes in windows: the blocks of one are let go before the next is asked for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvfs.cli import output
from kvfs.errors import EXIT_OK, BackendError, ConfigError, DeadlineError

if TYPE_CHECKING:
    from kvfs.chain import PrefixHasher
    from kvfs.fetcher.client import FetchClient
    from kvfs.fetcher.ticket import Ticket
    from kvfs.local import LocalStore
    from kvfs.namespace import Namespace
    from kvfs.plan import Plan

Sink = Callable[[memoryview], None]
_DRAW_SECONDS = 0.1
_ARENA_BYTES = 256 << 20
_MARGIN = 4 << 20
_FIND_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which blocks, and how. until: the deadline, on the monotonic clock."""

    store: LocalStore
    ns: Namespace
    plan: Plan
    hasher: PrefixHasher
    blocks: int
    verify: bool
    priority: int
    until: float

    @property
    def seconds(self) -> float:
        """What is left of the time."""
        return max(0.0, self.until - time.monotonic())


@dataclass(slots=True)
class Found:
    """The good blocks, and why there are no more."""

    blocks: int = 0
    reason: str = ""
    lasting: bool = False
    """The block behind them is bad or gone for good."""
    bytes_read: int = 0
    """From the store, while this command ran."""
    seconds: float = 0.0
    code: int = EXIT_OK
    """An exit code that says more than how many blocks there are."""
    _began: float = field(default_factory=time.monotonic)

    def end(self, reason: str, lasting: bool, bytes_read: int) -> Found:
        self.reason, self.lasting, self.bytes_read = reason, lasting, bytes_read
        self.seconds = time.monotonic() - self._began
        if reason == "deadline":
            self.code = DeadlineError.exit_code
        elif reason and not self.blocks and reason.startswith(("backend down", "fetcher")):
            self.code = BackendError.exit_code
        return self


def direct(wanted: Wanted, sink: Sink) -> Found:
    """Reads and verifies in this process."""
    import numpy  # noqa: F401  # verifying needs it, and its import is not to be timed

    from kvfs.backend.select import open_backend
    from kvfs.fetch import Reader

    found = Found()
    reader = Reader(open_backend(wanted.store.path))
    try:
        result = reader.fetch(
            wanted.ns, wanted.plan, wanted.hasher, blocks=wanted.blocks,
            payload_checksum=wanted.verify,
        )  # fmt: skip
    finally:
        reader.close()
    found.blocks = result.blocks
    found.end(result.reason or "", result.lasting, result.bytes_read)
    sink(result.data)
    return found


def connect(wanted: Wanted, arena: int | None, shm: str | None) -> FetchClient:
    """The store's fetcher if one runs, else one of this command's own, which ends with it.

    arena, shm: of one of its own, even if another runs. Raises ConfigError, NoStoreError,
    BackendError, DeadlineError.
    """
    from kvfs.fetcher import launch

    if arena is None and shm is None:
        with contextlib.suppress(ConfigError):  # of the directory for sockets: not needed
            client = launch.find(wanted.store.uuid, timeout=min(wanted.seconds, _FIND_SECONDS))
            if client is not None:
                return client
    need = wanted.blocks * wanted.ns.stride + _MARGIN
    options = launch.Options(arena or min(need, _ARENA_BYTES), shm=shm)
    timeout = min(wanted.seconds, options.start_seconds)
    try:
        return launch.private(wanted.store.path, options, timeout=timeout)
    except BackendError:
        if wanted.seconds:
            raise
        raise DeadlineError(f"{wanted.store.path}: deadline before the fetcher started") from None


def through(client: FetchClient, wanted: Wanted, sink: Sink, progress: output.Progress) -> Found:
    """Has a fetcher read them. Raises BusyError and BackendError if nothing comes of it."""
    found = Found()
    read = client.stats().get("bytes_read", 0)
    reason, lasting = "", False
    while found.blocks < wanted.blocks:
        with client.fetch(
            wanted.ns, wanted.plan, wanted.hasher, deadline=wanted.seconds,
            first=found.blocks, blocks=wanted.blocks - found.blocks, priority=wanted.priority,
            checksums=wanted.verify,
        ) as ticket:  # fmt: skip
            _hand_over(ticket, wanted, found, sink, progress)
            reason, lasting = ticket.reason, ticket.lasting
            if reason != "arena full" or not ticket.good:
                break
    with contextlib.suppress(BackendError):
        read = client.stats().get("bytes_read", 0) - read
    return found.end(reason, lasting, read)


def _hand_over(
    ticket: Ticket, wanted: Wanted, found: Found, sink: Sink, progress: output.Progress
) -> None:
    """Passes the blocks of one ticket on as they come."""
    done = False
    while not done:
        done = ticket.done
        for block in range(found.blocks, ticket.first + ticket.good):
            sink(ticket.payload(block))
            found.blocks += 1
        if not ticket.held and ticket.good:
            raise BackendError("the fetcher took blocks back while they were copied")
        have, size = found.blocks * wanted.ns.row_bytes, wanted.blocks * wanted.ns.row_bytes
        progress.draw(f"fetching: {output.size(have)} of {output.size(size)}")
        ticket.wait(found.blocks - ticket.first + 1, timeout=_DRAW_SECONDS)


def report(wanted: Wanted, found: Found, index: str | None) -> None:
    """Tells this host's index of a block that is bad for good. index: as for Store.open."""
    from kvfs.errors import KvfsError
    from kvfs.store import Store

    with (
        contextlib.suppress(KvfsError),
        Store.open(wanted.store.path, index=index, catch_up=False) as store,
    ):
        store.report_bad(wanted.ns, wanted.plan, wanted.hasher, found.blocks)
