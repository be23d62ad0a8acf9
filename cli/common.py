"""What commands share: the options every one of them has, and opening the store they name.

Opening shows on a terminal how far it is; everything else about a store is the library's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from kvfs.cli.output import Progress
from kvfs.cli.settings import Settings
from kvfs.errors import InputError

if TYPE_CHECKING:
    from kvfs.local import LocalStore
    from kvfs.namespace import Namespace
    from kvfs.store import Store

F = TypeVar("F", bound=Callable[..., Any])

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def command(epilog: str) -> Callable[[Callable[..., Any]], click.Command]:
    """A command; epilog: its examples, a line each."""
    return click.command(context_settings=HELP, epilog=examples(epilog))


def examples(lines: str) -> str:
    return "\b\nExamples:\n" + "\n".join(f"  {x.strip()}" for x in lines.strip().splitlines())


def _setting(key: str) -> Callable[[click.Context, click.Parameter, str | None], None]:
    def keep(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
        given = ctx.ensure_object(Settings).given
        if on_command_line(ctx, parameter.name):
            if not value:  # a script's variable that is not set: not to be taken for another place
                raise InputError(f"{parameter.opts[0]} is empty")
            given[key] = value
        elif value:  # the environment does not outdo what stands before a subcommand
            given.setdefault(key, value)

    return keep


def on_command_line(ctx: click.Context, name: str | None) -> bool:
    """Says whether an option was given there, and not by the environment or by default."""
    return ctx.get_parameter_source(name or "") is ParameterSource.COMMANDLINE


def _keep_json(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:  # it may stand before a subcommand as well
        ctx.ensure_object(Settings).as_json = True


def _keep_verbose(ctx: click.Context, _: click.Parameter, value: int) -> None:
    if value:
        import logging

        level = logging.INFO if value == 1 else logging.DEBUG
        logging.basicConfig(level=level, format="%(asctime)s %(name)s %(levelname)s %(message)s")


json_option = click.option(
    "--json", is_flag=True, expose_value=False, callback=_keep_json,
    help="Print JSON, one object on a line.",
)  # fmt: skip
_verbose = click.option(
    "-v", "--verbose", count=True, expose_value=False, callback=_keep_verbose,
    help="Say more on the standard error output; -vv: much more.",
)  # fmt: skip
store_option = click.option(
    "--store", metavar="DIR", envvar="KVFS_STORE", show_envvar=True, expose_value=False,
    callback=_setting("store"), help="The store.",
)  # fmt: skip
index_option = click.option(
    "--index", metavar="DIR", envvar="KVFS_INDEX", show_envvar=True, expose_value=False,
    callback=_setting("index"), help="Where this host keeps its indexes: a local disk.",
)  # fmt: skip
_namespace = click.option(
    "--ns", metavar="NAME", envvar="KVFS_NAMESPACE", show_envvar=True, expose_value=False,
    callback=_setting("namespace"),
    help="The namespace, by name or beginning of it. May be left out if the store has only one.",
)  # fmt: skip


def options(function: F) -> F:
    """--store, --index, --json and -v; the command gets them as Settings, its first argument."""
    for option in (_verbose, json_option, index_option, store_option):
        function = option(function)
    return click.make_pass_decorator(Settings, ensure=True)(function)  # type: ignore[return-value]


def namespace_option(function: F) -> F:
    """--ns, for commands that work in one namespace."""
    return _namespace(function)


def open_store(settings: Settings, *, catch_up: bool = True) -> Store:
    """Opens the store with all its journals applied. Raises KvfsError."""
    from kvfs.store import Store

    with Progress("reading journals, entries") as progress:
        return Store.open(
            settings.store, index=settings.index, catch_up=catch_up, progress=progress
        )


def open_index(settings: Settings) -> LocalStore | None:
    """Opens this host's index alone, without a call to the shared storage; None: there is none."""
    from kvfs.local import LocalStore

    return LocalStore.open_index(settings.store, index=settings.index)


def pick_namespace(store: LocalStore, settings: Settings) -> Namespace:
    """The namespace the settings name, or the store's only one. Raises InputError."""
    if settings.namespace is not None:
        return store.namespace(settings.namespace)
    known = store.listed_namespaces()
    if len(known) == 1:
        return known[0]
    if not known:
        raise InputError(f"{store.path} has no namespace yet: kvctl ns create makes one")
    names = ", ".join(ns.name for ns in known)
    raise InputError(f"which namespace? Give --ns or KVFS_NAMESPACE; the store has {names}")


def heading(store: LocalStore, ns: Namespace) -> dict[str, str]:
    """What every JSON result of a command in a namespace begins with."""
    return {"store": store.path, "namespace": ns.name}


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP end a command as Ctrl-C does: it cleans up first."""
    import signal

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    old = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
