"""What kvfs takes for granted of vLLM, compared with the release that is installed.

A failure here means that vLLM's plug-in interface has changed: read what changed, adapt the
connector, then the expectation.
"""

from __future__ import annotations

import dataclasses
import inspect

import pytest

pytest.importorskip("vllm", reason="make test-engines")

import vllm
from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base, metrics
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, NewRequestData
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload import base as offload
from vllm.v1.kv_offload.tiering import base as tiering
from vllm.v1.request import Request

from kvfs.connectors.vllm import KvfsConnector
from kvfs.connectors.vllm_tier import KvfsTier

pytestmark = pytest.mark.engines

TESTED = "0.32"

# Everything a subclass may override, and its arguments. What is new may need an answer from us.
CONNECTOR = {
    "bind_connector_metadata": "connector_metadata", "bind_gpu_block_pool": "gpu_block_pool",
    "bind_kv_cache_manager": "kv_cache_manager", "build_connector_meta": "scheduler_output",
    "build_connector_worker_meta": "", "build_kv_connector_stats": "data",
    "build_prom_metrics": "vllm_config metric_types labelnames per_engine_labelvalues",
    "clear_connector_metadata": "", "finish_forward": "", "get_block_ids_with_load_errors": "",
    "get_external_cache_hit_sources": "request num_external_tokens",
    "get_finished": "finished_req_ids", "get_finished_count": "", "get_handshake_metadata": "",
    "get_kv_connector_kv_cache_events": "", "get_kv_connector_stats": "",
    "get_loaded_kv_cache_group_ids": "request", "get_mem_pool_context": "",
    "get_num_new_matched_tokens": "request num_computed_tokens",
    "get_required_kvcache_layout": "vllm_config", "get_transfer_results": "finished_req_ids",
    "handle_preemptions": "kv_connector_metadata", "has_connector_metadata": "",
    "has_pending_block_frees": "", "has_pending_push_work": "", "on_new_request": "request",
    "register_finished_partial_tail": "request block_ids partial_tail_offloads",
    "register_kv_caches": "kv_caches", "request_finished": "request block_ids",
    "requires_piecewise_for_cudagraph": "extra_config", "reset_cache": "",
    "reset_capture_state": "", "save_kv_layer": "layer_name kv_layer attn_metadata kwargs",
    "set_host_xfer_buffer_ops": "copy_operation", "set_xfer_handshake_metadata": "metadata",
    "set_xfer_handshake_metadata_pp_aware": "metadata", "shutdown": "",
    "start_load_kv": "forward_context kwargs", "take_events": "",
    "update_connector_output": "connector_output",
    "update_state_after_alloc": "request blocks num_external_tokens",
    "wait_for_layer_load": "layer_name", "wait_for_save": "",
}  # fmt: skip
ABSTRACT = {
    "build_connector_meta", "get_num_new_matched_tokens", "save_kv_layer", "start_load_kv",
    "update_state_after_alloc", "wait_for_layer_load", "wait_for_save",
}  # fmt: skip
TIER = {
    "build_metric_definitions": "extra_config", "drain_jobs": "", "get_finished_jobs": "",
    "get_stats": "", "has_pending_work": "", "lookup": "key req_context",
    "on_new_request": "req_context", "on_request_finished": "req_context",
    "on_schedule_end": "context", "serve_external_requests": "parent", "shutdown": "",
    "submit_load": "job_metadata", "submit_store": "job_metadata", "take_events": "",
    "touch": "keys req_context",
}  # fmt: skip
TIER_ABSTRACT = {
    "drain_jobs", "get_finished_jobs", "lookup", "on_new_request", "submit_load", "submit_store",
}  # fmt: skip


def methods(cls: type) -> dict[str, str]:
    """Public methods a class defines itself, and the names of their arguments."""
    found = {}
    for name, member in vars(cls).items():
        function = getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(function):
            names = [n for n in inspect.signature(function).parameters if n not in ("self", "cls")]
            found[name] = " ".join(names)
    return found


def names(cls: type) -> set[str]:
    if dataclasses.is_dataclass(cls):
        return {f.name for f in dataclasses.fields(cls)}
    return set(cls.__annotations__)


def test_release() -> None:
    assert vllm.__version__.startswith(f"{TESTED}."), "read the changes, then raise TESTED"


def test_connector_interface() -> None:
    cls = base.KVConnectorBase_V1
    assert methods(cls) == CONNECTOR
    assert cls.__abstractmethods__ == ABSTRACT
    assert base.SupportsHMA.__abstractmethods__ == {"request_finished_all_groups"}
    assert methods(base.SupportsHMA) == {"request_finished_all_groups": "request block_ids"}
    arguments = list(inspect.signature(cls.__init__).parameters)
    assert arguments == ["self", "vllm_config", "role", "kv_cache_config"]
    assert {r.name for r in base.KVConnectorRole} == {"SCHEDULER", "WORKER"}
    assert isinstance(cls.requires_kv_delivery, property)


