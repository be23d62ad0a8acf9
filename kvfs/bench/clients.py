"""Client processes that fetch at the same moment, for `fetch.fetcher.clients*`.

    python -m kvfs.bench.clients STORE INDEX TOKENS BLOCKS

is one of them: it connects and prints the time, and for each line on its standard input fetches its
prompt and prints when it had all of it, on the clock that all processes of a host share.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_DEADLINE = 60.0


class Clients:
    """Processes with a prompt each; a context manager. One thread calls it."""

    def __init__(
        self, store: str, index: str, place: Path, prompts: Sequence[tuple[Any, int]]
    ) -> None:
        """place: a directory for their tokens; prompts: (tokens, blocks) of each."""
        self._processes = []
        for i, (tokens, blocks) in enumerate(prompts):
            file = place / f"{i}.u32"
            file.write_bytes(tokens.tobytes())
            command = [sys.executable, "-m", __name__, store, index, str(file), str(blocks)]
            self._processes.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )

    def fetch(self) -> float:
        """Seconds until the last of them has all its blocks."""
        start = time.perf_counter()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return max(self._answer(process) for process in self._processes) - start

    @staticmethod
    def _answer(process: subprocess.Popen[str]) -> float:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise AssertionError("a client of the benchmark ended")
        return float(line)

    def __enter__(self) -> Clients:
        try:
            for process in self._processes:
                self._answer(process)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            process.communicate()


def main() -> None:
    import numpy as np

    from kvfs.fetcher import launch
    from kvfs.local import LocalStore

    path, index, file, blocks = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    tokens = np.fromfile(file, np.int32)
    store = LocalStore.open_index(path, index=index)
    assert store is not None
    with store:
        (ns,) = store.namespaces()
        client = launch.find(store.uuid)
        assert client is not None
        with client:
            print(time.perf_counter(), flush=True)
            for _ in sys.stdin:
                hasher = ns.hasher(tokens)
                plan = store.check(ns, hasher)
                with client.fetch(ns, plan, hasher, deadline=_DEADLINE, blocks=blocks) as ticket:
                    if ticket.wait() < blocks:
                        raise AssertionError(f"a fetch ended early: {ticket.reason}")
                    print(time.perf_counter(), flush=True)


if __name__ == "__main__":
    main()
