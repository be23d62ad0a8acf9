"""`kvctl drain`: this host's slots move to others. How, kvfs.peers.drain says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvfs.cli import common, output
from kvfs.cli.peers import secret_option, slots_directory_option
from kvfs.cli.settings import Settings
from kvfs.cli.values import FiniteRange
from kvfs.errors import EXIT_OK, EXIT_PARTIAL

if TYPE_CHECKING:
    from kvfs.peers.drain import Drained

MANUAL = {
    "How it works": """
    Run it on a host that is about to leave, once its engine takes no requests any more. Slots, the
    sliding-window state in the memory of this host, go to the hosts that are named, those used
    last first, each to the one with most room. The others run kvctl serve --listen with the same
    secret. A slot is removed here when another host has it; who has it now is published, so that
    checks of all hosts name the new place. Blocks are in the shared storage and need no moving.

    It is refused (exit code 5, nothing moved) if more than --share of the slots of the named hosts
    would be held with ours among them: what is moved would drive out others. --force moves all the
    same.

    When the time of --grace is over, what is left stays here: exit code 4.
    """,
    "JSON output": """
    An object:

    moved -- slots that other hosts have now
    kept -- of these, those that they had already
    bytes -- that were sent
    left -- slots still here
    peers -- object: address -> slots moved there
    problems -- list of texts: what went wrong
    seconds -- how long it took
    """,
}


@common.command("""
    kvctl drain --to 10.0.0.8:7420 --to 10.0.0.9:7420 --secret-file /etc/kvfs/secret
    kvctl drain --to node-8:7420 --grace 20 --force
""")
@common.options
@click.option("--to", "to", metavar="HOST:PORT", multiple=True, required=True,
              help="A host that takes slots. May be given several times.")  # fmt: skip
@click.option("--grace", type=FiniteRange(0.1, 86400), default=60.0, show_default=True,
              help="Seconds after which it ends.")  # fmt: skip
@click.option("--share", type=FiniteRange(0, 1), default=0.8, show_default=True,
              help="How much of the slots of the named hosts may be held then.")  # fmt: skip
@click.option("--force", is_flag=True, help="Even if that is more.")
@secret_option
@slots_directory_option
def command(
    settings: Settings, to: tuple[str, ...], grace: float, share: float, force: bool,
    secret_file: str | None, slots: str,
) -> int:  # fmt: skip
    """Move this host's slots to other hosts, before it leaves."""
    import contextlib

    from kvfs.cli.peers import client, resolved
    from kvfs.peers.drain import drain
    from kvfs.peers.pools import Pools
    from kvfs.state.directory import Directory

    with contextlib.ExitStack() as stack:
        peers = stack.enter_context(client(secret_file))
        store = stack.enter_context(common.open_store(settings))
        identities = [ns.identity for ns in store.namespaces()]
        pools = stack.enter_context(Pools(lambda: identities, slots))
        addresses = [resolved(text) for text in to]
        result = drain(
            pools.all(), peers, addresses, grace=grace, share=share, force=force,
            withdraw=lambda pool, metas: Directory(store, pool).withdraw(metas),
        )  # fmt: skip
    if settings.as_json:
        output.json_line(result.to_json())
    else:
        _print(result)
    return EXIT_PARTIAL if result.left else EXIT_OK


def _print(result: Drained) -> None:
    sent = f"{output.size(result.bytes)} in {result.seconds:.1f} s"
    output.line(f"{output.many(result.moved, 'slot')} moved, {sent}; {result.left:,} left here")
    for address, moved in result.peers.items():
        output.line(f"{address}  {moved:,}")
    for problem in result.problems:
        output.message(f"kvctl drain: {problem}")
