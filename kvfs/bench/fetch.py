"""FETCH: 128 K stored tokens into memory that is there already, from the page cache and without it.

Beside it, in turns: one plain read of the same payload bytes from one file into the same buffer.
The store is on the file system under test; what it holds was put in one piece. This is reading in
the caller's process, as the command line and small tools do; kvfs.bench.fetcher has the fetcher.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from kvfs.bench import fetcher
from kvfs.bench.payload import Prompts, hit_blocks, touched
from kvfs.bench.place import drop_cache, new_store, scratch, segments
from kvfs.bench.put import write
from kvfs.bench.timing import Case, Options, Row, compared, in_turns, timed

RUNS = 7
REFERENCE = "one plain read of the same bytes"
# Name -> (page cache dropped, payloads verified, most of its ratio to a plain read).
ROWS: dict[str, tuple[bool, bool, float]] = {
    "warm": (False, True, 1.5),
    "warm.unverified": (False, False, 1.15),
    "cold": (True, True, 1.1),
    "cold.unverified": (True, False, 1.1),
}


def run(options: Options) -> Iterator[Row]:
    """Yields the rows `fetch.*`. Raises ConfigError, BackendError, SpaceError."""
    yield from _direct(options)
    yield from fetcher.run(options)


def _direct(options: Options) -> Iterator[Row]:
    runs = options.runs or RUNS
    with ExitStack() as stack:
        cases, blocks, size = _cases(stack, options)
        options.progress("fetch.128k")
        found = in_turns(cases, runs)
    for name, (cold, verified, limit) in ROWS.items():
        seconds, base, ratio = compared(found[name], found[_plain(cold)])
        how = "page cache dropped" if cold else "from the page cache"
        how += ", verified" if verified else ", payloads not verified"
        yield Row(
            f"fetch.128k.{name}", seconds, runs, f"{blocks:,} blocks, {size:,} bytes, {how}",
            ratio=ratio, ratio_limit=limit, reference=REFERENCE, reference_seconds=base,
            figures={"bytes": size, "bytes_per_second": size / seconds},
        )  # fmt: skip


def _plain(cold: bool) -> str:
    return "plain cold" if cold else "plain warm"


def _cases(stack: ExitStack, options: Options) -> tuple[dict[str, Case], int, int]:
    """(cases by name, blocks, payload bytes)."""
    plain = stack.enter_context(scratch(options.directory)) / "plain"
    store, ns = stack.enter_context(new_store(options.directory, options.index))
    blocks = hit_blocks(ns)
    prompts = Prompts(ns, blocks)
    tokens, payload = prompts.next(), prompts.payload
    put = store.put(ns, tokens, payload)
    if put.error is not None:
        raise put.error
    write(str(plain), payload, os.O_CREAT)
    into = touched(len(payload))

    def fetch(verified: bool) -> float:
        """As a request does: its hasher has been through `check`."""
        hasher = ns.hasher(tokens)
        plan = store.check(ns, hasher)
        start = time.perf_counter()
        got = store.fetch(ns, plan, hasher, into, blocks=blocks, payload_checksum=verified)
        seconds = time.perf_counter() - start
        if got.reason is not None:
            raise AssertionError(f"a fetch ended early: {got.reason}")
        return seconds

    def case(work: Case, files: list[Path], cold: bool) -> Case:
        def once() -> float:
            if cold:
                for path in files:
                    drop_cache(path)
            else:
                work()  # into the page cache
            return work()

        return once

    stored = segments(store)
    cases = {
        name: case(lambda v=verified: fetch(v), stored, cold)  # type: ignore[misc]
        for name, (cold, verified, _) in ROWS.items()
    }
    for cold in (False, True):
        cases[_plain(cold)] = case(lambda: timed(lambda: read(plain, into)), [plain], cold)
    fetch(True)
    if into != payload:
        raise AssertionError("fetched bytes differ from those put")
    return cases, blocks, len(payload)


def read(path: Path, into: memoryview) -> None:
    """Fills a buffer from the start of a file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        done = 0
        while done < len(into):
            n = os.preadv(fd, [into[done:]], done)
            if not n:
                raise AssertionError(f"{path} is too short")
            done += n
    finally:
        os.close(fd)
