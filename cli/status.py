"""`kvctl status`: how far this host is behind the writers of a store, and who keeps house."""

from __future__ import annotations

from typing import Any

from kvfs.cli import common, output
from kvfs.cli.settings import Settings

MANUAL = {
    "JSON output": """
    An object:

    store, uuid -- which store
    blocks -- blocks in this host's index
    followed -- share of the journals' bytes that are applied, 0 to 1; writers that ended and were
    read to the end do not count
    behind_records, behind_seconds -- entries that are not applied, and the age of the oldest
    writers -- list of objects with writer, journal (number), offset (bytes applied), records,
    bytes and seconds it is behind (records are an estimate where there are many), total (bytes of
    its journals), and problem (why it cannot be read on, or null)
    problems -- list of those; in passed, how many there were
    housekeeping -- object: working (host and pid of the process that collects now, or null) and
    passed: the last pass that is on record, by whichever host, or null: host, pid, token (another
    one for each pass), began_ms, ended_ms, age_seconds, live (segments in use before it), refused
    (why nothing was dropped, or null), problems, and last and total: sums of this pass and of all
    that are on record
    passes, dropped_segments, cleaned_segments, copied_bytes, evicted_bytes, removed_files,
    freed_bytes, bad_blocks -- those sums, as kvctl-gc(1) has them
    """,
}


@common.command("""
    kvctl status
    kvctl status --json | jq .behind_seconds
""")
@common.options
def command(settings: Settings) -> None:
    """Show how far this host is behind each writer, and who keeps house."""
    from kvfs.serve import status

    with common.open_store(settings, catch_up=False) as store:
        found = status(store)
    if settings.as_json:
        output.json_line(found)
    else:
        _print(found)


def _print(found: dict[str, Any]) -> None:
    output.pairs(
        [
            ("store", found["store"]),
            ("blocks", f"{found['blocks']:,}"),
            ("followed", f"{found['followed']:.1%}"),
            ("behind", f"{found['behind_records']:,} entries, {found['behind_seconds']:.1f} s"),
            *_housekeeping(found["housekeeping"]),
        ]
    )
    for writer in found["writers"]:
        problem = f": {writer['problem']}" if writer["problem"] else ""
        output.line(
            f"{writer['writer']}  {writer['records']} entries, {writer['seconds']:.1f} s{problem}"
        )


def _housekeeping(found: dict[str, Any]) -> list[tuple[str, str]]:
    working, passed = found["working"], found["passed"]
    rows = []
    if working is not None:
        rows.append(("collecting", f"process {working['pid']} on {working['host']}"))
    if passed is None:
        return [*rows, ("last pass", "none on record")]
    rows.append(
        (
            "last pass",
            f"{passed['age_seconds']:,.0f} s ago, by process {passed['pid']} on "
            f"{passed['host']}: {_sums(passed['last'])}",
        )
    )
    if passed["refused"] is not None:
        rows.append(("refused", passed["refused"]))
    if passed["problems"]:
        rows.append(("problems", f"{passed['problems']}; its host's log, or kvctl gc, names them"))
    total = passed["total"]
    rows.append(("all passes", f"{total['passes']:,}: {_sums(total)}"))
    return rows


def _sums(sums: dict[str, int]) -> str:
    removed = output.many(sums["removed_files"], "file")
    return (
        f"{output.size(sums['freed_bytes'])} freed in {removed}, "
        f"{output.size(sums['copied_bytes'])} copied, {output.size(sums['evicted_bytes'])} evicted"
    )
