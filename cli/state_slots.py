"""`kvctl state slots` and `kvctl state pull`: the slots of this host and of others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from kvfs.cli import common, output, tokens
from kvfs.cli.peers import (
    client,
    client_if_any,
    resolved,
    secret_option,
    slots_directory_option,
)
from kvfs.cli.settings import Settings
from kvfs.cli.values import FiniteRange
from kvfs.errors import EXIT_MISS, EXIT_OK, BackendError

if TYPE_CHECKING:
    from kvfs.namespace import Namespace
    from kvfs.peers.load import Loaded
    from kvfs.state.slot import SlotMeta
    from kvfs.state.slots import SlotPool

JSON = """
    kvctl state slots prints an object for each slot: anchor (chain hash of the block before it),
    position (tokens), generation, pool, rotation, overshoot, stored_ms (milliseconds since 1970)

    kvctl state pull prints an object:

    source -- "local", the address of the host it came from, or "" for none
    seconds -- how long it took
    generation -- of the slot, or null
    reasons -- list of texts: why no better slot was had
    decision -- object, as in kvctl check
"""
_ASK_SECONDS = 10.0
_NOT_ASKED = "no secret: other hosts were not asked (--secret-file or KVFS_PEER_SECRET)"


@click.command(context_settings=common.HELP)
@common.options
@common.namespace_option
@click.option("--at", "at", metavar="HOST:PORT",
              help="Ask another host, which runs kvctl serve --listen.")  # fmt: skip
@secret_option
@slots_directory_option
def slots(settings: Settings, at: str | None, secret_file: str | None, slots: str) -> None:
    """Show the slots of a namespace, on this host or another."""
    with common.open_index(settings) or common.open_store(settings) as store:
        ns = common.pick_namespace(store, settings)
        now_ms = store.now_ms()
    found = _here(ns, slots) if at is None else _there(ns, at, secret_file)
    found.sort(key=lambda meta: (meta.position, meta.anchor))
    if settings.as_json:
        for meta in found:
            output.json_line(_fields(meta))
    elif found:
        header = ("ANCHOR", "POSITION", "GENERATION", "AGE")
        rows = (
            (meta.anchor.hex(), f"{meta.position:,}", f"{meta.generation:,}",
             f"{max(0, now_ms - meta.stored_ms) / 1000:,.0f} s")
            for meta in found
        )  # fmt: skip
        output.table(header, rows, right="lrrr")


@click.command(context_settings=common.HELP)
@common.options
@common.namespace_option
@tokens.options
@click.option("--deadline", type=FiniteRange(0.001, 60), default=1.0, show_default=True,
              help="Seconds after which a replay is better.")  # fmt: skip
@secret_option
@slots_directory_option
def pull(
    settings: Settings, path: str | None, inline: str | None, form: str, deadline: float,
    secret_file: str | None, slots: str,
) -> int:  # fmt: skip
    """Get the slot of a prompt as an engine would, and say from where.

    Exits with 0 for a slot, 3 if the prompt has to be replayed, or hits nothing. Without a secret
    only the slots of this host are looked at.
    """
    from kvfs.cli.check import opened
    from kvfs.peers.load import load_state

    ids = tokens.read(path, inline, form)
    with opened(settings, fully=False) as (store, ns), contextlib.ExitStack() as stack:
        peers = client_if_any(secret_file)
        if peers is not None:
            stack.enter_context(peers)
        pool = stack.enter_context(_pool(ns, slots))
        hasher = ns.hasher(ids)
        plan = store.check(ns, hasher)
        began = time.monotonic()
        found = load_state(store, ns, plan, hasher, deadline, pool=pool, client=peers)
        seconds = time.monotonic() - began
    if peers is None and ns.identity.state is not None and found.source != "local":
        found = replace(found, reasons=(*found.reasons, _NOT_ASKED))
    if settings.as_json:
        output.json_line({**found.to_json(), "seconds": seconds})
    else:
        _print(found, seconds)
    return EXIT_MISS if found.slot is None else EXIT_OK


@contextlib.contextmanager
def _pool(ns: Namespace, directory: str) -> Iterator[SlotPool | None]:
    from kvfs.peers.pools import Pools

    with Pools(lambda: [ns.identity], directory) as pools:
        yield pools.get(ns.nsid)


def _here(ns: Namespace, directory: str) -> list[SlotMeta]:
    with _pool(ns, directory) as pool:
        return [] if pool is None else pool.metas()


def _there(ns: Namespace, at: str, secret_file: str | None) -> list[SlotMeta]:
    with client(secret_file) as peers:
        asked = peers.slots(resolved(at), ns.nsid, time.monotonic() + _ASK_SECONDS)
    if asked.value is None:
        raise BackendError(f"{at}: {asked.reason}")
    found: list[SlotMeta] = asked.value
    return found


def _fields(meta: SlotMeta) -> dict[str, object]:
    return {
        "anchor": meta.anchor.hex(), "position": meta.position, "generation": meta.generation,
        "pool": meta.pool.hex(), "rotation": meta.rotation, "overshoot": meta.overshoot,
        "stored_ms": meta.stored_ms,
    }  # fmt: skip


def _print(found: Loaded, seconds: float) -> None:
    decision = found.decision
    source = found.source or "none"
    replay = f", {decision.replay_tokens:,} to replay" if decision.replay else ""
    output.pairs(
        [("slot", f"{source}, in {seconds * 1000:.1f} ms" if found.slot else source),
         ("hit", f"{decision.hit_tokens:,} tokens, {decision.compute_tokens:,} to compute{replay}"),
         ("why", "; ".join(found.reasons))]
    )  # fmt: skip
