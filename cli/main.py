"""The command group. A command is loaded when it is called, so that each one starts fast."""

import click

from kvfs import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s (kvfs) %(version)s")
def main() -> None:
    """Store, check, fetch and see LLM KV-cache prefixes."""
