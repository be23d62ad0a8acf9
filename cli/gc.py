"""`kvctl gc`: gives back the room of what has expired. What may go, kvfs.gc decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvfs.cli import common, output
from kvfs.cli.settings import Settings

if TYPE_CHECKING:
    from kvfs.gc import GcResult

MANUAL = {
    "How it works": """
    Blocks go with their segment, and a segment goes when everything in it has expired or was
    evicted. A pass first removes the files of segments that were dropped longer ago than the
    store's grace time (kvctl init --grace), then drops what has expired: a fetch that is under
    way reads on until the next pass, or until the grace is over with --wait. One collector runs
    at a time for a whole store, whichever host it is on; a second one exits with 5.

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
    problems -- list of what could not be read or removed; the next pass tries again
    """,
}


@common.command("""
    kvctl gc --dry-run
    kvctl gc --wait
""")
@common.options
@click.option("-n", "--dry-run", is_flag=True, help="Change nothing; say what would be done.")
@click.option("--wait", is_flag=True,
              help="Stay for the grace time, and remove the files of what was dropped as well.",
              )  # fmt: skip
@click.option("--force", is_flag=True, help="Drop even what looks like a mistake.")
def command(settings: Settings, dry_run: bool, wait: bool, force: bool) -> int:
    """Give back the room of what has expired or was evicted.

    Meant to be run every few minutes on some host, by a timer.
    """
    from kvfs.gc import Collector

    with common.interruptible(), common.open_store(settings) as store:
        result = Collector(store, dry_run=dry_run, force=force).run(wait=wait)
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
