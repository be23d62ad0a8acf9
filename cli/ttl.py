"""`kvctl ttl`: how long blocks are kept. Classes, and moving what is stored to another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvfs.cli import common, output, targets, tokens
from kvfs.cli.settings import Settings
from kvfs.cli.values import DURATION
from kvfs.errors import InputError

if TYPE_CHECKING:
    from kvfs.store import Store

MANUAL = {
    "Classes": """
    Every block is stored under a TTL class and expires that class's time after it was written or
    last renewed. A class that is defined anew changes what is stored or renewed from then on.
    """,
    "Token ids": tokens.MANUAL,
    "JSON output": """
    kvctl ttl and ttl define print an object: classes (TTL class -> seconds); ttl set prints
    store, namespace, class, and runs (how many were moved).
    """,
}


@click.group(
    invoke_without_command=True,
    context_settings=common.HELP,
    epilog=common.examples("""
    kvctl ttl
    kvctl ttl define session 12h
    kvctl ttl set agent prompt.u32
    kvctl ttl set chatbot --node 000000-5a1f0c22
    kvctl ttl set session --all --ns llama
"""),
)
@common.options
@click.pass_context
def command(ctx: click.Context, settings: Settings) -> None:
    """Show and set how long blocks are kept.

    Without a command: show the TTL classes of the store.
    """
    if ctx.invoked_subcommand is None:
        with common.open_store(settings) as store:
            _print_classes(settings, store)


def _print_classes(settings: Settings, store: Store) -> None:
    classes = store.classes()
    if settings.as_json:
        output.json_line({"classes": classes})
    else:
        rows = [(name, output.duration(seconds)) for name, seconds in classes.items()]
        output.table(("CLASS", "TIME"), rows, right="lr")


@command.command(context_settings=common.HELP)
@common.options
@click.argument("name")
@click.argument("time", type=DURATION)
def define(settings: Settings, name: str, time: int) -> None:
    """Define the class NAME, or give it another TIME.

    TIME is a number and a unit: 90s, 30min, 12h, 3d, 2w.
    """
    with common.open_store(settings) as store:
        store.define_class(name, time)
        _print_classes(settings, store)


@command.command("set", context_settings=common.HELP)
@common.options
@common.namespace_option
@click.argument("ttl_class", metavar="CLASS")
@tokens.options
@targets.options
def set_(
    settings: Settings, ttl_class: str, path: str | None, inline: str | None, form: str,
    node: str | None, everything: bool,
) -> None:  # fmt: skip
    """Move what is stored of a prompt to CLASS, with its whole time from now.

    Or a node and all behind it, or the whole namespace.
    """
    with common.open_store(settings) as store:
        seconds = store.classes().get(ttl_class)
        if seconds is None:
            raise InputError(f"no TTL class {ttl_class!r}; known are {', '.join(store.classes())}")
        ns = common.pick_namespace(store, settings)
        from kvfs.catalog import TtlClass

        target = targets.Target(path, inline, form, node, everything)
        moved = 0
        for heads in targets.batches(target.heads(store, ns)):
            moved += store.renew_runs(ns, heads, TtlClass(ttl_class, seconds))
        if settings.as_json:
            result = {**common.heading(store, ns), "class": ttl_class, "runs": moved}
            output.json_line(result)
        else:
            output.line(
                f"{moved:,} runs are of class {ttl_class} now, for {output.duration(seconds)}"
            )
