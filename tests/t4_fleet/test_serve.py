"""`kvctl serve` keeps house: one of several does, and another one goes on when that is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.gc.passes import Passed
from kvfs.repair.fsck import fsck
from kvfs.serve import housekeeping
from kvfs.testing.command import command, environment
from kvfs.testing.stock import Clock, Stock, tokens


@pytest.fixture
def stock(ram_dir: Path) -> Iterator[Stock]:
    made = Stock.make(
        ram_dir / "store", clock=Clock(time.time()), index=str(ram_dir / "a"),
        grace_seconds=0.0, segment_bytes=128 << 10, classes={"brief": 1, "chatbot": 86_400},
    )  # fmt: skip
    yield made
    made.close()


Serve = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def serve(stock: Stock, ram_dir: Path) -> Iterator[Serve]:
    """Starts `kvctl serve` as a host of its own."""
    made: list[subprocess.Popen[str]] = []

    def start(name: str, *options: str) -> subprocess.Popen[str]:
        words = command(
            "serve", "--store", stock.store.path, "--index", str(ram_dir / name), "--json",
            "--interval", "0.05", *options,
        )  # fmt: skip
        made.append(
            subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment())
        )  # fmt: skip
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.communicate()


def until(found: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Waits for what other processes do; returns what it is."""
    end = time.monotonic() + seconds
    while not (result := found()):
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)
    return result


def passed(stock: Stock) -> Passed | None:
    return Passed.load(stock.store.backend)


def ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    told: dict[str, Any] = json.loads(out.splitlines()[-1])
    return told


def test_the_next_keeps_house_when_the_first_is_killed(stock: Stock, serve: Serve) -> None:
    kept = tokens(1, 40)
    stock.put(kept)
    first = serve("b", "--gc-interval", "0.1")
    until(lambda: (p := passed(stock)) and p.pid == first.pid)
    second = serve("c", "--gc-interval", "0.1")
    first.kill()
    first.wait()
    at = until(lambda: (p := passed(stock)) and p.pid == second.pid and p)
    brief = tokens(2, 40)
    stock.put(brief, ttl_class="brief")
    stock.store.writer().retire({s.segment for s in stock.store.index.segments()})
    done = until(lambda: (p := passed(stock)) and p.total.freed_bytes > at.total.freed_bytes and p)
    assert done.pid == second.pid and done.host == housekeeping(stock.store)["passed"]["host"]
    assert ended(second)["passes"] > 0
    stock.clock.now = time.time()
    stock.store.catch_up()
    assert stock.good(kept) == 10 and stock.good(brief) == 0
    assert not fsck(stock.store).damaged


def test_it_can_be_left_out(stock: Stock, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = [serve("b", "--no-gc", "--gc-interval", "0.1")]
    monkeypatch.setenv("KVFS_GC", "0")
    ways.append(serve("c", "--gc-interval", "0.1"))
    stock.put(tokens(1, 40))
    for name, process in zip("bc", ways, strict=True):
        host = stock.another(index=str(Path(stock.store.path).parent / name), catch_up=False)
        until(lambda host=host: host.stored(tokens(1, 40)) == 10)  # type: ignore[misc]
        assert ended(process)["passes"] == 0
    assert passed(stock) is None
