"""`kvctl fetch`: reads and verifies the stored blocks of a prompt."""

from __future__ import annotations

import contextlib
import errno
import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from kvfs.cli import common, fetching, output, tokens
from kvfs.cli.check import exit_code, opened
from kvfs.cli.fetching import Found, Wanted
from kvfs.cli.settings import Settings
from kvfs.cli.values import BYTES, MILLISECONDS
from kvfs.errors import EXIT_MISS, EXIT_PARTIAL, InputError

if TYPE_CHECKING:
    from kvfs.local import LocalStore
    from kvfs.namespace import Namespace
    from kvfs.plan import Plan

MANUAL = {
    "Token ids": tokens.MANUAL,
    "Plans": """
    What kvctl check --json prints is a plan. With --plan no index is asked: the plan says where
    the blocks are, and every one is verified against the token ids as always. A host that only
    fetches needs nothing but the store.
    """,
    "How it is read": """
    A fetcher reads: a process that keeps what it read in shared memory and verifies it. If the
    one of this store runs (see kvctl-fetcher(1)) it is used, else this command starts one of its
    own, which ends with it. The token ids are compared here, always. What is larger than the
    arena comes in windows. While the storage hangs the fetcher hangs, not this command: it ends
    at the deadline with the good blocks, and with code 10.
    """,
    "JSON output": """
    An object:

    store, namespace -- where
    tokens -- tokens of the prompt
    stored_tokens, hit_tokens -- as in kvctl-check(1)
    wanted_blocks -- blocks that were to be read
    blocks -- good blocks, a prefix of those
    bytes -- their payload bytes
    bytes_read -- bytes that were read from the store while this command ran; 0 if the fetcher had
    them all
    seconds -- how long reading and verifying took
    reason -- why there are fewer blocks than wanted or than the prompt has, or "hit"
    """,
}


