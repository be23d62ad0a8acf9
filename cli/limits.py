"""`kvctl limits`: how much a store may hold, and how fast it is cleaned (see kvfs.limits)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from kvfs.cli import common, output
from kvfs.cli.settings import Settings
from kvfs.cli.values import BYTES, FiniteRange
from kvfs.errors import InputError

if TYPE_CHECKING:
    from kvfs.limits import Limits
    from kvfs.store import Store

NONE = "none"
MANUAL = {
    "How it works": """
    Without limits a store takes what its file system has, but for a reserve. kvctl-gc(1), or a
    housekeeper, evicts what has not been used for longest where more than the high share of a
    limit is taken, until the low share is reached. A namespace or a tenant with a quota loses its
    own blocks, never those of others. A put that would exceed a whole limit is refused with
    "no space" until there is room again; fetches go on.

    Copies and removals keep to rates from the beginning: 64 MiB and 50 files a second, which leave
    a small storage to the requests (kvctl bench cleaner). That of a fleet wants more: about a third
    of what is put, in the mean.

    Writers and housekeepers of all hosts heed a change within seconds, also while they work. A
    value of "none" takes a limit away. A tenant is named by the digest of its salt, as
    kvctl ns list prints it.
    """,
    "JSON output": """
    An object:

    capacity_bytes, high, low, reserve_bytes, clean_share, copy_rate, remove_rate -- the limits;
    null where there is none
    namespaces, tenants -- objects: name or digest to quota in bytes
    used_bytes -- of all segment files
    used_namespaces -- object: namespace to the bytes of its segment files
    free_bytes -- of the file system
    """,
}


SHARE = FiniteRange(0, 1)


@common.command("""
    kvctl limits
    kvctl limits --capacity 40T --high 0.92 --low 0.85
    kvctl limits --namespace llama-3.1-8b-1f0c22d4a3b1=2T
    kvctl limits --rate 500M --removals 20
    kvctl limits --capacity none
""")
@common.options
@click.option("--capacity", metavar="SIZE",
              help="What all segments together may take.")  # fmt: skip
@click.option("--high", type=SHARE, help="Evict above this share of a limit.")
@click.option("--low", type=SHARE, help="Evict down to this share of a limit.")
@click.option("--reserve", metavar="SIZE",
              help="Of the file system, never written by puts. Default: 1 %, 1 GiB at most.",
              )  # fmt: skip
@click.option("--clean-share", metavar="SHARE",
              help="Copy a segment forward when less than this share of it is in use. Default: "
                   "half, less where there is room.")  # fmt: skip
@click.option("--rate", metavar="SIZE", help="Copy no more than this in a second. Default: 64M.")
@click.option("--removals", metavar="N", help="Remove no more files in a second. Default: 50.")
@click.option("--namespace", "namespaces", multiple=True, metavar="NAME=SIZE",
              help="Quota of a namespace. May be given again.")  # fmt: skip
@click.option("--tenant", "tenants", multiple=True, metavar="DIGEST=SIZE",
              help="Quota of a tenant's namespaces together. May be given again.")  # fmt: skip
def command(
    settings: Settings, namespaces: tuple[str, ...], tenants: tuple[str, ...], **values: Any
) -> None:
    """Show and set how much a store may hold, and how fast it is cleaned."""
    from kvfs.limits import Limits
    from kvfs.usage import measure

    with common.open_store(settings) as store:
        limits = Limits.load(store.backend)
        changed = _changed(store, limits, values, namespaces, tenants)
        if changed != limits:
            changed.save(store.backend)
        usage = measure(store.backend)
        free, _ = store.backend.free_bytes()
    result = {
        **changed.to_json(), "used_bytes": usage.bytes,
        "used_namespaces": dict(usage.namespaces), "free_bytes": free,
    }  # fmt: skip
    if settings.as_json:
        output.json_line(result)
    else:
        _print(result)


_FIELDS = {"capacity": "capacity_bytes", "reserve": "reserve_bytes", "rate": "copy_rate",
           "removals": "remove_rate", "high": "high", "low": "low",
           "clean_share": "clean_share"}  # fmt: skip


def _changed(
    store: Store, limits: Limits, values: dict[str, Any], namespaces: tuple[str, ...],
    tenants: tuple[str, ...],
) -> Limits:  # fmt: skip
    changes: dict[str, Any] = {
        _FIELDS[option]: _value(option, value)
        for option, value in values.items()
        if value is not None
    }
    quotas = dict(limits.namespaces)
    for name, quota in map(_quota, namespaces):
        _set(quotas, store.namespace(name).name, quota)
    of_tenants = dict(limits.tenants)
    for name, quota in map(_quota, tenants):
        _set(of_tenants, name, quota)
    return replace(limits, **changes, namespaces=quotas, tenants=of_tenants)


def _value(option: str, value: Any) -> Any:
    if value == NONE:
        return None
    if option in ("removals", "clean_share"):
        return FiniteRange().convert(value, None, None)
    return BYTES.convert(value, None, None) if isinstance(value, str) else value


def _quota(text: str) -> tuple[str, int | None]:
    name, equals, value = text.rpartition("=")
    if not equals or not name:
        raise InputError(f"{text!r} is not a quota, such as NAME=2T")
    return name, None if value == NONE else BYTES.convert(value, None, None)


def _set(quotas: dict[str, int], name: str, quota: int | None) -> None:
    quotas.pop(name, None)
    if quota is not None:
        quotas[name] = quota


def _print(result: dict[str, Any]) -> None:
    def size(name: str) -> str:
        value = result[name]
        return "no limit" if value is None else output.size(value)

    reserve = "1 %, 1 GiB at most" if result["reserve_bytes"] is None else size("reserve_bytes")
    removals, clean = result["remove_rate"], result["clean_share"]
    output.pairs([
        ("capacity", size("capacity_bytes")), ("used", size("used_bytes")),
        ("free", size("free_bytes")), ("reserve", reserve),
        ("high", f"{result['high']:.0%}"), ("low", f"{result['low']:.0%}"),
        ("clean below", "half, less where there is room" if clean is None else f"{clean:.0%}"),
        ("copies a second", size("copy_rate")),
        ("removals a second", "no limit" if removals is None else f"{removals:g}"),
    ])  # fmt: skip
    for name, quota in result["namespaces"].items():
        used = output.size(result["used_namespaces"].get(name, 0))
        output.line(f"namespace {name}: {used} of {output.size(quota)}")
    for digest, quota in result["tenants"].items():
        output.line(f"tenant {digest}: {output.size(quota)}")
