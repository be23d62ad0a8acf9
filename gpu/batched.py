"""Copies that the device's copy engines make from lists of addresses, without a kernel.

batch    one call for each part of each layer, however many pages (cudaMemcpyBatchAsync)
strided  one call for each run of pages that lie equally far apart, as do the pages of an engine
         that has just begun (cudaMemcpy2DAsync); a fragmented table makes it slow

The addresses of a piece are computed once for all its parts. Which run a page belongs to does not
depend on the part either. No state, no I/O; the calls run where the stream runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from kvfs.errors import ConfigError
from kvfs.gpu.cudart import Copies, find
from kvfs.gpu.host_memory import Records
from kvfs.gpu.paged import PagedLayout, Part, Target
from kvfs.gpu.strategies import Copy, Piece, Strategy
from kvfs.gpu.streams import Stream

_LONGEST_PITCH = (1 << 31) - 1


class Run(NamedTuple):
    """Cells first..first+count-1 of a column: their records are `source` bytes apart, their pages
    `pages` numbers."""

    first: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    source: int
    pages: int


class Column(NamedTuple):
    """The cells of a piece that have the same place in their blocks."""

    place: int
    records: Any
    """uint64 [cells]: addresses of their records."""
    pages: Any
    """uint64 [cells]: numbers of their pages."""


class Addresses:
    """Where the cells of a piece lie and where they go."""

    def __init__(self, piece: Piece, layout: PagedLayout) -> None:
        self.records = record_addresses(piece.records)
        self.groups = []
        for number, (target, group) in enumerate(zip(piece.targets, layout.groups, strict=True)):
            pitch = max(p.pages.stride(0) for p in layout.parts if p.group == number)
            longest = _LONGEST_PITCH // max(1, pitch)
            self.groups.append(_Cells(self.records, target, group.per_block, longest))

    def of(self, part: Part) -> tuple[Any, Any, int]:
        """(addresses of the cells, addresses of their pages, bytes of each)."""
        cells = self.groups[part.group]
        page = part.length // part.per_block
        sources = cells.records + np.uint64(part.offset)
        if part.per_block > 1:
            sources += cells.places * np.uint64(page)
        base, pitch = _memory(part)
        return sources, cells.pages * np.uint64(pitch) + np.uint64(base), page


class _Cells:
    """One group's."""

    def __init__(self, records: Any, target: Target, per_block: int, longest: int) -> None:
        """longest: numbers of pages that two rows of one copy may be apart."""
        self.longest = longest
        count = len(records) * per_block
        chosen = np.arange(count) if target.chosen is None else target.chosen.numpy()
        self.per_block = per_block
        self.records = records[chosen // per_block]
        self.places = (chosen % per_block).astype(np.uint64)
        self.pages = target.pages.numpy().astype(np.uint64)

    @cached_property
    def columns(self) -> list[tuple[Column, list[Run]]]:
        out = []
        for place in range(self.per_block):
            which = self.places == place
            column = Column(place, self.records[which], self.pages[which])
            out.append((column, list(runs(column, self.longest))))
        return out


def runs(column: Column, longest: int = _LONGEST_PITCH) -> Iterator[Run]:
    """Cuts a column into runs, each as long as it can be from where the one before ended.

    longest: numbers of pages that two neighbours of a run may be apart.
    """
    apart = (np.diff(v.astype(np.int64)).tolist() for v in (column.records, column.pages))
    steps = list(zip(*apart, strict=True))
    at, count = 0, len(column.pages)
    while at < count:
        end, step = at + 1, (0, 0)
        if at < len(steps) and _fits(steps[at], longest):
            step = steps[at]
            while end < count and steps[end - 1] == step:
                end += 1
        yield Run(at, end - at, *step)
        at = end


def _fits(step: tuple[int, int], longest: int) -> bool:
    return 0 < step[0] <= _LONGEST_PITCH and 0 < step[1] <= longest


def record_addresses(records: Sequence[Records]) -> Any:
    """The addresses of records, uint64 [blocks]."""
    out = []
    for stretch in records:
        blocks, stride = stretch.data.shape
        steps = np.arange(blocks, dtype=np.uint64) * np.uint64(stride)
        out.append(np.uint64(stretch.data.data_ptr()) + steps)
    return np.concatenate(out)


def _memory(part: Part) -> tuple[int, int]:
    """(address of page 0, bytes from one page to the next)."""
    return int(part.pages.data_ptr()), int(part.pages.stride(0))


class _Addressed(Copy):
    """A copy that knows the addresses of its piece."""

    __slots__ = ("act",)

    def __init__(self, piece: Piece, part: Part, act: Callable[[], None]) -> None:
        super().__init__(piece, part)
        self.act = act

    def run(self) -> None:
        self.act()


class _WithRuntime(Strategy):
    """What needs the CUDA runtime."""

    call = ""

    def __init__(self, copies: Copies | None = None) -> None:
        """copies: who makes them; None: the CUDA runtime of this machine, if there is one."""
        self._copies = copies
        self._given = copies is not None

    @property
    def copies(self) -> Copies:
        """Raises ConfigError where there are none."""
        if self._copies is None:
            self._copies = find()
        return self._copies

    def problem(self, layout: PagedLayout) -> str:
        if not self._given and layout.device.type != "cuda":
            return "the pages are not on a GPU"
        try:
            return self.copies.problem(self.call)
        except ConfigError as e:
            return str(e)

    def begin(self, piece: Piece, layout: PagedLayout, stream: Stream) -> Addresses:
        return Addresses(piece, layout)


class Batch(_WithRuntime):
    name = "batch"
    call = "batch"

    def copy(self, piece: Piece, part: Part, begun: Any) -> Copy:
        return _Addressed(piece, part, lambda: self.copies.batch(*begun.of(part)))


class Strided(_WithRuntime):
    name = "strided"
    call = "rectangle"

    def copy(self, piece: Piece, part: Part, begun: Any) -> Copy:
        return _Addressed(piece, part, lambda: self._copy(part, begun))

    def _copy(self, part: Part, addresses: Addresses) -> None:
        base, pitch = _memory(part)
        page = part.length // part.per_block
        for column, found in addresses.groups[part.group].columns:
            offset = part.offset + column.place * page
            for run in found:
                self.copies.rectangle(
                    int(column.records[run.first]) + offset, max(run.source, page),
                    base + int(column.pages[run.first]) * pitch, max(run.pages * pitch, page),
                    page, run.count,
                )  # fmt: skip
