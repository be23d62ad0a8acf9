"""Ways to get records from host memory into pages, behind one interface: those that torch has.

pages   one copy for each page: from pinned memory a DMA each, without a kernel on the device
staged  each stretch of records in one large copy to a buffer on the device; from there one scatter
        for each part of each layer
direct  a scatter for each part of each layer straight from host memory; for a CPU only

kvfs.gpu.batched and kvfs.gpu.gather have more, kvfs.gpu.choosing measures which is best. A strategy
turns a piece of a fetch into work, layer by layer, main KV and indexer of a layer one after the
other. Stateless; the work runs where its stream runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvfs.gpu.host_memory import Records
from kvfs.gpu.paged import PagedLayout, Part, Target
from kvfs.gpu.streams import Stream, Work

STAGING_BYTES = 64 << 20
"""Most that one piece takes of the device's memory while it is copied."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive blocks that have landed."""

    first: int
    """Number of its first block in the ticket."""
    records: Sequence[Records]
    targets: Sequence[Target]
    """For each group of the layout, where they go."""
    pinned: bool = False
    """The records lie in memory that the device may read by itself."""


class Copy(Work):
    """All blocks of one piece of one part of one layer."""

    __slots__ = ("part", "piece")

    def __init__(self, piece: Piece, part: Part) -> None:
        super().__init__()
        self.piece = piece
        self.part = part

    @property
    def target(self) -> Target:
        """Where its cells go."""
        return self.piece.targets[self.part.group]


class Strategy(ABC):
    """See the module docstring."""

    name = ""
    staging = False
    """Whether it takes memory on the device, a record for a record."""
    pinned_only = False
    """Whether it must not be used with records that are not pinned."""

    def problem(self, layout: PagedLayout) -> str:
        """Why it cannot be used on this machine, for people; "" if it can."""
        return ""

    def sms(self, layout: PagedLayout) -> int:
        """How many of the device's multiprocessors its copies take."""
        return 0

    def begin(self, piece: Piece, layout: PagedLayout, stream: Stream) -> Any:
        """Submits what all layers need; returns what `copy` wants to have."""
        return None

    @abstractmethod
    def copy(self, piece: Piece, part: Part, begun: Any) -> Copy:
        """The copy of a part, to be submitted to the same stream."""


class _PageCopy(Copy):
    __slots__ = ()

    def run(self) -> None:
        part, n, at = self.part, self.part.per_block, 0
        for records in self.piece.records:
            target = self.target.cut(at, at + len(records) * n)
            cells = part.cells(records.data).unflatten(1, (n, -1))
            which = range(len(target.pages)) if target.chosen is None else target.chosen.tolist()
            for cell, page in zip(which, target.pages.tolist(), strict=True):
                part.wide[page].copy_(cells[cell // n, cell % n], non_blocking=True)
            at += len(records) * n


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
        self.part.put(self.target, stage.rows)


class Staged(Strategy):
    name = "staged"
    staging = True

    def sms(self, layout: PagedLayout) -> int:
        if layout.device.type != "cuda":
            return 0
        return int(torch.cuda.get_device_properties(layout.device).multi_processor_count)

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
            part.put(self.target.cut(at, at + n), r.data)
            at += n


class Direct(Strategy):
    name = "direct"

    def problem(self, layout: PagedLayout) -> str:
        return "" if layout.device.type == "cpu" else "pages and records are in different memories"

    def copy(self, piece: Piece, part: Part, begun: Any) -> Copy:
        return _DirectCopy(piece, part)


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
