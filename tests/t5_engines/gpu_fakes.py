"""A device whose streams do as little as they may, as late as they may, and in any order.

Nothing runs until somebody waits for an event; then whichever stream may go on does, as a seed
says. Before a copy, its pages are filled with POISON, which is what a reader that did not wait
finds. A ticket stands for a fetch: blocks land when a seed says, and memory that was let go is
overwritten at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from kvfs import layout
from kvfs.errors import InputError
from kvfs.fetcher.wire import Range
from kvfs.gpu.strategies import Copy
from kvfs.gpu.streams import CpuDevice, Work
from kvfs.record import Shape

POISON, FREED = 0xAA, 0xEE


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.come = False

    def wait(self, timeout: float | None = None) -> bool:
        while not self.come:
            if not self.device.step() and timeout is not None:
                return False
        return True


class FakeStream:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.steps: deque[Callable[[], bool]] = deque()

    def submit(self, work: Work) -> None:
        if isinstance(work, Copy):
            self._push(lambda: self._poison(work))
        self._push(lambda: self._do(work))

    def record(self) -> FakeEvent:
        event = FakeEvent(self.device)

        def come() -> bool:
            event.come = True
            return True

        self._push(come)
        return event

    def wait_for(self, event: FakeEvent) -> None:
        self._push(lambda: event.come)

    def close(self) -> None:
        self.record().wait()

    def _push(self, step: Callable[[], bool]) -> None:
        with self.device.lock:
            self.steps.append(step)

    def _poison(self, work: Copy) -> bool:
        work.part.pages[work.target.pages] = POISON
        return True

    def _do(self, work: Work) -> bool:
        if isinstance(work, Copy) and self.device.fails(work):
            work.error = RuntimeError("this copy fails")
            return True
        _CURRENT.stream = self
        try:
            work.attempt()
        finally:
            _CURRENT.stream = None
        return True

    def soon(self, steps: list[Callable[[], bool]]) -> None:
        """Steps that come before what was submitted behind the work that runs now."""
        with self.device.lock:
            self.steps.extendleft(steps)


_CURRENT = threading.local()


class FakeCopies:
    """Stands for the CUDA runtime: copies what lies at the addresses it is given.

    Called by work of a FakeStream it only enqueues, a copy a step and in any order; elsewhere it
    copies at once.
    """

    def __init__(self) -> None:
        self.calls = 0

    def problem(self, call: str) -> str:
        return ""

    def attribute(self, number: int, device: int) -> int:
        return 1

    def batch(self, sources: Any, targets: Any, size: int) -> None:
        assert sources.dtype == targets.dtype == "uint64"
        self._copy(list(zip(sources.tolist(), targets.tolist(), strict=True)), size)

    def rectangle(
        self, source: int, source_pitch: int, target: int, target_pitch: int, size: int, rows: int
    ) -> None:
        assert source_pitch >= size <= target_pitch < 1 << 31
        both = [(source + i * source_pitch, target + i * target_pitch) for i in range(rows)]
        self._copy(both, size)

    def _copy(self, both: list[tuple[int, int]], size: int) -> None:
        self.calls += 1
        stream = getattr(_CURRENT, "stream", None)
        if stream is None:
            for source, target in both:
                ctypes.memmove(target, source, size)
            return
        stream.device.random.shuffle(both)
        stream.soon([partial(_moved, target, source, size) for source, target in both])


def _moved(target: int, source: int, size: int) -> bool:
    ctypes.memmove(target, source, size)
    return True


class FakeDevice(CpuDevice):
    name = "fake"

    def __init__(self, random: Random, fails: Callable[[Copy], bool] = lambda copy: False) -> None:
        self.random = random
        self.fails = fails
        self.lock = threading.RLock()
        self.streams: list[FakeStream] = []
        self.threads: list[int] = []
        """That work for it, each as often as it says so."""

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        self.threads.append(threading.get_ident())
        yield
        self.threads.remove(threading.get_ident())

    def stream(self) -> FakeStream:
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    def step(self) -> bool:
        """One step of one stream; False if none can go on."""
        with self.lock:
            for stream in self.random.sample(self.streams, len(self.streams)):
                if not stream.steps:
                    continue
                step = stream.steps.popleft()
                if step():
                    return True
                stream.steps.appendleft(step)
        return False

    def drain(self) -> None:
        while self.step():
            pass


class FakeTicket:
    """Blocks 0..wanted-1 of a prompt, in stretches all over an arena of its own."""

    def __init__(
        self, identity: Any, wanted: int, random: Random, *, lands: int | None = None,
        first: int = 0,
    ) -> None:  # fmt: skip
        """lands: blocks that come at all."""
        self.ns = SimpleNamespace(stride=Shape.of(identity).stride, row_bytes=identity.row_bytes)
        self.first, self.wanted, self.random = first, wanted, random
        self.lands = wanted if lands is None else lands
        self.reason = "" if self.lands == wanted else "checksum"
        self.landed = 0
        self.lost = False
        self.released = 0
        self.never_ends = False
        self.moved = threading.Event()
        self._nothing = threading.Event()
        self.arena = bytearray(random.randbytes((wanted + 8) * self.ns.stride))
        self.rows = []
        self.ranges = self._ranges()
        for r in self.ranges:
            for i in range(r.count):
                at = r.offset + i * self.ns.stride
                self.rows.append(bytes(self.arena[at : at + self.ns.row_bytes]))

    def _ranges(self) -> list[Range]:
        cuts, at = [], 0
        while at < self.wanted:
            cuts.append((at, min(self.wanted - at, self.random.randint(1, 5))))
            at += cuts[-1][1]
        places, offset = {}, self.random.randint(0, 8) * self.ns.stride
        for block, count in self.random.sample(cuts, len(cuts)):
            places[block] = Range(block, count, offset)
            offset += count * self.ns.stride
        return [places[block] for block, _ in cuts]

    @property
    def lender(self) -> FakeTicket:
        return self

    def gone(self) -> bool:
        return self.released > 0

    @property
    def good(self) -> int:
        return self.landed

    @property
    def done(self) -> bool:
        return self.landed == self.lands and not self.never_ends

    @property
    def held(self) -> bool:
        return not self.released and not self.lost

    def wait(self, blocks: int | None = None, timeout: float | None = None) -> int:
        if self.landed == self.lands and timeout:
            self._nothing.wait(timeout)  # no more comes
        step = self.random.randint(0, 9) if timeout else self.lands
        self.landed = min(self.lands, self.landed + step)
        if self.landed == self.lands:
            self.moved.set()
        return self.landed

    def payload(self, block: int) -> memoryview:
        if self.released or not self.first <= block < self.first + self.landed:
            raise InputError(f"block {block} is not here")
        for r in self.ranges:
            if r.block <= block - self.first < r.block + r.count:
                at = r.offset + (block - self.first - r.block) * self.ns.stride
                return memoryview(self.arena)[at : at + self.ns.row_bytes]
        raise AssertionError

    def release(self) -> None:
        self.released += 1
        self.arena[:] = bytes([FREED]) * len(self.arena)


def plan(blocks: int) -> Any:
    return SimpleNamespace(hit_blocks=blocks)


def identity(layers: int = 4, kv: int = 96, index: int = 40, gap: int = 8) -> layout.Identity:
    """Main KV and an indexer in every layer but the last, with gaps between."""
    spans, at = [], 0
    for layer in range(layers):
        for part, size in (("kv", kv), ("index", index)):
            if part == "kv" or layer < layers - 1:
                spans.append(layout.Span(layer, part, at, size))
                at += size + gap
    return layout.Identity("m", "w", "t", tuple(spans), at, "opaque")


def pages(identity: layout.Identity, count: int, per_block: int = 1) -> dict[Any, Any]:
    return {
        (s.layer, s.part): torch.full((count, s.length // per_block), POISON, dtype=torch.uint8)
        for s in identity.spans
    }


def expected(row: bytes, span: layout.Span) -> bytes:
    return row[span.offset : span.end]


def found(tensors: Any, span: layout.Span, table: list[int], block: int, per_block: int) -> bytes:
    taken = table[block * per_block : (block + 1) * per_block]
    return b"".join(tensors[span.layer, span.part][page].numpy().tobytes() for page in taken)
