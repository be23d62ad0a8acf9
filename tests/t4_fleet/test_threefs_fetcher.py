"""The fetch process on 3FS: its arena is the rings' memory, and the dead leave nothing behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.arena import sweep
from kvfs.backend.usrbio_layout import SHM
from kvfs.fetcher import launch
from kvfs.fetcher.client import FetchClient
from kvfs.fetcher.launch import Options
from kvfs.testing.blocks import payload
from kvfs.testing.mounts import end
from kvfs.testing.stock import Stock, tokens
from kvfs.testing.threefs.host import Host, cluster, may_serve, shared_memory

CHUNK = 256 << 10
ROW = (64 << 10) - 4096
PROMPT = tokens(1, 16 * 200)
pytestmark = pytest.mark.skipif(bool(may_serve()), reason=may_serve() or "-")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with cluster(tmp_path, chunk=CHUNK) as (made,):
        yield made


@pytest.fixture
def stock(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stock]:
    (tmp_path / "r").mkdir()
    monkeypatch.setenv("KVFS_RUNTIME", str(tmp_path / "r"))
    made = Stock.make(
        host.point / "kv", extent=None, segment_bytes=16 << 20,
        identity={"block_tokens": 16, "row_bytes": ROW},
    )  # fmt: skip
    assert made.put(PROMPT).error is None
    yield made
    made.close()


@pytest.fixture
def connect(stock: Stock, host: Host) -> Iterator[Callable[[], FetchClient]]:
    clients: list[FetchClient] = []
    stock.store.backend.release()
    before = shared_memory()

    def make() -> FetchClient:
        options = Options(arena_bytes=32 << 20, threads=4, parent=os.getpid())
        clients.append(launch.connect(stock.store.path, stock.store.uuid, options))
        return clients[-1]

    yield make
    pids = {client.fetcher_pid for client in clients}
    for client in clients:
        client.close()
    for pid in pids:
        end(pid)
    sweep(SHM)  # as the next fetcher would
    stock.store.backend.release()
    while host.links():  # whatever happened: no ring and no memory is left with the daemon
        time.sleep(0.01)
    while shared_memory() - before:  # another run's, for the moment in which they have names
        sweep(SHM)


def fetched(client: FetchClient, stock: Stock, *, deadline: float = 20.0) -> int:
    """Good blocks of the prompt; fails if a byte of them is wrong."""
    hasher = stock.ns.hasher(PROMPT)
    plan = stock.store.check(stock.ns, hasher)
    with client.fetch(stock.ns, plan, hasher, deadline=deadline) as ticket:
        ticket.wait()
        good = ticket.good
        lineages = hasher.lineages(good)
        for i in range(good):
            assert ticket.payload(i) == payload(lineages[16 * i : 16 * i + 16], ROW)
    return good


def test_blocks_land_in_the_arena_without_a_copy(
    stock: Stock, host: Host, connect: Callable[[], FetchClient]
) -> None:
    client = connect()
    assert fetched(client, stock) == 199
    # Rings that forbid holes are those of direct reads; a read that were copied would have come by
    # one that does not.
    rings = [name for name in host.links() if ".r" in name]
    assert rings and all(name.endswith(".f11") for name in rings)
    assert client.stats()["bytes_read"] == 199 * stock.ns.stride


@pytest.mark.parametrize("knobs", [
    {"fail_every": 7, "fail_errno": 121}, {"short_every": 5}, {"delay_ms": 10},
    {"drop_every": 9, "late_ms": 300},
], ids=str)  # fmt: skip
def test_faults(
    stock: Stock, host: Host, connect: Callable[[], FetchClient], knobs: dict[str, float]
) -> None:
    client = connect()
    host.set(**knobs)
    for _ in range(3):
        began = time.monotonic()
        fetched(client, stock, deadline=1.0)
        assert time.monotonic() - began < 3
        client.evict()
    host.set(**dict.fromkeys(knobs, 0))
    assert _until_whole(client, stock) < 5


def _until_whole(client: FetchClient, stock: Stock) -> float:
    began = time.monotonic()
    while True:
        try:
            if fetched(client, stock) == 199:
                return time.monotonic() - began
        except Exception as e:
            assert "down" in str(e) or "stall" in str(e) or "storage" in str(e), e
        assert time.monotonic() - began < 15
        client.evict()
        time.sleep(0.02)


def test_the_daemon_dies_in_the_middle_and_returns(
    stock: Stock, host: Host, connect: Callable[[], FetchClient]
) -> None:
    client = connect()
    host.set(delay_ms=50)
    hasher = stock.ns.hasher(PROMPT)
    plan = stock.store.check(stock.ns, hasher)
    with client.fetch(stock.ns, plan, hasher, deadline=5.0) as ticket:
        while not ticket.good:
            time.sleep(0.001)
        began = time.monotonic()
        host.kill()
        ticket.wait()
        assert time.monotonic() - began < 5.5 and ticket.good < 199
    host.start()
    took = _until_whole(client, stock)
    assert took < 5, took


def test_completions_that_never_come(
    stock: Stock, host: Host, connect: Callable[[], FetchClient]
) -> None:
    """The request ends at its deadline; when the daemon is replaced, all goes on."""
    client = connect()
    host.set(drop_every=5)
    hasher = stock.ns.hasher(PROMPT)
    plan = stock.store.check(stock.ns, hasher)
    with client.fetch(stock.ns, plan, hasher, deadline=1.0) as ticket:
        ticket.wait()
        assert ticket.good < 199
    host.kill()
    host.start()
    assert _until_whole(client, stock) < 5


def test_a_segment_is_removed_under_the_reader(
    stock: Stock, host: Host, connect: Callable[[], FetchClient]
) -> None:
    """Its chunks are gone at once, as where there is no room; a good prefix, then a miss."""
    client = connect()
    host.set(delay_ms=50, gc_delay_s=0)
    hasher = stock.ns.hasher(PROMPT)
    plan = stock.store.check(stock.ns, hasher)
    with client.fetch(stock.ns, plan, hasher, deadline=20.0) as ticket:
        while not ticket.good:
            time.sleep(0.001)
        stock.store.backend.remove_tree("seg")
        ticket.wait()
        good = ticket.good
        lineages = hasher.lineages(good)
        for i in range(good):
            assert ticket.payload(i) == payload(lineages[16 * i : 16 * i + 16], ROW)
    assert 0 < good < 199
    host.set(delay_ms=0)
    assert stock.fetch(PROMPT)[0] == 0, "and is forgotten"
    assert stock.put(PROMPT).stored == 200, "into a new segment"
    client.evict()
    assert _until_whole(client, stock) < 15


def test_a_fetcher_killed_in_the_middle_leaves_no_ring(
    stock: Stock, host: Host, connect: Callable[[], FetchClient]
) -> None:
    for _ in range(2):
        client = connect()
        host.set(delay_ms=50)
        hasher = stock.ns.hasher(PROMPT)
        plan = stock.store.check(stock.ns, hasher)
        ticket = client.fetch(stock.ns, plan, hasher, deadline=5.0)
        while not ticket.good:
            time.sleep(0.001)
        stock.store.backend.release()
        end(client.fetcher_pid)
        ticket.release()
        until = time.monotonic() + 5
        while host.links():
            assert time.monotonic() < until, host.links()
        host.set(delay_ms=0)
    assert fetched(connect(), stock) == 199
    arenas = [n for n in os.listdir("/dev/shm") if n.endswith(".arena") and _of(stock, n)]
    assert len(arenas) == 1, "those of the killed ones are still there"


def _of(stock: Stock, name: str) -> bool:
    return stock.store.uuid.hex()[:12] in name
