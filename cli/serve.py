"""`kvctl serve`: the background work of a host. What that is, kvfs.serve says."""

from __future__ import annotations

import click

from kvfs.cli import common, output
from kvfs.cli.settings import Settings

MANUAL = {
    "How it works": """
    Run it on every host whose routers check a store. It follows the journals of the store's other
    writers into this host's index, so that what any host stored is a hit here, usually within half
    a second. A new host begins with a checkpoint, if the store has one. It may be killed at any
    time: it goes on where it was. kvctl-status(1) shows how far it is.

    It tells systemd when it is ready, and ends with SIGTERM.
    """,
    "JSON output": """
    Nothing is printed while it serves; one object when it ends:

    turns -- looks at journals
    entries -- journal entries applied
    """,
}


@common.command("""
    kvctl serve --store /mnt/3fs/kvfs
    kvctl serve --interval 1
""")
@common.options
@click.option("--interval", type=click.FloatRange(0.01, 60), default=0.2, show_default=True,
              help="Seconds between looks at a writer that has news.")  # fmt: skip
def command(settings: Settings, interval: float) -> None:
    """Follow the other writers of a store, until it is told to end."""
    from kvfs.serve import Service

    with common.open_store(settings, catch_up=False) as store:
        service = Service(store, interval=interval)
        service.run()
        if settings.as_json:
            following = service.following
            output.json_line({"turns": following.turns, "entries": following.entries})
