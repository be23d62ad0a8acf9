"""PULL: a slot of DeepSeek-V4.1-Flash from another process, over a link between two namespaces.

Beside it, in turns: the same bytes over the same link by plain TCP, asked for with as long a
request on a connection that is kept, too, into memory, looked at by nobody. Where this machine lets
us make no network namespaces, both go over the loopback device, which the row says.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from kvfs.bench import netns
from kvfs.bench.timing import Options, Row, compared, in_turns, percentile
from kvfs.errors import ConfigError

T = TypeVar("T")
RUNS = 200
RATE = 200
"""Pulls a second of the row under load."""
LOAD_PULLS = 5
"""Of it for each run."""
THREADS = 4
REFERENCE = "the same bytes by plain TCP"
MOST_TIMES_PLAIN = 2.0
DEADLINE_SECONDS = 0.05
"""Of the row with a process that does not answer."""
SECONDS = 5.0


def run(options: Options) -> Iterator[Row]:
    """Yields the rows `state.pull*`. Raises ConfigError."""
    runs = options.runs or RUNS
    with ExitStack() as stack:
        link = _Link(stack)
        pull, plain = _Pull(link), link.run(lambda: _Plain(link))
        stack.callback(pull.close)
        stack.callback(plain.close)
        options.progress("state.pull")
        found = link.run(lambda: _in_turns(link, pull, plain, runs))
        seconds, base, ratio = compared(found["pull"], found["plain"])
        options.progress("state.pull.load")
        plain_load = _under_load(link, runs * LOAD_PULLS, _Plain)
        load = _under_load(link, runs * LOAD_PULLS, _Pull)
        options.progress("state.pull.frozen")
        frozen = link.run(lambda: _from_a_frozen_host(link, max(5, runs // 10)))
    yield Row(
        "state.pull", seconds, runs, f"a slot of {pull.size:,} bytes, verified, {link.what}",
        ratio=ratio, ratio_limit=MOST_TIMES_PLAIN, reference=REFERENCE, reference_seconds=base,
        figures={"bytes_per_second": pull.size / seconds, "share_of_plain": 1 / ratio},
    )  # fmt: skip
    median, base = statistics.median(load), statistics.median(plain_load)
    yield Row(
        "state.pull.load", median, len(load), f"the same at {RATE} pulls a second, from when each "
        "was due", ratio=median / base, reference=f"{REFERENCE} at that rate",
        reference_seconds=base, figures={
            "p99_seconds": percentile(load, 99), "plain_p99_seconds": percentile(plain_load, 99),
            "slowest_seconds": max(load),
        },
    )  # fmt: skip
    yield Row(
        "state.pull.frozen", statistics.median(frozen), len(frozen),
        "until it is given up for a replay, asked of a process that is stopped, with "
        f"{DEADLINE_SECONDS * 1000:.0f} ms to do it",
        figures={"slowest_seconds": max(frozen)},
    )  # fmt: skip


@contextmanager
def _apart(pid: int) -> Iterator[None]:
    """Keeps this thread to one processor and a process to the others, as two hosts share none.

    Without this the kernel has both on the same one at times, and a figure depends on when.
    """
    before = os.sched_getaffinity(0)
    threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    try:
        if len(before) > 1:
            mine = min(before)
            os.sched_setaffinity(0, {mine})
            for thread in threads:
                os.sched_setaffinity(thread, before - {mine})
        yield
    finally:
        for thread in (0, *threads):
            os.sched_setaffinity(thread, before)


class _Link:
    """A process that has a slot, and where it is asked from."""

    def __init__(self, stack: ExitStack) -> None:
        self._here: netns.Side | None = None
        try:
            there, self._here = stack.enter_context(netns.pair())
            self.what, ip = "over a link between two network namespaces", there.ip
            start: Callable[..., Any] = there.run
        except netns.Unavailable as e:
            self.what, ip = f"over the loopback device ({e})", "127.0.0.1"
            start = _call
        directory = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        words = [sys.executable, "-m", "kvfs.bench.state_host", ip, directory]
        process = start(
            subprocess.Popen, words, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        stack.callback(_end, process)
        self.process: subprocess.Popen[bytes] = process
        line = process.stdout.readline()
        if not line:
            said = process.stderr.read().decode(errors="replace").strip().splitlines()
            raise ConfigError(f"no server of slots: {said[-1] if said else 'it ended'}")
        addresses = json.loads(line)
        self.slots: str = addresses["slots"]
        self.plain: str = addresses["plain"]

    def run(self, work: Callable[[], T]) -> T:
        return work() if self._here is None else self._here.run(work)

    def start(self, work: Callable[[], object]) -> Callable[[], object]:
        """Begins it on a thread; returns what waits for its end."""
        if self._here is not None:
            wait: Callable[[], object] = self._here.start(work).result
            return wait
        thread = threading.Thread(target=work)
        thread.start()
        return thread.join


class _Pull:
    def __init__(self, link: _Link) -> None:
        from kvfs.bench import state_host
        from kvfs.peers.client import PeerClient
        from kvfs.peers.wire import Holder

        self._client = PeerClient(state_host.SECRET)
        self._holder, self._anchor = Holder(link.slots), state_host.ANCHOR
        self._identity = state_host.identity()
        assert self._identity.state is not None
        self._state = self._identity.state
        self.size = self._state.slot_bytes
        self._into = bytearray(self.size)

    def once(self) -> float:
        seconds, reason = self.tried(SECONDS)
        if reason:
            raise ConfigError(f"a pull failed: {reason}")
        return seconds

    def tried(self, deadline: float) -> tuple[float, str]:
        """Seconds that it took, and why there was no slot within `deadline` seconds."""
        start = time.perf_counter()
        pulled = self._client.pull(
            self._holder, self._identity.nsid, self._anchor, self._state,
            time.monotonic() + deadline, self._into,
        )  # fmt: skip
        return time.perf_counter() - start, pulled.reason

    def close(self) -> None:
        self._client.close()


class _Plain:
    def __init__(self, link: _Link) -> None:
        from kvfs.bench import state_host
        from kvfs.peers.wire import split_address

        self._request = bytes(state_host.REQUEST_BYTES)
        self._socket = socket.create_connection(split_address(link.plain), SECONDS)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._into = memoryview(bytearray(_Pull(link).size))

    def once(self) -> float:
        start = time.perf_counter()
        self._socket.sendall(self._request)
        done = 0
        while done < len(self._into):
            n = self._socket.recv_into(self._into[done:])
            if not n:
                raise ConfigError("the process that sends slots has ended")
            done += n
        return time.perf_counter() - start

    def close(self) -> None:
        self._socket.close()


def _in_turns(link: _Link, pull: _Pull, plain: _Plain, runs: int) -> dict[str, list[float]]:
    """One after the other."""
    pull.once()  # begins the thread that serves them all
    plain.once()
    with _apart(link.process.pid):
        return in_turns({"pull": pull.once, "plain": plain.once}, runs)


def _under_load(
    link: _Link, pulls: int, case: Callable[[_Link], _Pull | _Plain]
) -> list[float]:  # fmt: skip
    """Seconds of each, from the moment at which it was due."""
    took: list[float] = []
    numbers = iter(range(pulls))
    lock = threading.Lock()
    began = time.monotonic() + 0.05

    def work() -> None:
        one = case(link)
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                break
            due = began + number / RATE
            time.sleep(max(0.0, due - time.monotonic()))
            one.once()
            took.append(time.monotonic() - due)
        one.close()

    waits = [link.start(work) for _ in range(THREADS)]
    for wait in waits:
        wait()
    return took


def _from_a_frozen_host(link: _Link, pulls: int) -> list[float]:
    """Seconds until each was given up; of connections that are kept, as an engine has them."""
    cases = [_Pull(link) for _ in range(pulls)]
    for case in cases:
        case.once()
    link.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, link.process.pid, os.WSTOPPED | os.WNOWAIT)  # a signal takes its time
    try:
        found = [case.tried(DEADLINE_SECONDS) for case in cases]
    finally:
        link.process.send_signal(signal.SIGCONT)
    for case in cases:
        case.close()
    if not all(reason for _, reason in found):
        raise ConfigError("a process that is stopped gave a slot")
    return [seconds for seconds, _ in found]


def _call(work: Callable[..., T], *args: Any, **named: Any) -> T:
    return work(*args, **named)


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
