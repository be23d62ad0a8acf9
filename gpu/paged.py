"""Where the bytes of a block row belong in an engine's paged KV tensors.

An engine's memory for one part of one layer is given as uint8 [pages, page bytes]; a block of kvfs
is one page, or several that the engine's block table names one after the other. Copies work on the
widest integers that fit all offsets: eight bytes at a time cost a quarter of one at a time.

Immutable after it was made. No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvfs.errors import InputError
from kvfs.layout import Identity, Span

_WIDTHS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


class Part:
    """One span of the row and its pages."""

    __slots__ = ("dtype", "end", "length", "name", "offset", "pages", "per_block", "start", "wide")

    def __init__(self, span: Span, pages: Any) -> None:
        """pages: uint8 [pages, page bytes], bytes of a page dense. Raises InputError."""
        if pages.dtype != torch.uint8 or pages.dim() != 2 or pages.stride(1) != 1:
            raise InputError(f"{span}: pages must be uint8 [pages, page bytes] of dense bytes")
        page = int(pages.shape[1])
        if page == 0 or span.length % page:
            raise InputError(f"{span} is not a whole number of pages of {page} bytes")
        self.name = (span.layer, span.part)
        self.offset, self.length = span.offset, span.length
        self.pages = pages
        self.per_block = span.length // page
        what = (span.offset, page, pages.stride(0), pages.data_ptr())
        width, self.dtype = next(w for w in _WIDTHS if not any(x % w[0] for x in what))
        self.wide = pages.view(self.dtype)
        self.start, self.end = span.offset // width, span.end // width

    def cells(self, rows: Any) -> Any:
        """This part in rows (uint8 [blocks, row or record bytes]): [blocks, elements], a view."""
        return rows.view(self.dtype)[:, self.start : self.end]

    def put(self, pages: Any, cells: Any) -> None:
        """Writes cells into pages. pages: int64 [blocks * per_block], on this part's device."""
        if self.per_block == 1:
            self.wide.index_copy_(0, pages, cells)
        else:
            n = self.per_block
            self.wide[pages.view(-1, n)] = cells.unflatten(1, (n, -1))

    def get(self, pages: Any) -> Any:
        """The contents of pages as [blocks, elements]."""
        return self.wide.index_select(0, pages).view(len(pages) // self.per_block, -1)


class PagedLayout:
    """All parts of a rank's layers, bound to the engine's memory."""

    def __init__(self, tensors: Mapping[tuple[int, str], Any], identity: Identity) -> None:
        """tensors: (layer, part) -> pages, for every span of the identity and nothing else.

        Raises InputError unless all are on one device, hold equally many pages, and share what
        number of pages a block is.
        """
        spans = identity.spans
        names = {(s.layer, s.part) for s in spans}
        if names != set(tensors):
            odd = sorted(names ^ set(tensors))
            raise InputError(f"pages and layout do not have the same parts: {odd}")
        self.identity = identity
        self.row_bytes = identity.row_bytes
        self.parts = tuple(Part(s, tensors[s.layer, s.part]) for s in spans)
        facts = {(p.per_block, len(p.pages), p.pages.device) for p in self.parts}
        if len(facts) != 1:
            raise InputError("pages of different numbers or on different devices")
        self.per_block, self.num_pages, self.device = facts.pop()
        self.layers: dict[int, tuple[Part, ...]] = {}
        for part in sorted(self.parts, key=lambda p: p.name[0]):
            self.layers[part.name[0]] = (*self.layers.get(part.name[0], ()), part)

    def table(self, block_table: Sequence[int]) -> Any | None:
        """A block table as int64 in host memory; None if a page does not exist or comes twice."""
        try:
            pages = torch.as_tensor(block_table, dtype=torch.int64, device="cpu").flatten()
        except (TypeError, ValueError, RuntimeError):
            return None
        if len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < self.num_pages:
            return None
        return pages if len(pages.unique()) == len(pages) else None

    def scratch(self, blocks: int) -> PagedLayout:
        """The same layout over new memory for so many blocks."""
        tensors = {
            p.name: torch.zeros(
                (blocks * self.per_block, p.pages.shape[1]), dtype=torch.uint8, device=self.device
            )
            for p in self.parts
        }
        return PagedLayout(tensors, self.identity)
