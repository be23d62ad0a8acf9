"""`kvctl replay`: drives a store with a request trace. The replay itself is kvfs.sim.replay."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from kvfs.cli import common, output
from kvfs.cli.settings import Settings
from kvfs.cli.values import BYTES, DURATION, FiniteRange
from kvfs.errors import InputError

if TYPE_CHECKING:
    from kvfs.namespace import Namespace
    from kvfs.sim.replay import Options, Progress, Result
    from kvfs.sim.trace import Trace
    from kvfs.sim.windows import Sums
    from kvfs.store import Store

MANUAL = {
    "Traces": """
    A trace is a kvtrace file, JSON lines, gzipped or not: which requests came when, and which
    share which prefix. kvfs comes with some; a name that is no file is one of those, and
    kvctl replay --list lists them. Tokens and payloads are made up, the same ones every time, so
    that every fetched byte can be compared with what must have been put.
    """,
    "State policies": """
    With --state-policy the replay also reckons what a model with a sliding window would have hit:
    every prefix that is stored, where the window comes from a slot or from a replay; and, for
    comparison, "request ends": only where an earlier request ended, and never with a replay. Slots
    are kept without a limit. Traces do not say where answers ended, so no rule has a slot there.
    """,
    "JSON output": """
    An object:

    trace, store, namespace -- what was replayed where
    requests -- requests replayed
    input_tokens -- tokens of their prompts
    stored_tokens -- sum of the stored prefixes that were found, before any cap on hits
    hit_tokens, hit_rate -- what of them may be hit, and its share of the input tokens
    blocks_put, bytes_put -- blocks stored, and bytes of their payloads
    bytes_fetched -- bytes of payloads fetched and, unless told otherwise, compared
    seconds -- how long it took
    processes -- how many there were
    stopped -- the limit that ended the replay early (max_bytes, max_seconds), else ""
    failures, failure_details -- what came short or was refused -> how often, and an example
    latency -- check, fetch, put -> count, and p50 and p99 in seconds
    bytes_per_second -- fetch, put -> payload bytes, while fetching and putting
    state_policies -- with --state-policy: list of objects with policy, hit_tokens, hit_rate,
    replay_tokens, slots and bytes (taken in all)
    """,
}


@common.command("""
    kvctl replay --temporary --preset tiny weka_claude_code_small
    kvctl replay --ns llama --limit 500 --max-bytes 2G trace.jsonl.gz
    kvctl replay --temporary --processes 4 --json mooncake_conversation_2000
    kvctl replay --temporary --preset tiny-swa --no-fetch --state-policy all weka_claude_code_small
    kvctl replay --list
