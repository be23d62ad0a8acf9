"""`kvctl rm`: takes blocks out of sight. Their room is given back when their segments go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvfs.cli import common, output, places, targets, tokens
from kvfs.cli.settings import Settings
from kvfs.errors import EXIT_MISS, EXIT_OK

if TYPE_CHECKING:
    from kvfs.namespace import Namespace
    from kvfs.store import Store

MANUAL = {
    "Token ids": tokens.MANUAL,
    "JSON output": """
    An object: store, namespace, and blocks (how many were taken out of sight).
    """,
}


@common.command("""
    kvctl rm prompt.u32
    kvctl rm --from-block 96 prompt.u32
    kvctl rm --node 000000-5a1f0c22/000004-77ab03d1
    kvctl rm --all --ns llama-3.1-8b
""")
@common.options
@common.namespace_option
@tokens.options
@targets.options
@click.option("--from-block", type=click.IntRange(min=0), default=0, metavar="N",
              help="Of a prompt: keep the blocks before number N.")  # fmt: skip
def command(
    settings: Settings, path: str | None, inline: str | None, form: str, node: str | None,
    everything: bool, from_block: int,
) -> int:  # fmt: skip
    """Evict blocks: those of a prompt, of a node, or of a whole namespace.

    All that follows an evicted block goes as well, in every prompt that shares it. Exits with 3 if
    there was nothing to evict.
    """
    target = targets.Target(path, inline, form, node, everything)
    with common.open_store(settings) as store:
        ns = common.pick_namespace(store, settings)
        blocks = _remove(store, ns, target, from_block)
        result = {**common.heading(store, ns), "blocks": blocks}
    if settings.as_json:
        output.json_line(result)
    else:
        output.line(f"evicted {output.many(blocks, 'block')}")
    return EXIT_OK if blocks else EXIT_MISS


def _remove(store: Store, ns: Namespace, target: targets.Target, from_block: int) -> int:
    from kvfs.removal import cuts_for_all

    if target.kind == "tokens":
        return store.remove(ns, target.tokens(), from_block=from_block)
    if target.kind == "node":
        run, keep = places.find(store, ns, target.node or "")
        return store.remove_blocks(ns, run.head, keep)
    blocks = 0
    with output.Progress("blocks evicted") as progress:
        for entries, n in cuts_for_all(store.index, ns, store.now_ms()):
            store.writer().publish([], entries, {"removed_blocks": n})
            blocks += n
            progress(n)
    return blocks
