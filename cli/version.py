"""`kvctl version`: which kvfs this is, with what, and which formats it reads and writes."""

from __future__ import annotations

import sys
from typing import Any

import click

from kvfs import __version__
from kvfs.cli import common, output
from kvfs.cli.settings import Settings

MANUAL = {
    "JSON output": """
    An object:

    kvfs, python -- versions
    packages -- package -> version, or null where it is not installed
    formats -- versions of what is stored: store, segment, journal, record, index, identity
    """,
}

PACKAGES = ("click", "lmdb", "xxhash", "numpy", "blake3", "pyfuse3", "trio")


@click.command(
    context_settings=common.HELP,
    epilog=common.examples("""
    kvctl version
    kvctl version --json
"""),
)
@common.json_option
@click.make_pass_decorator(Settings, ensure=True)
def command(settings: Settings) -> None:
    """Say which version of kvfs this is, and which formats it reads."""
    from kvfs import config, journal, layout, record, segment
    from kvfs.index import schema

    formats = {
        "store": config.FORMAT, "segment": segment.VERSION, "journal": journal.VERSION,
        "record": record.VERSION, "index": int(schema.FORMAT), "identity": layout.ENCODING_VERSION,
    }  # fmt: skip
    values: dict[str, Any] = {
        "kvfs": __version__, "python": sys.version.split()[0], "packages": packages(),
        "formats": formats,
    }  # fmt: skip
    if settings.as_json:
        output.json_line(values)
        return
    output.line(f"kvfs {__version__}, Python {values['python']}")
    output.line("packages  " + ", ".join(f"{n} {v or '-'}" for n, v in packages().items()))
    output.line("formats   " + ", ".join(f"{name} {number}" for name, number in formats.items()))


def packages() -> dict[str, str | None]:
    """The versions of the packages kvfs uses; None where one is not installed."""
    from importlib import metadata

    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found
