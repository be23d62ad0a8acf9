"""The two halves of the vLLM connector over one store, without an engine: steps by hand."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.request import Request

from kvfs import Store
from kvfs.connectors.vllm_identity import base_identity
from kvfs.connectors.vllm_layout import Layout, groups_of, measure
from kvfs.connectors.vllm_scheduler import SchedulerSide
from kvfs.connectors.vllm_settings import Settings
from kvfs.connectors.vllm_slots import Finder, Keeper
from kvfs.connectors.vllm_window import measure_window, window_groups, with_window
from kvfs.connectors.vllm_worker import WorkerSide
from kvfs.layout import Partition

PAGES, TOKENS = 40, 64
IDLE = SimpleNamespace(
    scheduled_new_reqs=[],
    scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
)
"""A step in which nothing is computed."""


def full(tokens: int = TOKENS, **more: Any) -> Any:
    return kv.FullAttentionSpec(
        block_size=tokens, num_kv_heads=1, head_size=8, dtype=torch.float32, **more
    )


def sliding(window: int, tokens: int = TOKENS) -> Any:
    return kv.SlidingWindowSpec(
        block_size=tokens, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=window
    )


def config_of(*specs: Any) -> Any:
    groups = [
        kv.KVCacheGroupSpec([f"model.layers.{2 * g + i}.attn" for i in range(2)], spec)
        for g, spec in enumerate(specs)
    ]
    return kv.KVCacheConfig(num_blocks=PAGES, kv_cache_tensors=[], kv_cache_groups=groups)


def tensors(config: Any, seed: int) -> dict[str, Any]:
    make = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn((PAGES, 1, group.kv_cache_spec.block_size, 16), generator=make)
        for group in config.kv_cache_groups
        for name in group.layer_names
    }


class Half:
    """A worker and a scheduler over one store, and the steps between them."""

    def __init__(
        self, base: Path, config: Any, seed: int, backend: Any, shm: Path, **settings: Any
    ) -> None:
        """shm: where this host keeps slots."""
        self.config = config
        self.caches = tensors(config, seed)
        self.settings = Settings(store=str(base / "store"), fetch="inline", **settings)
        self.layout: Layout = measure(config, self.caches, 128)
        model = SimpleNamespace(
            model="m", dtype=torch.float32, quantization=None, max_model_len=1,
            hf_config=SimpleNamespace(to_dict=dict),
        )  # fmt: skip
        vllm_config = SimpleNamespace(
            model_config=model, cache_config=SimpleNamespace(cache_dtype="auto")
        )
        identity = base_identity(
            vllm_config, self.layout, "0.32.0", Partition(), weights="w", tokenizer="t", salt="",
            backend="b",
        )  # fmt: skip
        self.backend = backend
        self.shm = str(shm)
        shm.mkdir(exist_ok=True)
        store = self._open()
        window = measure_window(config, self.caches, self.layout.block_tokens)
        keeper = None
        if window is not None:
            identity = with_window(identity, window)
            store.create_namespace(identity)
            keeper = Keeper.open(self.settings, store, identity, window, self.shm)
        self.identity = identity
        self.worker = WorkerSide(self.settings, store, identity, self.layout, None, keeper)
        self.scheduler = SchedulerSide(
            self.settings, self._open(), groups_of(config), loads=True, saves=True,
            adapters=lambda lora: "" if lora is None else None,
        )  # fmt: skip
        finder = None
        if keeper is not None:
            workers = [(identity, keeper.pool_id)]
            finder = Finder.open(self.settings, self.scheduler.store, workers, self.shm)
        windows = window_groups(config, identity.block_tokens)
        self.scheduler.ready([identity], None, finder, windows)

    def _open(self) -> Store:
        return Store.open(self.settings.store, backend=self.backend)

    def step(self, output: Any) -> None:
        meta = self.scheduler.meta(output)
        self.worker.start_loads(meta)
        self.worker.take_saves(meta)

    def compute(self, request: Any, done: int, count: int, tables: Any) -> None:
        """A step in which vLLM computes `count` tokens of a request behind the first `done`."""
        state = SimpleNamespace(get_block_ids=lambda _: tables)
        cached = SimpleNamespace(req_ids=[request.request_id], num_computed_tokens=[done])
        self.step(
            SimpleNamespace(
                scheduled_new_reqs=[], scheduled_cached_reqs=cached,
                num_scheduled_tokens={request.request_id: count}, kv_connector_block_state=state,
            )
        )  # fmt: skip

    def load(self, request: Any, hit: int, tables: Any) -> bool:
        self.scheduler.allocated(request, tables, hit)
        self.step(IDLE)
        until = time.monotonic() + 10
        while not (loaded := self.worker.loaded()):
            assert time.monotonic() < until
        news = self.worker.news()
        if news is not None:
            self.scheduler.heard(news)
        return loaded[request.request_id]

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()


def request(ids: list[int], name: str = "r", **more: Any) -> Any:
    return Request(name, ids, SamplingParams(max_tokens=4), None, **more)


IDS = list(range(1000, 1000 + 600))
TABLE = list(range(1, 11))


def v41() -> Any:
    mla = kv.MLAAttentionSpec(block_size=128, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    window = kv.SlidingWindowMLASpec(
        block_size=128, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, sliding_window=128,
        bounded_replay=True,
    )  # fmt: skip
    return config_of(mla, window)


def stored(halves: Any, config: Any) -> Half:
    """A process that has stored the prompt, in two steps, and is gone."""
    half: Half = halves(config)
    r, tables = request(IDS), tuple([TABLE] * len(config.kv_cache_groups))
    assert half.scheduler.matched(r, 0) == 0
    half.compute(r, 0, 300, tables)
    half.compute(r, 300, 300, tables)
    assert half.worker.flush(10)
    assert half.worker.stats().data["stored_blocks"] == 4
    return half
