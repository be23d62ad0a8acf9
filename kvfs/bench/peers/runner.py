"""Starts a process for each peer and collects what it measured, or why it did not.

Each process is the head of a group of its own, so that servers which a peer starts end with it, and
writes below one temporary directory that is removed at the end, whatever ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfs.bench.peers import PEERS
from kvfs.bench.peers.install import ROOT, interpreter
from kvfs.bench.place import scratch
from kvfs.bench.timing import Progress

RUNS = 7
BLOCKS = 1_000_000
QUICK_RUNS = 5
QUICK_BLOCKS = 100_000
LIMIT_SECONDS = 1200.0

Outcome = dict[str, Any]
"""peer, title, status ("measured" or "failed"), reason; of a measured one what measure.py wrote."""


@dataclass(frozen=True, slots=True)
class Asked:
    """directory: on the file system to measure, None: the temporary one. blocks: in each index."""

    runs: int = RUNS
    blocks: int = BLOCKS
    removal: bool = True
    directory: str | None = None
    limit_seconds: float = LIMIT_SECONDS


def measure_all(names: Iterable[str], asked: Asked, progress: Progress) -> Iterator[Outcome]:
    """One peer after the other. Raises ConfigError for a directory that cannot be used."""
    wanted = [name for name in PEERS if name in set(names)]
    for number, name in enumerate(wanted, 1):
        progress(f"{name} ({number} of {len(wanted)})")
        python, reason = interpreter(name)
        outcome = _failed(reason) if python is None else _measured(python, name, asked)
        yield {"peer": name, "title": PEERS[name].title, **outcome}


def _failed(reason: str) -> Outcome:
    return {"status": "failed", "reason": reason}


def _measured(python: Path, name: str, asked: Asked) -> Outcome:
    with scratch(asked.directory) as place:
        output, log = place / "result", place / "log"
        end = _run(_command(python, name, output, place, asked), log, asked.limit_seconds)
        if not output.exists():
            return _failed(f"{end}: {_last_words(log)}")
        result = json.loads(output.read_text())
    if "error" in result:
        return _failed(result["error"])
    return {"status": "measured", "reason": "", **result}


def _command(python: Path, name: str, output: Path, place: Path, asked: Asked) -> list[str]:
    command = [
        str(python), "-m", "kvfs.bench.peers.measure", name, "--output", str(output),
        "--store", str(place), "--runs", str(asked.runs), "--blocks", str(asked.blocks),
    ]  # fmt: skip
    return [*command, "--removal"] if asked.removal else command


def _run(command: list[str], log: Path, limit: float) -> str:
    """Runs a command to its end or to the limit; says how it ended."""
    # The same hashes in every process; kvfs from the checkout, which the peers' environments lack.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
    with log.open("w") as f:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=f, stderr=f, stdin=subprocess.DEVNULL,
            process_group=0,
        )  # fmt: skip
    try:
        return f"exit {process.wait(limit)}"
    except subprocess.TimeoutExpired:
        return f"stopped after {limit:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
