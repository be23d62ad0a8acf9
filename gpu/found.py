"""What this machine has for copies between storage, host and GPU: looked for, loading none of it.

Needs neither torch nor a GPU, so that `kvctl doctor` may ask. What is found here is not yet known
to work; kvfs.gpu.choosing measures what it uses. Reads /proc and /dev, opens no device.
"""

from __future__ import annotations

import ctypes.util
import os
from importlib.util import find_spec
from typing import NamedTuple


class Found(NamedTuple):
    """Something that was looked for. text: what is there, or what is missing."""

    name: str
    there: bool
    text: str


def look() -> list[Found]:
    """All of it, in a fixed order."""
    return [_driver(), _runtime(), *map(_module, _MODULES), _gds()]


_MODULES = {
    "torch": ("torch", "swap-in needs it"),
    "triton": ("triton", "for the strategy `gather`"),
    "cuda-python": ("cuda.bindings", "for `batch` and `strided` where there is no libcudart"),
    "nixl": ("nixl", "no strategy uses it yet"),
}


def _driver() -> Found:
    path = "/proc/driver/nvidia/version"
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return Found("cuda", True, f.readline().strip().removeprefix("NVRM version: "))
    except OSError:
        return Found("cuda", False, f"no driver of an NVIDIA GPU ({path})")


def _runtime() -> Found:
    library = ctypes.util.find_library("cudart")
    if library is not None:
        return Found("cudart", True, library)
    return Found("cudart", False, "no libcudart in the linker's paths; torch may bring its own")


def _module(name: str) -> Found:
    module, use = _MODULES[name]
    try:
        there = find_spec(module) is not None
    except (ImportError, ValueError):
        there = False
    return Found(name, there, f"{'' if there else 'no '}Python package {module}: {use}")


def _gds() -> Found:
    """GPUDirect Storage: cuFile and the kernel module it needs."""
    library = ctypes.util.find_library("cufile")
    module = any(os.path.exists(p) for p in ("/proc/driver/nvidia-fs", "/dev/nvidia-fs0"))
    missing = [
        text
        for text, there in (("libcufile", library), ("the kernel module nvidia-fs", module))
        if not there
    ]
    if missing:
        return Found("gds", False, f"{' and '.join(missing)} not found")
    return Found("gds", True, f"{library} and nvidia-fs; no strategy uses them yet")
