"""`kvctl rm`: takes blocks out of sight, with --purge their bytes off the disk (kvfs.gc.purge)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvfs.cli import common, output, places, targets, tokens
from kvfs.cli.settings import Settings
from kvfs.errors import EXIT_MISS, EXIT_OK, BusyError

if TYPE_CHECKING:
    from kvfs.namespace import Namespace
    from kvfs.store import Store

MANUAL = {
    "Erasing": """
    Evicted blocks are not found any more, by any host that has read the journal; their bytes go
    with their segment. With --purge they go at once: what else is in the same segments is copied
    forward, and their files are removed after the store's grace time, for which the command
    stays. It prints a receipt, and exits with 5 if something is pending: a segment that another
    process still writes can only be rewritten when that has closed it.
    """,
    "Token ids": tokens.MANUAL,
    "JSON output": """
    An object: store, namespace, and blocks (how many were taken out of sight). With --purge also:

    started_ms, ended_ms -- when
    files -- list of the files that held one of the blocks: objects with path, bytes, removed_ms
    (when it was removed, or null) and pending (why it was not, or null)
    removed_bytes -- of the files that were removed
    copied_bytes -- of blocks in these files that are still of use, and are elsewhere now
    complete -- true if no byte of the blocks is left in the store
    problems -- list of what could not be read or written
    """,
}


@common.command("""
    kvctl rm prompt.u32
    kvctl rm --from-block 96 prompt.u32
    kvctl rm --node 000000-5a1f0c22/000004-77ab03d1
    kvctl rm --all --ns llama-3.1-8b
    kvctl rm --all --ns llama-3.1-8b --purge --json
""")
@common.options
@common.namespace_option
@tokens.options
@targets.options
@click.option("--from-block", type=click.IntRange(min=0), default=0, metavar="N",
              help="Of a prompt: keep the blocks before number N.")  # fmt: skip
@click.option("--purge", is_flag=True, help="Remove the bytes as well, and print a receipt.")
def command(
    settings: Settings, path: str | None, inline: str | None, form: str, node: str | None,
    everything: bool, from_block: int, purge: bool,
) -> int:  # fmt: skip
    """Evict blocks: those of a prompt, of a node, or of a whole namespace.

    All that follows an evicted block goes as well, in every prompt that shares it. Exits with 3 if
    there was nothing to evict.
    """
    target = targets.Target(path, inline, form, node, everything)
    with common.open_store(settings) as store:
        ns = common.pick_namespace(store, settings)
        if purge:
            return _purge(settings, store, ns, target, from_block)
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


def _purge(
    settings: Settings, store: Store, ns: Namespace, target: targets.Target, from_block: int
) -> int:
    from kvfs.gc.purge import Purge

    with common.interruptible():
        receipt = Purge(store, ns).run(_heads(store, ns, target, from_block))
    if settings.as_json:
        output.json_line({**common.heading(store, ns), **receipt.to_json()})
    else:
        output.line(f"evicted {output.many(receipt.blocks, 'block')} of {receipt.namespace}")
        for file in receipt.files:
            gone = file.removed_ms is not None
            what = f"removed at {output.when(file.removed_ms or 0)}" if gone else "pending"
            why = "" if gone else f" ({file.pending})"
            output.line(f"{file.path}, {output.size(file.bytes)}: {what}{why}")
        output.line(
            f"erased {output.size(receipt.removed_bytes)}; copied "
            f"{output.size(receipt.copied_bytes)} of other blocks"
        )
    for problem in receipt.problems:
        output.message(f"kvctl rm: {problem}")
    if not receipt.complete:
        return BusyError.exit_code
    return EXIT_OK if receipt.blocks else EXIT_MISS


def _heads(
    store: Store, ns: Namespace, target: targets.Target, from_block: int
) -> list[tuple[bytes, int]]:
    """First hashes of the runs meant, and how many blocks of each stay."""
    if target.kind == "node":
        run, keep = places.find(store, ns, target.node or "")
        return [(run.head, keep)]
    if target.kind == "all":
        return [(head, 0) for head in target.heads(store, ns)]
    hasher = ns.hasher(target.tokens())
    found = store.index.check(ns.number, hasher, store.now_ms())
    return [
        (hasher.digest(m.block + 1), from_block - m.block)
        for m in found.runs
        if m.block <= from_block < m.block + m.shared
    ]
