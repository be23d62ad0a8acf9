"""A kernel that reads records out of pinned host memory by itself, on few multiprocessors.

gather   no staging memory and no copy engine: the kernel's programs read a part's bytes over the
         bus and write them to their pages

Needs Triton, and a device that uses the host's addresses for registered memory. Memory that is not
pinned must never get here: the device would fault, and with it the engine; so `pinned_only`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from kvfs.gpu.batched import record_addresses
from kvfs.gpu.paged import PagedLayout, Part
from kvfs.gpu.strategies import Copy, Piece, Strategy
from kvfs.gpu.streams import Stream, Work

PROGRAMS = 8
"""Multiprocessors it takes at most: reads in flight, not threads, are what fills the bus."""
_WARPS, _WIDTH = 8, 1024
_HOST_ADDRESSES = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem


class _Addresses(Work):
    """Brings the addresses of a piece's records to the device."""

    __slots__ = ("device", "on_device", "records")

    def __init__(self, piece: Piece, device: Any) -> None:
        super().__init__()
        self.records = torch.from_numpy(record_addresses(piece.records).view("int64"))
        self.device = device
        self.on_device: Any = None

    def run(self) -> None:
        self.on_device = self.records.to(self.device, non_blocking=True)


class _Gather(Copy):
    __slots__ = ("addresses",)

    def __init__(self, piece: Piece, part: Part, addresses: _Addresses) -> None:
        super().__init__(piece, part)
        self.addresses = addresses

    def run(self) -> None:
        from kvfs.gpu.gather_kernel import gather

        if not self.piece.pinned:
            raise RuntimeError("records that are not pinned")
        part, target, records = self.part, self.target, self.addresses.on_device
        if records is None:
            raise RuntimeError("the addresses of its records did not reach the device")
        cells = len(target.pages)
        if not cells:
            return
        chosen = target.on_device if target.chosen is None else target.chosen_on_device
        gather[(min(PROGRAMS, cells),)](
            records, target.on_device, chosen, part.wide, part.offset, cells, part.wide.shape[1],
            part.wide.stride(0), part.per_block, part.wide.element_size(), target.shift,
            all_cells=target.chosen is None, width=_WIDTH, num_warps=_WARPS,
        )  # fmt: skip


class Gather(Strategy):
    name = "gather"
    pinned_only = True

    def problem(self, layout: PagedLayout) -> str:
        if find_spec("triton") is None:
            return "Triton is not installed"
        if layout.device.type != "cuda":
            return "no CUDA device"
        return _host_addresses(layout.device)

    def sms(self, layout: PagedLayout) -> int:
        return PROGRAMS

    def begin(self, piece: Piece, layout: PagedLayout, stream: Stream) -> Any:
        addresses = _Addresses(piece, layout.device)
        stream.submit(addresses)
        return addresses

    def copy(self, piece: Piece, part: Part, begun: Any) -> Copy:
        return _Gather(piece, part, begun)


def _host_addresses(device: Any) -> str:
    """Why the device cannot use the host's addresses; "" if it can."""
    from kvfs.errors import ConfigError
    from kvfs.gpu.cudart import find

    try:
        there = find().attribute(_HOST_ADDRESSES, device.index or 0)
    except ConfigError as e:
        return str(e)
    return "" if there else "the device has addresses of its own for registered host memory"
