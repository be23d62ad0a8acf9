"""What kvfs takes for granted of SGLang, compared with the release that is installed.

A failure here means that SGLang's plug-in interface has changed: read what changed, adapt the
backend and the double of its tests, then the expectation.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

pytest.importorskip("sglang.srt.server_args", reason="make test-sglang")

import sglang
import sglang_fake
from sglang.srt.arg_groups.model_override_base import model_config_of, resolved_view
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache import hicache_storage as storage
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_server_args
from sglang.srt.server_args import ServerArgs

from kvfs.connectors import sglang_identity
from kvfs.connectors.sglang import KvfsHiCache

pytestmark = pytest.mark.engines

TESTED = "0.5.23"

# Everything a backend may override, and its arguments. What is new may need an answer from us.
METHODS = {
    "register_mem_pool_host": "mem_pool_host",
    "register_mem_host_pool_v2": "host_pool host_pool_name",
    "on_host_pools_registered": "",
    "batch_exists_v2": "keys pool_transfers extra_info",
    "batch_get_v2": "transfers extra_info", "batch_set_v2": "transfers extra_info",
    "batch_get_v1": "keys host_indices extra_info", "batch_set_v1": "keys host_indices extra_info",
    "get": "key target_location target_sizes",
    "batch_get": "keys target_locations target_sizes",
    "set": "key value target_location target_sizes",
    "batch_set": "keys values target_locations target_sizes",
    "exists": "key", "batch_exists": "keys extra_info", "clear": "", "get_stats": "",
}  # fmt: skip
ABSTRACT = {"get", "batch_get", "set", "batch_set", "exists"}


def arguments(function: Any) -> str:
    return " ".join(p for p in inspect.signature(function).parameters if p != "self")


def methods(kind: type) -> dict[str, str]:
    return {
        name: arguments(value)
        for name, value in vars(kind).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }


def test_the_release() -> None:
    assert sglang.__version__ == TESTED


def test_the_interface() -> None:
    assert methods(storage.HiCacheStorage) == METHODS
    assert storage.HiCacheStorage.__abstractmethods__ == ABSTRACT


@pytest.mark.parametrize("name", METHODS)
def test_ours_takes_the_same_arguments(name: str) -> None:
    ours = inspect.unwrap(getattr(KvfsHiCache, name))
    assert arguments(ours) == METHODS[name]
    wanted = inspect.signature(getattr(storage.HiCacheStorage, name)).parameters
    for argument, parameter in inspect.signature(ours).parameters.items():
        if wanted[argument].default is not inspect.Parameter.empty:
            assert parameter.default is not inspect.Parameter.empty, argument


def test_it_is_made_with_two_arguments() -> None:
    source = inspect.getsource(StorageBackendFactory._create_dynamic_backend)
    assert "return backend_class(storage_config, kwargs)" in source
    assert issubclass(KvfsHiCache, storage.HiCacheStorage)


def test_what_is_passed_to_it() -> None:
    fields = {f.name for f in dataclasses.fields(storage.HiCacheStorageConfig)}
    ours = {f.name for f in dataclasses.fields(sglang_fake.HiCacheStorageConfig)}
    assert ours <= fields
    assert fields - ours == {
        "tp_lcm_size", "should_split_heads", "dp_rank", "dcp_size", "dcp_rank",
        "logical_page_size",
    }  # fmt: skip
    for name in ("PoolTransfer", "PoolTransferResult", "HiCacheStorageExtraInfo"):
        real, double = getattr(storage, name), getattr(sglang_fake, name)
        assert [f.name for f in dataclasses.fields(real)] == [
            f.name for f in dataclasses.fields(double)
        ]
    assert [f.name for f in dataclasses.fields(StorageMetrics)] == [
        f.name for f in dataclasses.fields(sglang_fake.StorageMetrics)
    ]
    assert {p.value for p in storage.PoolHitPolicy} == {p.value for p in sglang_fake.PoolHitPolicy}
    assert {p.value for p in sglang_fake.PoolName} <= {p.value for p in storage.PoolName}
    sharded = {p.value for p in storage.PoolName} & sglang_identity._SHARDED
    assert sharded == sglang_identity._SHARDED


def test_how_a_page_is_found() -> None:
    for pool in (HostKVCache, MHATokenToKVPoolHost, MLATokenToKVPoolHost):
        assert arguments(pool.get_data_page) == "index flat"
        assert arguments(pool.set_from_flat_data_page) == "index data_page"
        assert arguments(pool.get_dummy_flat_data_page) == ""
    for pool in (MHATokenToKVPoolHost, MLATokenToKVPoolHost):
        assert arguments(pool.get_page_buffer_meta) == "indices"


def test_how_keys_are_made() -> None:
    """Of the tokens and what comes before them, seeded by adapter and salt, of nothing else."""
    tokens = list(range(8))
    keys = get_storage_hash_str(tokens, None, page_size=4)
    assert len(keys) == 2 and all(len(k) == 64 and int(k, 16) >= 0 for k in keys)
    assert get_storage_hash_str(tokens[4:], keys[0], page_size=4) == keys[1:]
    assert get_storage_hash_str(tokens[4:], None, page_size=4) != keys[1:]
    # An adapter's id is that of its name and path: its files are in our identity therefore.
    assert LoRARef.deterministic_id("a", "/p") == LoRARef.deterministic_id("a", "/p")


def test_what_the_controllers_do_with_an_answer() -> None:
    source = inspect.getsource(HiCacheController._page_get_zero_copy)
    assert "if not results[i]:" in source and "break" in source
    assert "all(" in inspect.getsource(HiCacheController._page_set_zero_copy)
    pops = inspect.getsource(HybridCacheController.parse_storage_backend_extra_config)
    for ours in ("prefetch_threshold", "hicache_storage_pass_prefix_keys"):
        assert f'pop(\n            "{ours}"' in pops or f'pop("{ours}"' in pops


def test_where_the_arguments_of_the_server_are() -> None:
    with pytest.raises(ValueError, match="not set yet"):
        get_server_args()
    assert callable(model_config_of) and callable(resolved_view)
    known = set(inspect.signature(ServerArgs).parameters)
    used = {
        *sglang_identity._ARGUMENTS, "model_path", "load_format", "random_seed", "revision",
        "lora_paths", "context_length", "quantization_param_path", "speculative_draft_model_path",
        "speculative_draft_model_revision",
    }  # fmt: skip
    assert used <= known, used - known
