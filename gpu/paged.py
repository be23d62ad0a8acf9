"""Where the bytes of a block row belong in an engine's paged KV tensors.

An engine's memory for one part of one layer is given as uint8 [pages, page bytes]; a block of kvfs
is one page, or several that the engine's block table names one after the other. Parts that go by
different tables (a model with sliding windows has several) are in different groups; a table of such
a model may have holes, for pages that are not wanted. Copies work on the widest integers that fit
all offsets: eight bytes at a time cost a quarter of one at a time.

Immutable after it was made. No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from kvfs.errors import InputError
from kvfs.layout import Span

_WIDTHS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
HOLE = -1
"""In the table of a layout that was made with groups: nothing is copied for this page."""
Tensors = Mapping[tuple[int, str], Any]


class RowLayout(Protocol):
    """What a row is; kvfs.layout.Identity is one."""

    @property
    def spans(self) -> tuple[Span, ...]: ...
    @property
    def row_bytes(self) -> int: ...


class Spans(NamedTuple):
    """A RowLayout that is no identity, such as a part of one."""

    spans: tuple[Span, ...]
    row_bytes: int


@dataclass(frozen=True, slots=True)
class Target:
    """Where some consecutive blocks go in one group.

    pages: int64 [cells], in host memory; on_device: the same on the device. A cell is a page's
    share of a block. chosen: int64 [cells], which of the blocks' cells these are, in order; None:
    all. chosen_on_device: the same on the device, each more by `shift`: to subtract it is work for
    the stream that copies.
    """

    pages: Any
    on_device: Any
    chosen: Any = None
    chosen_on_device: Any = None
    shift: int = 0

    def cut(self, first: int, end: int) -> Target:
        """The same for cells first..end-1, counted from 0."""
        if self.chosen is None:
            return Target(self.pages[first:end], self.on_device[first:end])
        bounds = torch.tensor([first, end])
        part = slice(*torch.searchsorted(self.chosen, bounds).tolist())
        return Target(
            self.pages[part], self.on_device[part], self.chosen[part] - first,
            self.chosen_on_device[part], self.shift + first,
        )  # fmt: skip


class Part:
    """One span of the row and its pages."""

    __slots__ = (
        "dtype", "end", "group", "length", "name", "offset", "pages", "per_block", "start", "wide",
        "wide_here",
    )  # fmt: skip

    def __init__(self, span: Span, pages: Any, row_bytes: int, group: int = 0) -> None:
        """pages: uint8 [pages, page bytes], bytes of a page dense. Raises InputError."""
        if pages.dtype != torch.uint8 or pages.dim() != 2 or pages.stride(1) != 1:
            raise InputError(f"{span}: pages must be uint8 [pages, page bytes] of dense bytes")
        page = int(pages.shape[1])
        if page == 0 or span.length % page:
            raise InputError(f"{span} is not a whole number of pages of {page} bytes")
        self.name = (span.layer, span.part)
        self.group = group
        self.offset, self.length = span.offset, span.length
        self.pages = pages
        self.per_block = span.length // page
        what = (span.offset, page, pages.stride(0), pages.data_ptr(), row_bytes)
        width, self.dtype = next(w for w in _WIDTHS if not any(x % w[0] for x in what))
        self.wide = pages.view(self.dtype)
        self.wide_here: Any = self.wide.numpy() if pages.device.type == "cpu" else None
        self.start, self.end = span.offset // width, span.end // width

    def cells(self, rows: Any) -> Any:
        """This part in rows (uint8 [blocks, row or record bytes]): [blocks, elements], a view."""
        return rows.view(self.dtype)[:, self.start : self.end]

    def put(self, target: Target, rows: Any) -> None:
        """Writes the part of rows (on the pages' device) into their pages."""
        n, cells = self.per_block, self.cells(rows)
        if n > 1:
            cells = cells.unflatten(1, (n, -1))
        if self.wide_here is not None:
            return self._put_here(target, cells.numpy())
        if target.chosen is not None:
            at = target.chosen_on_device - target.shift
            cells = cells[at] if n == 1 else cells[at // n, at % n]
        elif n > 1:
            self.wide[target.on_device.view(-1, n)] = cells
            return
        self.wide.index_copy_(0, target.on_device, cells)

    def _put_here(self, target: Target, cells: Any) -> None:
        """On a CPU with numpy: torch would wake its threads for each part, and on a busy host
        that takes many times as long as the copy."""
        n, pages = self.per_block, target.pages.numpy()
        if target.chosen is not None:
            at = target.chosen.numpy()
            self.wide_here[pages] = cells[at] if n == 1 else cells[at // n, at % n]
        else:
            self.wide_here[pages if n == 1 else pages.reshape(-1, n)] = cells

    def get(self, pages: Any) -> Any:
        """The contents of pages as [blocks, elements]."""
        return self.wide.index_select(0, pages).view(len(pages) // self.per_block, -1)


class Group(NamedTuple):
    """Parts that go by one block table."""

    per_block: int
    """Pages of a block."""
    num_pages: int


class PagedLayout:
    """All parts of a rank's layers, bound to the engine's memory."""

    def __init__(
        self, tensors: Tensors, row: RowLayout, groups: Mapping[tuple[int, str], int] | None = None
    ) -> None:
        """tensors: (layer, part) -> pages, for every span of the row and nothing else. groups:
        which block table, from 0 on, a part goes by; None: there is one for all, without holes.

        Raises InputError unless all are on one device, and those of a group hold equally many pages
        and share what number of pages a block is.
        """
        names = {(s.layer, s.part) for s in row.spans}
        if names != set(tensors):
            odd = sorted(names ^ set(tensors))
            raise InputError(f"pages and layout do not have the same parts: {odd}")
        self.row_bytes = row.row_bytes
        self.row = Spans(row.spans, row.row_bytes)
        self.holes = groups is not None
        of = groups or dict.fromkeys(names, 0)
        self.parts = tuple(
            Part(s, tensors[s.layer, s.part], row.row_bytes, of[s.layer, s.part]) for s in row.spans
        )
        if len({p.pages.device for p in self.parts}) != 1:
            raise InputError("pages on different devices")
        self.device = self.parts[0].pages.device
        self.groups = tuple(self._group(number) for number in range(max(of.values()) + 1))
        self.layers: dict[int, tuple[Part, ...]] = {}
        for part in sorted(self.parts, key=lambda p: p.name[0]):
            self.layers[part.name[0]] = (*self.layers.get(part.name[0], ()), part)

    def _group(self, number: int) -> Group:
        facts = {Group(p.per_block, len(p.pages)) for p in self.parts if p.group == number}
        if len(facts) != 1:
            raise InputError(f"pages of different numbers in group {number}, or none")
        return facts.pop()

    def tables(self, block_table: Sequence[Any]) -> tuple[Any, ...] | None:
        """Block tables as int64 in host memory, one for each group.

        block_table: of the pages, or if the layout was made with groups, one for each of them.
        None if a page does not exist or comes twice.
        """
        given = block_table if self.holes else (block_table,)
        if len(given) != len(self.groups):
            return None
        out = []
        for pages, group in zip(given, self.groups, strict=True):
            found = self._table(pages, group)
            if found is None:
                return None
            out.append(found)
        return tuple(out)

    def _table(self, block_table: Any, group: Group) -> Any | None:
        try:
            pages = torch.as_tensor(block_table, dtype=torch.int64, device="cpu").flatten()
        except (TypeError, ValueError, RuntimeError):
            return None
        named = pages[pages != HOLE] if self.holes else pages
        if len(named) and not 0 <= int(named.min()) <= int(named.max()) < group.num_pages:
            return None
        return pages if len(named.unique()) == len(named) else None

    def blocks(self, tables: Sequence[Any]) -> int:
        """How many whole blocks all tables have pages for."""
        sizes = (len(t) // g.per_block for t, g in zip(tables, self.groups, strict=True))
        return min(sizes)

    def scratch(self, blocks: int) -> PagedLayout:
        """The same layout over new memory for so many blocks."""
        tensors = {
            p.name: torch.zeros(
                (blocks * p.per_block, p.pages.shape[1]), dtype=torch.uint8, device=self.device
            )
            for p in self.parts
        }
        return PagedLayout(tensors, self.row, {p.name: p.group for p in self.parts})


def target_of(table: Any, upload: Any) -> Target:
    """A whole block table of one group, on the device too; upload: brings a tensor there."""
    if not len(table) or int(table.min()) != HOLE:
        return Target(table, upload(table))
    chosen = (table != HOLE).nonzero().flatten()
    pages = table[chosen]
    return Target(pages, upload(pages), chosen, upload(chosen))
