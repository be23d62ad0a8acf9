"""`kvctl status`: how far this host is behind the writers of a store."""

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
    problems -- list of those
    """,
}


@common.command("""
    kvctl status
    kvctl status --json | jq .behind_seconds
""")
@common.options
def command(settings: Settings) -> None:
    """Show how far this host is behind each writer."""
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
        ]
    )
    for writer in found["writers"]:
        problem = f": {writer['problem']}" if writer["problem"] else ""
        output.line(
            f"{writer['writer']}  {writer['records']} entries, {writer['seconds']:.1f} s{problem}"
        )
