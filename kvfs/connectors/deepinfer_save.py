"""Stores what a DeepInfer engine computed: taken in its step, written behind it.

In the step the blocks' rows and the states are only enqueued to be copied out, on a side stream,
and the engine's blocks are pinned, so that a sequence that ends may free them at once. A thread
waits for the copies, lets go of the blocks, and puts. Memory for rows is bounded: what does not fit
is not stored. Nothing is raised into the engine.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvfs.connectors.deepinfer_layout import Memory
from kvfs.errors import KvfsError
from kvfs.gpu.host_memory import HostBuffer
from kvfs.gpu.streams import Event, Work
from kvfs.gpu.swap_in import Swapper
from kvfs.gpu.swap_out import SwapOut
from kvfs.namespace import Namespace
from kvfs.state.directory import Directory
from kvfs.state.slot import Anchor
from kvfs.state.slots import SlotPool
from kvfs.store import Store

log = logging.getLogger(__name__)
_UNIT = 1 << 20


@dataclass(frozen=True, slots=True)
class State:
    """A state to keep. source: where it lies now, [state slots, bytes]; slot: which of them."""

    anchor: int
    overshoot: int
    source: Any
    slot: int


class _ToHost(Work):
    """Kept until it is done: the device's memory would be used again otherwise."""

    __slots__ = ("buffer", "state")

    def __init__(self, state: Any, buffer: HostBuffer) -> None:
        super().__init__()
        self.state = state
        self.buffer = buffer

    @property
    def host(self) -> Any:
        return self.buffer.tensor()[: len(self.state)]

    def run(self) -> None:
        self.host.copy_(self.state, non_blocking=True)


@dataclass(slots=True)
class _Job:
    tokens: Callable[[], Any]
    first: int
    end: int
    pages: list[int]
    out: SwapOut | None
    states: list[tuple[State, _ToHost]]
    done: Event
    buffers: list[HostBuffer]


