"""`kvctl rebuild`: makes this host's index anew. How, kvfs.repair.rebuild says."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from kvfs.cli import common, output
from kvfs.cli.settings import Settings
from kvfs.errors import IndexFault

if TYPE_CHECKING:
    from kvfs.repair.rebuild import Rebuilt
    from kvfs.store import Store

MANUAL = {
    "Sources": """
    journals -- what every writer made visible, renewed and removed: the index becomes what it was
    segments -- the stored blocks themselves, where the journals are lost. Removals and renewals
    are told by journals only, so removed blocks come back, each with the expiry it began with
    """,
    "JSON output": """
    An object:

    store -- which store
    source -- journals or segments
    entries -- entries applied
    segments, runs, blocks -- what the index holds now
    waiting -- runs out of sight until the block before them is stored
    newer -- journals and segments of a version this kvfs does not read; they are left alone
    unmentioned -- list of segments that no journal tells of
    skipped -- list of what could not be read, or not to its end, and why
    """,
}


@common.command("""
    kvctl rebuild
    kvctl rebuild --from segments
""")
@common.options
@click.option("--from", "source", type=click.Choice(["auto", "journals", "segments"]),
              default="auto", show_default=True,
              help="What to read; auto: the journals if there are any that can be read.",
              )  # fmt: skip
def command(settings: Settings, source: str) -> None:
    """Make this host's index anew, from journals or stored blocks.

    Nothing of the store is changed. Processes that have the index open go on with the old one
    until the new one is whole.
    """
    from kvfs.repair.rebuild import rebuild

    with _open(settings) as store:
        with output.Progress("entries applied") as progress:
            result = rebuild(store, source=source, progress=progress)
        if settings.as_json:
            output.json_line({"store": store.path, **result.to_json()})
        else:
            _print(result)


def _open(settings: Settings) -> Store:
    try:
        return common.open_store(settings, catch_up=False)
    except IndexFault:
        _throw_away(settings)
    return common.open_store(settings, catch_up=False)


def _throw_away(settings: Settings) -> None:
    """Removes an index that is of another format, or that cannot be opened at all."""
    from kvfs.backend.select import open_backend
    from kvfs.config import load_config
    from kvfs.index.guard import throw_away
    from kvfs.index.place import default_root

    uuid = load_config(open_backend(settings.store)).uuid
    throw_away(os.path.join(settings.index or default_root(), uuid.hex()))


def _print(result: Rebuilt) -> None:
    output.line(
        f"from the {result.source}: {output.many(result.blocks, 'block')} in "
        f"{output.many(result.runs, 'run')}, {output.many(result.segments, 'segment')}"
    )
    if result.newer:
        output.line(f"left alone, of a newer version: {output.many(result.newer, 'file')}")
    for path in result.unmentioned:
        output.line(f"no journal tells of {path}")
    for what in result.skipped:
        output.line(f"skipped: {what}")
