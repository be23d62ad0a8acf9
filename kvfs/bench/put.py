"""PUT: 128 K new tokens at the block size of DeepSeek-V4.1-Flash, index and journal included.

Beside it, in turns and on the same file system: one plain write of the same payload bytes to a new
file, and to space that is allocated and written already, followed by fdatasync. Every sample finds
its predecessors written back.

New blocks go to space that was never written, which costs more than to overwrite where a disk is
provisioned as it is used; so there is also what a plain write and fdatasync of the same bytes take
there (`new_space_*`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from kvfs.bench.payload import Prompts, hit_blocks
from kvfs.bench.place import drop_cache, new_store, scratch, segments, settle
from kvfs.bench.timing import Case, Options, Row, compared, in_turns, timed
from kvfs.namespace import Namespace
from kvfs.store import Store

RUNS = 7
# Durability -> (what its time is compared with, most of its ratio to that).
MODES = {
    "none": ("one plain write of the same bytes", 1.3),
    "batch": ("one overwrite of allocated space and fdatasync, the same bytes", 1.2),
}


def run(options: Options) -> Iterator[Row]:
    """Yields the rows `put.*`. Raises ConfigError, BackendError, SpaceError."""
    runs = options.runs or RUNS
    with ExitStack() as stack:
        plain = Plain(stack.enter_context(scratch(options.directory)) / "plain")
        cases: dict[str, Case] = {}
        for mode in MODES:
            store, ns = stack.enter_context(
                new_store(options.directory, options.index, durability=mode)
            )
            prompts = Prompts(ns, hit_blocks(ns))
            cases[mode] = _put(store, ns, prompts, options)
            cases[MODES[mode][0]] = plain.new if mode == "none" else plain.over
            plain.prepare(prompts.payload)
        cases["new space"] = plain.new_space
        blocks, size = hit_blocks(ns), len(prompts.payload)
        found = in_turns(cases, runs)
    for mode, (reference, limit) in MODES.items():
        seconds, base, ratio = compared(found[mode], found[reference])
        figures = {"bytes": size, "bytes_per_second": size / seconds}
        if mode != "none":
            _, fresh, fresh_ratio = compared(found[mode], found["new space"])
            figures |= {"new_space_seconds": fresh, "new_space_ratio": fresh_ratio}
        yield Row(
            f"put.128k.{mode}", seconds, runs,
            f"{blocks:,} new blocks, {size:,} bytes, durability {mode}",
            ratio=ratio, ratio_limit=limit, reference=reference, reference_seconds=base,
            figures=figures,
        )  # fmt: skip


def _put(store: Store, ns: Namespace, prompts: Prompts, options: Options) -> Case:
    def case() -> float:
        options.progress(f"put.128k.{store.config.durability}")
        tokens = prompts.next()
        results = []
        seconds = timed(lambda: results.append(store.put(ns, tokens, prompts.payload)))
        if results[0].error is not None:
            raise results[0].error
        for path in segments(store):
            drop_cache(path)
        return seconds

    case()  # the first one makes directories and namespace rows
    return case


class Plain:
    """What the file system does with the same bytes."""

    def __init__(self, path: Path) -> None:
        self._over, self._new = str(path) + ".over", str(path) + ".new"
        self._payload = memoryview(b"")

    def prepare(self, payload: memoryview) -> None:
        self._payload = payload
        if not os.path.exists(self._over):
            write(self._over, payload, os.O_CREAT)
            settle(Path(self._over))

    def new(self) -> float:
        """Writes a new file; it is not synced within the time."""
        seconds = timed(lambda: write(self._new, self._payload, os.O_CREAT | os.O_EXCL))
        settle(Path(self._new))
        os.unlink(self._new)
        return seconds

    def new_space(self) -> float:
        """Writes into room that is allocated and was never written, and waits for the device."""
        fd = os.open(self._new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with contextlib.suppress(OSError):  # where it cannot be done it is not, as by a store
                os.posix_fallocate(fd, 0, len(self._payload))
            os.fsync(fd)
        finally:
            os.close(fd)
        seconds = timed(lambda: write(self._new, self._payload, 0, sync=True))
        os.unlink(self._new)
        return seconds

    def over(self) -> float:
        """Writes over a file that is there, and waits for the device."""
        return timed(lambda: write(self._over, self._payload, 0, sync=True))


def write(path: str, data: memoryview, flags: int, *, sync: bool = False) -> None:
    """Writes all of data to the start of a file."""
    fd = os.open(path, os.O_WRONLY | flags, 0o600)
    try:
        done = 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], done)
        if sync:
            os.fdatasync(fd)
    finally:
        os.close(fd)