def test_tier_interface() -> None:
    cls = tiering.SecondaryTierManager
    assert methods(cls) == TIER
    assert cls.__abstractmethods__ == TIER_ABSTRACT
    arguments = list(inspect.signature(cls.__init__).parameters)
    assert arguments == [
        "self", "offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(KvfsConnector, base.KVConnectorBase_V1), (KvfsTier, tiering.SecondaryTierManager)],
)
def test_ours_take_what_theirs_take(ours: type, theirs: type) -> None:
    inherited = methods(theirs)
    for name, arguments in methods(ours).items():
        if name in inherited:
            assert arguments == inherited[name], name
    assert not ours.__abstractmethods__


def test_the_factory_finds_the_connector() -> None:
    from vllm.config import KVTransferConfig

    config = KVTransferConfig(
        kv_connector="KvfsConnector", kv_connector_module_path="kvfs.connectors.vllm",
        kv_role="kv_both",
    )  # fmt: skip
    assert KVConnectorFactory.get_connector_class(config) is KvfsConnector
    assert KVConnectorFactory.supports_hma_config(config)


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (base.KVConnectorTransferResults, "finished_sending finished_recving failed_recving"),
        (NewRequestData, "req_id num_computed_tokens"),
        (CachedRequestData, "req_ids num_computed_tokens"),
        (KVConnectorBlockState, "req_ids resolve_block_ids"),
        (kv.KVCacheGroupSpec, "layer_names kv_cache_spec enable_kv_transfer"),
        (kv.KVCacheConfig, "num_blocks kv_cache_groups kv_cache_layout hash_block_size"),
        (kv.SlidingWindowSpec, "block_size sliding_window extra_retained_tokens"),
        (kv.SlidingWindowMLASpec, "bounded_replay"),
        (tiering.TransferJob, "job_id keys chunk_ids is_promotion req_context"),
        (tiering.JobResult, "job_id success successful_keys transfer_time transfer_bytes"),
    ],
)  # fmt: skip
def test_fields_that_are_read_or_set(cls: type, fields: str) -> None:
    assert set(fields.split()) <= names(cls)


def test_small_things() -> None:
    assert {m.name for m in offload.LookupResult} == {"MISS", "HIT", "HIT_PENDING", "RETRY"}
    assert len(offload.make_offload_key(bytes(32), 1)) == 36
    assert methods(metrics.KVConnectorStats) == {
        "to_dict": "", "reset": "", "aggregate": "other", "reduce": "", "is_empty": "",
    }  # fmt: skip
    assert methods(metrics.KVConnectorPromMetrics) == {"observe": "transfer_stats_data engine_idx"}
    stored = BlockStored([b""], None, [], 1, None, None, None)
    assert stored.block_hashes == [b""]
    request = inspect.getsource(Request.__init__)
    names = "cache_salt mm_features lora_request prompt_embeds block_hashes replay_start"
    for name in (*names.split(), "num_prompt_tokens"):
        assert f"self.{name}" in request
    assert offload.get_offload_group_idx(offload.make_offload_key(bytes(32), 7)) == 7
    context = offload.ReqContext("r")
    context.set_offload_key_position(b"key", 256)
    assert (context.get_offload_key_position(b"key"), context.get_offload_key_position(b"")) == (
        256, None,
    )  # fmt: skip


def test_the_policy_for_failed_loads_is_read_after_the_connector_is_made() -> None:
    """The connector sets it, so that a failed load is never a failed request."""
    source = inspect.getsource(Scheduler.__init__)
    made = source.index("create_connector(")
    assert source.index("kv_transfer_config.kv_load_failure_policy") > made


def test_kinds_of_cache() -> None:
    """A class that is new here is refused until somebody has looked at it."""
    from kvfs.connectors import vllm_layout

    kinds = {
        name
        for name, cls in vars(kv).items()
        if isinstance(cls, type) and issubclass(cls, kv.KVCacheSpec)
    }
    assert kinds >= vllm_layout._FULL | vllm_layout._WINDOW
    refused = kinds - vllm_layout._FULL - vllm_layout._WINDOW
    assert refused == REFUSED


REFUSED = {
    "KVCacheSpec", "AttentionSpec", "UniformTypeKVCacheSpecs",  # not kinds of their own
    "HiddenStateCacheSpec", "RSWASpec", "ChunkedLocalAttentionSpec", "MambaSpec",
    "EncoderOnlyAttentionSpec", "CrossAttentionSpec", "SinkFullAttentionSpec",
    "CircularBufferSpec", "HiSparseHotSpec", "HiSparseResidentSpec",
}  # fmt: skip