@common.command("""
    kvctl fetch prompt.u32 -o kv.bin
    kvctl fetch prompt.u32 -o - | engine-load
    kvctl check --json prompt.u32 > plan.json; kvctl fetch --plan plan.json prompt.u32 -o kv.bin
    kvctl fetch --stored --json prompt.u32
    kvctl fetch --deadline 2s --arena 1G prompt.u32
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
@click.option("--catch-up", is_flag=True,
              help="First apply what other hosts have written.")  # fmt: skip
@click.option("--deadline", "milliseconds", type=MILLISECONDS, default=600_000, metavar="TIME",
              help="End by then, with what is there: 2s, 500ms. Default: 10 minutes.",
              )  # fmt: skip
@click.option("--priority", type=click.IntRange(0, 9), default=0,
              help="0 comes first; prefetches want a larger one.")  # fmt: skip
@click.option("--no-verify", is_flag=True,
              help="Trust the payloads: leave out their checksums, but not the token ids.",
              )  # fmt: skip
@click.option("--arena", type=BYTES, metavar="SIZE",
              help="Shared memory of a fetcher of this command's own. Default: as needed, at most "
                   "256M.")  # fmt: skip
@click.option("--shm", metavar="DIR",
              help="Where that shared memory gets a file. Default: memory without a name.",
              )  # fmt: skip
@click.option("--direct", is_flag=True,
              help="Read in this process, without a fetcher. It cannot be given up while the "
                   "storage hangs.")  # fmt: skip
def command(
    settings: Settings, path: str | None, inline: str | None, form: str, target: str | None,
    plan_file: str | None, stored: bool, catch_up: bool, milliseconds: int, priority: int,
    no_verify: bool, arena: int | None, shm: str | None, direct: bool,
) -> int:  # fmt: skip
    """Read the stored blocks of a prompt and verify them.

    Nothing that does not verify is written: the output is a prefix of the blocks, whole and good.
    Exits with 0 if all that may be hit was read, 4 if a shorter prefix was, 3 if nothing was, 10 if
    the deadline came first.
    """
    until = time.monotonic() + milliseconds / 1000
    if target == "-" and settings.as_json:
        raise InputError("--json and -o - would both write to the standard output")
    if direct and (arena or shm):
        raise InputError("--arena and --shm are of a fetcher; --direct uses none")
    ids = tokens.read(path, inline, form)
    plan = None if plan_file is None else _read_plan(plan_file)
    with ExitStack() as stack:
        store, ns = stack.enter_context(_opened(settings, plan, catch_up))
        file = stack.enter_context(_target(target))
        hasher = ns.hasher(ids)
        plan = store.check(ns, hasher) if plan is None else plan
        if plan.stored_blocks > hasher.n_blocks:
            raise InputError(f"{plan_file}: the plan is of a longer prompt than the token ids")
        blocks = plan.stored_blocks if stored else plan.hit_blocks
        wanted = Wanted(store, ns, plan, hasher, blocks, not no_verify, priority, until)
        found = _fetch(wanted, _sink(file, target), direct, arena, shm)
        if found.lasting:
            fetching.report(wanted, found, settings.index)
        _print(settings, wanted, found, to_stderr=target == "-")
    return _exit_code(wanted, found)


@contextlib.contextmanager
def _opened(
    settings: Settings, plan: Plan | None, catch_up: bool
) -> Iterator[tuple[LocalStore, Namespace]]:
    """As for a check, but that a plan names its namespace and needs no journals."""
    if plan is None:
        with opened(settings, fully=catch_up) as found:
            yield found
        return
    with ExitStack() as stack:
        ns: Namespace | None = None
        store = common.open_index(settings)
        if store is not None:
            stack.enter_context(store)
            with contextlib.suppress(InputError):
                ns = store.namespace(plan.nsid)
        if store is None or ns is None:
            store = stack.enter_context(common.open_store(settings, catch_up=False))
            ns = store.namespace(plan.nsid)
        yield store, ns


def _fetch(
    wanted: Wanted, sink: fetching.Sink, direct: bool, arena: int | None, shm: str | None
) -> Found:
    if not wanted.blocks:
        return Found()
    with output.Progress("fetching") as progress:
        progress.show(f"fetching {output.size(wanted.blocks * wanted.ns.row_bytes)}")
        if direct:
            return fetching.direct(wanted, sink)
        with fetching.connect(wanted, arena, shm) as client:
            return fetching.through(client, wanted, sink, progress)


def _exit_code(wanted: Wanted, found: Found) -> int:
    if found.code or not found.blocks:
        return found.code or EXIT_MISS
    return exit_code(wanted.ns, wanted.plan) if found.blocks == wanted.blocks else EXIT_PARTIAL


def _read_plan(path: str) -> Plan:
    from kvfs.plan import Plan

    try:
        return Plan.from_json(json.loads(tokens.load(path)))
    except (ValueError, RecursionError) as e:
        raise InputError(f"{path}: not JSON: {e}") from None


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


def _sink(file: Any, path: str | None) -> fetching.Sink:
    if file is None:
        return lambda data: None
    return lambda data: _write(file, path or "", data)


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


def _print(settings: Settings, wanted: Wanted, found: Found, *, to_stderr: bool) -> None:
    plan, size = wanted.plan, found.blocks * wanted.ns.row_bytes
    reason = found.reason or plan.reason
    result = {
        **common.heading(wanted.store, wanted.ns), "tokens": plan.tokens,
        "stored_tokens": plan.stored_tokens, "hit_tokens": plan.hit_tokens,
        "wanted_blocks": wanted.blocks, "blocks": found.blocks, "bytes": size,
        "bytes_read": found.bytes_read, "seconds": found.seconds, "reason": reason,
    }  # fmt: skip
    if settings.as_json:
        output.json_line(result)
        return
    short = "" if found.blocks == wanted.blocks else f"{found.blocks:,} of "
    text = f"{short}{output.many(wanted.blocks, 'block')}, {output.size(size)}"
    if found.blocks:
        text += f", in {output.duration(found.seconds)}"
    if reason != "hit":
        text += f" ({reason})"
    if to_stderr:
        output.message(text)
    else:
        output.line(text)
