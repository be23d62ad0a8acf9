"""FETCH through the fetcher's process: stored prompts into its shared memory, and to clients.

A sample begins when a client asks and ends when it holds all blocks, compared with its tokens; the
fetcher has none of them before. Beside it, in turns, kvfs.bench.plain. `unverified` leaves out the
checksums and the comparison of tokens. With several client processes each has a prompt of its own.

The prompt of a million tokens is left out where there is not memory enough for it.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from kvfs.arena import available_memory
from kvfs.bench import payload
from kvfs.bench.advice import ADVISING
from kvfs.bench.clients import Clients
from kvfs.bench.payload import Prompts, hit_blocks
from kvfs.bench.place import new_store, scratch
from kvfs.bench.plain import PlainReader
from kvfs.bench.timing import Case, Options, Row, compared, in_turns, timed
from kvfs.fetcher import launch
from kvfs.fetcher.client import FetchClient, pieces_of
from kvfs.fetcher.wire import Piece
from kvfs.filesystems import LOCAL_DISKS, filesystem_type
from kvfs.namespace import Namespace
from kvfs.store import Store

RUNS = 7
FIRST_BLOCKS = 32
REFERENCE = "a plain read of the same bytes into shared memory by as many threads: "
# Name -> (page cache dropped, verified, most of the ratio to a plain read).
CASES: dict[str, tuple[bool, bool, float]] = {
    "warm": (False, True, 1.5),
    "warm.unverified": (False, False, 1.15),
    "cold": (True, True, 1.1),
    "cold.unverified": (True, False, 1.1),
}
FIRST_SECONDS = 5e-3
_DEADLINE = 60.0
_SPARE = 1 << 30


@dataclass(frozen=True, slots=True)
class Prompt:
    """A stored prompt: its tokens, the blocks that are fetched of it, and where they lie."""

    tokens: Any
    blocks: int
    pieces: list[Piece]


class Rig:
    """A store, its fetcher, and plain reads beside it."""

    def __init__(
        self, store: Store, ns: Namespace, client: FetchClient, plain: PlainReader
    ) -> None:
        self.store = store
        self.ns = ns
        self.client = client
        self.plain = plain
        self.check_seconds: list[float] = []

    def prompt(self, tokens: Any, blocks: int) -> Prompt:
        plan = self.store.check(self.ns, tokens)
        pieces = pieces_of(self.ns, plan, 0, blocks)
        self.plain.open(pieces)
        return Prompt(tokens, blocks, pieces)

    def fetch(self, prompt: Prompt, *, verify: bool = True, first: int | None = None) -> float:
        """Seconds until all blocks are here, or the first ones."""
        self.client.evict()
        hasher = self.ns.hasher(prompt.tokens)
        began = time.perf_counter()
        plan = self.store.check(self.ns, hasher)
        start = time.perf_counter()
        self.check_seconds.append(start - began)
        with self.client.fetch(
            self.ns, plan, hasher, deadline=_DEADLINE, blocks=prompt.blocks, checksums=verify,
            identity=verify,
        ) as ticket:  # fmt: skip
            ticket.wait(first)
            seconds = time.perf_counter() - start
            if ticket.wait() < prompt.blocks:
                raise AssertionError(f"a fetch ended early: {ticket.reason}")
        return seconds

    def case(self, work: Case, prompt: Prompt, *, cold: bool) -> Case:
        """Work with the page cache as it should be."""

        def once() -> float:
            if cold:
                self.plain.drop(prompt.pieces)
            else:
                self.plain.read(prompt.pieces)
            return work()

        return once

    def plain_case(self, prompt: Prompt, *, cold: bool) -> Case:
        read = self.plain.read
        return self.case(lambda: timed(lambda: read(prompt.pieces)), prompt, cold=cold)

    def fetch_case(self, prompt: Prompt, *, cold: bool, **options: Any) -> Case:
        return self.case(lambda: self.fetch(prompt, **options), prompt, cold=cold)


def run(options: Options) -> Iterator[Row]:
    """Yields the rows `fetch.fetcher.*`. Raises ConfigError, BackendError, SpaceError."""
    runs = options.runs or RUNS
    with ExitStack() as stack:
        store, ns = stack.enter_context(new_store(options.directory, options.index))
        prompts = Prompts(ns, hit_blocks(ns))
        long = payload.LONG_TOKENS // ns.block_tokens
        most = max(options.clients * prompts.blocks, long)
        if available_memory()[0] < 4 * most * ns.stride + _SPARE:
            long = 0
            most = options.clients * prompts.blocks
        rig, prompts_of = _rig(stack, options, store, ns, most), _stored(store, ns, prompts)
        short = [rig.prompt(next(prompts_of), prompts.blocks) for _ in range(options.clients)]
        _compare(rig, short[0], prompts)
        yield from _small(rig, options, runs, short[0])
        yield from _sized(rig, options, runs, "128k", short[0])
        if long:
            tokens = prompts.long(long)
            _put(store, ns, tokens, prompts.cycle(long))
            yield from _sized(rig, options, runs, "1m", rig.prompt(tokens, long))
        yield from _many(rig, options, runs, short)


def _rig(stack: ExitStack, options: Options, store: Store, ns: Namespace, most: int) -> Rig:
    threads = launch.default_threads(filesystem_type(store.path) in LOCAL_DISKS)
    runtime = stack.enter_context(scratch(None))
    stack.enter_context(_environment("KVFS_RUNTIME", str(runtime)))
    size = most * ns.stride
    plain = stack.enter_context(PlainReader(store.path, ns, threads, size))
    arena = launch.Options(size + (16 << 20), threads, parent=os.getpid())
    client = stack.enter_context(_fetcher(store, arena))
    return Rig(store, ns, client, plain)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@contextmanager
def _fetcher(store: Store, options: launch.Options) -> Iterator[FetchClient]:
    """A client of a shared fetcher of the benchmark's own, which is gone afterwards."""
    client = launch.connect(store.path, store.uuid, options)
    handle = os.pidfd_open(client.fetcher_pid)
    try:
        yield client
    finally:
        client.close()
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        _wait(handle)
        os.close(handle)


