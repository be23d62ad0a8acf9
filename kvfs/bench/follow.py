"""FOLLOW: another host's journal into this host's index, and what checks cost meanwhile.

The journal is made up of runs as in kvfs.bench.synthetic. For `follow.check` a process follows it
into the index that is checked; it is stopped and goes on in turns, so that both figures are of the
same moments.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

import numpy as np
import xxhash

from kvfs.backend import OpenFile
from kvfs.bench import check
from kvfs.bench.place import new_store, scratch
from kvfs.bench.synthetic import CONTINUED, MEAN_RUN, Filler, fill, plant
from kvfs.bench.timing import Case, Options, Row, compared, in_turns, timed
from kvfs.chain import HASH_BYTES
from kvfs.frames import Entry
from kvfs.journal import Header, JournalWriter
from kvfs.namespace import Namespace
from kvfs.segment import WRITER_BYTES
from kvfs.store import Store

RUNS, CHECK_RUNS = 3, 60
BLOCKS = 1_000_000
LIMITS = {"microseconds_per_block": 10.0}
RATIO_LIMIT = 2.0
HASHED = "one plain xxh3 of the journal's bytes"
IDLE = "the same while nobody follows"
_CHECKS = 20
_AHEAD = 2  # journals of so many times BLOCKS are there to follow
_GO_SECONDS = 0.01
_PUBLISHED_TOGETHER = 500

_FOLLOWER = """
import sys
from kvfs.follow.following import Following
from kvfs.store import Store
with Store.open(sys.argv[1], index=sys.argv[2], catch_up=False) as store:
    print("open", flush=True)
    following = Following(store, interval=0.001)
    while following.turn().entries or following.turns < 3:
        pass
    sys.stdin.read()
"""


def run(options: Options) -> Iterator[Row]:
    """Yields the rows `follow.*`. Raises ConfigError, BackendError, IndexFault."""
    blocks = min(options.blocks, BLOCKS)
    with new_store(options.directory, options.index) as (store, ns):
        options.progress("follow.blocks: writing a journal")
        path, entries = journal(store, ns, blocks)
        options.progress("follow.blocks")
        yield _blocks(store, path, blocks, entries, options)
    with new_store(options.directory, options.index) as (store, ns):
        fill(store, ns, blocks, options.progress)
        options.progress("follow.check: writing a journal")
        journal(store, ns, _AHEAD * blocks)
        options.progress("follow.check")
        yield _check(store, ns, options.runs or CHECK_RUNS)


def journal(store: Store, ns: Namespace, blocks: int) -> tuple[str, int]:
    """Writes the journal of another host with so many blocks; returns its path and its entries."""
    rng, filler = np.random.default_rng(5), Filler(store, ns)
    writer_id = os.urandom(WRITER_BYTES)
    header = Header(writer_id, 0, 0, store.uuid, store.now_ms())
    made = JournalWriter(store.backend, f"bench-{writer_id.hex()}", header)
    entries: list[Entry] = []
    parent, heads, at, done, count = b"", b"", 0, 0, 0
    while done < blocks:
        n = min(int(rng.geometric(1 / MEAN_RUN)), blocks - done)
        if not heads or rng.random() >= CONTINUED:
            parent, heads, at = ns.root, b"", 0
        hashes = os.urandom(n * HASH_BYTES)
        entries += filler.run(at, parent, heads, hashes)
        parent, heads, at = hashes[-HASH_BYTES:], hashes[:HASH_BYTES], at + n
        done += n
        if len(entries) >= _PUBLISHED_TOGETHER or done == blocks:
            count += len(entries)
            made.append(entries)
            entries.clear()
    made.close()
    return made.path, count


def _blocks(store: Store, path: str, blocks: int, entries: int, options: Options) -> Row:
    size = store.backend.size(path)
    data = bytearray(size)
    file: OpenFile = store.backend.open(path)
    store.backend.readv(file, [memoryview(data)], 0)
    store.backend.close(file)

    def follow() -> float:
        with (
            scratch(options.index) as place,
            Store.open(store.path, index=str(place), catch_up=False) as host,
        ):
            seconds = timed(host.catch_up)
            if host.index.counters()["blocks"] != blocks:
                raise AssertionError("not all blocks came in")
        return seconds

    cases = {"follow": follow, HASHED: lambda: timed(lambda: xxhash.xxh3_64_digest(data))}
    runs = options.runs or RUNS
    found = in_turns(cases, runs)
    seconds, plain, ratio = compared(found["follow"], found[HASHED])
    return Row(
        "follow.blocks", seconds, runs,
        f"a journal of {blocks:,} blocks in {entries:,} entries, {size:,} bytes, on one core",
        ratio=ratio, reference=HASHED, reference_seconds=plain,
        figures={
            "blocks_per_second": blocks / seconds,
            "microseconds_per_block": seconds / blocks * 1e6,
        },
        limits=LIMITS,
    )  # fmt: skip


def _check(store: Store, ns: Namespace, runs: int) -> Row:
    tokens, stored_runs = check.SIZES[1][1:3]
    prompt = np.random.default_rng(tokens).integers(0, check.VOCABULARY, tokens, np.int32)
    plant(store, ns, prompt, stored_runs)
    turn = cycle([prompt.copy() for _ in range(_CHECKS)])

    def checks() -> float:
        return sum(timed(lambda: store.check(ns, next(turn))) for _ in range(_CHECKS)) / _CHECKS

    before = store.index.counters()["blocks"]
    with _follower(store) as process:
        found = in_turns({"following": _going(process, checks), IDLE: checks}, runs)
    followed = store.index.counters()["blocks"] - before
    seconds, idle, ratio = compared(found["following"], found[IDLE])
    return Row(
        "follow.check", seconds, runs,
        f"{tokens:,} tokens, stored in {stored_runs} runs, while another process follows a journal "
        f"into the same index; the mean of {_CHECKS}",
        ratio=ratio, ratio_limit=RATIO_LIMIT, reference=IDLE, reference_seconds=idle,
        figures={"blocks_followed_meanwhile": followed},
    )  # fmt: skip


def _going(process: subprocess.Popen[bytes], work: Case) -> Case:
    """Lets the process run while the work is measured."""

    def case() -> float:
        process.send_signal(signal.SIGCONT)
        time.sleep(_GO_SECONDS)
        try:
            return work()
        finally:
            process.send_signal(signal.SIGSTOP)

    return case


@contextmanager
def _follower(store: Store) -> Iterator[subprocess.Popen[bytes]]:
    """A process that follows the store's journals into this host's index; it is stopped."""
    index = os.path.dirname(store.index.path)
    process = subprocess.Popen(
        [sys.executable, "-c", _FOLLOWER, store.path, index],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        yield process
    finally:
        process.kill()
        process.communicate()
