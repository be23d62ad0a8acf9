"""SGLang's storage interface and host pools, as little of them as the backend needs.

Where SGLang is not installed `install` puts this in its place; the tests of the backend run with
either. What is here is held to the real thing by test_sglang_contract.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch


class PoolName(StrEnum):
    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    INDEXER = "indexer"
    DRAFT = "draft"


class PoolHitPolicy(StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: Any = None
    device_indices: Any = None
    keys: Any = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    nodes_to_load: Any = None
    indices_from_pool: Any = None
    block_pages: int = 0
    group_pages: int = 0


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None

    @classmethod
    def empty(cls) -> PoolTransferResult:
        return cls(0, {})


@dataclass
class HiCacheStorageExtraInfo:
    prefix_keys: list[str] | None = None
    extra_info: Any = None


@dataclass
class HiCacheStorageConfig:
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    extra_config: dict[str, Any] | None = None


class HiCacheStorage(ABC):
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    @abstractmethod
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def batch_get(
        self, keys: Any, target_locations: Any = None, target_sizes: Any = None
    ) -> Any: ...

    @abstractmethod
    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool: ...

    @abstractmethod
    def batch_set(
        self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool: ...

    @abstractmethod
    def exists(self, key: str) -> bool: ...


@dataclass
class StorageMetrics:
    prefetch_pgs: list[int]
    backup_pgs: list[int]
    prefetch_bandwidth: list[float]
    backup_bandwidth: list[float]


def load() -> types.SimpleNamespace:
    """The modules of the backend, with this in SGLang's place unless SGLang is there."""
    if "sglang" not in sys.modules and importlib.util.find_spec("sglang") is None:
        _install()
    names = {"backend": "kvfs.connectors.sglang", "link": "kvfs.connectors.keyed_link",
             "storage": "sglang.srt.mem_cache.hicache_storage"}  # fmt: skip
    return types.SimpleNamespace(**{k: importlib.import_module(v) for k, v in names.items()})


def _install() -> None:
    package = types.ModuleType("sglang")
    package.__version__ = "0.5.23"  # type: ignore[attr-defined]
    storage = types.ModuleType("sglang.srt.mem_cache.hicache_storage")
    metrics = types.ModuleType("sglang.srt.observability.metrics_collector")
    for name in ("HiCacheStorage", "PoolHitPolicy", "PoolName", "PoolTransferResult"):
        setattr(storage, name, globals()[name])
    metrics.StorageMetrics = StorageMetrics  # type: ignore[attr-defined]
    for module in (package, storage, metrics):
        sys.modules[module.__name__] = module
    for name in ("sglang.srt", "sglang.srt.mem_cache", "sglang.srt.observability"):
        sys.modules[name] = types.ModuleType(name)


class FakePool:
    """A pool of host memory like that of a Llama: K and V of some layers, in one of two layouts."""

    def __init__(
        self, layout: str = "page_first", *, page_size: int = 4, layers: int = 3, pages: int = 64,
        heads: int = 2, dim: int = 8, dtype: torch.dtype = torch.float32, pointers: bool = True,
    ) -> None:  # fmt: skip
        self.layout, self.page_size, self.layer_num = layout, page_size, layers
        self.head_num, self.head_dim, self.dtype = heads, dim, dtype
        self.size = page_size * pages
        self.pointers = pointers
        shape = (layers, self.size) if layout == "layer_first" else (self.size, layers)
        self.kv_buffer = torch.zeros((2, *shape, heads, dim), dtype=dtype)

    def fill(self, seed: int = 0) -> None:
        noise = torch.randn(self.kv_buffer.shape, generator=torch.Generator().manual_seed(seed))
        self.kv_buffer.copy_(noise.to(self.dtype))

    def indices(self, pages: list[int]) -> torch.Tensor:
        """The host indices of some pages of the pool."""
        tokens = [p * self.page_size + i for p in pages for i in range(self.page_size)]
        return torch.tensor(tokens, dtype=torch.int64)

    def page(self, number: int) -> torch.Tensor:
        return self.get_data_page(number * self.page_size).clone()

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        own = slice(index, index + self.page_size)
        first = self.layout == "layer_first"
        page = self.kv_buffer[:, :, own] if first else self.kv_buffer[:, own]
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self.get_data_page(0))

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        page = self.get_data_page(index, flat=False)
        page.copy_(data_page.reshape(page.shape))

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        if not self.pointers:
            raise ValueError(f"Unsupported layout: {self.layout}")
        pointers, sizes = [], []
        for index in indices.tolist()[:: self.page_size]:
            page = self.get_data_page(index, flat=False)
            pieces = [page[part] for part in range(2)]
            if self.layout == "layer_first":
                pieces = [page[part, layer] for layer in range(self.layer_num) for part in range(2)]
            pointers += [piece.data_ptr() for piece in pieces]
            sizes += [piece.numel() * piece.element_size() for piece in pieces]
        return pointers, sizes