def _wait(handle: int) -> None:
    import select

    select.select([handle], [], [], 10.0)


def _stored(store: Store, ns: Namespace, prompts: Prompts) -> Iterator[Any]:
    """Tokens of prompts that are stored."""
    while True:
        tokens = prompts.next()
        _put(store, ns, tokens, prompts.payload)
        yield tokens


def _put(store: Store, ns: Namespace, tokens: Any, blocks: Any) -> None:
    put = store.put(ns, tokens, blocks)
    if put.error is not None:
        raise put.error


def _compare(rig: Rig, prompt: Prompt, prompts: Prompts) -> None:
    """What is fetched is what was put."""
    plan, row = rig.store.check(rig.ns, prompt.tokens), rig.ns.row_bytes
    with rig.client.fetch(
        rig.ns, plan, prompt.tokens, deadline=_DEADLINE, blocks=prompt.blocks
    ) as ticket:
        ticket.wait()
        for block in range(prompt.blocks):
            if ticket.payload(block) != prompts.payload[block * row : (block + 1) * row]:
                raise AssertionError("fetched bytes differ from those put")


# rows


def _sized(rig: Rig, options: Options, runs: int, size: str, prompt: Prompt) -> Iterator[Row]:
    options.progress(f"fetch.fetcher.{size}")
    rig.check_seconds.clear()
    first = min(FIRST_BLOCKS, prompt.blocks)
    head = rig.prompt(prompt.tokens, first)
    cases = {
        name: rig.fetch_case(prompt, cold=cold, verify=verified)
        for name, (cold, verified, _) in CASES.items()
    }
    cases["first"] = rig.fetch_case(prompt, cold=False, first=first)
    cases["plain"] = rig.plain_case(prompt, cold=False)
    cases["plain cold"] = rig.plain_case(prompt, cold=True)
    cases["plain first"] = rig.plain_case(head, cold=False)
    found = in_turns(cases, runs)
    for name, (cold, verified, limit) in CASES.items():
        how = "page cache dropped" if cold else "from the page cache"
        how += ", verified" if verified else ", not verified"
        samples = found[name], found["plain cold" if cold else "plain"]
        yield _row(rig, f"{size}.{name}", prompt, how, samples, ratio_limit=limit)
    how = f"the first of {prompt.blocks:,}, from the page cache, verified"
    samples = found["first"], found["plain first"]
    yield _row(rig, f"{size}.first", head, how, samples, limit_seconds=FIRST_SECONDS)


