"""The Triton kernel of kvfs.gpu.gather. Importing it needs Triton, so only gather does, if found.

Works on addresses: of records in pinned host memory, which the device reads over the bus by itself,
and of pages. Each program takes every n-th cell, so that the number of programs is the number of
multiprocessors it takes, however much there is to copy.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def gather(
    records: Any, pages: Any, chosen: Any, out: Any, offset: int, cells: int, words: int,
    pitch: int, per_block: int, word_bytes: int, shift: int, all_cells: tl.constexpr,
    width: tl.constexpr,
) -> None:  # fmt: skip
    """records: int64 [blocks], addresses; pages, chosen: int64 [cells]; out: the part's memory
    from its first page on, as words; offset: bytes of the part in a record; words, pitch: words of
    a page, and from one page to the next; shift: what chosen is too much; all_cells: chosen is not
    looked at; width: words at once.
    """
    for cell in range(tl.program_id(0), cells, tl.num_programs(0)):
        at = cell
        if not all_cells:
            at = tl.load(chosen + cell) - shift
        start = tl.load(records + at // per_block) + offset + (at % per_block) * words * word_bytes
        source = start.to(tl.pointer_type(out.dtype.element_ty))
        target = out + tl.load(pages + cell) * pitch
        for first in range(0, words, width):
            lane = first + tl.arange(0, width)
            there = lane < words
            tl.store(target + lane, tl.load(source + lane, mask=there), mask=there)
