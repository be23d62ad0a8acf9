"""Swap-in: the blocks of a fetch into an engine's paged KV tensors, layer by layer.

    swapper = Swapper(tensors, identity)                   # once, at the start of the engine
    swap = swapper.swap_in(plan, ticket, block_table)      # a thread begins; nothing waits
    n = swap.usable_blocks()                               # how much of the prompt is a hit
    for layer in ...:                                      # compute what is behind it
        swap.wait_layer(layer)                             # the layer's bytes are there
        ...
    swap.finish()                                          # n again, or less: drop the step

Pieces of a fetch are copied as they land. A block counts only with all its parts: a fetch that
fails or is late, or a copy that cannot be made, ends the prefix before it. Nothing here raises into
an engine's step; what went wrong is in `reason`.

Every swap has a thread of its own, which alone enqueues its copies and lets go of its ticket, when
the last copy out of the arena is done. All methods may be called from any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from kvfs.errors import ConfigError, InputError
from kvfs.geometry import PAGE
from kvfs.gpu.choosing import Choice, choose
from kvfs.gpu.host_memory import Arenas, records_of
from kvfs.gpu.paged import PagedLayout, RowLayout, Target, Tensors, target_of
from kvfs.gpu.strategies import STAGING_BYTES, Copy, Piece, Staged, Strategy
from kvfs.gpu.streams import Device, Event, Stream, device_of
from kvfs.gpu.swap_out import SwapOut

log = logging.getLogger(__name__)
FIRST_PIECE = 32
"""Blocks that are worth a round of copies, while more are under way."""
_LOOK_SECONDS = 0.002
"""How long a thread that waits for a fetch may not notice an abort."""


class Swapper:
    """An engine's memory, the side stream, the copy strategy and the pinned arenas.

    Make one at the start; `close` it when no swap is under way.
    """

    def __init__(
        self, tensors: Tensors, row: RowLayout, *,
        groups: Mapping[tuple[int, str], int] | None = None, strategy: Strategy | None = None,
        device: Device | None = None, inline: bool = False,
    ) -> None:  # fmt: skip
        """tensors: (layer, part) -> uint8 [pages, page bytes], views of the engine's memory for
        every span of the row; row: an identity; groups: which block table a part goes by, as for
        PagedLayout; strategy: None for the one that measures best; device: None for the one the
        tensors are on; inline: on a CPU, copy in the thread that enqueues. Raises InputError for
        tensors that do not fit, and ConfigError if no strategy works.
        """
        self.layout = PagedLayout(tensors, row, groups)
        self.device = device or device_of(self.layout.parts[0].pages, inline=inline)
        self.choice: Choice | None = None
        """What was measured; None if the strategy was given."""
        if strategy is None:
            stride = (row.row_bytes // PAGE + 1) * PAGE  # a record's, or nearly
            with self.device.entered():
                self.choice = choose(self.layout, self.device, stride)
            strategy = self.choice.strategy
            if strategy is None:
                why = self.choice.unavailable
                raise ConfigError(f"no way to copy into {self.device.name} works: {why}")
        self.strategy = strategy
        self._unpinned = Staged() if strategy.pinned_only else strategy
        self.stream = self.device.stream()
        self.arenas = Arenas()

    def swap_in(
        self, plan: Any, ticket: Any, block_table: Sequence[Any], after: Event | None = None
    ) -> SwapIn:
        """Begins to copy the blocks of a ticket (kvfs.fetcher.ticket) and returns at once.

        block_table: the pages for the ticket's blocks in order, or a table for each group; what is
        behind its end is not copied. The swap owns the ticket from now on. after: who used the
        pages before has finished there; None for what the calling thread has enqueued so far.
        """
        most = plan.hit_blocks - ticket.first
        return SwapIn(self, most, ticket, block_table, after or self.device.fence())

    def load(self, ticket: Any, block_table: Sequence[Any], after: Event | None = None) -> SwapIn:
        """The same in the calling thread, for who has nothing else to do: all of the ticket, done
        on return. after: must be given where another thread computes, whose stream is its own."""
        after = after or self.device.fence()
        return SwapIn(self, ticket.wanted, ticket, block_table, after, threaded=False)

    def swap_out(
        self, block_table: Sequence[Any], buffer: Any = None, after: Event | None = None
    ) -> SwapOut:
        """The mirror: begins to copy blocks out of the pages. See kvfs.gpu.swap_out."""
        with self.device.entered():
            return SwapOut(self.layout, self.device, self.stream, block_table, buffer, after)

    def strategy_for(self, *, pinned: bool) -> Strategy:
        """How records are copied that are pinned, or are not."""
        return self.strategy if pinned else self._unpinned

    def close(self) -> None:
        """Waits for the copies that were enqueued."""
        self.stream.close()
        self.arenas.close()

    def __enter__(self) -> Swapper:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class SwapIn:
    """One request's swap-in; see the module docstring. Blocks are counted from the ticket's first.

    After `abort` (True) or `finish` without a timeout has returned, nothing is written into the
    pages any more.
    """

    def __init__(
        self, swapper: Swapper, most: int, ticket: Any, block_table: Sequence[Any],
        after: Event | None, *, threaded: bool = True,
    ) -> None:  # fmt: skip
        """For Swapper.swap_in and Swapper.load. most: blocks of the ticket that are wanted."""
        self._swapper = swapper
        self._ticket = ticket
        self._after = after
        self._layout = swapper.layout
        self._lock = threading.Lock()
        self._stop = False  # what has landed has to do
        self._aborted = False
        self._decided = threading.Event()
        self._over = threading.Event()
        self._settled = False  # the ticket is no longer needed
        self._usable = self._promised = 0
        self._reason = ""
        self._copies: dict[int, list[Copy]] = {layer: [] for layer in swapper.layout.layers}
        self._events: dict[int, Event] = {}
        self._arena: int | None = None
        self.control_seconds = 0.0
        """CPU time of the thread from plan to enqueued copies, without waiting for the fetch."""
        if not threaded:
            self._run(most, block_table)
            return
        self._thread = threading.Thread(
            target=self._run, args=(most, block_table), name="kvfs-swap-in", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as e:  # no more threads: a miss like any other
            self._reason = f"no thread: {e}"
            ticket.release()
            self._decided.set()
            self._over.set()

    # what an engine asks

    def usable_blocks(self, timeout: float | None = None) -> int:
        """Waits until the fetch has ended and all copies are enqueued; returns how many blocks the
        forward pass may count on. timeout: seconds after which what has landed has to do."""
        if not self._decided.wait(timeout):
            self._stop = True
            self._decided.wait()
        with self._lock:
            self._promised = 0 if self._aborted else self._usable
            return self._promised

    def wait_layer(self, layer: int, stream: Stream | None = None) -> bool:
        """Waits until every byte of the layer of every usable block is in its page.

        stream: instead of the calling thread, that stream waits; whether all went well is then
        known at `finish`. A layer of which nothing is stored is waited for by nobody. Returns False
        if bytes are missing: what the step computes is of no use, and `usable_blocks` is lower now.
        """
        self._decided.wait()
        event = self._events.get(layer)
        if event is None:
            return self._whole()
        try:
            if stream is not None:
                stream.wait_for(event)
            else:
                event.wait()
        except Exception as e:  # of the device; the step loop gets an answer all the same
            log.exception("waiting for layer %d", layer)
            with self._lock:
                self._cut(0, f"the device failed: {e!r}")
        if stream is None:
            self._look(layer)
        return self._whole()

    def finish(self, timeout: float | None = None) -> int:
        """Waits until the last copy is done; returns the blocks that are whole. If these are fewer
        than `usable_blocks` said, what was computed with them is of no use. 0 after `timeout`."""
        if not self._over.wait(timeout) or self._aborted:
            return 0
        return self._usable

    def over(self, timeout: float | None = None) -> bool:
        """Waits until the last copy is done and the ticket let go; says whether that is so."""
        return self._over.wait(timeout)

    def abort(self, timeout: float | None = None) -> bool:
        """Copies no more, lets go of the ticket, and waits until no copy is under way. Returns
        False if one still is after `timeout` seconds: the pages must not be given to others yet."""
        self._aborted = self._stop = True
        return self._over.wait(timeout)

    @property
    def reason(self) -> str:
        """Why less than the whole hit is usable; "" if it is not less, or not known yet."""
        return self._reason

    def _whole(self) -> bool:
        return self._usable >= self._promised and not self._aborted

    # cutting

    def _cut(self, blocks: int, reason: str) -> None:
        """No more than `blocks` blocks are usable. Under the lock."""
        self._usable = min(self._usable, blocks)
        self._reason = self._reason or reason

    def _look(self, *layers: int) -> None:
        """Cuts off what did not arrive in these layers, as far as is known now."""
        with self._lock:
            if self._settled:
                return
            if self._usable and not self._ticket.held:
                self._cut(0, "the fetched blocks were lost")
            for copy in chain.from_iterable(self._copies[layer] for layer in layers):
                if copy.error is not None:
                    layer, part = copy.part.name
                    why = f"{part} of layer {layer} was not copied: {copy.error!r}"
                    self._cut(copy.piece.first, why)

    # the thread

    def _run(self, most: int, block_table: Sequence[Any]) -> None:
        for step in (partial(self._swap, most, block_table), self._settle):
            try:
                with self._swapper.device.entered():
                    step()
            except Exception as e:
                log.exception("swap-in")
                with self._lock:
                    self._cut(0, f"internal error: {e!r}")
            self._decided.set()
        self._over.set()

    def _swap(self, most: int, block_table: Sequence[Any]) -> None:
        began = time.thread_time()
        ticket, layout, swapper = self._ticket, self._layout, self._swapper
        tables = layout.tables(block_table)
        if tables is None or ticket.ns.row_bytes != layout.row_bytes:
            self._reason = "the block table or the namespace does not fit the pages"
            return
        if self._after is not None:
            swapper.stream.wait_for(self._after)
        upload = partial(swapper.device.upload, stream=swapper.stream)
        targets = [target_of(table, upload) for table in tables]
        wanted: int = min(ticket.wanted, most, layout.blocks(tables))
        self.control_seconds += time.thread_time() - began
        done, more = 0, True
        while done < wanted and more:
            more = not self._stop
            end = self._landed(done, wanted)
            began = time.thread_time()
            while done < end and not self._aborted:
                piece = self._piece(done, end, targets)
                if piece is None:
                    break
                done += sum(map(len, piece.records))
                self._enqueue(piece, done == wanted)
            self.control_seconds += time.thread_time() - began
            more = more and done >= end and not self._ended(done)
        self._decide(done, wanted)

    def _landed(self, done: int, wanted: int) -> int:
        """Waits until a piece is worth a round of copies; returns how many blocks are here."""
        target = min(wanted, done + FIRST_PIECE)
        while True:
            stop = self._stop
            good = int(self._ticket.wait(target, 0 if stop else _LOOK_SECONDS))
            if good >= target or stop or self._ticket.done:
                return min(wanted, int(self._ticket.good))

    def _ended(self, done: int) -> bool:
        return self._aborted or (self._ticket.done and self._ticket.good <= done)

    def _piece(self, first: int, end: int, targets: Sequence[Target]) -> Piece | None:
        """The blocks from `first` on, as many as fit into staging; None if they were lost."""
        swapper, ticket = self._swapper, self._ticket
        try:
            pinned = self._pinned()
            if swapper.strategy_for(pinned=pinned).staging:
                end = min(end, first + max(1, STAGING_BYTES // ticket.ns.stride))
            records = records_of(ticket, first, end)
        except InputError:
            return None
        parts = [
            target.cut(first * group.per_block, end * group.per_block)
            for target, group in zip(targets, self._layout.groups, strict=True)
        ]
        return Piece(first, records, parts, pinned)

    def _pinned(self) -> bool:
        """Whether the device may read the ticket's blocks by itself. Only what a fetcher lends
        again and again is worth pinning. Raises InputError if they were lost."""
        ticket, arenas = self._ticket, self._swapper.arenas
        if ticket.lender is None:
            return bool(ticket.pinned)
        if self._arena is None:
            self._arena = arenas.use(ticket.payload(ticket.first), ticket.lender.gone)
        return arenas.pinned(self._arena)

    def _enqueue(self, piece: Piece, last: bool) -> None:
        """Submits all copies of a piece; of the last one, an event behind each layer."""
        stream = self._swapper.stream
        strategy = self._swapper.strategy_for(pinned=piece.pinned)
        begun = strategy.begin(piece, self._layout, stream)
        for layer, parts in self._layout.layers.items():
            for part in parts:
                copy = strategy.copy(piece, part, begun)
                self._copies[layer].append(copy)
                stream.submit(copy)
            if last:
                self._events[layer] = stream.record()

    def _decide(self, done: int, wanted: int) -> None:
        if done < wanted or not self._events:
            self._events = dict.fromkeys(self._layout.layers, self._swapper.stream.record())
        with self._lock:
            self._usable = self._promised = done
            if done < wanted:
                late = "aborted" if self._aborted else "late"
                self._reason = self._ticket.reason or late
            elif self._ticket.wanted == wanted:
                self._reason = self._ticket.reason
        self._look(*self._copies)
        self._promised = self._usable

    def _settle(self) -> None:
        """Lets go of ticket and arena, when nothing reads there any more."""
        try:
            self._swapper.stream.record().wait()
            self._look(*self._copies)
        finally:
            with self._lock:
                self._settled = True
                self._copies.clear()
            if self._arena is not None:
                self._swapper.arenas.leave(self._arena)
            self._ticket.release()
