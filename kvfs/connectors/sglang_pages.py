"""Pages of SGLang's host memory pools as rows of bytes: one page, one row, one block of a store.

A pool either says where the pieces of a page lie (`get_page_buffer_meta`: pointers and sizes), and
a row is the pieces one after the other, copied without SGLang's help; or it only hands a page over
as a flat tensor. The two may order the same numbers differently, so the form is part of what
`description` says, and blocks of one form are never taken for the other's.

Needs torch, not SGLang: pools are looked at by attribute. Whoever calls holds on to the pages.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from kvfs.errors import InputError

# What a pool may have of these is part of its layout.
_FACTS = (
    "layout", "page_size", "layer_num", "start_layer", "end_layer", "head_num", "head_dim",
    "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "indexer_size_per_token",
    "size_per_token", "storage_format_tag", "dcp_size", "pool_label",
)  # fmt: skip


class Pages(Protocol):
    """The pages of one pool."""

    row_bytes: int
    page_tokens: int
    description: str
    """What decides the order of the bytes in a row: equal for pools that may exchange rows."""

    def take(self, indices: Any, pages: Sequence[int], into: memoryview) -> None:
        """Copies pages, by their number in `indices`, one row after the other into a buffer."""
        ...

    def give(self, indices: Any, page: int, row: memoryview) -> None:
        """Copies a row into a page."""
        ...


def pages_of(pool: Any) -> Pages:
    """The pages of a host pool, by pointers if it has them. Raises InputError if it has neither."""
    try:
        return Pieces(pool)
    except (AttributeError, NotImplementedError, ValueError, RuntimeError, InputError):
        return Flat(pool)


def _facts(pool: Any, form: str, dtype: Any, sizes: Sequence[int]) -> str:
    facts = {name: getattr(pool, name, None) for name in _FACTS}
    facts = {k: v for k, v in facts.items() if isinstance(v, int | float | str)}
    facts.update(pool=type(pool).__name__, form=form, dtype=str(dtype), sizes=list(sizes))
    return json.dumps(facts, sort_keys=True)


def _page_tokens(pool: Any) -> int:
    return int(getattr(pool, "page_size", 1) or 1)


class Pieces:
    """Pages whose pieces lie at known addresses."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.page_tokens = _page_tokens(pool)
        _, sizes = pool.get_page_buffer_meta(torch.arange(self.page_tokens, dtype=torch.int64))
        self._sizes = [int(size) for size in sizes]
        if not self._sizes:
            raise InputError(f"{type(pool).__name__}: a page of no bytes")
        self.row_bytes = sum(self._sizes)
        self.description = _facts(pool, "pieces", getattr(pool, "dtype", None), self._sizes)

    def _places(self, indices: Any, page: int) -> list[tuple[int, int]]:
        """(address, bytes) of each piece of a page."""
        own = indices[page * self.page_tokens : (page + 1) * self.page_tokens]
        pointers, sizes = self.pool.get_page_buffer_meta(own)
        if [int(size) for size in sizes] != self._sizes:
            raise InputError(f"{type(self.pool).__name__}: a page of other pieces than the first")
        return list(zip(map(int, pointers), self._sizes, strict=True))

    def take(self, indices: Any, pages: Sequence[int], into: memoryview) -> None:
        at = _address(into)
        for page in pages:
            for pointer, size in self._places(indices, page):
                ctypes.memmove(at, pointer, size)
                at += size

    def give(self, indices: Any, page: int, row: memoryview) -> None:
        # A view: the row may be read-only memory, of which ctypes gives no address.
        held = np.frombuffer(row, np.uint8)
        at = int(held.ctypes.data)
        for pointer, size in self._places(indices, page):
            ctypes.memmove(pointer, at, size)
            at += size


class Flat:
    """Pages that a pool hands over as flat tensors."""

    def __init__(self, pool: Any) -> None:
        """Raises InputError for a pool that has no such pages."""
        self.pool = pool
        self.page_tokens = _page_tokens(pool)
        try:
            page = pool.get_dummy_flat_data_page()
        except Exception as e:
            raise InputError(f"{type(pool).__name__} has no pages to store: {e!r}") from e
        self.dtype = page.dtype
        self.row_bytes = page.numel() * page.element_size()
        self.description = _facts(pool, "flat", page.dtype, [self.row_bytes])

    def take(self, indices: Any, pages: Sequence[int], into: memoryview) -> None:
        for i, page in enumerate(pages):
            data = self.pool.get_data_page(int(indices[page * self.page_tokens]), flat=True)
            into[i * self.row_bytes : (i + 1) * self.row_bytes] = bytes_of(data)

    def give(self, indices: Any, page: int, row: memoryview) -> None:
        data = tensor_of(row, self.dtype)
        self.pool.set_from_flat_data_page(int(indices[page * self.page_tokens]), data)


def bytes_of(tensor: Any) -> memoryview:
    """The bytes of a tensor of any dtype, in the order of its elements."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())


def tensor_of(row: memoryview, dtype: Any) -> Any:
    """A flat tensor of the bytes of a row, which are copied."""
    return torch.frombuffer(bytearray(row), dtype=torch.uint8).view(dtype)


def _address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
