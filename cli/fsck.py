"""`kvctl fsck`: reads everything and says what is wrong. What is checked, kvfs.repair.fsck says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvfs.cli import common, output
from kvfs.cli.settings import Settings

if TYPE_CHECKING:
    from kvfs.repair.fsck import Progress
    from kvfs.scan.findings import Finding, Report

MANUAL = {
    "Findings": """
    damage -- stored blocks cannot be had, or the index would answer wrongly. Kinds: record,
    short, missing, unreadable, index
    warning -- something is wrong that no read needs. Kinds: padding, gap, header, footer,
    journal, checkpoint, untold
    note -- normal, and worth knowing. Kinds: orphan, unsealed, dropped, duplicate (a second file
    of a segment), copy (blocks that two writers stored at once), hole (blocks that no check
    reaches, since the one before them is not there), newer, strange, behind
    """,
    "Repair": """
    Damaged records, and all that follows them, are taken out of sight on every host, as are
    blocks whose file is gone; an index that contradicts itself is made anew. Sound blocks are
    never removed and no file is changed. Segments that cannot be opened may only be out of reach
    and are left alone. If all files are missing nothing is done without --force: the storage may
    be away.
    """,
    "JSON output": """
    An object:

    store -- which store
    segments, runs, records, bytes -- what was verified
    expired_runs -- runs that were not, because their time is over
    waiting_runs -- runs out of sight until the block before them is stored
    journals -- journals that were read
    damage, warnings, notes -- number of findings of each level
    counts -- kind of finding -> how many
    findings -- list of objects: level, kind, path, detail, and where they apply slot, offset,
    block, blocks (how many it costs) and namespace
    left_out -- findings that are counted, but not listed
    repaired -- true if what could be repaired was
    cut_blocks -- blocks that the repair took out of sight, those behind a bad one included
    dropped_segments -- segments it dropped, whose files are gone
    rebuilt -- true if it made the index anew
    unrepaired -- list of why damage was left as it is
    """,
}

_SHOWN = 100


@common.command("""
    kvctl fsck
    kvctl fsck --repair
    kvctl fsck --json | jq '.findings[] | select(.level == "damage")'
""")
@common.options
@click.option("--repair", is_flag=True, help="Drop what is bad.")
@click.option("--force", is_flag=True,
              help="With --repair: even if every segment is missing.")  # fmt: skip
def command(settings: Settings, repair: bool, force: bool) -> int:
    """Read everything, verify it and report.

    The store may be in use meanwhile. Exits with 12 if damage was found, repaired or not.
    """
    from kvfs.repair.fsck import fsck

    with (
        common.interruptible(),
        common.open_store(settings) as store,
        output.Progress("verifying") as line,
    ):
        report = fsck(store, repair=repair, force=force, progress=_progress(line))
        where = store.path
    if settings.as_json:
        output.json_line({"store": where, **report.to_json()})
    else:
        _print(report)
    return report.exit_code


def _progress(line: output.Progress) -> Progress:
    def show(done: int, total: int) -> None:
        line.draw(f"verified {output.size(done)} of {output.size(total)}")

    return show


def _print(report: Report) -> None:
    shown = sorted(report.findings, key=_weight)[:_SHOWN]
    for finding in shown:
        output.line(str(finding))
    more = sum(report.counts.values()) - len(shown)
    if more:
        output.line(f"and {output.many(more, 'more finding')}; --json lists them")
    output.line(
        f"{output.many(report.records, 'record')} in {output.many(report.segments, 'segment')}, "
        f"{output.size(report.bytes)}: {_sum(report)}"
    )
    if report.repaired:
        index = ", made the index anew" if report.rebuilt else ""
        output.line(
            f"repaired: took {output.many(report.cut_blocks, 'block')} out of sight, dropped "
            f"{output.many(report.dropped_segments, 'segment')}{index}"
        )
    for why in report.unrepaired:
        output.line(f"not repaired: {why}")


def _weight(finding: Finding) -> int:
    return ("damage", "warning", "note").index(finding.level)


def _sum(report: Report) -> str:
    if not report.counts:
        return "all sound"
    levels = ("damage", "warning", "note")
    counts = [(level, report.level_count(level)) for level in levels]
    return ", ".join(f"{n:,} {level}" for level, n in counts if n)
