"""`kvctl gc`: gives back room and makes some. What may go, kvfs.gc.collector decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvfs.cli import common, output
from kvfs.cli.settings import Settings
from kvfs.cli.values import BYTES, FiniteRange

if TYPE_CHECKING:
    from kvfs.gc.collector import GcResult

MANUAL = {
    "How it works": """
    Blocks go with their segment, and a segment goes when everything in it has expired or was
    evicted. A pass first removes the files of segments that were dropped longer ago than the
    store's grace time (kvctl init --grace), then drops what has expired: a fetch that is under
    way reads on until the next pass, or until the grace is over with --wait. One collector runs
    at a time for a whole store, whichever host it is on; a second one exits with 5.

    Where the store, a namespace or a tenant has more than its limit (kvctl-limits(1)), the longest
    unused blocks are evicted, those that others follow last. Segments of which little is in use
    are copied forward, the runs of a prompt one behind the other, and dropped as well. Copies and
    removals keep to the rates of kvctl-limits(1), which may be changed while it works.

    A pass also writes a checkpoint when the journals have grown, and removes journals that no host
    needs any more.

    A pass is refused, and exits with 7, if the clock disagrees with the store's own times, or if
    it would drop more than half of the segments of a store: both look like a mistake more than
    like age. --force overrides it.
    """,
    "JSON output": """
    An object:

    dry_run -- true: nothing was changed, and the rest is what would have been
    live -- segments in use before the pass
    dropped -- list of segments that were dropped: objects with segment (id), path, ttl_class,
    reason (expired, removed, or empty), runs and blocks (visible ones), bytes
    dropped_bytes -- their bytes, which a later pass gives back
    removed -- list of files that were removed: objects with path, bytes and reason (dropped,
    orphan: no journal tells of it, unfinished: it was never written)
    freed_bytes -- their bytes
    spared -- segments that were renewed just before they would have been dropped
    being_written -- segments that may go when their writers have ended
    in_grace -- dropped segments whose files wait for the grace to end
    newer -- segments of a version this kvfs does not read; they are left alone
    refused -- why nothing was dropped, or null
    used_bytes, live_bytes -- of the segments in use before: their files, and what is in use there
    evicted -- list of objects with namespace, runs, blocks, bytes, and unused_ms (for how long the
    most recent of them had not been used)
    evicted_bytes -- their bytes
    cleaned -- list of segments that were copied forward: objects with path, bytes, live_bytes and
    reason
    cleaned_bytes -- their bytes, which a later pass gives back
    moved_blocks, moved_runs, new_runs -- what was copied forward, and what the runs became
    copied_bytes -- bytes of the copies
    bad_blocks -- blocks that could not be carried on, since a record was damaged
    checkpoint -- the checkpoint that was written, or null
    pruned -- list of journals and checkpoints that were removed
    problems -- list of what could not be read or removed; the next pass tries again
    """,
}


@common.command("""
    kvctl gc --dry-run
    kvctl gc --wait
    kvctl gc --rate 200M
""")
@common.options
@click.option("-n", "--dry-run", is_flag=True, help="Change nothing; say what would be done.")
@click.option("--wait", is_flag=True,
              help="Stay for the grace time, and remove the files of what was dropped as well.",
              )  # fmt: skip
@click.option("--force", is_flag=True, help="Drop even what looks like a mistake.")
@click.option("--rate", type=BYTES, metavar="SIZE",
              help="Copy no more than this in a second. Default: as kvctl limits has it.",
              )  # fmt: skip
@click.option("--removals", type=FiniteRange(0, min_open=True), metavar="N",
              help="Remove no more than N files in a second. Default: as kvctl limits has it.",
              )  # fmt: skip
def command(
    settings: Settings, dry_run: bool, wait: bool, force: bool, rate: int | None,
    removals: float | None,
) -> int:  # fmt: skip
    """Give back the room of what has expired or was evicted.

    Meant to be run every few minutes on some host, by a timer.
    """
    from kvfs.gc.collector import Collector

    with common.interruptible(), common.open_store(settings) as store:
        collector = Collector(
            store, dry_run=dry_run, force=force, copy_rate=rate, remove_rate=removals
        )
        result = collector.run(wait=wait)
    if settings.as_json:
        output.json_line(result.to_json())
    else:
        _print(result)
    return result.exit_code


def _print(result: GcResult) -> None:
    would = "would be " if result.dry_run else ""
    for doomed in result.dropped:
        output.line(f"{would}dropped: {doomed.path} ({doomed.reason})")
    for removed in result.removed:
        output.line(f"{would}removed: {removed.path} ({removed.reason})")
    dropped = output.many(len(result.dropped), "segment")
    removed_ = output.many(len(result.removed), "file")
    output.line(
        f"{would}dropped {dropped} of {result.live:,}, {output.size(result.dropped_bytes)}; "
        f"{would}removed {removed_}, {output.size(result.freed_bytes)}"
    )
    _print_reclaimed(result, would)
    for number, what in (
        (result.in_grace, "wait for the grace to end"),
        (result.being_written, "are expired, but may still be written"),
        (len(result.spared), "were renewed just in time"),
        (result.newer, "are of a newer version and stay"),
    ):
        if number:
            output.line(f"{output.many(number, 'segment')}: {what}")
    for problem in result.problems:
        output.message(f"kvctl gc: {problem}")
    if result.refused is not None:
        output.message(f"kvctl gc: refused: {result.refused}")


def _print_reclaimed(result: GcResult, would: str) -> None:
    done = result.reclaimed
    for e in done.evicted:
        days = output.duration(e.unused_ms / 1000)
        output.line(
            f"{would}evicted: {output.many(e.blocks, 'block')} of {e.namespace}, "
            f"{output.size(e.bytes)}, unused for {days} and more"
        )
    for wear in done.cleaned:
        output.line(
            f"{would}cleaned: {wear.path} ({wear.reason}): {output.size(wear.live_bytes)} of "
            f"{output.size(wear.bytes)} in use"
        )
    if done.moved.copied_bytes:
        moved = done.moved
        output.line(
            f"copied {output.size(moved.copied_bytes)}: {output.many(moved.moved_runs, 'run')} "
            f"became {moved.new_runs:,}"
        )
    if done.moved.bad_blocks:
        output.message(f"kvctl gc: {done.moved.bad_blocks} damaged blocks were left behind")
    if result.folded.checkpoint is not None:
        output.line(f"checkpoint: {result.folded.checkpoint}")
    if result.folded.pruned:
        output.line(f"removed {output.many(len(result.folded.pruned), 'journal')} of the past")
