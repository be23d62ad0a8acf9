"""Replays of real traces: the sums to the token, in one process and in several."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvfs import presets
from kvfs.errors import DamageError, InputError, KvfsError
from kvfs.namespace import Namespace
from kvfs.sim import trace
from kvfs.sim.lockstep import replay_processes
from kvfs.sim.model import PrefixModel
from kvfs.sim.replay import Options, Replayer, Result, TraceClock, replay
from kvfs.sim.synth import TokenSynth
from kvfs.sim.trace import Request
from kvfs.store import Store

WEKA = "weka_claude_code_small"
WEKA_STORED = 250_535_552
WEKA_BLOCKS = 112_615
MOONCAKE = "mooncake_conversation_2000"
END_SECONDS = 30.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.init(tmp_path / "store", durability="none") as made:
        yield made


@pytest.fixture
def ns(store: Store) -> Namespace:
    return store.create_namespace(presets.get("tiny", weights="w", tokenizer="t"))


def expect_weka(result: Result, ns: Namespace) -> None:
    assert result.requests == result.total == 2287
    assert result.input_tokens == 265_095_681
    assert result.stored_tokens == WEKA_STORED
    assert result.blocks_put == WEKA_BLOCKS
    assert result.bytes_put == WEKA_BLOCKS * ns.row_bytes
    assert not result.failures and not result.stopped


def test_totals_of_weka_in_one_process(store: Store, ns: Namespace) -> None:
    opened = trace.find(WEKA)
    synth = TokenSynth(128, WEKA)
    cap = sum(
        min(ns.identity.hit_cap(r.tokens), stored) for r, stored in _model_steps(opened, synth)
    )
    result = replay(store, ns, opened)
    expect_weka(result, ns)
    assert result.hit_tokens == cap
    assert result.bytes_fetched == cap // 128 * ns.row_bytes


def _model_steps(opened: trace.Trace, synth: TokenSynth) -> Iterator[tuple[Request, int]]:
    model = PrefixModel()
    for request in opened.requests():
        yield request, model.step(synth.tokens(request))


def test_totals_of_weka_in_four_processes(store: Store, ns: Namespace) -> None:
    result = replay_processes(store.path, ns.name, trace.find(WEKA), 4, Options(fetch=False))
    expect_weka(result, ns)
    assert result.processes == 4


def test_every_request_of_mooncake_equals_the_model(store: Store, ns: Namespace) -> None:
    opened = trace.find(MOONCAKE)
    replayer = Replayer(store, ns, opened, Options())
    for request, stored in _model_steps(opened, TokenSynth(512, MOONCAKE)):
        step = replayer.step(request)
        assert step is not None and step.stored_tokens == stored, request
        assert step.hit_tokens == min(stored, ns.identity.hit_cap(request.tokens))
        assert not step.failures


def test_processes_fetch_and_verify_what_others_put(store: Store, ns: Namespace) -> None:
    options = Options(limit=60)
    seen: list[int] = []
    result = replay_processes(
        store.path,
        ns.name,
        trace.find(WEKA),
        3,
        options,
        progress=lambda result: seen.append(result.requests),
    )
    assert seen == list(range(1, 61))
    assert result.bytes_fetched == result.hit_tokens // 128 * ns.row_bytes > 0
    again = replay(store, ns, trace.find(WEKA), options)
    assert (again.blocks_put, again.input_tokens) == (0, result.input_tokens)


def test_a_replay_stops_before_it_writes_too_much(store: Store, ns: Namespace) -> None:
    limit = 1500 * ns.stride
    result = replay(store, ns, trace.find(WEKA), Options(max_bytes=limit, fetch=False))
    assert result.stopped == "max_bytes"
    assert 0 < result.written <= limit < result.written + 1024 * ns.stride
    shared = replay_processes(
        store.path, ns.name, trace.find(MOONCAKE), 2, Options(max_bytes=10 * ns.stride)
    )
    assert (shared.stopped, shared.requests) == ("max_bytes", 0)


def test_a_replay_stops_at_its_limits(store: Store, ns: Namespace) -> None:
    opened = trace.find(WEKA)
    assert replay(store, ns, opened, Options(limit=0)).requests == 0
    assert replay(store, ns, opened, Options(limit=3)).requests == 3
    timed = replay(store, ns, opened, Options(max_seconds=0.0))
    assert (timed.stopped, timed.requests) == ("max_seconds", 1)
    with pytest.raises(InputError, match="-1 requests"):
        replay(store, ns, opened, Options(limit=-1))


def write_trace(path: Path, *times: float) -> trace.Trace:
    lines = [f'{{"t":{t},"in":400,"r":[[0,3]]}}\n' for t in times]
    path.write_text('{"kvtrace":1,"block_tokens":128}\n' + "".join(lines))
    return trace.Trace(path)


@pytest.mark.parametrize(
    ("touch", "expected"), [(False, [0, 384, 0, 384]), (True, [0, *[384] * 3])]
)
def test_the_clock_shows_trace_time(tmp_path: Path, touch: bool, expected: list[int]) -> None:
    """A class of 60 s: what was put at 0 and used at 50 is there at 70 if that use renewed it."""
    clock = TraceClock(1_700_000_000.0)
    opened = write_trace(tmp_path / "t", 0, 50, 70, 100)
    with Store.init(tmp_path / "store", clock=clock) as store:
        store.define_class("minute", 60)
        ns = store.create_namespace(presets.get("tiny", weights="w", tokenizer="t"))
        replayer = Replayer(store, ns, opened, Options(ttl_class="minute", touch=touch), clock)
        steps = [replayer.step(request) for request in opened.requests()]
    assert [step.stored_tokens for step in steps if step is not None] == expected


def test_wrong_bytes_end_a_replay(
    store: Store, ns: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = store.fetch

    def flipped(*args: Any, **kwargs: Any) -> Any:
        found = fetch(*args, **kwargs)
        found.data[2 * ns.row_bytes + 1] ^= 1
        return found

    monkeypatch.setattr(store, "fetch", flipped)
    opened = write_trace(tmp_path / "t", 0, 1)
    with pytest.raises(DamageError, match="block 2 of the request in line 3"):
        replay(store, ns, opened)


def test_a_short_fetch_is_counted_and_the_replay_goes_on(
    store: Store, ns: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = store.fetch

    def short(*args: Any, **kwargs: Any) -> Any:
        found = fetch(*args, **kwargs)
        return replace(found, blocks=1, data=found.data[: ns.row_bytes], reason="checksum")

    monkeypatch.setattr(store, "fetch", short)
    result = replay(store, ns, write_trace(tmp_path / "t", 0, 1, 2))
    assert dict(result.failures) == {"fetch: checksum": 2}
    assert result.bytes_fetched == 2 * ns.row_bytes
    assert result.requests == 3


def test_the_result_as_json(store: Store, ns: Namespace, tmp_path: Path) -> None:
    result = replay(store, ns, write_trace(tmp_path / "t", 0, 1))
    out = result.to_json()
    assert {key: out[key] for key in ("requests", "input_tokens", "stored_tokens")} == {
        "requests": 2,
        "input_tokens": 800,
        "stored_tokens": 384,
    }
    assert out["hit_tokens"] == 384 and out["hit_rate"] == 384 / 800
    assert out["bytes_put"] == out["bytes_fetched"] == 3 * ns.row_bytes
    assert out["latency"]["check"]["count"] == 2
    assert 0 < out["latency"]["put"]["p50"] <= out["latency"]["put"]["p99"]
    empty = Result().to_json()
    assert empty["hit_rate"] == 0.0 and empty["latency"]["fetch"]["p50"] is None


def test_what_stops_a_worker_is_raised_here(store: Store, ns: Namespace) -> None:
    with pytest.raises(KvfsError, match="nothing_here"):
        replay_processes(store.path, "nothing_here", trace.find(WEKA), 2)
    for processes in (0, 10_000):
        with pytest.raises(InputError, match="processes"):
            replay_processes(store.path, ns.name, trace.find(WEKA), processes)


def workers_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(child)
        for child in children
        if b"kvfs.sim.lockstep" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def ended(pidfd: int) -> bool:
    """Waits for a process, not for a time."""
    return bool(select.select([pidfd], [], [], END_SECONDS)[0])


def test_a_worker_that_dies_is_reported(store: Store, ns: Namespace) -> None:
    def kill(result: Result) -> None:
        if result.requests == 2:
            os.kill(workers_of(os.getpid())[0], signal.SIGKILL)

    with pytest.raises(KvfsError, match=r"replay process \d ended early, with status -9"):
        replay_processes(store.path, ns.name, trace.find(WEKA), 2, progress=kill)
    assert not workers_of(os.getpid())


_PARENT = """
import sys
from kvfs.namespace import Namespace
from kvfs.sim import trace
from kvfs.sim.lockstep import replay_processes

def wait(result):
    print("under way", flush=True)
    sys.stdin.read()

replay_processes(sys.argv[1], sys.argv[2], trace.find(sys.argv[3]), 3, progress=wait)
"""


def test_workers_end_with_their_parent(store: Store, ns: Namespace) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(store.path), ns.name, WEKA],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "under way\n"
        workers = workers_of(parent.pid)
        assert len(workers) == 3
        watched = [os.pidfd_open(pid) for pid in workers]
        parent.kill()
    try:
        assert all(ended(pidfd) for pidfd in watched)
    finally:
        for pidfd in watched:
            os.close(pidfd)
