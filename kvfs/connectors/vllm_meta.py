"""What the two halves of the vLLM connector tell each other, and what they count.

Scheduler to worker, once a step: Meta. Worker to scheduler, with a step's output: WorkerNews.
Worker to scheduler, once at the start: Hello. All of it travels between processes as a pickle, so
it is plain data: no tensors, no handles.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvfs.plan import Plan

Tables = tuple[list[int], ...]
"""For each group of the layout, vLLM block numbers."""


class Window(NamedTuple):
    """A window to keep in a slot: that before `position`, a boundary of the request.

    lasting: it is one of the prompt's, which others may have too; tables: for each group of the
    window its vLLM blocks, with a null for each that holds nothing of it.
    """

    position: int
    lasting: bool
    tables: Tables


COUNTERS = {
    "requests": "Requests that were looked up",
    "requests_not_cacheable": "Requests that are neither looked up nor stored",
    "hit_tokens": "Prompt tokens offered to vLLM as stored",
    "miss_tokens": "Prompt tokens that were not stored, of requests that were looked up",
    "fetches_short": "Fetches that brought less than was stored: late, damaged or gone",
    "loads": "Loads into the KV cache",
    "loads_failed": "Loads that failed; the tokens were computed",
    "load_bytes": "Bytes loaded into the KV cache",
    "load_seconds": "Time spent loading",
    "slots_loaded": "Windows loaded from a slot, which vLLM did not replay",
    "slots_stored": "Windows put into a slot",
    "stored_blocks": "Blocks stored",
    "stored_bytes": "Bytes stored",
    "saves_dropped_blocks": "Blocks not stored because there was no room for them in memory",
    "saves_failed": "Puts that failed",
    "errors": "Calls of vLLM's that failed inside kvfs; each counts as a miss",
}


@dataclass(frozen=True, slots=True)
class Load:
    """Bring tokens start..end-1 of a request into vLLM's blocks.

    plans: for each worker's namespace id, where its blocks are; tokens: of all that is stored, u32
    little-endian; tables: up to `end`, with a null for each block that is not to be loaded.
    window: vLLM counts on the window before `end` as well, from a slot; None if it replays it, ()
    if it has no blocks for it.
    """

    request: str
    start: int
    end: int
    salt: str
    adapter: str
    plans: dict[bytes, Plan]
    tokens: bytes
    tables: Tables
    window: Tables | None = None


@dataclass(frozen=True, slots=True)
class Save:
    """Store the blocks first..first+n-1 of a request, once this step is computed.

    tokens: of the request, from where the last Save's ended up to the end of these blocks; anew:
    from the first on, forget what was said before. tables: of these blocks only; windows: what is
    kept in slots at their ends.
    """

    request: str
    first: int
    anew: bool
    salt: str
    adapter: str
    tokens: bytes
    tables: Tables
    windows: tuple[Window, ...] = ()


@dataclass
class Meta(KVConnectorMetadata):  # type: ignore[misc]
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)


@dataclass
class Hello(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A worker's identity as Identity.to_json has it, and the id of its slot pool."""

    identity: dict[str, Any]
    pool: bytes = b""


@dataclass
class WorkerNews(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """stored: request -> id of a worker's namespace -> (first, end) blocks that this worker has
    stored. failed: requests whose load failed."""

    stored: dict[str, dict[bytes, tuple[int, int]]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerNews:
        assert isinstance(other, WorkerNews)
        both = {
            request: {**self.stored.get(request, {}), **other.stored.get(request, {})}
            for request in self.stored.keys() | other.stored.keys()
        }
        return WorkerNews(both, self.failed | other.failed)


class KvfsStats(KVConnectorStats):  # type: ignore[misc]
    """Counters since the last report, by name."""

    data: dict[str, Any]

    def count(self, name: str, n: float = 1) -> None:
        self.data[name] = self.data.get(name, 0) + n

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: Any) -> KvfsStats:
        for name, n in other.data.items():
            self.count(name, n)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: n if isinstance(n, int) else round(n, 4) for name, n in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class KvfsPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same as Prometheus counters `vllm:kvfs_<name>_total`."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, text in COUNTERS.items():
            counter = self._counter_cls(
                name=f"vllm:kvfs_{name}", documentation=f"{text}.", labelnames=labelnames
            )
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, n in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(n)
