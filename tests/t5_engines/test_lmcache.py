"""LMCache with kvfs behind it: its real storage manager, and its server with vLLM before it.

Ruled out are objects of another model, dtype or tenant, objects that are damaged, and a storage
error that is served, or ends something.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="make test-engines")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

import lmcache.v1.distributed.config as config
import torch
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.storage_manager import StorageManager
from vllm_support import Place, Vllm, said
from vllm_tiny import make, prompt

from kvfs.connectors.keyed_link import Loaded
from kvfs.connectors.lmcache import KvfsL2

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

SHAPE = torch.Size([2, 4, 128, 64])
LAYOUT = MemoryLayoutDesc([SHAPE], [torch.float32])
CHUNKS = 5
WAIT_SECONDS = 60

# Everything an adapter must answer, and its arguments. What is new needs an answer from us.
ABSTRACT = {
    "close": "", "get_load_event_fd": "", "get_lookup_and_lock_event_fd": "",
    "get_store_event_fd": "", "pop_completed_store_tasks": "", "query_load_result": "task_id",
    "query_lookup_and_lock_result": "task_id", "submit_load_task": "keys objects",
    "submit_lookup_and_lock_task": "keys group_layout_descs", "submit_store_task": "keys objects",
    "submit_unlock": "keys",
}  # fmt: skip
OPTIONAL = {
    "delete": "keys", "get_usage": "", "list_l2_keys": "model_name page_size cursor",
    "register_listener": "listener", "report_status": "", "set_backend_identity": "name shared",
    "supports_global_eviction": "",
}  # fmt: skip


def arguments(function: Any) -> str:
    return " ".join(p for p in inspect.signature(function).parameters if p != "self")


def test_the_interface_is_the_one_that_was_written_for() -> None:
    base = {n: m for n, m in vars(L2AdapterInterface).items() if not n.startswith("_")}
    theirs = {n: arguments(m) if callable(m) else "" for n, m in base.items()}
    assert theirs == {**ABSTRACT, **OPTIONAL}
    assert set(L2AdapterInterface.__abstractmethods__) == set(ABSTRACT)
    for name, expected in ABSTRACT.items():
        assert arguments(getattr(KvfsL2, name)) == expected


def adapter(place: Place, **more: Any) -> str:
    params = place.settings(chunk_size=128, weights="rev1", **more)
    spec = {
        "type": "plugin", "module_path": "kvfs.connectors.lmcache", "class_name": "KvfsL2",
        "adapter_params": params,
    }  # fmt: skip
    return json.dumps(spec)


@contextmanager
def manager(place: Place, **more: Any) -> Iterator[StorageManager]:
    """LMCache's storage manager, with nothing in memory yet."""
    memory = config.L1MemoryManagerConfig(
        size_in_bytes=64 << 20, use_lazy=False, init_size_in_bytes=64 << 20
    )
    made = StorageManager(
        config.StorageManagerConfig(
            l1_manager_config=config.L1ManagerConfig(memory),
            eviction_config=config.EvictionConfig("LRU"),
            l2_adapter_config=parse_args_to_l2_adapters_config(
                argparse.Namespace(l2_adapter=[adapter(place, **more)])
            ),
        )
    )
    try:
        yield made
    finally:
        made.close()


def keys(n: int = CHUNKS, **more: Any) -> list[ObjectKey]:
    return [ObjectKey(hashlib.sha256(b"%d" % i).digest(), "org/tiny", 0, **more) for i in range(n)]


def content(n: int = CHUNKS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=generator) for _ in range(n)]


def store(place: Place, names: list[ObjectKey]) -> None:
    """Stores objects through LMCache and waits until another process could find them."""
    with manager(place) as storage:
        objects = storage.reserve_write(names, LAYOUT)
        for name, data in zip(names, content(len(names)), strict=True):
            objects[name].tensor.copy_(data)
        storage.finish_write(names)
        until = time.monotonic() + WAIT_SECONDS
        while blocks(place) < len(names):
            assert time.monotonic() < until, "LMCache's objects do not reach the store"
            time.sleep(0.02)


def blocks(place: Place) -> int:
    with place.open() as opened:
        opened.catch_up()
        index = opened.index
        return sum(r.count for ns in opened.namespaces() for r in index.all_runs(ns.number))


def found(place: Place, names: list[ObjectKey], layout: Any = LAYOUT, **more: Any) -> int:
    """How many leading objects a new manager loads; they are compared with what was stored."""
    with manager(place, **more) as storage:
        rows = [GroupedObjectKeys(names, names[0].object_group_id, layout)]
        handle = storage.submit_prefetch_task(PrefetchTaskSpec(rows), "request")
        assert storage.wait_prefetch_status(handle, WAIT_SECONDS)
        result = storage.query_prefetch_status(handle)
        n = sum(cells.popcount() for cells in result.l2_hit_cells)
        if n:
            with storage.read_prefetched_results(names[:n], result.l1_owners) as objects:
                for obj, data in zip(objects, content(n), strict=True):
                    assert torch.equal(obj.tensor.view(SHAPE), data)
            storage.finish_read_prefetched(names[:n], l1_owners=result.l1_owners)
        return n


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    place = Place(tmp_path)
    for name in ("KVFS_RUNTIME", "KVFS_INDEX"):
        monkeypatch.setenv(name, place.environment[name])
    yield place
    place.close()


def test_another_manager_finds_what_one_stored(place: Place) -> None:
    store(place, keys())
    assert found(place, keys()) == CHUNKS
    assert found(place, [*keys(), ObjectKey(b"x" * 32, "org/tiny", 0)]) == CHUNKS
    assert found(place, keys(3)) == 3


