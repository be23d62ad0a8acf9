"""`kvctl rm`: takes blocks out of sight, with --purge their bytes off the disk (kvfs.gc.purge)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from kvfs.cli import common, output, places, targets, tokens
from kvfs.cli.settings import Settings
from kvfs.errors import EXIT_MISS, EXIT_OK, BusyError, InputError

if TYPE_CHECKING:
    from kvfs.gc.purge import Receipt
    from kvfs.namespace import Namespace
    from kvfs.store import Store

MANUAL = {
    "Erasing": """
    Evicted blocks are not found any more, in no copy, by any host that has read the journal; that
    takes a moment (kvctl-serve(1)). Their bytes go with their segment. With --purge they go at
    once: what else is in the same segments is copied forward, and their files are removed after
    the store's grace time, for which the command stays. It prints a receipt, and exits with 5 if
    something is pending: a segment that another process still writes can only be rewritten when
    that has closed it. What is stored again afterwards is there again.

    Slots of sliding-window state behind these blocks are not found any more either; hosts that run
    kvctl serve take them out of their memory.
    """,
    "Whole namespaces and tenants": """
    --all takes all blocks of the namespace that --ns names. --namespace takes the namespace itself
    as well: no host lists it any more until it is made again or something is stored in it; with
    --purge its description goes, too. --tenant does the same with all namespaces of a tenant, named
    by the digest of its salt as kvctl ns show prints it. On a terminal these two ask first.
    """,
    "Token ids": tokens.MANUAL,
    "JSON output": """
    An object for each namespace: store, namespace, and blocks (how many were taken out of sight,
    or would be). With --purge also:

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
    kvctl rm --prefix 000000-5a1f0c22/000004-77ab03d1
    kvctl rm --dry-run --all --ns llama-3.1-8b
    kvctl rm --namespace llama-3.1-8b-30c1a20f43cc --purge --json
    kvctl rm --tenant blake2b:60a2c0b9a1f2d3e4 --purge --yes
