"""`kvctl bench`: what this machine does, beside its limits in the same run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvfs.bench import BENCHES, LONG
from kvfs.cli import common, output
from kvfs.cli.settings import Settings
from kvfs.cli.values import FiniteRange
from kvfs.errors import InputError

if TYPE_CHECKING:
    from kvfs.bench.timing import Options, Row

MANUAL = {
    "Figures": """
    A ratio is to a reference that is measured in turns with the figure, so that it holds on a
    machine whose speed moves; the table has the reference's own time under "beside". What is
    above its limit is marked "over".

    check.1m, check.128k -- a prompt of 1,000,000 or 131,072 tokens that is fully stored in 40 or
    5 runs, from arrays of 32-bit integers that are not in cache; with .int64, .list: from other
    forms of tokens; with .per_block: as done with a SHA-256 chain and a lookup for every block
    check.miss -- a prompt whose first block is not stored
    put.128k.none, put.128k.batch -- 1,022 new blocks of DeepSeek-V4.1-Flash, by durability
    fetch.128k.warm, fetch.128k.cold -- the same blocks read and verified in this process, from the
    page cache and without it; with .unverified: without the checksums of the payloads
    fetch.fetcher.4k, .128k, .1m -- 32, 1,022 and 7,812 blocks through the fetcher (see
    kvctl-fetcher(1)), to the client: .warm and .cold; with .unverified: neither checksums nor
    token ids are looked at; .first: the first 32 blocks of so many. 1m is left out where there is
    too little memory: 4 GB and a half should be free
    fetch.fetcher.clients2, .clients4 -- so many client processes at once, 1,022 blocks each
    startup.check, startup.help -- whole processes of kvctl check and kvctl --help
    follow.blocks -- a journal of a million blocks of another host into this host's index
    follow.check -- check of 131,072 tokens while a process follows such a journal
    cleaner.check, cleaner.fetch.warm, cleaner.fetch.cold -- what 99 % of the checks take at most,
    and fetches, while kvctl serve keeps house at the rate that a store has by default;
    copied_bytes_per_second: what it copied
    state.pull -- sliding-window state of DeepSeek-V4.1-Flash from another process, over a link
    between two network namespaces where they may be made, else the loopback device; with .load:
    at 200 a second. Needs the packages of kvfs[serve]
    steady.1h, steady.1d, steady.3d -- not of "all", since they take many minutes: five days of
    coding agents at a fixed capacity, by time to live. points_below: of the hit rate, below what
    the rule of a sliding time to live with that capacity hits; copied_per_written: bytes that
    cleaning copies; removals_per_tb: calls that remove a file, beside those of a file for each
    block
    swap.control, swap.control.batch -- not of "all", since it needs torch: name swap-in. CPU time
    of a swap-in's thread from plan to enqueued copies, 1,022 blocks of 60 layers; with_torch_calls:
    and of the calls that enqueue them. swap.copy.*: 128 K tokens into an engine's pages, by each
    way to copy that this machine has; multiprocessors: what it takes of the GPU. swap.overlap: a
    forward pass that waits for each layer, where there is a GPU
    """,
    "JSON output": """
    An object:

    rows -- list of objects: name; seconds (a median), limit_seconds; ratio, ratio_limit;
    reference (what the ratio is to), reference_seconds; samples; within_limits (true or false);
    what (in words); figures and limits (objects of further numbers by name, and what they are at
    most). What does not apply is null.
    machine -- kvfs, python, cpus, processor, filesystem
    advice -- with --prefill-tokens-per-second: warm and cold, each an object: fixed_seconds and
    tokens_per_second of loading, from_tokens (null: loading never beats recomputing), and for a
    prompt of so many tokens load_seconds and compute_seconds
    """,
    "Advice": """
    With --prefill-tokens-per-second the figures of fetch answer from which length on a stored
    prefix should be loaded. Loading costs a fixed time and then so much for each token; the
    fetches of 32 and of 1,022 blocks through the fetcher, with the check before them, give both.
    The copy to the GPU is not in it, nor what else the GPU could do in the time.
    """,
}


@common.command("""
    kvctl bench
    kvctl bench check --blocks 1000000
    kvctl bench put fetch --store /srv/kvfs --json
    kvctl bench swap-in --json
    kvctl bench fetch --store /srv/kvfs --prefill-tokens-per-second 20000
""")
@click.argument("names", metavar="[check|put|fetch|startup|follow|cleaner|state|all]...", nargs=-1,
                type=click.Choice([*BENCHES, *LONG, "all"]))  # fmt: skip
@click.option("--store", "directory", metavar="DIR",
              help="Measure the file system of this directory, in a store of its own that is "
                   "removed at the end. Default: the temporary directory.")  # fmt: skip
@click.option("--index", metavar="DIR",
              help="Where the index is made, also for the time of the run: a local disk. "
                   "Default: the temporary directory.")  # fmt: skip
@click.option("--blocks", type=click.IntRange(1), default=10_000_000, show_default=True,
              help="Blocks in the index that check is measured on.")  # fmt: skip
@click.option("--runs", type=click.IntRange(1),
              help="Samples of each figure. Default: 60 for check (500 for check.miss), 7 for put "
                   "and fetch, 20 for startup, 3 and 60 for follow, 8 for cleaner, 200 for "
                   "state.")  # fmt: skip
@click.option("--clients", type=click.IntRange(1), default=4, show_default=True,
              help="Client processes that fetch at once, at most.")  # fmt: skip
@click.option("--prefill-tokens-per-second", "prefill", type=FiniteRange(0, min_open=True),
              metavar="N",
              help="Say from which prefix length on loading beats recomputing at this speed.",
              )  # fmt: skip
@common.json_option
@click.make_pass_decorator(Settings, ensure=True)
def command(
    settings: Settings, names: tuple[str, ...], directory: str | None, index: str | None,
    blocks: int, runs: int | None, clients: int, prefill: float | None,
) -> None:  # fmt: skip
    """Measure check, put, fetch and start-up beside the limits of this machine.

    Works in temporary stores: needs about 2 GB of disk, 5 GB for cleaner, and 500 MB for the index
    of check with 10 million blocks. Takes some minutes.
    """
    from kvfs.bench import report
    from kvfs.bench.timing import Options

    wanted = BENCHES if not names or "all" in names else names
    if prefill is not None and "fetch" not in wanted:
        raise InputError("--prefill-tokens-per-second is of the figures of fetch")
    with output.Progress("bench") as progress:
        options = Options(blocks, runs, directory, index, progress.show, clients, prefill)
        rows = report.measure(wanted, options)
    if settings.as_json:
        output.json_line(report.to_json(rows, options))
    else:
        _print(rows, options)


def _print(rows: list[Row], options: Options) -> None:
    from kvfs.bench import report

    output.table(report.HEADER, [report.cells(row) for row in rows], right=report.RIGHT)
    output.line()
    for note in report.notes(rows):
        output.line(note)
    for line in report.advice(rows, options):
        output.line(line)
    output.line(", ".join(f"{key} {value}" for key, value in report.machine(options).items()))
