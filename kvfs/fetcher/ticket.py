"""A fetch under way, as its client sees it: blocks that arrive in shared memory, in chain order.

Progress is read from shared memory, without a system call a block; each new block is compared with
the request's own tokens before it counts. A ticket raises nothing for what the storage or the
fetcher does: a fetcher that is gone is a ticket that ended early. Thread-safe.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfs.errors import InputError
from kvfs.fetcher.control import DONE, ENDED
from kvfs.fetcher.wire import Range
from kvfs.record import Landing, RunBlocks, matches

if TYPE_CHECKING:
    from kvfs.fetcher.client import FetchClient
    from kvfs.keys import Chain
    from kvfs.namespace import Namespace

GONE = "fetcher gone"
_SHORTEST_POLL, _LONGEST_POLL = 0.00005, 0.01
_SHARE_OF_REST = 0.75
_NOT_OF_STORAGE = ("busy", "arena full", GONE, "fetcher silent", "cancelled")
# Of the identities of so many blocks, in one go: 0.1 ms.
_PREPARED_AT_ONCE = 128
_PREPARED_AHEAD = 1024


class Outcome(NamedTuple):
    """What became of a ticket: the blocks first..end-1 were good; why there were no more, "" if
    all of them were wanted; and whether the block behind them is bad or gone for good."""

    first: int
    end: int
    reason: str
    lasting: bool


class Ticket:
    """The blocks first..first+wanted-1 of a prompt. Let go with `release`, or as a context manager.

    The first `good` of them are in shared memory and verified, until `release`. They are lost
    earlier only where a fetcher that lives drops this client, which it does for a broken protocol
    alone; `held` tells, so who copies blocks away should look at it afterwards (copy_into does).
    """

    def __init__(
        self, client: FetchClient | None, ns: Namespace, hasher: Chain | None,
        key: tuple[int, int], first: int, wanted: int, ranges: list[Range], deadline: float,
    ) -> None:  # fmt: skip
        """hasher: the request's tokens; None: blocks are not compared with them. ranges: of blocks
        counted from `first`; deadline: on the monotonic clock."""
        self.ns = ns
        self.first = first
        self.wanted = wanted
        self.ranges = ranges
        self.when_over: Callable[[Outcome], None] | None = None
        """Called at `release`."""
        self._client = client
        self._hasher = hasher
        self._slot, self._generation = key
        self._starts = [r.block for r in ranges]
        self._asked = self._news = time.monotonic()
        self._deadline = deadline
        self._good = 0
        self._prepared = 0
        self._end: tuple[str, bool] | None = None
        self._released = False
        self._lock = threading.Lock()

    @classmethod
    def missed(cls, ns: Namespace, first: int, reason: str) -> Ticket:
        """A ticket that ended before anything came."""
        ticket = cls(None, ns, None, (-1, 0), first, 0, [], 0.0)
        ticket._end = reason, False
        return ticket

    @property
    def good(self) -> int:
        """Leading blocks that are here now and are the request's own."""
        self._look()
        return self._good

    @property
    def done(self) -> bool:
        """It ended: `good` will not grow any more."""
        self._look()
        return self._end is not None

    @property
    def reason(self) -> str:
        """Why it ended early; "" if it did not, or has not yet."""
        self._look()
        return "" if self._end is None else self._end[0]

    @property
    def lasting(self) -> bool:
        """The block behind the good ones is bad or gone for good; see Store.report_bad."""
        return self._end is not None and self._end[1]

    @property
    def held(self) -> bool:
        """The good blocks are still this ticket's."""
        client = self._client
        if self._released or client is None:
            return False
        return client.control.generation(self._slot) == self._generation

    @property
    def lender(self) -> FetchClient | None:
        """Whose memory the blocks are in, until it is `gone()`; None for a ticket of none."""
        return self._client

    def _look(self) -> None:
        """Takes in what the fetcher has done since the last look."""
        if self._end is not None:
            return
        with self._lock:
            client = self._client
            if self._end is not None or client is None:
                return
            late, gone = time.monotonic() >= self._deadline, client.gone()
            state, there = client.control.state(self._slot), client.control.good(self._slot)
            if not self.held:
                self._end = GONE, False
            elif self._compare(client, there):
                if state in ENDED:
                    reason, lasting = client.control.outcome(self._slot)
                    self._end = ("", False) if state == DONE else (reason, lasting)
                elif gone:
                    self._end = GONE, False
                elif late:  # also where the fetcher is stopped or too busy to say so
                    self._end = "deadline", False

    def _compare(self, client: FetchClient, there: int) -> bool:
        """Compares the blocks that are new with the request's tokens; False: one is not its own.

        Here and not in the fetcher: it costs a fetcher's thread nothing, and happens while more
        blocks are being read.
        """
        if self._good < there:
            self._news = time.monotonic()
        while self._good < there:
            if self._hasher is None:
                self._good = there
                break
            r = self._range(self._good)
            end, stride = min(there, r.block + r.count), self.ns.stride
            records = client.arena.view[r.offset : r.offset + r.count * stride]
            landing = Landing.whole(self.ns.shape, records)
            want = RunBlocks.of(self._hasher, self.first + self._good, self.first + end)
            same, reason = matches(landing, want, self._good - r.block)
            self._good += same
            if reason is not None:
                self._end = (reason, True) if self.held else (GONE, False)
                return False
        return True

    def _prepare(self, blocks: int) -> bool:
        """Uses the time until blocks come to work out some more of what they will be compared with,
        which the hasher keeps; False: that of the first `blocks` blocks is known."""
        with self._lock:
            hasher, end = self._hasher, self.first + blocks
            if hasher is None or self._prepared >= end:
                return False
            following = min(end, self._prepared + _PREPARED_AT_ONCE)
            RunBlocks.of(hasher, self._prepared, following)
            self._prepared = following
            return True

    def _range(self, block: int) -> Range:
        return self.ranges[bisect_right(self._starts, block) - 1]

    def wait(self, blocks: int | None = None, timeout: float | None = None) -> int:
        """Waits until `blocks` blocks (default: all wanted) are here or it ended.

        timeout: seconds, besides the ticket's deadline. Returns the number of good blocks.
        """
        began = time.monotonic()
        while True:
            good = self.good
            if self._end is not None or (blocks is not None and good >= blocks):
                return good
            now = time.monotonic()
            wanted = self.wanted if blocks is None else min(blocks, self.wanted)
            pause = _pause(now - self._news, self._news - self._asked, good, wanted)
            pause = min(pause, max(0.0, self._deadline - now))
            if timeout is not None:
                if now - began >= timeout:
                    return good
                pause = min(pause, timeout - (now - began))
            if not self._prepare(min(wanted, good + _PREPARED_AHEAD)):
                time.sleep(pause)

    def payload(self, block: int) -> memoryview:
        """The payload of block number `block` of the prompt, if it is good: read-only shared
        memory, valid until `release`. Raises InputError."""
        good = self.good
        if self._client is None or not self.first <= block < self.first + good:
            raise InputError(f"block {block} is not here: {good} from {self.first} on are")
        r = self._range(block - self.first)
        at = r.offset + (block - self.first - r.block) * self.ns.stride
        return self._client.arena.view[at : at + self.ns.row_bytes]

    def copy_into(self, buffer: Any, skip: int = 0) -> int:
        """Copies the payloads of the good blocks, without the first `skip`, one after the other
        into a writable buffer. Returns how many; 0 if they were lost meanwhile."""
        out, row, good = memoryview(buffer).cast("B"), self.ns.row_bytes, self.good
        for i in range(skip, good):
            out[(i - skip) * row : (i - skip + 1) * row] = self.payload(self.first + i)
        return max(0, good - skip) if self.held else 0

    def release(self) -> None:
        """Lets the blocks go, or cancels what is still under way. May be called twice."""
        with self._lock:
            if self._released:
                return
            self._released = True
            self._end = self._end or ("cancelled", False)
            over = Outcome(self.first, self.first + self._good, *self._end)
            self._good = 0
        if self._client is not None:
            self._client.release(self._slot, self._generation)
        if self.when_over is not None:
            self.when_over(over)

    cancel = release

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __del__(self) -> None:
        # Somebody forgot. No locks here: the thread that runs this may hold any of them.
        if not self._released and self._client is not None:
            self._client.orphans.append((self._slot, self._generation))


def of_storage(reason: str) -> bool:
    """Whether a reason that passes speaks of the storage, so that the next fetch waits as well;
    else that may go through: the fetcher was full, or is just being replaced."""
    return not reason.startswith(_NOT_OF_STORAGE)


def _pause(since_news: float, until_news: float, good: int, wanted: int) -> float:
    """Seconds until the next look at a ticket that has `good` of `wanted` blocks.

    since_news: since `good` last grew (or the ticket was asked for); until_news: from the asking
    until then. Short at first, and then a fiftieth of the time that brought nothing. As long as
    blocks come as fast as before, most of what the rest of them takes, but half of what has passed
    at most: a few looks instead of dozens, since each costs the reader next door a little.
    """
    pause = since_news / 50
    if good:
        rest = until_news * (wanted - good) / good - since_news
        pause = max(pause, min(rest * _SHARE_OF_REST, (since_news + until_news) / 2))
    return min(max(_SHORTEST_POLL, pause), _LONGEST_POLL)
