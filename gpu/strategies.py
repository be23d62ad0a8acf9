"""Ways to get records from host memory into pages, behind one interface, and choosing among them.

pages   one copy for each page: from pinned memory a DMA each, without a kernel on the device
staged  each stretch of records in one large copy to a buffer on the device; from there one scatter
        for each part of each layer
direct  a scatter for each part of each layer straight from host memory; for a CPU only

What is best depends on the machine and the layout: `choose` measures on memory of its own at the
start. A strategy turns a piece of a fetch into work, layer by layer, main KV and indexer of a layer
one after the other. Stateless; the work runs where its stream runs.
"""

from __future__ import annotations

import ctypes.util
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch

from kvfs.gpu.host_memory import HostBuffer, Records
from kvfs.gpu.paged import PagedLayout, Part
from kvfs.gpu.streams import Device, Stream, Work

STAGING_BYTES = 64 << 20
"""Most that one piece takes of the device's memory while it is copied."""
_TRIAL_BYTES, _TRIAL_BLOCKS, _TRIAL_RUNS = 16 << 20, 64, 3


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive blocks that have landed."""

    first: int
    """Number of its first block in the ticket."""
    records: Sequence[Records]
    pages: Any
    """int64 [blocks * pages a block], in host memory."""
    on_device: Any
    """The same on the device."""


class Copy(Work):
    """All blocks of one piece of one part of one layer."""

    __slots__ = ("part", "piece")

    def __init__(self, piece: Piece, part: Part) -> None:
        super().__init__()
        self.piece = piece
        self.part = part


class Strategy:
    """See the module docstring."""

    name = ""
    staging = False
    """Whether it takes memory on the device, a record for a record."""

    def begin(self, piece: Piece, layout: PagedLayout, stream: Stream) -> Any:
        """Submits what all layers need; returns what `copy` wants to have."""
        return None

    def copy(self, piece: Piece, part: Part, begun: Any) -> Copy:
        """The copy of a part, to be submitted to the same stream."""
        raise NotImplementedError


class _PageCopy(Copy):
    __slots__ = ()

    def run(self) -> None:
        part, page = self.part, self.piece.pages.tolist()
        at, n = 0, part.per_block
        for records in self.piece.records:
            for row in part.cells(records.data):
                for cell in row.view(n, -1):
                    part.wide[page[at]].copy_(cell, non_blocking=True)
                    at += 1


class Pages(Strategy):
    name = "pages"

    def copy(self, piece: Piece, part: Part, begun: Any) -> Copy:
        return _PageCopy(piece, part)


class _Stage(Work):
    __slots__ = ("device", "piece", "rows")

    def __init__(self, piece: Piece, device: Any) -> None:
        super().__init__()
        self.piece = piece
        self.device = device
        self.rows: Any = None

    def run(self) -> None:
        records = self.piece.records
        shape = (sum(map(len, records)), records[0].data.shape[1])
        rows, at = torch.empty(shape, dtype=torch.uint8, device=self.device), 0
        for r in records:
            rows[at : at + len(r)].copy_(r.data, non_blocking=True)
            at += len(r)
        self.rows = rows


class _StagedCopy(Copy):
    __slots__ = ("stage",)

    def __init__(self, piece: Piece, part: Part, stage: _Stage) -> None:
        super().__init__(piece, part)
        self.stage: _Stage | None = stage

    def run(self) -> None:
        stage, self.stage = self.stage, None  # its memory goes with the last copy out of it
        if stage is None or stage.rows is None:
            raise RuntimeError("its records did not reach the device")
        self.part.put(self.piece.on_device, self.part.cells(stage.rows))


class Staged(Strategy):
    name = "staged"
    staging = True

    def begin(self, piece: Piece, layout: PagedLayout, stream: Stream) -> Any:
        stage = _Stage(piece, layout.device)
        stream.submit(stage)
        return stage

    def copy(self, piece: Piece, part: Part, begun: Any) -> Copy:
        return _StagedCopy(piece, part, begun)


class _DirectCopy(Copy):
    __slots__ = ()

    def run(self) -> None:
        part, at = self.part, 0
        for r in self.piece.records:
            n = len(r) * part.per_block
            part.put(self.piece.pages[at : at + n], part.cells(r.data))
            at += n


class Direct(Strategy):
    name = "direct"

    def copy(self, piece: Piece, part: Part, begun: Any) -> Copy:
        return _DirectCopy(piece, part)


def strategies(layout: PagedLayout) -> tuple[Strategy, ...]:
    """Those that work with a layout's device."""
    if layout.device.type == "cpu":
        return Direct(), Pages(), Staged()
    return Staged(), Pages()


# choosing


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen and why. seconds: by strategy, for `trial_bytes`; pinned: the trial's host
    memory was; found: see `available`."""

    strategy: Strategy
    seconds: dict[str, float]
    trial_bytes: int
    pinned: bool
    found: dict[str, bool] = field(default_factory=dict)


def choose(layout: PagedLayout, device: Device, stride: int) -> Choice:
    """Measures every strategy on memory of its own and returns the fastest.

    stride: bytes of a record. Takes some tens of milliseconds and a few megabytes on the device.
    """
    blocks = max(1, min(_TRIAL_BLOCKS, _TRIAL_BYTES // stride, layout.num_pages))
    trial, host, stream = layout.scratch(blocks), HostBuffer(blocks * stride), device.stream()
    try:
        pages = torch.randperm(blocks * layout.per_block)
        records = Records(host.tensor().view(blocks, stride), host.view)
        piece = Piece(0, (records,), pages, pages.to(layout.device))
        seconds = {s.name: _measure(s, piece, trial, stream) for s in strategies(layout)}
        best = min(strategies(layout), key=lambda s: seconds[s.name])
        return Choice(best, seconds, blocks * layout.row_bytes, host.pin.pinned, available())
    finally:
        stream.close()
        host.close()


def _measure(strategy: Strategy, piece: Piece, layout: PagedLayout, stream: Stream) -> float:
    """The least seconds of some runs; infinite if it does not work here."""
    best = float("inf")
    for _ in range(_TRIAL_RUNS):
        start = time.perf_counter()
        copies = submit(strategy, piece, layout, stream)
        stream.record().wait()
        if any(copy.error for copy in copies):
            return float("inf")
        best = min(best, time.perf_counter() - start)
    return best


def submit(
    strategy: Strategy, piece: Piece, layout: PagedLayout, stream: Stream
) -> list[Copy]:  # fmt: skip
    """Submits all copies of a piece."""
    begun = strategy.begin(piece, layout, stream)
    copies = [strategy.copy(piece, part, begun) for parts in layout.layers.values()
              for part in parts]  # fmt: skip
    for copy in copies:
        stream.submit(copy)
    return copies


def available() -> dict[str, bool]:
    """What this machine has for copies: looked for, not used unless a strategy above says so."""

    def module(name: str) -> bool:
        try:
            return find_spec(name) is not None
        except (ImportError, ValueError):
            return False

    return {
        "cuda": torch.cuda.is_available(),
        "cuda-python": module("cuda.bindings"),
        "triton": module("triton"),
        "nixl": module("nixl"),
        "gds": os.path.exists("/dev/nvidia-fs0") and ctypes.util.find_library("cufile") is not None,
    }
