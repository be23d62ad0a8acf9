"""A connection to a fetcher: hand over a plan, get a ticket.

    client = launch.connect(path, store.uuid)
    with client.fetch(ns, plan, tokens, deadline=0.5) as ticket:
        if ticket.wait(32): swap in ticket.payload(0), ...     # long before the end
        ticket.wait(); ...

Thread-safe; requests of one client go out one at a time. A forked child must not use its parent's
client, and cannot. kvfs.fetcher.engine has the same without exceptions, and finds a new fetcher
when this one is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import threading
import time
from collections import deque
from math import inf, isnan
from typing import Any

from kvfs.arena import Arena
from kvfs.errors import BackendError, BusyError, InputError, KvfsError
from kvfs.fetcher import wire
from kvfs.fetcher.control import CONTROL_BYTES, ControlArea
from kvfs.fetcher.ticket import GONE, Ticket
from kvfs.namespace import Namespace
from kvfs.plan import Plan

ANSWER_SECONDS = 2.0
"""A fetcher that does not answer for so long is not waited for again before it does."""
_CLOSE_SECONDS = 5.0
_LOOK_SECONDS = 0.001
_CONNECT_SECONDS = 0.005
_REFUSALS: dict[int, type[KvfsError]] = {k.exit_code: k for k in (BusyError, InputError)}


class FetchClient:
    """See the module docstring; kvfs.fetcher.launch makes them."""

    def __init__(
        self, peer: str | socket.socket, timeout: float | None = None,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:  # fmt: skip
        """Connects to a fetcher. Raises BackendError if none answers within `timeout` seconds.

        peer: the path of its socket, or one that is connected; process: the fetcher, if it is this
        client's own.
        """
        self._pid = os.getpid()
        self._process = process
        self._asking = threading.Lock()  # one question at a time
        self._sending = threading.Lock()
        self._received = bytearray()
        self._number = 0
        self._silent_since = inf  # when the first question that is not answered yet was sent
        self._gone = False
        self._looked = 0.0
        self._told: set[bytes] = set()
        self.orphans: deque[tuple[int, int]] = deque()
        """Tickets that were dropped without `release`."""
        self._sock = peer if isinstance(peer, socket.socket) else socket.socket(socket.AF_UNIX)
        timeout = ANSWER_SECONDS if timeout is None else timeout
        try:
            if isinstance(peer, str):
                _connect(self._sock, peer, time.monotonic() + timeout)
            self._sock.settimeout(timeout)
            self._sock.sendall(wire.hello())
            self.fetcher_pid, fd = self._welcome()
            self.arena = Arena.attach(fd)
        except (OSError, KvfsError) as e:
            self._sock.close()
            raise BackendError(f"no fetcher answers: {e}") from e
        self._sock.setblocking(False)
        self.control = ControlArea(self.arena.view)

    def _welcome(self) -> tuple[int, int]:
        data, ancillary, _, _ = self._sock.recvmsg(wire.WELCOME_BYTES, socket.CMSG_SPACE(4))
        fds = wire.take_fds(ancillary)
        try:
            if not data:
                raise InputError("it hung up")
            if len(fds) != 1:
                raise InputError("not a fetcher's welcome")
            return wire.parse_welcome(data), fds[0]
        except InputError:
            wire.close_all(fds)
            raise

    def gone(self) -> bool:
        """Says whether the fetcher is dead or has hung up, as of the last millisecond."""
        now = time.monotonic()
        if not self._gone and now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            try:
                poll = select.poll()  # not to be shared by threads
                poll.register(self._sock, select.POLLRDHUP)
                self._gone = bool(poll.poll(0))
            except (OSError, ValueError):  # closed
                self._gone = True
        return self._gone

    # requests

    def fetch(
        self, ns: Namespace, plan: Plan, tokens: Any, *, deadline: float, first: int = 0,
        blocks: int | None = None, priority: int = 0, checksums: bool = True,
        identity: bool = True,
    ) -> Ticket:  # fmt: skip
        """Asks for `blocks` blocks of a plan from block `first` on (default: what may be hit).

        tokens: the request's, as for `check`; a hasher is used by whoever looks at the ticket, and
        must not be extended meanwhile. deadline: seconds from now; priority: 0 for a request that
        waits, more for prefetches; checksums, identity: False leaves that check out, for measuring
        or a trusted store. The ticket wants less if not all of it fits in the arena.
        Raises InputError for arguments that do not fit, BusyError, and BackendError if the fetcher
        is gone or silent or the storage down.
        """
        if isnan(deadline) or priority < 0:
            raise InputError(f"deadline {deadline}, priority {priority}")
        until = time.monotonic() + deadline
        hasher = ns.as_hasher(tokens)
        wanted = max(0, plan.hit_blocks - first) if blocks is None else blocks
        pieces = pieces_of(ns, plan, first, wanted)
        if first + wanted > hasher.n_blocks:
            raise InputError(f"the plan is of a longer prompt than {hasher.n_blocks} blocks")
        if not pieces:
            return Ticket.missed(ns, first, "")
        request = wire.FetchRequest(ns.nsid, pieces, until, priority, checksums)
        try:
            with self._asking:
                self._tell(ns)
                kind, body = self._ask(wire.fetch(request, self._next()), until)
        except BackendError:
            if self._gone or time.monotonic() < until:
                raise
            return Ticket.missed(ns, first, "deadline")
        if kind == wire.REFUSED:
            code, text = wire.parse_refused(body)
            raise _REFUSALS.get(code, BackendError)(text)
        slot, generation, granted, ranges = wire.parse_ticket(body)
        own = hasher if identity else None
        return Ticket(self, ns, own, (slot, generation), first, granted, ranges, until)

    def _tell(self, ns: Namespace) -> None:
        if ns.nsid not in self._told:
            text = json.dumps(ns.identity.to_json(), separators=(",", ":")).encode()
            self._send(wire.frame(wire.NAMESPACE, text))
            self._told.add(ns.nsid)

    def release(self, slot: int, generation: int) -> None:
        """For Ticket.release."""
        with contextlib.suppress(BackendError):
            self._send(wire.release(slot, generation))

    def stats(self) -> dict[str, int]:
        """The fetcher's counters. Raises BackendError."""
        return self._figures(wire.STATS)

    def evict(self) -> dict[str, int]:
        """Drops the blocks in the arena that nobody uses; returns the counters after that."""
        return self._figures(wire.EVICT)

    def _figures(self, kind: int) -> dict[str, int]:
        until = time.monotonic() + ANSWER_SECONDS
        with self._asking:
            _, body = self._ask(wire.frame(kind, number=self._next()), until, patient=True)
        figures: dict[str, int] = json.loads(body)
        return figures

    # frames

    def _next(self) -> int:
        self._number = (self._number + 1) % wire.NUMBERS
        return self._number

    def _ask(self, question: bytes, until: float, *, patient: bool = False) -> tuple[int, bytes]:
        """Sends a frame and returns the answer's type and body. Raises BackendError if there is
        none in time; one that comes later is dropped.

        patient: wait even for a fetcher that has not answered the last question.
        """
        while self.orphans:
            self.release(*self.orphans.popleft())
        asked = time.monotonic()
        until = min(until, asked + ANSWER_SECONDS)
        silent = asked - self._silent_since > ANSWER_SECONDS
        if silent and not self._heard(until if patient else asked):
            raise BackendError("fetcher silent: it has not answered for a while")
        self._send(question)
        self._silent_since = min(self._silent_since, asked)
        while self._heard(until):
            length, kind, number = wire.parse_head(self._received)
            body = bytes(self._received[wire.HEAD.size : wire.HEAD.size + length])
            del self._received[: wire.HEAD.size + length]
            if number == self._number:
                return kind, body
            self._silent_since = asked
            if kind == wire.TICKET:  # whoever asked for it has given up
                self.release(*wire.parse_ticket(body)[:2])
        raise BackendError("fetcher silent: no answer in time")

    def _heard(self, until: float) -> bool:
        """Receives until a whole frame is here; says whether it is. Raises BackendError."""
        received = self._received
        while True:
            size = wire.HEAD.size
            if len(received) >= size:
                size += self._length()
            if len(received) >= size:
                self._silent_since = inf
                return True
            try:
                data = self._sock.recv(size - len(received))
            except BlockingIOError:
                if not self._ready(select.POLLIN, until):
                    return False
                continue
            except OSError as e:
                raise self._lost(e) from e
            if not data:
                raise self._lost("it hung up")
            received += data

    def _length(self) -> int:
        try:
            return wire.parse_head(self._received)[0]
        except InputError as e:
            raise self._lost(e) from e

    def _send(self, frame: bytes) -> None:
        """Raises BackendError."""
        if self._pid != os.getpid():
            raise BackendError("the client of another process: each has to connect by itself")
        with self._sending:
            if self._gone:
                raise BackendError(GONE)
            view, until = memoryview(frame), time.monotonic() + ANSWER_SECONDS
            while view:
                try:
                    view = view[self._sock.send(view) :]
                except BlockingIOError:
                    if not self._ready(select.POLLOUT, until):
                        raise self._lost("it takes nothing in") from None
                except OSError as e:
                    raise self._lost(e) from e

    def _ready(self, event: int, until: float) -> bool:
        poll = select.poll()
        poll.register(self._sock, event)
        return bool(poll.poll(max(0.0, until - time.monotonic()) * 1000))

    def _lost(self, why: object) -> BackendError:
        # The socket stays open: while it is, a fetcher that lives keeps the blocks of our tickets.
        self._gone = True
        return BackendError(f"{GONE}: {why}")

    # the end

    def close(self) -> None:
        """Drops all tickets and the mapping; a fetcher of this client's own ends."""
        self._gone = True
        self._sock.close()
        self.control = ControlArea(memoryview(bytearray(CONTROL_BYTES)))
        self.arena.close()
        if self._process is not None and self._pid == os.getpid():
            try:
                self._process.wait(_CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def __del__(self) -> None:
        # Of a client that was replaced, when the last of its tickets is gone.
        with contextlib.suppress(AttributeError):
            self._sock.close()

    def __enter__(self) -> FetchClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _connect(sock: socket.socket, path: str, until: float) -> None:
    """Raises OSError; BlockingIOError if too many others are connecting all the time."""
    sock.setblocking(False)
    while True:
        try:
            return sock.connect(path)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
            time.sleep(_CONNECT_SECONDS)


def pieces_of(ns: Namespace, plan: Plan, first: int, wanted: int) -> list[wire.Piece]:
    """Where the blocks first..first+wanted-1 of a plan lie. Raises InputError."""
    if plan.nsid != ns.nsid:
        raise InputError(f"the plan is of namespace {plan.namespace}, not {ns.name}")
    if first < 0 or wanted < 0 or first + wanted > plan.stored_blocks:
        raise InputError(
            f"the plan has {plan.stored_blocks} blocks; asked for {wanted} from {first} on"
        )
    pieces, block, end = [], first, first + wanted
    for e in plan.extents:
        n = min(e.block + e.count, end) - block
        if e.block <= block and n > 0:
            if e.geometry.stride != ns.stride:
                raise InputError(f"records of {e.geometry.stride} bytes, not {ns.stride}")
            for offset, count in e.geometry.pieces(e.slot + block - e.block, n):
                pieces.append(wire.Piece(e.segment, offset, count))
            block += n
    if block != end:
        raise InputError(f"the plan does not say where block {block} is")
    return pieces
