"""How long the command line takes to start: a whole process, beside the imports it cannot avoid."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kvfs.bench.payload import Prompts
from kvfs.bench.place import new_store
from kvfs.bench.timing import Case, Options, Row, compared, in_turns, timed
from kvfs.errors import EXIT_OK, EXIT_PARTIAL

RUNS = 20
RATIO_LIMIT = 1.6
REFERENCE = "python -c 'import click, lmdb, xxhash'"
_BLOCKS = 8


def run(options: Options) -> Iterator[Row]:
    """Yields the rows `startup.*`. Raises ConfigError, BackendError, SpaceError."""
    runs = options.runs or RUNS
    with new_store(options.directory, options.index, "tiny") as (store, ns):
        prompts = Prompts(ns, _BLOCKS)
        tokens = prompts.next()
        put = store.put(ns, tokens, prompts.payload)
        if put.error is not None:
            raise put.error
        # Not in the store: nothing that is not its own belongs there.
        file = Path(os.path.dirname(store.path), "tokens.u32")
        file.write_bytes(tokens.tobytes())
        index = os.path.dirname(store.index.path)
        check = ["check", "--store", store.path, "--index", index, str(file)]
        # As on a host where nothing else has the store open: the process leaves the index last.
        store.close()
        cases = {
            "check": _process([*_kvctl(), *check]),
            "help": _process([*_kvctl(), "--help"]),
            REFERENCE: _process([sys.executable, "-c", "import click, lmdb, xxhash"]),
        }
        options.progress("startup")
        found = in_turns(cases, runs)
    for name, what in {"check": "kvctl check FILE", "help": "kvctl --help"}.items():
        seconds, base, ratio = compared(found[name], found[REFERENCE])
        yield Row(
            f"startup.{name}", seconds, runs, f"{what}, a whole process",
            ratio=ratio, ratio_limit=RATIO_LIMIT, reference=REFERENCE, reference_seconds=base,
        )  # fmt: skip


def _kvctl() -> list[str]:
    """The installed command, else the module."""
    script = os.path.join(os.path.dirname(sys.executable), "kvctl")
    return [script] if os.access(script, os.X_OK) else [sys.executable, "-m", "kvfs.cli"]


def _process(command: list[str]) -> Case:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}

    def start() -> None:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False, env=environment
        )
        if done.returncode not in (EXIT_OK, EXIT_PARTIAL):
            raise AssertionError(f"{' '.join(command)}: {done.stderr.decode(errors='replace')}")

    def case() -> float:
        return timed(start)

    case()  # byte code is written, as it is where a package was installed; pages are in cache
    return case
