"""The memory layout of a DeepInfer release, from its own source, on a machine without its hardware.

Loads attrdict, layer_utils and cache_engine as they are. What they import and cannot be had without
a GPU is stood for: the extension, the settings, two cache formats (288 and 528 bytes a token, as
cache_engine's own comments have them) and the two kernels on states, in whose place is the
arithmetic of the release's reference for them.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


class Envs:
    """deepinfer.envs, as far as cache_engine asks it."""

    DEEPINFER_USE_NEXTN_DECODE = 5
    DEEPINFER_MAX_BACKTRACKING_TOKENS = 6
    DEEPINFER_NUM_STATE_SLOTS_RATIO = 1.2
    DEEPINFER_PREFILL_STORE_EXTRA_STATE = False
    DEEPINFER_PREFILL_STORE_EXTRA_SIZE = 128
    DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE = "compact"
    DEEPINFER_YOCO_PREFILL_KEEP_TOKENS = 0


class Metadata:
    """deepinfer's ModelMetadata, as far as the cache manager asks it."""

    kvcache_align_to = 128

    def __init__(self, cfg: Any) -> None:
        self.use_fp4_sparse_kv = cfg.use_fp4_sparse_kv


def select(state: Any, cache: Any, position: int) -> None:
    index = torch.arange(position - state.shape[1], position)
    state[:, index % state.shape[1]] = cache[:, index % cache.shape[1]]


def load(state: Any, cache: Any, position: int) -> None:
    index = torch.arange(position - state.shape[1], position)
    cache[:, index % cache.shape[1]] = state[:, index % state.shape[1]]


def cache_engine(source: Path) -> Any:
    """The release's module deepinfer.worker.cache_engine. source: the unpacked sdist."""

    def module(name: str, **content: Any) -> ModuleType:
        made = ModuleType(name)
        vars(made).update(content)
        sys.modules[name] = made
        return made

    def real(name: str) -> ModuleType:
        path = source / (name.replace(".", "/") + ".py")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        sys.modules[name] = made
        spec.loader.exec_module(made)
        return made

    package = module("deepinfer", envs=Envs, __path__=[])
    package.AttrDict = real("deepinfer.attrdict").AttrDict  # type: ignore[attr-defined]
    module("deepinfer._C", cuda_utils=None, __path__=[])
    module("deepinfer.config", CacheConfig=object)
    quiet = SimpleNamespace(info=lambda text: None)
    module("deepinfer.logger", init_logger=lambda name: quiet)
    module("deepinfer.model_executor", __path__=[])
    real("deepinfer.model_executor.layer_utils")
    module("deepinfer.model_executor.layers", __path__=[])
    ops = "deepinfer.model_executor.layers.tilelang_ops"
    module(ops, __path__=[])
    module(
        f"{ops}.cache_common",
        V41_FORMAT=SimpleNamespace(num_elements=512, elements_per_sf=32, bytes_per_token=528),
        V41_FP4_FORMAT=SimpleNamespace(num_elements=512, elements_per_sf=16, bytes_per_token=288),
    )
    module(f"{ops}.state_cache", select_state_slice=select, load_state_to_cache=load)
    module(
        "deepinfer.model_executor.model_metadata_utils", ModelMetadata=Metadata,
        derive_main_kv_cache_num_per_channels=lambda cfg, is_swa: 32 if is_swa else 16,
    )  # fmt: skip
    module("deepinfer.utils", show_gpu_memory_stats=lambda text: None)
    module("deepinfer.worker", __path__=[])
    return real("deepinfer.worker.cache_engine")


def flash(attr_dict: Any) -> Any:
    """The configuration of DeepSeek-V4.1-Flash, as far as the layout depends on it."""
    ratios = (0,) * 2 + (2,) * 18 + (1,) * 20
    sources = (2, 8, 14, 20)
    shared = {i: max(s for s in sources if s <= i) for i in range(2, 40)}
    maps = {"layer_kv_map": shared, "layer_index_module_map": shared}
    layers = []
    for ratio in ratios:
        cfg: dict[str, Any] = {"sink_mode": "swa", "kv_compress_ratio": ratio}
        cfg["layer_info_shared_cfg"] = maps
        if ratio:
            cfg["index_topk"] = 512
            cfg["attn_index"] = {"index_head_dim": 128, "use_kproj": False}
        layers.append(attr_dict(cfg=cfg))
    return attr_dict(
        attn_module_list=layers, num_hidden_layers=40, n_prefill_layer=20, kv_lora_rank=448,
        qk_rope_head_dim=64, window_size=[128, 0], num_key_value_heads=1, use_fp4_sparse_kv=True,
    )  # fmt: skip