""")
@common.options
@common.namespace_option
@tokens.options
@targets.options
@click.option("--namespace", "name", metavar="NAME",
              help="In place of a prompt: a namespace and all of it.")  # fmt: skip
@click.option("--tenant", metavar="DIGEST",
              help="In place of a prompt: all namespaces of a tenant.")  # fmt: skip
@click.option("--from-block", type=click.IntRange(min=0), metavar="N",
              help="Of a prompt: keep the blocks before number N.")  # fmt: skip
@click.option("--purge", is_flag=True, help="Remove the bytes as well, and print a receipt.")
@click.option("-n", "--dry-run", is_flag=True, help="Change nothing; say how many blocks would go.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before a namespace or a tenant goes.")
def command(
    settings: Settings, path: str | None, inline: str | None, form: str, node: str | None,
    everything: bool, name: str | None, tenant: str | None, from_block: int | None, purge: bool,
    dry_run: bool, yes: bool,
) -> int:  # fmt: skip
    """Evict blocks: those of a prompt, a node, a namespace, or a tenant.

    All that follows an evicted block goes as well, in every prompt that shares it, and every copy
    of it, on all hosts. Exits with 3 if there was nothing to evict.
    """
    target = targets.Target(path, inline, form, node, everything)
    if (name is not None) + (tenant is not None) + target.given > 1:
        raise InputError("give one of: token ids, --prefix, --all, --namespace, --tenant")
    whole = name is not None or tenant is not None
    if from_block is not None and (whole or target.kind != "tokens"):
        raise InputError("--from-block is of token ids; it keeps nothing of what else is evicted")
    if whole and common.on_command_line(click.get_current_context(), "ns"):
        raise InputError("--ns is of a prompt, --prefix or --all; leave it out")
    with common.open_store(settings) as store:
        spaces = _namespaces(store, settings, name, tenant, purge)
        if whole and not dry_run and not yes:
            _ask(store, spaces)
        work = _Work(settings, store, target, from_block or 0, whole)
        if dry_run:
            return work.told([(ns, work.count(ns)) for ns in spaces], "would evict")
        if purge:
            return work.purge(spaces)
        return work.told([(ns, work.remove(ns)) for ns in spaces], "evicted")


def _namespaces(
    store: Store, settings: Settings, name: str | None, tenant: str | None, purge: bool
) -> list[Namespace]:
    """Those meant; a purge may also finish what another one has begun, of what is not listed."""
    known = store.namespaces() if purge else store.listed_namespaces()
    if name is not None:
        return [ns for ns in known if ns.name == name] or [store.namespace(name)]
    if tenant is None:
        return [common.pick_namespace(store, settings)]
    from kvfs.usage import tenant_of

    found = [ns for ns in known if tenant_of(ns.identity) == tenant]
    if not tenant or not found:
        raise InputError(f"{tenant}: no namespace has a salt of this digest (see kvctl ns show)")
    return found


def _ask(store: Store, spaces: list[Namespace]) -> None:
    if _on_terminal():
        names = ", ".join(ns.name for ns in spaces)
        click.confirm(f"Remove all of {names} from {store.path}?", abort=True, err=True)


def _on_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


class _Work:
    """What is to go of each namespace, and the ways to say so."""

    def __init__(
        self, settings: Settings, store: Store, target: targets.Target, from_block: int, whole: bool
    ) -> None:
        """whole: namespaces go, target does not matter."""
        self.settings = settings
        self.store = store
        self.target = target
        self.from_block = from_block
        self.whole = whole

    @property
    def everything(self) -> bool:
        return self.whole or self.target.kind == "all"

    def heads(self, ns: Namespace) -> list[tuple[bytes, int]]:
        """First hashes of the runs meant, and how many blocks of each stay."""
        store, target = self.store, self.target
        if target.kind == "node":
            run, keep = places.find(store, ns, target.node or "")
            return [(run.head, keep)]
        hasher = ns.hasher(target.tokens())
        found = store.index.check(ns.number, hasher, store.now_ms())
        return [
            (hasher.digest(m.block + 1), self.from_block - m.block)
            for m in found.runs
            if m.block <= self.from_block < m.block + m.shared
        ]

    def count(self, ns: Namespace) -> int:
        """How many blocks would go."""
        from kvfs.removal import removals_for

        if self.everything:
            return sum(run.count for run in self.store.index.all_runs(ns.number))
        now_ms, index = self.store.now_ms(), self.store.index
        return sum(removals_for(index, ns, head, keep, now_ms)[1] for head, keep in self.heads(ns))

    def remove(self, ns: Namespace) -> int:
        """Takes them out of sight; returns how many they were."""
        if self.everything:
            with output.Progress("blocks evicted") as progress:
                return self.store.remove_all(ns, whole=self.whole, progress=progress)
        if self.target.kind == "tokens":
            return self.store.remove(ns, self.target.tokens(), from_block=self.from_block)
        return sum(self.store.remove_blocks(ns, head, keep) for head, keep in self.heads(ns))

    def purge(self, spaces: list[Namespace]) -> int:
        """Erases them; prints the receipts."""
        from kvfs.gc.purge import Purge, purge

        wanted = [
            (Purge(self.store, ns, whole=self.whole), None if self.everything else self.heads(ns))
            for ns in spaces
        ]
        with common.interruptible():
            receipts = purge(wanted)
        for ns, receipt in zip(spaces, receipts, strict=True):
            self._print(ns, receipt)
        if not all(receipt.complete for receipt in receipts):
            return BusyError.exit_code
        return EXIT_OK if any(r.blocks or r.files for r in receipts) else EXIT_MISS

    def _print(self, ns: Namespace, receipt: Receipt) -> None:
        if self.settings.as_json:
            output.json_line({**common.heading(self.store, ns), **receipt.to_json()})
        else:
            output.line(f"evicted {output.many(receipt.blocks, 'block')} of {ns.name}")
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

    def told(self, done: list[tuple[Namespace, int]], what: str) -> int:
        """Prints how many blocks of each namespace; returns the exit code."""
        for ns, blocks in done:
            if self.settings.as_json:
                output.json_line({**common.heading(self.store, ns), "blocks": blocks})
            else:
                of = f" of {ns.name}" if self.whole else ""
                output.line(f"{what} {output.many(blocks, 'block')}{of}")
        return EXIT_OK if any(blocks for _, blocks in done) else EXIT_MISS
