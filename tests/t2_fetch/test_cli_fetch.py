"""kvctl fetch and kvctl fetcher: the command line of what the other tests here look at."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.cli import fetcher as module
from kvfs.fetcher import launch
from kvfs.testing.blocks import payloads
from kvfs.testing.command import kvctl, kvctl_json, run
from kvfs.testing.stock import Stock, flip, tokens
from tests.t2_fetch.conftest import end
from tests.t2_fetch.test_fetcher import BLOCK, ask, stored
from tests.t2_fetch.test_fetcher_faults import at

BLOCKS = 300


@pytest.fixture
def prompt(stock: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of token ids of a prompt that is stored, but for its last block."""
    monkeypatch.setenv("KVFS_STORE", stock.store.path)
    stored(stock, 1, BLOCKS)
    path = tmp_path / "prompt.json"
    path.write_text(str(tokens(1, BLOCK * BLOCKS)))
    stock.store.flush_counters()
    return path


@pytest.fixture
def served(stock: Stock, prompt: Path) -> Iterator[int]:
    """The pid of a shared fetcher."""
    kvctl("fetcher", "--background", "--arena", "32M", "--threads", 2)
    client = launch.find(stock.store.uuid)
    assert client is not None
    client.close()
    yield client.fetcher_pid
    end(client.fetcher_pid)


def blocks_of(stock: Stock, n: int = BLOCKS - 1) -> bytes:
    return payloads(stock.ns.hasher(tokens(1, BLOCK * BLOCKS)), stock.ns.row_bytes, 0, n)


@pytest.mark.parametrize(
    "how", [[], ["--direct"], ["--arena", "5M"], ["--no-verify"], ["--arena", "64M", "--stored"]]
)
def test_each_way_gives_the_same_bytes(
    how: list[str], stock: Stock, prompt: Path, tmp_path: Path
) -> None:
    found = kvctl_json("fetch", prompt, "-o", tmp_path / "kv", *how)
    n = BLOCKS - ("--stored" not in how)
    assert (found["blocks"], found["wanted_blocks"], found["reason"]) == (n, n, "hit")
    assert found["bytes_read"] == n * stock.ns.stride
    assert (tmp_path / "kv").read_bytes() == blocks_of(stock, n)
    assert launch.find(stock.store.uuid) is None, "a fetcher of its own stays"


def test_a_fetcher_that_runs_is_used(stock: Stock, prompt: Path, served: int) -> None:
    first, second = kvctl_json("fetch", prompt), kvctl_json("fetch", prompt)
    assert first["bytes_read"] == (BLOCKS - 1) * stock.ns.stride and second["bytes_read"] == 0
    assert kvctl("fetch", prompt, "-o", "-").stdout_bytes == blocks_of(stock)
    figures = kvctl_json("fetcher", "--stats")
    assert figures["pid"] == served and figures["blocks_here"] == BLOCKS - 1
    assert figures["clients"] == 1 and not figures["tickets"]
    assert figures["counters"]["blocks_shared"] == 2 * (BLOCKS - 1)
    assert "arena_bytes" in kvctl("fetcher", "--stats").stdout
    assert kvctl_json("fetcher", "--evict")["blocks_here"] == 0
    assert "runs" in kvctl("fetcher", "--background", code=5).stderr
    assert "takes no settings" in kvctl("fetcher", "--stats", "--arena", "1G", code=2).stderr
    own = kvctl_json("fetch", prompt, "--arena", "32M")
    assert own["bytes_read"] and not kvctl_json("fetcher", "--stats")["blocks_here"]


def test_the_manual_names_every_figure(prompt: Path, served: int) -> None:
    kvctl("fetch", prompt)
    figures = kvctl_json("fetcher", "--stats")
    manual = module.MANUAL["JSON output"]
    names = [*figures, *figures["counters"]]
    assert all(re.search(rf"\b{re.escape(name)}\b", manual) for name in names)


def test_it_is_told_to_end(stock: Stock, prompt: Path, served: int) -> None:
    handle = os.pidfd_open(served)
    assert kvctl_json("fetcher", "--stop")["pid"] == served
    import select

    assert select.select([handle], [], [], 10)[0]
    os.close(handle)
    assert "no fetcher runs" in kvctl("fetcher", "--stats", code=9).stderr


