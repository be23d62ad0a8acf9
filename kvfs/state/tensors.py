"""Slots from and into torch tensors, on a CPU or a GPU, of any dtype.

Torch is never imported here: whoever has a tensor has loaded it. Tensors must be contiguous; they
are taken as their bytes, so that formats numpy has no name for (bfloat16, fp8) go through
unchanged. Copies from and to a GPU are ordered behind what its current stream was given before, and
done when the call returns.
"""

from __future__ import annotations

import sys
from typing import Any

from kvfs.errors import InputError
from kvfs.state.table import Fill


def filler(tensor: Any) -> Fill:
    """What SlotPool.write takes as `data`: copies the tensor straight into the slot.

    tensor: contiguous, of slot_bytes bytes, on any device. Raises InputError.
    """
    flat = _as_bytes(tensor)

    def copy(into: memoryview) -> None:
        if len(into) != flat.numel():
            raise InputError(f"a slot has {len(into)} bytes, the tensor {flat.numel()}")
        _over(into).copy_(flat)

    return copy


def load(data: Any, tensor: Any) -> None:
    """Copies a slot's data (bytes-like) into a contiguous tensor of as many bytes, on any device.

    Raises InputError.
    """
    flat = _as_bytes(tensor)
    view = memoryview(data).cast("B")
    if len(view) != flat.numel():
        raise InputError(f"the slot has {len(view)} bytes, the tensor {flat.numel()}")
    # frombuffer warns of memory that must not be written; a copy from it is no offence.
    flat.copy_(_over(view if not view.readonly else memoryview(bytearray(view))))


def buffer(tensor: Any) -> memoryview:
    """A CPU tensor's memory, writable: what SlotPool.read takes as `into`. Raises InputError."""
    flat = _as_bytes(tensor)
    if flat.device.type != "cpu":
        raise InputError(f"a tensor on {flat.device} has no memory here; use load")
    return memoryview(flat.numpy())


def _torch(tensor: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        raise InputError(f"a torch tensor is needed, not {type(tensor).__name__}")
    return torch


def _as_bytes(tensor: Any) -> Any:
    """The tensor as a flat one of bytes, over the same memory."""
    torch = _torch(tensor)
    if not tensor.is_contiguous():
        raise InputError("the tensor is not contiguous")
    return tensor.detach().reshape(-1).view(torch.uint8)


def _over(view: memoryview) -> Any:
    """A tensor over memory that is there."""
    torch = sys.modules["torch"]
    return torch.frombuffer(view, dtype=torch.uint8)