class Saver:
    """See the module docstring."""

    def __init__(
        self, store: Store, ns: Namespace, memory: Memory, swapper: Swapper, blocks: Any, *,
        pool: SlotPool | None, directory: Directory | None, ttl_class: str, most_bytes: int,
        counts: Counter[str],
    ) -> None:  # fmt: skip
        """blocks: the engine's block manager; most_bytes: of memory for rows and states."""
        self.store, self.ns, self.memory, self.swapper = store, ns, memory, swapper
        self._blocks = blocks
        self._pool, self._directory = pool, directory
        self._ttl_class = ttl_class
        self._most, self._used = most_bytes, 0
        self._counts = counts
        self._free: list[HostBuffer] = []
        """By size; with what is used, no more than the most."""
        self._change = threading.Condition()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvfs-save", daemon=True)
        self._thread.start()

    # in the engine's step

    def take(
        self, tokens: Callable[[], Any], first: int, end: int, pages: Sequence[int],
        states: Sequence[State],
    ) -> bool:  # fmt: skip
        """Begins to store blocks first..end-1 that lie in `pages`, and states. tokens: gives the
        sequence's tokens, called by another thread. False: there is no room."""
        sizes = [self.memory.state_bytes] * len(states)
        if first < end:
            sizes.append((end - first) * self.memory.identity.row_bytes)
        buffers = self._room(sizes)
        if buffers is None:
            self._counts["dropped_blocks"] += end - first
            return False
        try:
            self._jobs.put(self._begin(tokens, first, end, pages, states, buffers))
        except BaseException:
            self.swapper.stream.record().wait()  # some of them may be written to already
            self._let_go(buffers)
            raise
        return True

    def _begin(
        self, tokens: Callable[[], Any], first: int, end: int, pages: Sequence[int],
        states: Sequence[State], buffers: list[HostBuffer],
    ) -> _Job:  # fmt: skip
        """buffers: one for each state, and one for the rows if there are any."""
        taken = [
            (state, self._state(state, buffer))
            for state, buffer in zip(states, buffers, strict=False)
        ]
        out = self.swapper.swap_out(pages, buffers[-1]) if first < end else None
        done = self.swapper.stream.record()
        held = list(pages) if out is not None else []
        self._blocks.pin_blocks(held)
        return _Job(tokens, first, end, held, out, taken, done, buffers)

    def _state(self, state: State, buffer: HostBuffer) -> _ToHost:
        """The kept part of a state on its way to host memory. It is read where it lies now, before
        anything that the engine enqueues after this can change it."""
        source, size = state.source, self.memory.state_bytes
        kept = torch.empty(size, dtype=torch.uint8, device=source.device)
        self.memory.cache.select_state_slice_to_store(state.slot, state.anchor, source, kept)
        work = _ToHost(kept, buffer)
        after = self.swapper.device.fence()
        if after is not None:
            self.swapper.stream.wait_for(after)
        self.swapper.stream.submit(work)
        return work

    def _room(self, sizes: Sequence[int]) -> list[HostBuffer] | None:
        """A buffer for each size, pinned already if one that is free fits; None if they would be
        too much."""
        wanted = [-(-size // _UNIT) * _UNIT for size in sizes]
        with self._change:
            found = [self._pick(size) for size in wanted]
            pairs = list(zip(wanted, found, strict=True))
            total = sum(size if b is None else b.view.nbytes for size, b in pairs)
            if self._used + total > self._most:
                self._keep(found)
                return None
            self._used += total
            self._keep()
        try:
            return [HostBuffer(size) if b is None else b for size, b in pairs]
        except BaseException:
            with self._change:
                self._used -= total
                self._keep(found)
            raise

    def _pick(self, size: int) -> HostBuffer | None:
        """One that is much larger would be missing where it is needed. Under the lock."""
        for i, buffer in enumerate(self._free):
            if size <= buffer.view.nbytes <= 2 * size:
                return self._free.pop(i)
        return None

    def _keep(self, buffers: Sequence[HostBuffer | None] = ()) -> None:
        """Keeps memory to be used again, as much as there may be. Under the lock."""
        kept = [*self._free, *(b for b in buffers if b is not None)]
        self._free = sorted(kept, key=lambda b: b.view.nbytes)
        while sum(b.view.nbytes for b in self._free) > self._most - self._used:
            self._free.pop(0).close()

    # the thread

    def _run(self) -> None:
        with self.swapper.device.entered():
            self._run_here()

    def _run_here(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._finish(job)
            except Exception as e:  # whatever it is, the engine goes on
                self._counts["failed"] += 1
                log.warning("not stored: %s", e, exc_info=not isinstance(e, KvfsError))
            self._let_go(job.buffers)

    def _let_go(self, buffers: list[HostBuffer]) -> None:
        with self._change:
            self._used -= sum(b.view.nbytes for b in buffers)
            self._keep(buffers)
            self._change.notify_all()

    def _finish(self, job: _Job) -> None:
        try:
            job.done.wait()
        finally:
            if job.pages:
                self._blocks.unpin_blocks(job.pages)
        hasher = self.ns.hasher(job.tokens()[: job.end * self.ns.block_tokens])
        if job.out is not None:
            result = job.out.put(
                self.store, self.ns, hasher, first_block=job.first, ttl_class=self._ttl_class
            )
            self._counts["stored_blocks"] += result.stored
            if result.error is not None:
                raise result.error
        for state, work in job.states:
            if work.error is not None:
                raise work.error
            self._write(Anchor.of(hasher, state.anchor), state, work.host)

    def _write(self, anchor: Anchor, state: State, host: Any) -> None:
        assert self._pool is not None and self.memory.ring is not None
        data = self.memory.slot_of(host).numpy()
        rotation = state.anchor % self.memory.ring.size
        stored = self._pool.write(anchor, data, rotation=rotation, overshoot=state.overshoot)
        self._counts["stored_slots"] += stored.new
        if self._directory is not None:
            self._directory.stored(stored)

    # the end

    def flush(self, seconds: float) -> bool:
        """Waits until all that was taken is stored, or could not be; says whether that is so."""
        with self._change:
            return self._change.wait_for(lambda: not self._used, seconds)

    def close(self, seconds: float) -> bool:
        """Stores what is waiting, for so long at most; says whether the thread has ended."""
        self._jobs.put(None)
        self._thread.join(seconds)
        for buffer in self._free:
            buffer.close()
        return not self._thread.is_alive()
