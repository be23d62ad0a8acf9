"""The calls of the CUDA runtime that torch does not pass on: copies in batches and in two
dimensions.

The library is the one this process has loaded already, torch's, so that streams and addresses mean
the same; it is called with ctypes, which takes arrays of addresses as they are. cuda-python takes
lists of Python objects, a microsecond and more for each address, so it is used only where no
library can be found. Nothing is linked or installed for it: where neither is there, or the library
is older than a call, `find` says why.

CUDA keeps the error of a call for the thread until somebody asks for it, and torch asks after each
of its kernels: an error that is dealt with here is taken back, or the engine would fail for it.

The arrays that are passed are read before a call returns. All may be used from any thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import re
from typing import Any, Protocol

import numpy as np
import torch

from kvfs.errors import ConfigError

HOST_TO_DEVICE = 1
_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
_BATCH_SINCE, _NO_FAIL_INDEX_SINCE = 12080, 13000


class Copies(Protocol):
    """Who makes copies from host memory, in the calling thread's current stream of the device."""

    def batch(self, sources: Any, targets: Any, size: int) -> None:
        """Copies `size` bytes from each source to its target, in no order. sources, targets:
        uint64 [n], contiguous, addresses. Raises ConfigError."""

    def rectangle(
        self, source: int, source_pitch: int, target: int, target_pitch: int, size: int, rows: int
    ) -> None:
        """Copies rows of `size` bytes that lie a pitch apart. Raises ConfigError."""

    def problem(self, call: str) -> str:
        """Why "batch" or "rectangle" cannot be used; "" if it can."""

    def attribute(self, number: int, device: int) -> int:
        """An attribute of a device (cudaDeviceAttr). Raises ConfigError."""


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes: order of access, two hints of (type, id), flags."""

    _fields_ = (
        ("order", ctypes.c_int), ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2), ("flags", ctypes.c_uint),
    )  # fmt: skip


def _current_stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def _no_device() -> str:
    return "" if torch.cuda.is_available() else "no CUDA device"


class Library:
    """libcudart through ctypes."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError for a library that cannot be loaded."""
        try:
            self._lib = ctypes.CDLL(path)
            version = ctypes.c_int()
            self._check(self._lib.cudaRuntimeGetVersion(ctypes.byref(version)))
            rectangle = self._lib.cudaMemcpy2DAsync
            self._batch = getattr(self._lib, "cudaMemcpyBatchAsync", None)
        except (OSError, AttributeError) as e:
            raise ConfigError(f"{path}: {e}") from e
        self.path, self.version = path, version.value
        word, size = ctypes.c_void_p, ctypes.c_size_t
        rectangle.argtypes = (word, size, word, size, size, size, ctypes.c_int, word)
        if self._batch is not None:
            failed = () if self.version >= _NO_FAIL_INDEX_SINCE else (word,)
            self._batch.argtypes = (word, word, word, size, word, word, size, *failed, word)
        self._attributes = _Attributes(order=_STREAM_ORDER)
        self._first = ctypes.c_size_t(0)

    def problem(self, call: str) -> str:
        if call == "batch" and (self._batch is None or self.version < _BATCH_SINCE):
            return f"{self.path} is of CUDA {_dotted(self.version)}; batches came with 12.8"
        return _no_device()

    def batch(self, sources: Any, targets: Any, size: int) -> None:
        if self._batch is None:
            raise ConfigError(self.problem("batch"))
        count = len(sources)
        if not count:
            return
        sizes = np.full(count, size, dtype=np.uint64)
        failed = ctypes.c_size_t()
        where = () if self.version >= _NO_FAIL_INDEX_SINCE else (ctypes.addressof(failed),)
        self._check(
            self._batch(
                targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, count,
                ctypes.addressof(self._attributes), ctypes.addressof(self._first), 1, *where,
                _current_stream(),
            )
        )  # fmt: skip

    def rectangle(
        self, source: int, source_pitch: int, target: int, target_pitch: int, size: int, rows: int
    ) -> None:
        self._check(
            self._lib.cudaMemcpy2DAsync(
                target, target_pitch, source, source_pitch, size, rows, HOST_TO_DEVICE,
                _current_stream(),
            )
        )  # fmt: skip

    def attribute(self, number: int, device: int) -> int:
        value = ctypes.c_int()
        self._check(self._lib.cudaDeviceGetAttribute(ctypes.byref(value), number, device))
        return value.value

    def _check(self, code: int) -> None:
        if code:
            self._lib.cudaGetErrorName.restype = ctypes.c_char_p
            name = self._lib.cudaGetErrorName(code)
            self._lib.cudaGetLastError()
            raise ConfigError(f"CUDA: {name.decode()} ({code})")


class CudaPython:
    """cuda-python."""

    def __init__(self, runtime: Any) -> None:
        """runtime: the module cuda.bindings.runtime. Raises ConfigError."""
        self._cuda = runtime
        self.version = int(self._checked(runtime.getLocalRuntimeVersion()))

    def problem(self, call: str) -> str:
        if call == "batch" and not hasattr(self._cuda, "cudaMemcpyBatchAsync"):
            return f"cuda-python is of CUDA {_dotted(self.version)}; batches came with 12.8"
        return _no_device()

    def batch(self, sources: Any, targets: Any, size: int) -> None:
        count = len(sources)
        if not count:
            return
        attributes = self._cuda.cudaMemcpyAttributes()
        attributes.srcAccessOrder = (
            self._cuda.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        )
        self._checked(
            self._cuda.cudaMemcpyBatchAsync(
                targets.tolist(), sources.tolist(), [size] * count, count, [attributes], [0], 1,
                _current_stream(),
            )
        )  # fmt: skip

    def rectangle(
        self, source: int, source_pitch: int, target: int, target_pitch: int, size: int, rows: int
    ) -> None:
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._checked(
            self._cuda.cudaMemcpy2DAsync(
                target, target_pitch, source, source_pitch, size, rows, kind, _current_stream()
            )
        )

    def attribute(self, number: int, device: int) -> int:
        kind = self._cuda.cudaDeviceAttr(number)
        return int(self._checked(self._cuda.cudaDeviceGetAttribute(kind, device)))

    def _checked(self, result: tuple[Any, ...]) -> Any:
        code = result[0]
        if int(code):
            self._cuda.cudaGetLastError()
            raise ConfigError(f"CUDA: {code}")
        return result[1] if len(result) > 1 else None


class Registration:
    """The calls that pin host memory, which torch has, and the one that it has not."""

    def __init__(self) -> None:
        runtime = torch.cuda.cudart()
        self.cudaHostRegister = runtime.cudaHostRegister
        self.cudaHostUnregister = runtime.cudaHostUnregister

    def cudaGetLastError(self) -> None:
        """Takes back the calling thread's last error, where torch's library can be called."""
        path = loaded()
        if path is not None:
            with contextlib.suppress(OSError, AttributeError):  # as good as none
                ctypes.CDLL(path).cudaGetLastError()


def find() -> Copies:
    """The runtime of this machine. Raises ConfigError if there is none, with the reason."""
    path = loaded() or ctypes.util.find_library("cudart")
    if path is not None:
        return Library(path)
    try:
        from cuda.bindings import runtime
    except ImportError as e:
        raise ConfigError("neither libcudart nor cuda-python is there") from e
    return CudaPython(runtime)


def loaded() -> str | None:
    """Path of the libcudart that this process has loaded."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as f:
        found = re.search(r"(/\S*libcudart[^/\s]*\.so[.\d]*)$", f.read(), re.MULTILINE)
    return None if found is None else found[1]


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
