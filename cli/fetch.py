"""`kvctl fetch`: reads and verifies the stored blocks of a prompt."""

from __future__ import annotations

import contextlib
import errno
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from kvfs.cli import common, output, tokens
from kvfs.cli.check import exit_code
from kvfs.cli.settings import Settings
from kvfs.errors import EXIT_MISS, EXIT_PARTIAL, InputError

if TYPE_CHECKING:
    from kvfs.fetch import FetchResult
    from kvfs.namespace import Namespace
    from kvfs.plan import Plan
    from kvfs.store import Store

MANUAL = {
    "Token ids": tokens.MANUAL,
    "Plans": """
    What kvctl check --json prints is a plan. With --plan no index is asked: the plan says where
    the blocks are, and every one is verified against the token ids as always. A host that only
    fetches needs nothing but the store.
    """,
    "JSON output": """
    An object:

    store, namespace -- where
    tokens -- tokens of the prompt
    stored_tokens, hit_tokens -- as in kvctl-check(1)
    wanted_blocks -- blocks that were to be read
    blocks -- good blocks, a prefix of those
    bytes -- their payload bytes
    bytes_read -- bytes read from the store
    seconds -- how long reading and verifying took
    reason -- why there are fewer blocks than wanted or than the prompt has, or "hit"
    """,
}


@common.command("""
    kvctl fetch prompt.u32 -o kv.bin
    kvctl fetch prompt.u32 -o - | engine-load
    kvctl check --json prompt.u32 > plan.json; kvctl fetch --plan plan.json prompt.u32 -o kv.bin
    kvctl fetch --stored --json prompt.u32
""")
@common.options
@common.namespace_option
@tokens.options
@click.option("-o", "--output", "target", metavar="FILE",
              help="Write the payloads there, one after the other, - for the standard output. "
                   "Default: read and verify only.")  # fmt: skip
@click.option("--plan", "plan_file", metavar="FILE",
              help="A plan that kvctl check --json printed, in place of a check.")  # fmt: skip
@click.option("--stored", is_flag=True,
              help="All that is stored, not only what may be hit.")  # fmt: skip
def command(
    settings: Settings, path: str | None, inline: str | None, form: str, target: str | None,
    plan_file: str | None, stored: bool,
) -> int:  # fmt: skip
    """Read the stored blocks of a prompt and verify them.

    Nothing that does not verify is written: the output is a prefix of the blocks, whole and good.
    Exits with 0 if all that may be hit was read, 4 if a shorter prefix was, 3 if nothing was.
    """
    if target == "-" and settings.as_json:
        raise InputError("--json and -o - would both write to the standard output")
    ids = tokens.read(path, inline, form)
    plan = None if plan_file is None else _read_plan(plan_file)
    with common.open_store(settings, catch_up=plan is None) as store, _target(target) as file:
        ns = common.pick_namespace(store, settings) if plan is None else store.namespace(plan.nsid)
        hasher = ns.hasher(ids)
        plan = store.check(ns, hasher) if plan is None else plan
        if plan.stored_blocks > hasher.n_blocks:
            raise InputError(f"{plan_file}: the plan is of a longer prompt than the token ids")
        found, seconds = _fetch(store, ns, plan, hasher, stored)
        if file is not None:
            _write(file, target or "", found.data)
        _print(settings, store, ns, plan, found, seconds, to_stderr=target == "-")
    if not found.blocks:
        return EXIT_MISS
    return exit_code(ns, plan) if found.complete else EXIT_PARTIAL


def _read_plan(path: str) -> Plan:
    from kvfs.plan import Plan

    try:
        return Plan.from_json(json.loads(tokens.load(path)))
    except (ValueError, RecursionError) as e:
        raise InputError(f"{path}: not JSON: {e}") from None


def _fetch(
    store: Store, ns: Namespace, plan: Plan, hasher: Any, stored: bool
) -> tuple[FetchResult, float]:
    import time

    import numpy  # noqa: F401  # verifying needs it, and its import is not to be timed

    wanted = plan.stored_blocks if stored else plan.hit_blocks
    with output.Progress("fetching") as progress:
        progress.show(f"fetching {output.size(wanted * ns.row_bytes)}")
        began = time.perf_counter()
        found = store.fetch(ns, plan, hasher, blocks=wanted)
        return found, time.perf_counter() - began


@contextlib.contextmanager
def _target(path: str | None) -> Iterator[Any]:
    """The file to write to, opened before the work begins; None: nowhere."""
    if path is None:
        yield None
        return
    if path == "-":
        if sys.stdout.isatty():
            raise InputError("payloads are binary; the standard output is a terminal")
        yield sys.stdout.buffer
        return
    with output.opened(path, "wb") as file:
        yield file


def _write(file: Any, path: str, data: memoryview) -> None:
    """Raises OutputFailed; then a part of the data may be there."""
    if path == "-":
        output.data(data)
        return
    done = 0
    try:
        while done < len(data):
            done += file.write(data[done:])
    except OSError as e:
        raise output.OutputFailed(e.errno or errno.EIO, path) from None


def _print(
    settings: Settings, store: Store, ns: Namespace, plan: Plan, found: FetchResult,
    seconds: float, *, to_stderr: bool,
) -> None:  # fmt: skip
    reason = found.reason or plan.reason
    result = {
        **common.heading(store, ns), "tokens": plan.tokens, "stored_tokens": plan.stored_tokens,
        "hit_tokens": plan.hit_tokens, "wanted_blocks": found.wanted, "blocks": found.blocks,
        "bytes": len(found.data), "bytes_read": found.bytes_read, "seconds": seconds,
        "reason": reason,
    }  # fmt: skip
    if settings.as_json:
        output.json_line(result)
        return
    short = "" if found.complete else f"{found.blocks:,} of "
    text = f"{short}{output.many(found.wanted, 'block')}, {output.size(len(found.data))}"
    if found.blocks:
        text += f", in {output.duration(seconds)}"
    if reason != "hit":
        text += f" ({reason})"
    if to_stderr:
        output.message(text)
    else:
        output.line(text)
