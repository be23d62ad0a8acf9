"""`kvctl stats`: figures of a store, as this host's index and its counters have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvfs.cli import common, output
from kvfs.cli.settings import Settings

if TYPE_CHECKING:
    from kvfs.local import LocalStore

MANUAL = {
    "Counters": """
    Counters are those of all processes of this host, since the index was made. A process adds its
    own every few seconds and when it closes the store.

    check.REASON -- checks that ended for that reason; see kvctl-check(1)
    fetch_blocks, fetch_bytes -- blocks delivered
    fetch_miss.REASON -- fetches that came short, by what was found
    put_blocks, put_bytes, put_existing -- blocks written, and blocks that were there already
    store_failures, puts_dropped -- puts that failed or were refused, and puts that came when too
    many others of their process were under way
    renewed_runs, removed_blocks -- what was touched and evicted
    renewed_on_hit, renewals_left_out -- runs that hits have renewed, and hits that were not noted
    since too many waited to be published
    """,
    "JSON output": """
    An object:

    store, uuid -- which store
    namespaces, segments -- how many; segments that are dropped do not count
    blocks -- stored blocks, expired ones included until they are collected
    orphans -- runs out of sight until the block before them is stored
    index_bytes, index_map_bytes -- bytes of the index in use, and of its map
    index_readers -- readers in the index now
    classes -- TTL class -> seconds
    space -- object with free and total: bytes of the file system that holds the store; null with
    --local

    and every counter under its own name.
    """,
}


@common.command("""
    kvctl stats
    kvctl stats --json | jq '."check.root_unknown"'
""")
@common.options
@click.option("--local", is_flag=True,
              help="Only this host's index: nothing is asked of the shared storage.")  # fmt: skip
def command(settings: Settings, local: bool) -> None:
    """Show figures of a store and of this host's index."""
    alone = common.open_index(settings) if local else None
    with alone or common.open_store(settings) as store:
        values = {**store.stats(), "classes": store.classes(), "space": _space(store)}
    if settings.as_json:
        output.json_line(values)
    else:
        _print(values)


def _space(store: LocalStore) -> dict[str, int] | None:
    from kvfs.store import Store

    if not isinstance(store, Store):
        return None
    free, total = store.backend.free_bytes()
    return {"free": free, "total": total}


def _print(values: dict[str, Any]) -> None:
    classes, space = values.pop("classes"), values.pop("space")
    known = ", ".join(f"{name} {output.duration(s)}" for name, s in classes.items())
    sizes = {"index_bytes", "index_map_bytes", "put_bytes", "fetch_bytes"}
    rows = [
        (name, output.size(v) if name in sizes else f"{v:,}" if isinstance(v, int) else str(v))
        for name, v in values.items()
    ]
    if space is not None:
        free, total = output.size(space["free"]), output.size(space["total"])
        rows.append(("space", f"{free} free of {total}"))
    output.pairs([*rows, ("classes", known)])