def _small(rig: Rig, options: Options, runs: int, prompt: Prompt) -> Iterator[Row]:
    """What a fetch costs however little is fetched."""
    options.progress("fetch.fetcher.4k")
    blocks = min(FIRST_BLOCKS, prompt.blocks)
    # The last token of a prompt is never hit: a block more than is fetched.
    small = rig.prompt(prompt.tokens[: (blocks + 1) * rig.ns.block_tokens], blocks)
    rig.check_seconds.clear()
    cases = {}
    for name, cold in (("warm", False), ("cold", True)):
        cases[name] = rig.fetch_case(small, cold=cold)
        cases[f"plain {name}"] = rig.plain_case(small, cold=cold)
    found = in_turns(cases, runs)
    for name, how in (("warm", "from the page cache"), ("cold", "page cache dropped")):
        samples = found[name], found[f"plain {name}"]
        yield _row(rig, f"4k.{name}", small, f"{how}, verified", samples)


def _many(rig: Rig, options: Options, runs: int, prompts: list[Prompt]) -> Iterator[Row]:
    """Several clients at once, each with a prompt of its own."""
    n = 2
    while n <= len(prompts):
        options.progress(f"fetch.fetcher.clients{n}")
        pieces = [piece for prompt in prompts[:n] for piece in prompt.pieces]
        everything = Prompt(None, n * prompts[0].blocks, pieces)
        index = os.path.dirname(rig.store.index.path)
        wanted = [(prompt.tokens, prompt.blocks) for prompt in prompts[:n]]
        with scratch(None) as place, Clients(rig.store.path, index, place, wanted) as clients:

            def fetch(clients: Clients = clients) -> float:
                rig.client.evict()
                return clients.fetch()

            cases = {
                "fetch": rig.case(fetch, everything, cold=False),
                "plain": rig.plain_case(everything, cold=False),
            }
            found = in_turns(cases, runs)
        how = f"for {n} client processes at once, from the page cache, verified"
        yield _row(rig, f"clients{n}", everything, how, (found["fetch"], found["plain"]))
        n *= 2


def _row(
    rig: Rig, name: str, prompt: Prompt, how: str, samples: tuple[list[float], list[float]], *,
    ratio_limit: float | None = None, limit_seconds: float | None = None,
) -> Row:  # fmt: skip
    seconds, base, ratio = compared(*samples)
    size = prompt.blocks * rig.ns.row_bytes
    figures = {"bytes": size, "bytes_per_second": size / seconds}
    if f"fetch.fetcher.{name}" in ADVISING:
        figures |= {
            "tokens": prompt.blocks * rig.ns.block_tokens,
            "check_seconds": statistics.median(rig.check_seconds),
        }
    return Row(
        f"fetch.fetcher.{name}", seconds, len(samples[0]),
        f"{prompt.blocks:,} blocks, {size:,} bytes, {how}", ratio=ratio,
        reference=f"{REFERENCE}{rig.plain.threads}",
        reference_seconds=base, ratio_limit=ratio_limit, limit_seconds=limit_seconds,
        figures=figures,
    )  # fmt: skip
