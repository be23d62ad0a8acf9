"""Host memory as torch sees it: records in the arena, and memory that a GPU may read directly.

The arena is mapped for reading, so its tensors must never be written to; torch cannot know.
Pinned memory is registered exactly as large as it is (torch's own pinned memory is rounded up to a
power of two), and given back. Where CUDA refuses, copies still work, only slower, and `problem`
says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvfs.errors import InputError
from kvfs.gpu.cudart import Registration

_PORTABLE, _READ_ONLY = 1, 8  # flags of cudaHostRegister


def address_of(view: memoryview) -> int:
    """Where the bytes of a view are, also of a read-only one."""
    import numpy as np

    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def tensor_at(address: int, size: int) -> Any:
    """`size` bytes at an address as a uint8 tensor; the caller keeps the memory alive."""
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Records:
    """Consecutive records: `data` is uint8 [blocks, stride], contiguous; payloads come first."""

    data: Any
    keep: memoryview
    """Of the mapping, which lives as long as this."""

    def __len__(self) -> int:
        return len(self.data)


class _Stride(NamedTuple):
    stride: int
    row_bytes: int


class _Stretch(NamedTuple):
    block: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    offset: int


class Landed:
    """A ticket whose blocks are all here: records or rows that somebody has read already.

    For Swapper.swap_in, where there is no fetch process. `first`: number of the first block in the
    prompt.
    """

    done = held = True
    reason = ""
    lender = None
    """Whose memory it is, to be pinned for all that comes there: nobody's who lends it again."""

    def __init__(
        self, memory: Any, stride: int, row_bytes: int, blocks: int, *, first: int = 0,
        stretches: int = 1, pinned: bool = False,
    ) -> None:  # fmt: skip
        """memory: a buffer of `blocks` records, `stride` bytes from one to the next, the payload of
        row_bytes first; stretches: as how many ranges they are shown; pinned: the device may read
        it by itself."""
        self.pinned = pinned
        self.ns = _Stride(stride, row_bytes)
        self.first = first
        self.wanted = self.good = blocks
        self._view = memoryview(memory).cast("B")
        each = max(1, -(-blocks // stretches))
        self.ranges = [
            _Stretch(b, min(each, blocks - b), b * stride) for b in range(0, blocks, each)
        ]

    def wait(self, blocks: int | None = None, timeout: float | None = None) -> int:
        return self.good

    def payload(self, block: int) -> memoryview:
        return self._view[(block - self.first) * self.ns.stride :]

    def release(self) -> None:
        """The memory belongs to whoever made it."""


def records_of(ticket: Any, first: int, end: int) -> list[Records]:
    """The records of a ticket's good blocks first..end-1, counted from its own first one.

    One Records for each stretch of the arena. Raises InputError if one is not there (any more).
    """
    out, stride = [], ticket.ns.stride
    for r in ticket.ranges:
        a, b = max(first, r.block), min(end, r.block + r.count)
        if a < b:
            payload = ticket.payload(ticket.first + a)
            data = tensor_at(address_of(payload), (b - a) * stride)
            out.append(Records(data.view(b - a, stride), payload))
    if sum(map(len, out)) != end - first:
        raise InputError(f"blocks {first}..{end - 1} are not in the ticket's ranges")
    return out


class Pinned:
    """Memory that is registered with CUDA, where there is CUDA. Close it before it is unmapped."""

    def __init__(self, memory: Any, *, read_only: bool = False, cudart: Any = None) -> None:
        """memory: a buffer, pinned as it is, not a byte more; cudart: who is asked for it, as
        kvfs.gpu.cudart.Registration, None for CUDA."""
        self._view = memoryview(memory)
        self.address, self.size = address_of(self._view), self._view.nbytes
        self.problem = ""
        """Why it is not pinned; "" if it is."""
        self._cudart = cudart
        if cudart is None:
            if not torch.cuda.is_available():
                self.problem = "no CUDA device"
                self._view = memoryview(b"")  # nothing to keep mapped
                return
            self._cudart = Registration()
        flags = _PORTABLE | (_READ_ONLY if read_only else 0)
        code = self._call(self._cudart.cudaHostRegister, self.address, self.size, flags)
        if code:
            self.problem = f"cudaHostRegister: error {code}"

    def _call(self, call: Callable[..., Any], *args: int) -> int:
        """The code of a call. It is dealt with here: no kernel of this thread is to fail for it."""
        code = int(call(*args))
        if code:
            self._cudart.cudaGetLastError()
        return code

    @property
    def pinned(self) -> bool:
        return not self.problem

    def close(self) -> None:
        """May be called twice."""
        if not self.problem:
            self._call(self._cudart.cudaHostUnregister, self.address)
            self.problem = "closed"
        self._view = memoryview(b"")


class HostBuffer:
    """Zeroed host memory of exactly `size` bytes, rounded up to pages of the system, pinned."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, max(1, size))
        with contextlib.suppress(OSError):  # a system without huge pages has small ones
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)[:size]
        self.pin = Pinned(self._map)

    def tensor(self) -> Any:
        """The memory as uint8 [size]; keep the buffer as long."""
        return tensor_at(address_of(self.view), self.view.nbytes)

    def close(self) -> None:
        """Unpins it. The memory goes with the last view of it."""
        self.pin.close()


@dataclass(slots=True)
class _Arena:
    pin: Pinned
    gone: Callable[[], bool]
    users: int = 0


class Arenas:
    """The arenas of fetchers whose tickets are being swapped in, pinned once each.

    One stays pinned between swaps, which takes as long as many of them. It is let go when its
    fetcher is gone, or was replaced, and nobody uses it.
    """

    def __init__(self, cudart: Any = None) -> None:
        self._cudart = cudart
        self._lock = threading.Lock()
        self._arenas: dict[int, _Arena] = {}

    def use(self, payload: memoryview, gone: Callable[[], bool]) -> int:
        """Pins the mapping that a payload lies in; returns the key for `leave`. gone: says whether
        nothing new will come there."""
        whole = memoryview(payload.obj)
        key = address_of(whole)
        with self._lock:
            if key not in self._arenas:
                self._let_go()
                pin = Pinned(whole, read_only=whole.readonly, cudart=self._cudart)
                self._arenas[key] = _Arena(pin, gone)
            self._arenas[key].users += 1
        return key

    def pinned(self, key: int) -> bool:
        """Whether the device may read the mapping by itself."""
        with self._lock:
            return key in self._arenas and self._arenas[key].pin.pinned

    def leave(self, key: int) -> None:
        with self._lock:
            self._arenas[key].users -= 1
            self._let_go()

    def _let_go(self) -> None:
        """Under the lock."""
        for key in [k for k, a in self._arenas.items() if not a.users and a.gone()]:
            self._arenas.pop(key).pin.close()

    @property
    def used(self) -> bool:
        """Whether a swap uses one of them."""
        with self._lock:
            return any(arena.users for arena in self._arenas.values())

    def problems(self) -> list[str]:
        """Why arenas are not pinned."""
        with self._lock:
            return [a.pin.problem for a in self._arenas.values() if a.pin.problem]

    def close(self) -> None:
        with self._lock:
            for arena in self._arenas.values():
                arena.pin.close()
            self._arenas.clear()
