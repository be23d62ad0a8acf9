"""`kvctl fetcher`: the process that fetches for all engines of a host; or a question to it."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
from typing import TYPE_CHECKING, Any

import click

from kvfs.cli import common, output
from kvfs.cli.settings import Settings
from kvfs.cli.values import BYTES
from kvfs.errors import BackendError, ConfigError, InputError

if TYPE_CHECKING:
    from kvfs.fetcher.client import FetchClient

MANUAL = {
    "What it is": """
    One process for each host, user and store reads blocks into shared memory, verifies them, and
    keeps them until their room is needed. Engines find it by a socket in $KVFS_RUNTIME/kvfs or
    $XDG_RUNTIME_DIR/kvfs, else in /run/kvfs (root) or /tmp/kvfs-UID, and start one where there is
    none. Started by hand or by systemd it runs until it is told to end; one that an engine
    started ends when nobody has used it for ten minutes, and logs to the socket's path with .log
    behind it. SIGUSR1 has it log what its threads are doing.
    """,
    "Memory": """
    The arena is reserved whole at the start. Without --shm it has no name, whatever the size of
    /dev/shm, and nothing is left of it however the process ends. What --shm names holds a file for
    as long as the process lives; a file whose process is gone is removed by the next one.
    """,
    "JSON output": """
    With --stats, --evict and --stop an object:

    store, pid -- of the store and of the fetcher
    clients, requests, tickets -- connections; requests under way; those and what is still held
    arena_bytes, arena_free_bytes, arena_idle_bytes -- of its shared memory: all; free; blocks that
    nobody uses now
    blocks_here -- blocks in it
    counters -- object: blocks_delivered, blocks_shared (of these, not read for the request),
    blocks_evicted, bytes_read, miss.REASON, expired, cancelled, busy, refused_down,
    clients_disconnected; one that is absent is 0
    """,
}
_GAUGES = (
    "clients", "requests", "tickets", "arena_bytes", "arena_free_bytes", "arena_idle_bytes",
    "blocks_here",
)  # fmt: skip


@common.command("""
    kvctl fetcher --arena 16G
    kvctl fetcher --background --shm /dev/shm
    kvctl fetcher --stats
    kvctl fetcher --evict --json
    kvctl fetcher --stop
""")
@common.options
@click.option("--arena", type=BYTES, metavar="SIZE", help="Shared memory for blocks. Default: 2G.")
@click.option("--shm", metavar="DIR", help="Where that gets a file. Default: no name.")
@click.option("--threads", type=click.IntRange(1, 256),
              help="That read. Default: half the cores for a local disk, 8 for shared storage.",
              )  # fmt: skip
@click.option("--background", is_flag=True, help="Return once it serves.")
@click.option("--stats", "question", flag_value="stats", help="Show the figures of the one there.")
@click.option("--evict", "question", flag_value="evict",
              help="Have it drop the blocks that nobody uses.")  # fmt: skip
@click.option("--stop", "question", flag_value="stop", help="Have it end.")
def command(
    settings: Settings, arena: int | None, shm: str | None, threads: int | None, background: bool,
    question: str | None,
) -> None:  # fmt: skip
    """Fetch for all engines of this host, until told to end.

    Exits with 5 if one runs already for this store and user.
    """
    if question is not None:
        if arena or shm or threads or background:
            raise InputError(f"--{question} is for the fetcher that runs; it takes no settings")
        _ask(settings, question)
        return
    from kvfs.fetcher import launch

    options = launch.Options(arena or launch.ARENA_BYTES, threads, shm, idle_seconds=None)
    if background:
        launch.start(settings.store, options)
        return
    from kvfs.systemd import notify

    try:
        from kvfs.fetcher.process import run
    except ImportError as e:
        raise ConfigError(f"no Python package {e.name}; pip install 'kvfs[fetch]'") from None
    faulthandler.register(signal.SIGUSR1)
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    run(settings.store, options, ready=lambda name: notify("READY=1"))
    notify("STOPPING=1")


def _ask(settings: Settings, question: str) -> None:
    with _client(settings) as client:
        figures = client.evict() if question == "evict" else client.stats()
        pid = client.fetcher_pid
        if question == "stop":
            os.kill(pid, signal.SIGTERM)
    gauges = {name: figures.pop(name) for name in _GAUGES}
    result: dict[str, Any] = {"store": settings.store, "pid": pid, **gauges, "counters": figures}
    if settings.as_json:
        output.json_line(result)
        return
    sizes = {**gauges, **figures}
    shown = {n: output.size(v) if "bytes" in n else f"{v:,}" for n, v in sizes.items()}
    output.pairs([("pid", str(pid)), *shown.items()])


def _client(settings: Settings) -> FetchClient:
    from kvfs.fetcher import launch

    client = launch.find(_uuid(settings))
    if client is None:
        raise BackendError(f"{settings.store}: no fetcher runs here, or it does not answer")
    return client


def _uuid(settings: Settings) -> bytes:
    """Of the store: from this host's index where there is one, for the storage may hang."""
    store = common.open_index(settings)
    if store is not None:
        with store:
            return store.uuid
    from kvfs.backend.select import open_backend
    from kvfs.config import load_config

    return load_config(open_backend(settings.store)).uuid
