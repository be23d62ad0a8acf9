"""Stores with blocks of a useful size, and fetchers for them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.backend import Backend
from kvfs.backend.select import open_backend
from kvfs.fetcher import launch
from kvfs.fetcher.client import FetchClient
from kvfs.fetcher.launch import Options
from kvfs.testing.faults import FaultyBackend, Hold
from kvfs.testing.fetchers import FetcherThread
from kvfs.testing.stock import Stock

# A record is 64 KiB: 64 of them are a stretch, and a store of a few hundred is made in an instant.
IDENTITY = {"block_tokens": 16, "row_bytes": (64 << 10) - 4096}
# On 3FS too runs are packed: tests count from where a record lies to which block it is.
STORE = {"extent": 1 << 20, "segment_bytes": 16 << 20, "own_extents": False}


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's fetchers have their sockets."""
    path = tmp_path / "r"
    path.mkdir()
    monkeypatch.setenv("KVFS_RUNTIME", str(path))
    return path


@pytest.fixture
def stock(store_dir: Path) -> Iterator[Stock]:
    made = Stock.make(store_dir, identity=IDENTITY, **STORE)
    yield made
    made.close()


@pytest.fixture
def faults(stock: Stock) -> FaultyBackend:
    """Storage that fails on purpose; what a test that failed still holds goes on when it ends."""
    return FaultyBackend(open_backend(stock.store.path), seed=1)


Start = Callable[..., FetcherThread]


@pytest.fixture
def start(stock: Stock) -> Iterator[Start]:
    """Starts fetchers in threads: `start(backend, threads=1)`."""
    running: list[FetcherThread] = []

    def begin(backend: Backend | None = None, **options: Any) -> FetcherThread:
        backend = backend or open_backend(stock.store.path)
        fetcher = FetcherThread(backend, stock.store.uuid, **options)
        running.append(fetcher.__enter__())
        return fetcher

    yield begin
    for fetcher in running:
        for rule in getattr(fetcher.workers.backend, "_rules", ()):
            if isinstance(rule.do, Hold):
                rule.do.release()
        fetcher.__exit__()


Connect = Callable[..., FetchClient]


@pytest.fixture
def connect(stock: Stock) -> Iterator[Connect]:
    """Clients of the store's shared fetcher, which is a process: `connect(arena_bytes=1 << 20)`."""
    clients: list[FetchClient] = []

    def make(**options: Any) -> FetchClient:
        given = {"arena_bytes": 32 << 20, "threads": 2, "parent": os.getpid(), **options}
        clients.append(launch.connect(stock.store.path, stock.store.uuid, Options(**given)))
        return clients[-1]

    yield make
    pids = {client.fetcher_pid for client in clients}
    for client in clients:
        client.close()
    for pid in pids:
        end(pid, signal.SIGTERM)


def end(pid: int, number: int = signal.SIGKILL) -> None:
    """Sends a signal to a process that is nobody's child and waits until it is gone."""
    import select

    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(handle, number)
        select.select([handle], [], [], 10)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)
