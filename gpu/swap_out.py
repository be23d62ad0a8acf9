"""Swap-out: blocks out of an engine's paged KV tensors into host memory, and from there to a store.

    out = swapper.swap_out(block_table)        # enqueued behind what computes the blocks
    ...                                        # the engine goes on
    out.wait()                                 # now the pages may be used for something else
    out.put(store, ns, tokens, first_block=k)  # by whoever has the time

Rows are gathered part by part; on a GPU into a buffer there, and then in one copy to the host.
A row has all its parts or the whole swap-out is given up. May be used from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvfs.errors import InputError
from kvfs.gpu.host_memory import HostBuffer
from kvfs.gpu.paged import HOLE, PagedLayout
from kvfs.gpu.streams import Device, Event, Stream, Work
from kvfs.put import PutResult


class _Gather(Work):
    __slots__ = ("host", "layout", "pages")

    def __init__(self, layout: PagedLayout, pages: Sequence[Any], host: Any) -> None:
        """pages: for each group, int64 [blocks * pages a block] on the device."""
        super().__init__()
        self.layout = layout
        self.pages = pages
        self.host = host

    def run(self) -> None:
        host, device = self.host, self.layout.device
        # Padding is zero: equal blocks are equal bytes.
        rows = torch.zeros(host.shape, dtype=torch.uint8, device=device)
        for part in self.layout.parts:
            part.cells(rows).copy_(part.get(self.pages[part.group]))
        host.copy_(rows, non_blocking=True)


class SwapOut:
    """See the module docstring. `blocks`: how many; 0 for a block table that does not fit."""

    def __init__(
        self, layout: PagedLayout, device: Device, stream: Stream, block_table: Sequence[Any],
        buffer: HostBuffer | None, after: Event | None,
    ) -> None:  # fmt: skip
        """For Swapper.swap_out. buffer: memory to use again; None for new memory, which has to be
        pinned first. after: whoever wrote the pages has finished there; None for what
        the calling thread has enqueued so far."""
        tables = layout.tables(block_table)
        if tables is not None and any(int(t.min()) == HOLE for t in tables if len(t)):
            tables = None  # a row has all its parts
        self.blocks = 0 if tables is None else layout.blocks(tables)
        size = self.blocks * layout.row_bytes
        self.buffer = buffer if buffer is not None else HostBuffer(size)
        if size > self.buffer.view.nbytes:
            self.blocks = size = 0
        after = after or device.fence()
        if after is not None:
            stream.wait_for(after)
        self._work: Work | None = None
        if tables is not None and self.blocks:
            host = self.buffer.tensor()[:size].view(self.blocks, layout.row_bytes)
            taken = [
                device.upload(pages[: self.blocks * group.per_block], stream)
                for pages, group in zip(tables, layout.groups, strict=True)
            ]
            self._work = _Gather(layout, taken, host)
            stream.submit(self._work)
        self._event = stream.record()
        self._rows = self.buffer.view[:size]

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the pages are no longer read; says whether they are not."""
        return self._event.wait(timeout)

    def rows(self) -> memoryview:
        """Waits; returns the rows one after the other, until the buffer is used again; nothing if
        the copy failed."""
        self.wait()
        return self._rows if self._error is None else memoryview(b"")

    @property
    def _error(self) -> Exception | None:
        return None if self._work is None else self._work.error

    def put(
        self, store: Any, ns: Any, tokens: Any, *, first_block: int = 0,
        ttl_class: str | None = None,
    ) -> PutResult:  # fmt: skip
        """Waits and stores the rows as blocks first_block.. of the tokens; as Store.put.

        Raises InputError if there are none, because the block table did not fit or the copy failed.
        """
        rows = self.rows()
        if not rows:
            raise InputError(f"nothing was swapped out: {self._error!r}")
        result: PutResult = store.put(
            ns, tokens, rows, first_block=first_block, ttl_class=ttl_class
        )
        return result
