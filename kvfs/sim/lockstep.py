"""A replay spread over processes that share a store, one request at a time.

Of N processes, process k takes request i where i % N == k. The parent hands out the turns strictly
in trace order and waits for each, so the sums are those of one process if and only if what one
process has put is visible to the next. Every process opens the store and reads the trace itself.

A turn is a line of JSON to the worker's standard input, its answer a line on the standard output.
A worker that reads the end of its input ends: so none outlives the parent, however that dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import kvfs
from kvfs import errors
from kvfs.errors import InputError, KvfsError
from kvfs.sim.replay import (
    Options,
    Progress,
    Replayer,
    Result,
    Step,
    TraceClock,
    requests,
    run,
)
from kvfs.sim.trace import Request, Trace
from kvfs.store import Store

_END_SECONDS = 10.0
_MAX_PROCESSES = 256


def replay_processes(
    path: str | Path,
    namespace: str,
    trace: Trace,
    processes: int,
    options: Options | None = None,
    *,
    index: str | Path | None = None,
    clock_start: float | None = None,
    progress: Progress | None = None,
) -> Result:
    """Replays the trace with several processes in lock-step and returns the sums.

    path, index: as for Store.open; namespace: its name; clock_start: if given, the stores' clocks
    show trace time from there on. Raises what replay raises, and KvfsError if a worker dies.
    """
    if not 1 <= processes <= _MAX_PROCESSES:
        raise InputError(f"1 to {_MAX_PROCESSES} processes, not {processes}")
    chosen = options or Options()
    if chosen.state_policy and processes > 1:
        raise InputError("state policies are reckoned in one process: leave --processes out")
    job = _Job(
        store=str(path),
        index=None if index is None else str(index),
        namespace=namespace,
        trace=str(trace.path),
        processes=processes,
        number=0,
        options=asdict(chosen),
        clock_start=clock_start,
    )
    with _start(job) as workers:

        def turn(i: int, _: Request, left: int | None) -> Step | None:
            answer = workers[i % processes].turn(i, left)
            return None if answer.get("full") else Step(**answer)

        return run(trace, chosen, Result(processes=processes), turn, progress)


@dataclass(frozen=True, slots=True)
class _Job:
    """What a worker has to know; its first line of input."""

    store: str
    index: str | None
    namespace: str
    trace: str
    processes: int
    number: int
    options: dict[str, Any]
    clock_start: float | None


@contextlib.contextmanager
def _start(job: _Job) -> Iterator[list[_Worker]]:
    """Starts all workers, then waits until each has opened the store; ends them all behind."""
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(_Worker({**asdict(job), "number": k})) for k in range(job.processes)
        ]
        for worker in workers:
            worker.answer()
        yield workers
        for worker in workers:
            worker.hang_up()


class _Worker:
    """The parent's end of one worker process."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._number = job["number"]
        env = dict(os.environ)
        # The same kvfs as here, also where it was found by the working directory alone.
        here = str(Path(kvfs.__file__).resolve().parent.parent)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (here, env.get("PYTHONPATH"))))
        # A process group of its own: Ctrl-C is for the parent, which then hangs up.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvfs.sim.lockstep"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            process_group=0,
        )
        self._send(job)

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.hang_up()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def hang_up(self) -> None:
        """Tells the worker to end, without waiting for it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def turn(self, i: int, left: int | None) -> dict[str, Any]:
        self._send({"i": i, "budget": left})
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait(_END_SECONDS)
            raise KvfsError(f"replay process {self._number} ended early, with status {status}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise getattr(errors, answer["error"])(answer["message"])
        return answer

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        # A worker that is gone is reported by answer(), which knows its exit status.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()


def _work(job: _Job, turns: Any, answer: Any) -> None:
    """A worker's life: open, then a request a turn, until the parent hangs up."""
    options = Options(**job.options)
    trace = Trace(job.trace)
    clock = None if job.clock_start is None else TraceClock(job.clock_start)
    with Store.open(job.store, index=job.index, clock=clock or time.time) as store:
        replayer = Replayer(store, store.namespace(job.namespace), trace, options, clock)
        answer({"ready": True})
        mine = (
            (i, request)
            for i, request in enumerate(requests(trace, options))
            if i % job.processes == job.number
        )
        for line in turns:
            turn = json.loads(line)
            i, request = next(mine)
            if i != turn["i"]:
                raise KvfsError(f"the trace changed under way: at request {i}, not {turn['i']}")
            step = replayer.step(request, turn["budget"])
            answer({"full": True} if step is None else asdict(step))


def _main() -> None:
    # The answers have the standard output to themselves; what a library prints goes elsewhere.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    try:
        _work(_Job(**json.loads(sys.stdin.readline())), sys.stdin, answer)
    except BrokenPipeError:
        sys.exit(1)
    except KvfsError as e:
        with contextlib.suppress(BrokenPipeError):
            answer({"error": type(e).__name__, "message": str(e)})
        sys.exit(e.exit_code)


if __name__ == "__main__":
    _main()