def test_other_models_tenants_and_layouts_find_nothing(place: Place) -> None:
    store(place, keys())
    assert found(place, keys(cache_salt="alice")) == 0
    assert found(place, keys(object_group_id=1)) == 0
    assert found(place, [ObjectKey(k.chunk_hash, "org/tiny", 1) for k in keys()]) == 0
    assert found(place, keys(), MemoryLayoutDesc([SHAPE], [torch.int32])) == 0
    assert found(place, keys(), salt="tenant") == 0


def test_an_object_that_was_damaged_is_not_served(place: Place) -> None:
    store(place, keys())
    (segment,) = place.segments()
    data = bytearray(segment.read_bytes())
    third = content(3)[2].numpy().tobytes()
    at = data.index(third[:4096])
    data[at + 1000] ^= 1
    segment.write_bytes(data)
    assert found(place, keys(), fetch="inline") == 2


def test_objects_whose_files_are_gone_are_misses(place: Place) -> None:
    store(place, keys())
    for segment in place.segments():
        segment.unlink()
    assert found(place, keys(), fetch="inline") == 0


@pytest.fixture
def l2(place: Place) -> Iterator[KvfsL2]:
    """The adapter alone."""
    made = KvfsL2(place.settings(chunk_size=128, weights="rev1", fetch="inline", save_seconds=0.05))
    yield made
    made.close()


class Obj:
    """As little of one of LMCache's objects in memory as is looked at."""

    def __init__(self) -> None:
        self.byte_array = bytearray(64)

    def get_shapes(self) -> list[Any]:
        return [torch.Size([16])]

    def get_dtypes(self) -> list[Any]:
        return [torch.float32]

    def get_size(self) -> int:
        return 64


def ended(outcomes: Any, task: int) -> Any:
    """The result of a task, when there is one."""
    poll = select.poll()
    poll.register(outcomes.fd, select.POLLIN)
    while (result := outcomes.take(task)) is None:
        assert poll.poll(WAIT_SECONDS * 1000), "the task does not end"
        os.eventfd_read(outcomes.fd)
    return result


@pytest.mark.parametrize(
    ("lasting", "asked", "loaded"), [(False, [5], 1), (True, [5, 3, 1], 3)], ids=["away", "bad"]
)
def test_chunks_behind_one_that_is_bad_are_tried(
    l2: KvfsL2, monkeypatch: pytest.MonkeyPatch, lasting: bool, asked: list[int], loaded: int
) -> None:
    """Not where the storage does not answer: each would wait for its deadline."""
    seen: list[int] = []

    def load(identity: Any, some: list[bytes], give: Any) -> Loaded:
        seen.append(len(some))
        return Loaded(1, lasting or len(some) == 1)

    monkeypatch.setattr(l2._link, "load", load)
    task = l2.submit_load_task(keys(), [Obj() for _ in keys()])
    assert ended(l2._loads, task).popcount() == loaded
    assert seen == asked


def test_tasks_that_are_dropped_at_the_end_have_failed(
    l2: KvfsL2, monkeypatch: pytest.MonkeyPatch, expect_logs: Any
) -> None:
    """The end does not wait for all that is queued, and LMCache is told of each task."""
    expect_logs("a task did not end")
    held, go = threading.Event(), threading.Event()

    def save(*_: Any, **__: Any) -> list[bool]:
        held.set()
        go.wait()
        return [True]

    monkeypatch.setattr(l2._link, "save", save)
    first, second = (l2.submit_store_task(keys(1), [Obj()]) for _ in range(2))
    assert held.wait(WAIT_SECONDS)
    monkeypatch.setattr(l2._stores, "close", lambda: None)
    l2.close()
    assert not ended(l2._stores, second).is_successful()
    go.set()
    assert l2._storing.close(WAIT_SECONDS)
    assert ended(l2._stores, first).is_successful()
    late = l2.submit_store_task(keys(1), [Obj()])
    assert not ended(l2._stores, late).is_successful()
    monkeypatch.undo()  # and now all is closed


def test_a_store_that_cannot_be_opened_stops_the_start(place: Place, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no store here"):
        KvfsL2({"store": str(tmp_path / "nothing")})


# the server, and vLLM before it


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(place: Place, log: Path) -> Iterator[int]:
    """LMCache's server; yields its port."""
    port, http = free_port(), free_port()
    command = [
        sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1",
        "--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(http),
        "--chunk-size", "128", "--supported-transfer-mode", "engine_driven",
        "--l1-size-gb", "0.25", "--no-l1-use-lazy", "--eviction-policy", "LRU",
        "--disable-observability", "--l2-adapter", adapter(place),
    ]  # fmt: skip
    environment = {**place.environment, "LMCACHE_TRACK_USAGE": "false"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        wait_for(f"http://127.0.0.1:{http}/", process, log)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 240
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except urllib.error.HTTPError:
            return  # it answers
        except OSError:
            assert process.poll() is None and time.monotonic() < until, log.read_text()[-4000:]
            time.sleep(0.1)


def transfer(port: int) -> dict[str, Any]:
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port,
        },
    }  # fmt: skip


def test_vllm_is_served_by_a_server_that_was_started_anew(place: Place, tmp_path: Path) -> None:
    model, ids = make("llama", tmp_path), prompt(600)
    with Vllm(model) as engine:
        (plain,) = engine.generate(ids)
    log = tmp_path / "server.log"
    with server(place, log) as port, Vllm(model, transfer(port)) as engine:
        assert said(engine.generate(ids)[0]) == said(plain)
        until = time.monotonic() + WAIT_SECONDS
        while blocks(place) < 4:
            assert time.monotonic() < until, log.read_text()[-4000:]
            time.sleep(0.1)
    with server(place, log) as port, Vllm(model, transfer(port)) as engine:
        (answer,) = engine.generate(ids)
    assert answer["cached"] == 512
    assert said(answer) == said(plain)
