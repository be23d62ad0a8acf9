"""`kvctl init`: makes a store. What its settings mean is kvfs.config's to say."""

from __future__ import annotations

import click

from kvfs.cli import common, output
from kvfs.cli.settings import Settings
from kvfs.cli.values import BYTES, DURATION

MANUAL = {
    "JSON OUTPUT": """
    store -- path of the store
    uuid -- its id, 32 hex digits
    extent, segment_bytes -- bytes
    durability -- none, batch or always
    grace_seconds -- how long the file of a removed segment stays
    classes -- TTL class -> seconds
    """,
}


@common.command("""
    kvctl init /srv/kvfs
    kvctl init --durability none --class session=12h /mnt/fast/kvfs
""")
@common.options
@click.option("--extent", type=BYTES, default="4M", show_default=True, metavar="SIZE",
              help="The file system's chunk: no record crosses a multiple of it.")  # fmt: skip
@click.option("--segment", type=BYTES, default="256M", show_default=True, metavar="SIZE",
              help="Size at which a segment is sealed.")  # fmt: skip
@click.option("--durability", type=click.Choice(["none", "batch", "always"]), default="batch",
              show_default=True,
              help="When written blocks are made durable: never, once a run, after each write.",
              )  # fmt: skip
@click.option("--grace", type=DURATION, default="60s", show_default=True, metavar="TIME",
              help="How long a removed segment's file stays: longer than any fetch.")  # fmt: skip
@click.option("--class", "classes", multiple=True, metavar="NAME=TIME",
              help="A TTL class besides agent (3d) and chatbot (7d), or another time for one of "
                   "them. May be repeated.")  # fmt: skip
@click.argument("directory", metavar="[DIR]", required=False)
def command(
    settings: Settings, extent: int, segment: int, durability: str, grace: int,
    classes: tuple[str, ...], directory: str | None,
) -> None:  # fmt: skip
    """Make a store in an empty directory.

    DIR, or --store, is made if it does not exist. Nothing is ever written into a directory that
    holds something else.
    """
    from kvfs.config import DEFAULT_CLASSES
    from kvfs.store import Store

    if directory is not None:
        settings.given["store"] = directory
    chosen = {**DEFAULT_CLASSES, **dict(_class(text) for text in classes)}
    with Store.init(
        settings.store, extent=extent, segment_bytes=segment, durability=durability,
        classes=chosen, grace_seconds=grace, index=settings.index,
    ) as store:  # fmt: skip
        made = store.config
        values = {
            "store": store.path, "uuid": store.uuid.hex(), "extent": made.extent,
            "segment_bytes": made.segment_bytes, "durability": made.durability,
            "grace_seconds": made.grace_seconds, "classes": made.classes,
        }  # fmt: skip
    if settings.as_json:
        output.json_line(values)
    else:
        output.line(f"made a store in {values['store']} ({values['uuid']})")


def _class(text: str) -> tuple[str, int]:
    name, equals, time = text.partition("=")
    if not equals:
        raise click.BadParameter(f"{text!r} is not NAME=TIME", param_hint="--class")
    return name, DURATION.convert(time, None, None)
