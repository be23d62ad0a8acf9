"""What an engine process uses: hand over a plan, see blocks arrive in shared memory, let them go.

    client = FetchClient.connect(store)
    ticket = client.fetch(ns, plan, tokens, deadline=0.5)
    if ticket.wait(32): swap in ticket.payload(0), ...     # long before the end
    ticket.wait(); ...; ticket.release()

Progress is read from shared memory, without a system call. A ticket raises nothing for what the
storage or the fetcher does: a fetcher that is gone is a ticket that ended early. Thread-safe:
tickets may be used from several threads; requests of one client go out one at a time.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from bisect import bisect_right
from typing import Any

from kvfs.arena import Arena
from kvfs.chain import PrefixHasher
from kvfs.errors import BackendError, BusyError, InputError, KvfsError
from kvfs.fetcher import wire
from kvfs.fetcher.tickets import CONTROL_BYTES, DONE, ENDED, ControlArea
from kvfs.namespace import Namespace
from kvfs.plan import Plan
from kvfs.record import Landing, RunBlocks, matches

ANSWER_SECONDS = 2.0
"""A fetcher that does not take a request in for so long is taken to be gone."""
_SHORTEST_POLL, _LONGEST_POLL = 0.0001, 0.002
GONE = "fetcher gone"


class Ticket:
    """One fetch under way. `good` leading blocks are in shared memory, verified, until `release`.

    reason: why it ended early ("" if it did not, or has not yet); lasting: the block behind `good`
    is bad or gone for good.
    """

    def __init__(
        self, client: FetchClient, ns: Namespace, hasher: PrefixHasher | None,
        key: tuple[int, int], wanted: int, ranges: list[wire.Range], deadline: float,
    ) -> None:  # fmt: skip
        """hasher: the request's tokens; None: blocks are not compared with them."""
        self.wanted = wanted
        self.ranges = ranges
        self.ns = ns
        self._client = client
        self._hasher = hasher
        self._slot, self._generation = key
        self._firsts = [r.block for r in ranges]
        self._deadline = deadline
        self._good = 0
        self._end: tuple[str, bool] | None = None
        self._released = False
        self._lock = threading.Lock()

    @property
    def good(self) -> int:
        """Leading blocks that are there now and are the request's own."""
        self._look()
        return self._good

    @property
    def done(self) -> bool:
        """It ended: `good` will not grow any more."""
        self._look()
        return self._end is not None

    @property
    def reason(self) -> str:
        return self._end[0] if self.done and self._end else ""

    @property
    def lasting(self) -> bool:
        return self._end is not None and self._end[1]

    def _look(self) -> None:
        """Takes in what the fetcher has done since the last look."""
        if self._end is not None:
            return
        with self._lock:
            control = self._client.control
            late = time.monotonic() > self._deadline
            state, there = control.state(self._slot), control.good(self._slot)
            if control.generation(self._slot) != self._generation:
                self._end = self._end or (GONE, False)
            elif self._compare(there) and self._end is None:
                if state in ENDED:
                    reason, lasting = control.outcome(self._slot)
                    self._end = ("", False) if state == DONE else (reason, lasting)
                elif late:  # also where the fetcher is stopped or too busy to say so
                    self._end = ("deadline", False)

    def _compare(self, there: int) -> bool:
        """Compares the blocks that are new with the request's tokens; False: one is not its own.

        Here and not in the fetcher: it costs a fetcher's thread nothing, and happens while more
        blocks are being read.
        """
        while self._good < there:
            if self._hasher is None:
                self._good = there
                break
            r = self._range(self._good)
            end = min(there, r.block + r.count)
            stride = self.ns.stride
            records = self._client.arena.view[r.offset : r.offset + r.count * stride]
            want = RunBlocks.of(self._hasher, self._good, end)
            landing = Landing.whole(self.ns.shape, records)
            same, reason = matches(landing, want, self._good - r.block)
            self._good += same
            if reason is not None:
                self._end = (reason, True)
                return False
        return True

    def _range(self, block: int) -> wire.Range:
        return self.ranges[bisect_right(self._firsts, block) - 1]

    def wait(self, blocks: int | None = None, timeout: float | None = None) -> int:
        """Waits until `blocks` blocks (default: all wanted) are there or it ended.

        timeout: seconds, besides the ticket's deadline. Returns the number of good blocks.
        """
        began = time.monotonic()
        while True:
            good = self.good
            if self._end is not None or (blocks is not None and good >= blocks):
                return good
            waited = time.monotonic() - began
            if timeout is not None and waited >= timeout:
                return good
            if not self._client.alive():
                self._look()
                self._end = self._end or (GONE, False)
                return self._good
            # Short at first, when every bit counts; then a fiftieth of what has passed.
            time.sleep(min(max(_SHORTEST_POLL, waited / 50), _LONGEST_POLL))

    def payload(self, block: int) -> memoryview:
        """The payload of a good block: read-only shared memory, valid until `release`."""
        if not 0 <= block < self.good:
            raise InputError(f"block {block} is not there: {self.good} are")
        r = self._range(block)
        at = r.offset + (block - r.block) * self.ns.stride
        return self._client.arena.view[at : at + self.ns.row_bytes]

    def copy_into(self, buffer: Any, first: int = 0) -> int:
        """Copies the good blocks from `first` on into a writable buffer; returns how many."""
        out, row = memoryview(buffer).cast("B"), self.ns.row_bytes
        for i in range(first, self.good):
            out[(i - first) * row : (i - first + 1) * row] = self.payload(i)
        return self.good - first

    def release(self) -> None:
        """Lets the blocks go, or cancels what is still under way. May be called twice."""
        if not self._released:
            self._released = True
            self._end = self._end or ("cancelled", False)
            self._good = 0
            self._client._release(self._slot, self._generation)

    cancel = release

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class FetchClient:
    """A connection to a fetcher. See the module docstring; `launch.connect` finds or starts one."""

    def __init__(self, path: str, timeout: float = ANSWER_SECONDS) -> None:
        """Connects to the fetcher's socket. Raises BackendError if nobody answers."""
        self._lock = threading.Lock()
        self._gone = False
        self._identities: dict[bytes, bytes] = {}
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(timeout)
        self._poll = select.poll()
        try:
            self._sock.connect(path)
            self._sock.sendall(wire.hello())
            self.fetcher_pid, fd = self._welcome()
        except (OSError, InputError) as e:
            self._sock.close()
            raise BackendError(f"{path}: no fetcher answers: {e}") from e
        self.arena = Arena.attach(fd)
        self.control = ControlArea(self.arena.view[:CONTROL_BYTES])
        self._poll.register(self._sock, select.POLLIN | select.POLLHUP)

    def _welcome(self) -> tuple[int, int]:
        size = wire.HEAD.size + 16
        data, ancillary, _, _ = self._sock.recvmsg(size, socket.CMSG_SPACE(4))
        fds = wire.take_fds(ancillary)
        if len(data) != size or len(fds) != 1:
            wire.close_all(fds)
            raise InputError("not a fetcher's welcome")
        return wire.parse_welcome(data[wire.HEAD.size :]), fds[0]

    def alive(self) -> bool:
        """Says whether the fetcher is there, without waiting."""
        if not self._gone and self._poll.poll(0) and not self._lock.locked():
            with self._lock, contextlib.suppress(BlockingIOError):
                try:
                    flags = socket.MSG_PEEK | socket.MSG_DONTWAIT
                    self._gone = not self._sock.recv(1, flags)
                except BlockingIOError:
                    raise
                except OSError:
                    self._gone = True
        return not self._gone

    def fetch(
        self, ns: Namespace, plan: Plan, tokens: Any, *, deadline: float,
        blocks: int | None = None, priority: int = 0, checksums: bool = True,
        identity: bool = True,
    ) -> Ticket:  # fmt: skip
        """Asks for the first `blocks` blocks of a plan (default: what may be hit).

        tokens: the request's, as for `check`; deadline: seconds from now; priority: 0 for a request
        that waits, more for prefetches; checksums, identity: False leaves that check out, for
        measuring or a trusted store. Raises InputError for arguments that do not fit, BusyError,
        and BackendError if the fetcher is gone or the storage down.
        """
        hasher = ns.as_hasher(tokens)
        wanted = plan.hit_blocks if blocks is None else blocks
        if not 0 <= wanted <= min(plan.stored_blocks, hasher.n_blocks):
            raise InputError(f"the plan has {plan.stored_blocks} blocks; asked for {wanted}")
        until = time.monotonic() + deadline
        flags = 0 if checksums else wire.NO_CHECKSUMS
        text = json.dumps(plan.to_json(), separators=(",", ":")).encode()
        described = self._identity(ns)
        fields = wire.FetchFrame(len(text), len(described), wanted, priority, flags, until)
        memory = wire.sealed_memory([text, described])
        try:
            kind, body = self._ask(wire.fetch(fields), memory)
        finally:
            wire.close_all([memory])
        if kind == wire.REFUSED:
            _raise_refusal(*wire.parse_refused(body))
        slot, generation, granted, ranges = wire.parse_ticket(body)
        key, own = (slot, generation), hasher if identity else None
        return Ticket(self, ns, own, key, granted, ranges, until)

    def _identity(self, ns: Namespace) -> bytes:
        text = self._identities.get(ns.nsid)
        if text is None:
            text = json.dumps(ns.identity.to_json(), separators=(",", ":")).encode()
            self._identities[ns.nsid] = text
        return text

    def _ask(self, frame: bytes, fd: int | None = None) -> tuple[int, bytes]:
        """Sends a frame and returns the answer. Raises BackendError if there is none in time."""
        with self._lock:
            if self._gone:
                raise BackendError(GONE)
            try:
                if fd is None:
                    self._sock.sendall(frame)
                else:
                    socket.send_fds(self._sock, [frame], [fd])
                head = self._exactly(wire.HEAD.size)
                length, kind, _ = wire.HEAD.unpack(head)
                if length > wire.SERVER_LIMIT:
                    raise InputError(f"an answer of {length} bytes")
                return kind, self._exactly(length)
            except (OSError, InputError) as e:
                # After a timeout a late answer would be taken for the next one's: start anew.
                self._gone = True
                self._sock.close()
                raise BackendError(f"{GONE}: {e}") from e

    def _exactly(self, n: int) -> bytes:
        data = b""
        while len(data) < n:
            more = self._sock.recv(n - len(data))
            if not more:
                raise ConnectionResetError("closed")
            data += more
        return data

    def _release(self, slot: int, generation: int) -> None:
        with self._lock, contextlib.suppress(OSError):
            if not self._gone:
                self._sock.sendall(wire.release(slot, generation))

    def stats(self) -> dict[str, int]:
        """The fetcher's counters. Raises BackendError."""
        return self._figures(wire.STATS)

    def evict(self) -> dict[str, int]:
        """Drops the blocks in the arena that nobody uses; returns the counters after that."""
        return self._figures(wire.EVICT)

    def _figures(self, request: int) -> dict[str, int]:
        kind, body = self._ask(wire.frame(request, b""))
        figures: dict[str, int] = json.loads(body) if kind == wire.FIGURES else {}
        return figures

    def close(self) -> None:
        """Drops all tickets and the mapping."""
        with self._lock:
            self._gone = True
            self._sock.close()
        self.control = ControlArea(memoryview(bytes(CONTROL_BYTES)))
        self.arena.close()

    def __enter__(self) -> FetchClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _raise_refusal(code: int, text: str) -> None:
    kinds: dict[int, type[KvfsError]] = {k.exit_code: k for k in (BusyError, InputError)}
    raise kinds.get(code, BackendError)(text)
