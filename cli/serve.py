"""`kvctl serve`: the background work of a host. What that is, kvfs.serve and kvfs.peers say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvfs.cli import common, output
from kvfs.cli.peers import secret_option, slots_directory_option
from kvfs.cli.settings import Settings
from kvfs.cli.values import FiniteRange

if TYPE_CHECKING:
    from kvfs.peers.service import PeerService
    from kvfs.store import Store

MANUAL = {
    "How it works": """
    Run it on every host whose routers check a store. It follows the journals of the store's other
    writers into this host's index, so that what any host stored is a hit here, usually within half
    a second. A new host begins with a checkpoint, if the store has one. It may be killed at any
    time: it goes on where it was. kvctl-status(1) shows how far it is.

    With --listen it also answers other hosts that ask for sliding-window state which this host
    has in memory, takes what they move here (kvctl-drain(1)), and publishes what is here, so that
    checks of all hosts name it. It needs the packages of kvfs[serve].

    It also keeps house: every --gc-interval seconds one of the hosts that serve a store makes the
    pass that kvctl-gc(1) describes, at the rates of kvctl-limits(1). Who passed last goes on;
    another host takes over when it is silent. kvctl status says who it is and what came of it.
    With --no-gc on all hosts nothing is given back unless kvctl gc is run, by a timer perhaps.

    It tells systemd when it is ready, and ends with SIGTERM.
    """,
    "Secret": """
    Hosts prove to each other that they have the same secret, 16 bytes or more; nothing is told or
    taken without. Their clocks may differ by 30 seconds. What is sent is not encrypted: give an
    address of a network that only they are on. The secret is in one of:

    --secret-file, KVFS_PEER_SECRET_FILE -- a file of this user or root that nobody else can read
    KVFS_PEER_SECRET -- the environment, where no file is named
    """,
    "JSON output": """
    With --listen, when others can connect, an object with address (IP:PORT). One object when it
    ends:

    turns -- looks at journals
    entries -- journal entries applied
    passes -- of housekeeping that were made here; 0 with --no-gc
    requests -- object: answers to other hosts by method and status; empty without --listen
    """,
}


@common.command("""
    kvctl serve --store /mnt/3fs/kvfs
    kvctl serve --interval 1 --no-gc
    kvctl serve --listen 10.0.0.7:7420 --secret-file /etc/kvfs/secret
""")
@common.options
@click.option("--interval", type=FiniteRange(0.01, 60), default=0.2, show_default=True,
              help="Seconds between looks at a writer that has news.")  # fmt: skip
@click.option("--gc/--no-gc", default=True, show_default=True, envvar="KVFS_GC", show_envvar=True,
              help="Keep house in the store, in turns with the other hosts.")  # fmt: skip
@click.option("--gc-interval", type=FiniteRange(0.1, 86_400), default=60.0, show_default=True,
              help="Seconds between two passes of housekeeping.")  # fmt: skip
@click.option("--listen", metavar="IP:PORT", help="Answer other hosts for slots, at this address.")
@click.option("--any-interface", is_flag=True,
              help="Let --listen be 0.0.0.0 or [::]: every interface of this host.")  # fmt: skip
@click.option("--advertise", metavar="IP:PORT",
              help="The address that other hosts are told. Default: that of --listen.",
              )  # fmt: skip
@click.option("--requests", type=click.IntRange(1, 1024), default=8, show_default=True,
              help="Slots in transit at once; who comes then is told to come again.",
              )  # fmt: skip
@secret_option
@slots_directory_option
def command(
    settings: Settings, interval: float, gc: bool, gc_interval: float, listen: str | None,
    any_interface: bool, advertise: str | None, requests: int, secret_file: str | None, slots: str,
) -> None:  # fmt: skip
    """Follow the other writers of a store and keep house, until it is told to end."""
    from kvfs.errors import InputError
    from kvfs.gc.housekeeping import Housekeeper
    from kvfs.serve import Service

    if listen is None and (any_interface or advertise):
        raise InputError("--any-interface and --advertise are for --listen")
    with common.open_store(settings, catch_up=False) as store:
        peers: PeerService | None = None
        if listen is not None:
            options: dict[str, Any] = {
                "any_interface": any_interface, "advertise": advertise, "directory": slots,
                "turns": requests,
            }  # fmt: skip
            peers = _peers(settings, store, listen, secret_file, options)
        keeper = Housekeeper(store, gc_interval) if gc else None
        beside = [work for work in (peers, keeper) if work is not None]
        service = Service(store, interval=interval, beside=beside)
        service.run()
        if settings.as_json:
            following = service.following
            counters = {} if peers is None else peers.app.counters
            output.json_line(
                {
                    "turns": following.turns,
                    "entries": following.entries,
                    "passes": 0 if keeper is None else keeper.passes,
                    "requests": counters,
                }
            )


def _peers(
    settings: Settings, store: Store, listen: str, secret_file: str | None, options: dict[str, Any]
) -> PeerService:
    import gc
    import sys

    from kvfs.errors import ConfigError
    from kvfs.peers.auth import Secret

    secret = Secret.load(secret_file)
    try:
        from kvfs.peers.service import PeerService
    except ImportError as e:
        raise ConfigError(f"no Python package {e.name}; pip install 'kvfs[serve]'") from None
    peers = PeerService(store, listen, secret, **options)
    # Who asks for a slot must not wait long for the following beside it, nor for the garbage
    # collector to look through all that is loaded, which stays.
    sys.setswitchinterval(0.001)
    gc.freeze()
    if settings.as_json:
        output.json_line({"address": peers.address})
    return peers
