"""F3 on a real mount: the daemon behind the store's file system is stopped in the middle."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.errors import BackendError
from kvfs.fetcher import launch
from kvfs.fetcher.client import FetchClient
from kvfs.fetcher.launch import Options
from kvfs.testing.blocks import payload
from kvfs.testing.command import kvctl, kvctl_json
from kvfs.testing.stock import Stock, tokens
from kvfs.testing.threefs.host import Host, cluster, may_serve

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(bool(may_serve()), reason=may_serve() or "-"),
]
BLOCK = 16
PROMPTS = [tokens(seed, BLOCK * 60) for seed in range(8)]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with cluster(tmp_path) as (made,):
        yield made
        if made.process is not None:
            made.process.send_signal(signal.SIGCONT)


@pytest.fixture
def stock(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stock]:
    (tmp_path / "r").mkdir()
    monkeypatch.setenv("KVFS_RUNTIME", str(tmp_path / "r"))
    place = f"posix:{host.point / 'kv'}"
    monkeypatch.setenv("KVFS_STORE", place)
    identity = {"block_tokens": BLOCK, "row_bytes": (64 << 10) - 4096}
    made = Stock.make(place, identity=identity, extent=1 << 20, segment_bytes=16 << 20)
    for prompt in PROMPTS:
        assert made.put(prompt).error is None
    made.store.flush_counters()
    yield made
    assert host.process is not None
    host.process.send_signal(signal.SIGCONT)
    made.close()


def test_a_stopped_daemon_costs_the_deadline_and_nothing_more(
    stock: Stock, host: Host, tmp_path: Path
) -> None:
    place, ns = f"posix:{stock.store.path}", stock.ns
    plans = [stock.store.check(ns, prompt) for prompt in PROMPTS]
    prompt_file = tmp_path / "prompt.json"
    prompt_file.write_text(str(PROMPTS[0]))
    options = Options(32 << 20, threads=3, stall_seconds=1.0, parent=os.getpid())
    with launch.connect(place, stock.store.uuid, options) as client:
        with client.fetch(ns, plans[7], PROMPTS[7], deadline=10) as ticket:
            assert ticket.wait() == 59
        assert host.process is not None
        host.process.send_signal(signal.SIGSTOP)
        fetcher = Path(f"/proc/{client.fetcher_pid}")
        began = time.monotonic()
        assert kvctl("check", prompt_file).exit_code == 0
        assert time.monotonic() - began < 1, "a check asks the storage"
        began = time.monotonic()
        kvctl_json("fetch", prompt_file, "--deadline", "1s", code=10)
        assert time.monotonic() - began < 1.5
        before = _threads_and_files(fetcher)
        down = 0
        for i in range(200):
            began = time.monotonic()
            try:
                with client.fetch(ns, plans[i % 7], PROMPTS[i % 7], deadline=0.05) as ticket:
                    assert ticket.wait() == 0 and not ticket.lasting
            except BackendError as e:
                down += "backend down" in str(e)
            assert time.monotonic() - began < 0.5
        assert down > 100
        after = _threads_and_files(fetcher)
        assert after[0] <= before[0] and after[1] <= before[1] + 2
        with client.fetch(ns, plans[7], PROMPTS[7], deadline=1) as ticket:
            assert ticket.wait() == 59, "what is in memory needs no storage"
        host.process.send_signal(signal.SIGCONT)
        _whole(client, stock)


def _threads_and_files(process: Path) -> tuple[int, int]:
    return len(os.listdir(process / "task")), len(os.listdir(process / "fd"))


def _whole(client: FetchClient, stock: Stock) -> None:
    """Everything can be fetched again, soon, and is what was put."""
    until = time.monotonic() + 10
    for prompt in PROMPTS:
        plan, hasher = stock.store.check(stock.ns, prompt), stock.ns.hasher(prompt)
        while True:
            try:
                with client.fetch(stock.ns, plan, hasher, deadline=5) as ticket:
                    if ticket.wait() == 59:
                        row = stock.ns.row_bytes
                        assert ticket.payload(30) == payload(hasher.lineages(31, first=30), row)
                        break
            except BackendError:
                assert time.monotonic() < until, "it does not recover"
                time.sleep(0.05)


def test_a_fetcher_killed_while_its_storage_hangs_is_a_miss_at_once(
    stock: Stock, host: Host
) -> None:
    """Its threads sit in the kernel, so that it does not go away: nobody waits for that."""
    place, ns = f"posix:{stock.store.path}", stock.ns
    plan = stock.store.check(ns, PROMPTS[0])
    options = Options(32 << 20, threads=2, parent=os.getpid())
    client = launch.connect(place, stock.store.uuid, options)
    assert host.process is not None
    host.process.send_signal(signal.SIGSTOP)
    running = client.fetch(ns, plan, PROMPTS[0], deadline=1)
    threading.Timer(0.2, os.kill, [client.fetcher_pid, signal.SIGKILL]).start()
    began = time.monotonic()
    assert running.wait() == 0 and running.reason in ("fetcher gone", "deadline")
    assert time.monotonic() - began < 1.5
    running.release()
    host.process.send_signal(signal.SIGCONT)
    client.close()
    with launch.connect(place, stock.store.uuid, options) as again:
        assert again.fetcher_pid != client.fetcher_pid
        _whole(again, stock)