""")
@common.options
@common.namespace_option
@click.option("--list", "show", is_flag=True, help="List the traces that come with kvfs.")
@click.option("--temporary", is_flag=True,
              help="Make a store of its own, and remove it at the end.")  # fmt: skip
@click.option("--dir", "below", metavar="DIR",
              help="Where to make the temporary store. Default: $TMPDIR or /tmp.")  # fmt: skip
@click.option("--preset", metavar="NAME",
              help="Replay in a namespace of this layout, made if need be; see kvctl-ns(1). "
                   "Default with --temporary: tiny.")  # fmt: skip
@click.option("--processes", type=click.IntRange(1, 256), metavar="N", default=1,
              show_default=True,
              help="Share the requests out to so many processes, in lock-step.")  # fmt: skip
@click.option("--limit", type=click.IntRange(0, 1_000_000_000), metavar="N",
              help="So many requests at most.")  # fmt: skip
@click.option("--max-bytes", type=BYTES, metavar="SIZE",
              help="End before more than that would be written.")  # fmt: skip
@click.option(
    "--max-seconds", type=FiniteRange(0), metavar="N", help="Start no request after N seconds."
)
@click.option("--fetch/--no-fetch", default=True, help="Fetch what hits, or only check and put.")
@click.option("--verify/--no-verify", default=True, help="Compare fetched bytes with those put.")
@click.option("--touch", is_flag=True, help="Renew what was hit, as an engine does.")
@click.option("--class", "ttl_class", metavar="NAME", help="TTL class of what is put.")
@click.option("--state-policy", multiple=True, metavar="NAME",
              help="Reckon besides what a sliding window would hit under a policy of "
                   "kvctl-state(1); may be given again, or be all.")  # fmt: skip
@click.option("--trace-time", is_flag=True,
              help="Let the store's clock show the time of the trace, so that blocks expire.",
              )  # fmt: skip
@click.option("--session-gap", type=DURATION, metavar="TIME", default="10min", show_default=True,
              help="Time between the starts of sessions, which traces leave open.")  # fmt: skip
@click.argument("trace", required=False)
def command(
    settings: Settings, show: bool, temporary: bool, below: str | None, preset: str | None,
    processes: int, trace_time: bool, trace: str | None, session_gap: int,
    state_policy: tuple[str, ...], **chosen: Any,
) -> None:  # fmt: skip
    """Drive a store with a request trace and say what hit.

    For each request of TRACE: check, fetch what hits, put the rest, with made-up blocks. Exits
    with 12 if a fetched byte is not the one that was put. What came short or was refused is
    counted and printed.
    """
    from kvfs.sim import trace as traces
    from kvfs.sim.replay import Options

    if show:
        _list(settings)
        return
    if trace is None:
        raise InputError(f"which trace? A file, or one of {', '.join(traces.builtin())}")
    opened = traces.find(trace)
    if "all" in state_policy:
        state_policy = ("full", "periodic:4096", "last", "last:1", "zero")
    options = Options(session_gap=float(session_gap), state_policy=state_policy, **chosen)
    with common.interruptible(), _place(settings, temporary, below) as (path, index):
        start = time.time() if trace_time else None
        job = _Job(settings, path, index, opened, options, processes, start)
        with job.open(temporary) as store:
            ns = job.namespace(store, preset or ("tiny" if temporary else None))
            result = job.run(store, ns)
            fields = {"trace": opened.header.name, **common.heading(store, ns), **result.to_json()}
    if settings.as_json:
        output.json_line(fields)
    else:
        _print(result)


def _list(settings: Settings) -> None:
    from kvfs.sim import trace as traces

    for name, path in traces.builtin().items():
        header = traces.Trace(path).header
        if settings.as_json:
            fields = {"trace": name, "path": str(path), "requests": header.requests}
            output.json_line({**fields, "source": header.source, "licence": header.licence})
        else:
            output.line(f"{name}  {header.requests or '?'} requests, {header.licence}")


@contextlib.contextmanager
def _place(
    settings: Settings, temporary: bool, below: str | None
) -> Iterator[tuple[str, str | None]]:
    """Paths of the store and of the indexes."""
    if not temporary:
        yield settings.store, settings.index
        return
    try:
        root = tempfile.mkdtemp(prefix="kvfs-replay-", dir=below)
    except OSError as e:
        raise InputError(f"{below or tempfile.gettempdir()}: {e.strerror}") from None
    # Nobody else will ever see this index, so the directory may be an overlay of a container.
    os.environ["KVFS_INDEX_FORCE"] = "1"
    try:
        yield os.path.join(root, "store"), os.path.join(root, "index")
    finally:
        shutil.rmtree(root, ignore_errors=True)


class _Job:
    """One replay, from opening the store on."""

    def __init__(
        self, settings: Settings, path: str, index: str | None, trace: Trace, options: Options,
        processes: int, start: float | None,
    ) -> None:  # fmt: skip
        """start: the time that stands for the trace's beginning; None: the real time counts."""
        from kvfs.sim.replay import TraceClock

        self.settings, self.path, self.index = settings, path, index
        self.trace, self.options, self.processes = trace, options, processes
        self.start = start
        self.clock = None if start is None else TraceClock(start)

    def open(self, new: bool) -> Store:
        from kvfs.store import Store

        clock = self.clock or time.time
        if new:
            return Store.init(self.path, index=self.index, clock=clock, durability="none")
        with output.Progress("reading journals, entries") as progress:
            return Store.open(self.path, index=self.index, clock=clock, progress=progress)

    def namespace(self, store: Store, preset: str | None) -> Namespace:
        from kvfs import presets

        if preset is None:
            return common.pick_namespace(store, self.settings)
        return store.create_namespace(presets.get(preset, weights="replay", tokenizer="replay"))

    def run(self, store: Store, ns: Namespace) -> Result:
        from kvfs.sim.lockstep import replay_processes
        from kvfs.sim.replay import replay

        with output.Progress("requests") as line:
            progress = _progress(line)
            if self.processes == 1:
                return replay(
                    store, ns, self.trace, self.options, clock=self.clock, progress=progress
                )
            return replay_processes(
                self.path, ns.name, self.trace, self.processes, self.options, index=self.index,
                clock_start=self.start, progress=progress,
            )  # fmt: skip


def _progress(line: output.Progress) -> Progress:
    def show(result: Result) -> None:
        total = "" if result.total is None else f" of {result.total:,}"
        text = f"{result.requests:,}{total} requests, {result.hit_rate:.1%} hit"
        text += f", put {output.size(result.bytes_put)}"
        line.draw(f"{text}, fetched {output.size(result.bytes_fetched)}")

    return show


def _print(result: Result) -> None:
    stopped = f" (stopped by {result.stopped})" if result.stopped else ""
    output.pairs(
        [("requests", f"{result.requests:,} in {output.duration(result.seconds)}{stopped}"),
         ("input tokens", f"{result.input_tokens:,}"),
         ("stored tokens", f"{result.stored_tokens:,}"),
         ("hit tokens", f"{result.hit_tokens:,}, {result.hit_rate:.1%} of the input"),
         ("put", f"{output.size(result.bytes_put)}, {output.many(result.blocks_put, 'block')}"),
         ("fetched", output.size(result.bytes_fetched)),
         *((f"{name} time", _times(result, name)) for name in ("check", "fetch", "put"))]
    )  # fmt: skip
    if result.windows:
        output.line()
        header = ("STATE POLICY", "HIT TOKENS", "RATE", "REPLAYED", "SLOTS", "BYTES")
        output.table(header, (_window_row(sums, result) for sums in result.windows), right="lrrrrr")
    for reason, count in result.failures.items():
        output.line(f"{count:,} x {reason}: {result.details[reason]}")


def _window_row(sums: Sums, result: Result) -> tuple[str, ...]:
    rate = sums.hit_tokens / result.input_tokens if result.input_tokens else 0.0
    return (
        sums.policy, f"{sums.hit_tokens:,}", f"{rate:.1%}", f"{sums.replay_tokens:,}",
        f"{sums.slots:,}", output.size(sums.bytes),
    )  # fmt: skip


def _times(result: Result, operation: str) -> str:
    half, most = (result.percentile(operation, share) for share in (0.5, 0.99))
    if half is None or most is None:
        return ""
    rate = result.rate(operation) if operation != "check" else None
    speed = "" if rate is None else f", {output.size(rate)}/s"
    return f"{output.duration(half)} median, {output.duration(most)} at 99 %{speed}"
