"""vLLM's tiered offloading on a CPU, for tests: vLLM itself has it for accelerators alone.

Everything but the worker that copies is vLLM's own: use as `spec_name` "CpuTiers" with the
`spec_module_path` of this module.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies pages between the KV cache and vLLM's host memory, at once."""

    def __init__(self, kv_caches: Any, region: Any) -> None:
        self._region = region
        self._done: list[Any] = []
        self._groups = kv_caches.group_data_refs
        sizes = [t.page_size_bytes for t in kv_caches.tensors]
        self._cache = [
            t.tensor.view(torch.int8).view(-1, size)
            for t, size in zip(kv_caches.tensors, sizes, strict=True)
        ]
        self._host = [region.create_next_worker_view(size) for size in sizes]

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, storing=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, storing=False)

    def _copy(self, job_id: int, cache: Any, host: Any, *, storing: bool) -> bool:
        began, size, at = time.monotonic(), 0, 0
        for group, count in enumerate(cache.group_sizes):
            for i in range(at, at + count):
                for ref in self._groups[group]:
                    pages = self._cache[ref.tensor_idx][int(cache.block_ids[i])]
                    chunk = self._host[ref.tensor_idx][int(host.block_ids[i])]
                    target, source = (chunk, pages) if storing else (pages, chunk)
                    target[: ref.page_size_bytes].copy_(source[: ref.page_size_bytes])
                    size += ref.page_size_bytes
            at += count
        seconds = time.monotonic() - began
        self._done.append(TransferResult(job_id, True, size, seconds))
        return True

    def get_finished(self) -> list[Any]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Any) -> None:
        """All jobs are done when they are submitted."""

    def shutdown(self) -> None:
        self._cache.clear()
        self._host.clear()
        self._region.cleanup()


class CpuTiers(TieringOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> CopyingWorker:
        assert self.blocks_per_chunk == 1
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id, num_chunks=self.num_chunks, rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )  # fmt: skip
            self._worker = CopyingWorker(kv_caches, region)
        return self._worker
