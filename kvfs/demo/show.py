"""`make demo`: real requests through a store, the store as a mounted tree, a prefix compared.

Makes a store and an index in a temporary directory, replays the first requests of a coding agent's
sessions at the block size of DeepSeek-V4.1-Flash, shows the tree with ordinary tools, fetches the
longest prompt once more and compares it byte for byte. At most 2 GB and about a minute; whatever
ends it, the mount and the directory go. Without FUSE the tree is shown by `kvctl ls`.

The replay runs in this process; `kvctl mount` runs the mount in one of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvfs import presets
from kvfs.chain import HASH_BYTES
from kvfs.cli.common import interruptible
from kvfs.cli.output import duration, size
from kvfs.demo import tour
from kvfs.demo.screen import Screen
from kvfs.demo.tour import Place
from kvfs.errors import (
    EXIT_BROKEN_PIPE,
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_OK,
    DamageError,
    KvfsError,
    SpaceError,
)
from kvfs.filesystems import at
from kvfs.index.place import FORCE_ENVIRONMENT
from kvfs.namespace import Namespace
from kvfs.sim import trace
from kvfs.sim.replay import Options, Result, replay, requests, touched
from kvfs.sim.synth import PayloadSynth, TokenSynth
from kvfs.store import Store

TRACE = "weka_claude_code_small"
PRESET = "deepseek-v4.1-flash"
REQUESTS = 200
MAX_BYTES = 2_000_000_000
MIN_BYTES = 100_000_000
REPLAY_SECONDS = 40.0
_COMMAND_SECONDS = 20.0


@dataclass(slots=True)
class Findings:
    """What goes into the table at the end."""

    replayed: Result
    mounted: str = "not shown"
    compared_tokens: int = 0
    compared_bytes: int = 0
    check: float = 0.0
    fetch: float = 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demonstration; returns the exit code."""
    options = _arguments(argv)
    began = time.monotonic()
    screen = Screen()
    # Nobody else will ever see this index, so its directory may be an overlay of a container.
    os.environ[FORCE_ENVIRONMENT] = "1"
    try:
        with interruptible(), _place(screen, options.dir, options.keep) as place:
            found = _demonstrate(screen, place, options.requests)
        screen.heading("Result")
        screen.table([*_rows(found), ("all of it took", duration(time.monotonic() - began), "")])
        return EXIT_INTERNAL if found.replayed.failures else EXIT_OK
    except KeyboardInterrupt:
        print("\ninterrupted; cleaned up", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The interpreter would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except KvfsError as e:
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kvfs.demo", description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="replay so many at most")
    parser.add_argument("--dir", type=Path, help="where to make the temporary directory")
    parser.add_argument("--keep", action="store_true", help="leave the store behind, to look at")
    options = parser.parse_args(argv)
    if options.requests < 1:
        parser.error("--requests must be 1 or more")
    return options


@contextlib.contextmanager
def _place(screen: Screen, below: Path | None, keep: bool) -> Iterator[Place]:
    """A temporary directory that goes at the end, whatever happens; kept if asked for."""
    try:
        place = Place(Path(tempfile.mkdtemp(prefix="kvfs-demo-", dir=below)))
    except OSError as e:
        raise SpaceError(f"no temporary directory: {e}") from None
    try:
        yield place
        if keep:
            screen.heading("Kept")
            screen.say(f"export KVFS_STORE={place.store} KVFS_INDEX={place.index}")
    finally:
        # An interrupt that arrives now would leave gigabytes behind.
        with _uninterrupted():
            tour.unmount(place)
            if not (keep and place.store.exists()):
                _remove(place)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    old = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def _remove(place: Place) -> None:
    if at(str(place.mount)):
        print(f"{place.mount} is still mounted, so {place.root} stays", file=sys.stderr)
        return
    shutil.rmtree(place.root, ignore_errors=True)


def _demonstrate(screen: Screen, place: Place, limit: int) -> Findings:
    opened = trace.find(TRACE)
    options = Options(limit=limit, max_bytes=_room(place), max_seconds=REPLAY_SECONDS)
    identity = presets.get(PRESET, weights="demo", tokenizer="demo")
    with Store.init(place.store, index=str(place.index)) as store:
        ns = store.create_namespace(identity)
        screen.heading("A store")
        screen.say(f"{place.store}, namespace {ns.name}")
        screen.say(f"a block is 128 tokens, {ns.row_bytes:,} bytes; a record {ns.stride:,} bytes")
        found = Findings(_replay(screen, store, ns, opened, options))
        found.mounted = tour.show_tree(screen, place, ns.name)
        _compare(screen, store, ns, opened, options, found)
    return found


def _room(place: Place) -> int:
    """Bytes that may be written: 2 GB, or less where that would fill the disk."""
    room = min(MAX_BYTES, int(shutil.disk_usage(place.root).free * 0.6))
    if room < MIN_BYTES:
        raise SpaceError(f"too little room in {place.root.parent}; choose another with --dir")
    return room


def _replay(
    screen: Screen, store: Store, ns: Namespace, opened: trace.Trace, options: Options
) -> Result:
    screen.heading(f"Requests of a coding agent: {opened.header.name}")
    screen.say(f"from {opened.header.source.split(' ')[0]} ({opened.header.licence})")
    screen.say("each is checked; what hits is fetched and verified, the rest is put")

    def progress(result: Result) -> None:
        share = result.requests / (result.total or result.requests)
        text = f"{result.requests} requests, {result.hit_rate:.0%} hit"
        text += f", put {size(result.bytes_put)}, fetched {size(result.bytes_fetched)}"
        screen.progress(share, text)

    try:
        result = replay(store, ns, opened, options, progress=progress)
    finally:
        screen.progress_done()
    if result.stopped:
        limit = "time" if result.stopped == "max_seconds" else "room on the disk"
        screen.say(f"stopped behind {result.requests} requests: no {limit} for more")
    for reason, count in result.failures.items():
        screen.say(f"{count} x {reason}: {result.details[reason]}")
    return result


def _compare(
    screen: Screen,
    store: Store,
    ns: Namespace,
    opened: trace.Trace,
    options: Options,
    found: Findings,
) -> None:
    """Checks and fetches the longest prompt again, and compares every byte of it."""
    done = list(requests(opened, options))[: found.replayed.requests]
    tokens = TokenSynth(opened.header.block_tokens, opened.header.name).tokens(
        max(done, key=lambda r: r.tokens)
    )
    screen.heading(f"The longest prompt again: {len(tokens):,} tokens")
    began = time.perf_counter()
    plan = store.check(ns, tokens)
    found.check = time.perf_counter() - began
    screen.say(f"check: {plan.hit_tokens:,} tokens may be hit, found in {duration(found.check)}")
    if not plan.hit_blocks:
        raise KvfsError(f"nothing of it is stored ({plan.reason})")
    into = touched(plan.hit_blocks * ns.row_bytes)
    began = time.perf_counter()
    fetched = store.fetch(ns, plan, tokens, into)
    found.fetch = time.perf_counter() - began
    keys = ns.hasher(tokens).hashes()
    count = plan.hit_blocks
    bad = PayloadSynth(ns.row_bytes).first_difference(keys[: HASH_BYTES * count], fetched.data)
    if bad is not None:
        raise DamageError(f"block {bad} of {count} is not what was put ({fetched.reason})")
    found.compared_tokens, found.compared_bytes = plan.hit_tokens, len(fetched.data)
    screen.say(f"fetch: {size(found.compared_bytes)} in {duration(found.fetch)}")
    screen.say(f"all {count:,} blocks are byte for byte what was put")


def _rows(found: Findings) -> list[tuple[str, str, str]]:
    result = found.replayed

    def rate(operation: str) -> str:
        speed = result.rate(operation)
        return "" if speed is None else f"at {size(speed)}/s"

    def within(share: float) -> str:
        seconds = result.percentile("check", share)
        return "-" if seconds is None else duration(seconds)

    share = f"{result.hit_rate:.1%} of the prompts"
    return [
        ("requests", f"{result.requests:,}", f"{sum(result.failures.values())} failures"),
        ("prompt tokens", f"{result.input_tokens:,}", ""),
        ("hit tokens", f"{result.hit_tokens:,}", share),
        ("put", size(result.bytes_put), rate("put")),
        ("fetched, verified", size(result.bytes_fetched), rate("fetch")),
        ("check, median", within(0.5), f"99 % within {within(0.99)}"),
        ("compared", size(found.compared_bytes), f"{found.compared_tokens:,} tokens, all equal"),
        ("mounted tree", found.mounted, ""),
    ]
