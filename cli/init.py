"""`kvctl init`: makes a store. What its settings mean is kvfs.config's to say."""

from __future__ import annotations

from typing import Any

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
@click.option("--extent", type=BYTES, metavar="SIZE",
              help="No record crosses a multiple of it: the chunk of the file system where it has "
                   "one. Default: 64M.")  # fmt: skip
@click.option("--segment", "segment_bytes", type=BYTES, metavar="SIZE",
              help="Size at which a segment is sealed. Default: 256M.")  # fmt: skip
@click.option("--durability", type=click.Choice(["none", "batch", "always"]),
              help="none: written blocks become durable when the kernel gets to it; batch: before "
                   "a put returns, together with others that wait; always: each put by itself. "
                   "Default: batch.")  # fmt: skip
@click.option("--grace", "grace_seconds", type=DURATION, metavar="TIME",
              help="How long a removed segment's file stays: longer than any fetch. Default: 60s.",
              )  # fmt: skip
@click.option("--class", "classes", multiple=True, metavar="NAME=TIME",
              help="A TTL class besides agent (3d) and chatbot (7d), or another time for one of "
                   "them. May be repeated.")  # fmt: skip
@click.argument("directory", metavar="[DIR]", required=False)
def command(
    settings: Settings, classes: tuple[str, ...], directory: str | None, **chosen: Any
) -> None:
    """Make a store in an empty directory.

    DIR, or --store, is made if it does not exist. Nothing is ever written into a directory that
    holds something else.
    """
    from kvfs.config import DEFAULT_CLASSES
    from kvfs.store import Store

    if directory is not None:
        settings.given["store"] = directory
    given = {name: value for name, value in chosen.items() if value is not None}
    given["classes"] = {**DEFAULT_CLASSES, **dict(_class(text) for text in classes)}
    with Store.init(settings.store, index=settings.index, **given) as store:
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