def test_in_the_foreground_it_serves_until_a_signal(stock: Stock, prompt: Path) -> None:
    command = [sys.executable, "-m", "kvfs", "fetcher", "--arena", "32M"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    until = time.monotonic() + 10
    while launch.find(stock.store.uuid) is None and time.monotonic() < until:
        time.sleep(0.01)
    assert kvctl_json("fetch", prompt)["blocks"] == BLOCKS - 1
    assert kvctl_json("fetcher", "--stats")["pid"] == process.pid
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=10)
    assert (process.returncode, said) == (0, b"")


def test_a_bad_block_is_a_partial_hit_and_is_forgotten(stock: Stock, prompt: Path) -> None:
    flip(stock.paths()[0], at(20))
    found = kvctl_json("fetch", prompt, code=4)
    assert (found["blocks"], found["reason"]) == (20, "checksum of part index")
    assert stock.stored(tokens(1, BLOCK * BLOCKS)) == 20


def test_what_does_not_fit_is_said(stock: Stock, prompt: Path, tmp_path: Path) -> None:
    assert "arena needs" in kvctl("fetch", prompt, "--arena", "1024T", code=7).stderr
    absent = tmp_path / "absent"
    assert str(absent) in kvctl("fetch", prompt, "--shm", absent, code=7).stderr
    assert "--direct" in kvctl("fetch", prompt, "--direct", "--arena", "1G", code=2).stderr
    assert "2s or 500ms" in kvctl("fetch", prompt, "--deadline", "soon", code=2).stderr
    kvctl("fetch", "--tokens", "1,2,3", code=3)


def test_a_full_arena_is_busy(stock: Stock, prompt: Path, served: int) -> None:
    others = [stored(stock, seed, 300) for seed in (2, 3)]
    client = launch.find(stock.store.uuid)
    assert client is not None
    with client:
        tickets = [ask(client, stock, other) for other in others]
        assert sum(ticket.wait() for ticket in tickets) == 512
        assert "arena is full" in kvctl("fetch", prompt, code=5).stderr
        for ticket in tickets:
            ticket.release()
    assert kvctl_json("fetch", prompt)["blocks"] == BLOCKS - 1


_HANGS = """if True:
    import time
    from kvfs.backend.select import open_backend
    from kvfs.testing.faults import FaultyBackend
    from kvfs.fetcher.launch import Options
    from kvfs.fetcher.process import run
    faults = FaultyBackend(open_backend({path!r}))
    faults.on("readv", "seg/*", nth=7, do=lambda call: time.sleep(600), times=None)
    options = Options(32 << 20, threads=1)
    run({path!r}, options, backend=faults, ready=lambda name: print(flush=True))
"""


def test_a_deadline_is_kept_while_the_storage_hangs(stock: Stock, prompt: Path) -> None:
    """Within half a second."""
    code = _HANGS.format(path=stock.store.path)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout and process.stdout.read(1)
        began = time.monotonic()
        found = kvctl_json("fetch", prompt, "--deadline", "1s", code=10)
        assert 1.0 <= time.monotonic() - began < 1.5
        assert found["reason"] == "deadline" and 90 < found["blocks"] < BLOCKS - 1
        assert run("check", prompt).returncode == 0, "a check asks the storage"
    finally:
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()


def test_a_fetcher_that_is_stopped_is_not_waited_for(prompt: Path, served: int) -> None:
    os.kill(served, signal.SIGSTOP)
    began = time.monotonic()
    assert kvctl_json("fetch", prompt)["blocks"] == BLOCKS - 1
    assert time.monotonic() - began < 10
    assert kvctl("fetch", prompt, "--deadline", "300ms", code=None).exit_code in (0, 10)


def test_progress_is_for_a_terminal(prompt: Path) -> None:
    import pty

    main, terminal = pty.openpty()
    words = [sys.executable, "-m", "kvfs", "fetch", str(prompt), "--arena", "5M"]
    environment = {**os.environ, "TERM": "xterm"}
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=terminal, env=environment)
    os.close(terminal)
    said = b""
    try:
        while data := os.read(main, 4096):
            said += data
    except OSError:  # EIO: nobody holds the other end
        pass
    os.close(main)
    assert done.returncode == 0 and b"299 blocks" in done.stdout
    assert b"fetching 17.5 MiB" in said and said.endswith(b"\r\x1b[K")
