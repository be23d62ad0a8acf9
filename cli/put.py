"""`kvctl put`: stores blocks from a file. The whole prompt is never held in memory: it is put in
pieces, each behind those before it, so that what was put of an interrupted command is a prefix."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

import click

from kvfs.cli import common, output, tokens
from kvfs.cli.settings import Settings
from kvfs.errors import EXIT_OK, InputError, KvfsError

if TYPE_CHECKING:
    from kvfs.chain import PrefixHasher
    from kvfs.namespace import Namespace
    from kvfs.store import Store

_PIECE_BYTES = 128 << 20

MANUAL = {
    "Token ids": tokens.MANUAL,
    "Blocks": """
    The blocks are the bytes of the whole blocks of the prompt, one after the other, each of the
    row size of the namespace (kvctl ns show), without the tokens behind the last whole block. A
    file of another size is refused.
    """,
    "JSON output": """
    An object:

    store, namespace -- where
    tokens -- tokens of the prompt
    blocks -- whole blocks of the prompt
    stored -- newly written blocks
    existing -- blocks that were there already; they are kept for the class's whole time from now
    remainder_tokens -- tokens behind the last whole block; they are never stored
    bytes -- payload bytes written
    durable -- true if what was written is on stable storage
    error -- why not all of them are stored, or null
    """,
}


@common.command("""
    kvctl put prompt.u32 --blocks kv.bin
    engine-dump | kvctl put prompt.u32 --blocks - --class agent
    kvctl put prompt.u32 --blocks tail.bin --first-block 96
    kvctl put --synthetic --tokens "$(seq -s, 1024)"
""")
@common.options
@common.namespace_option
@tokens.options
@click.option("--blocks", "source", metavar="FILE",
              help="The blocks: a file, or - for the standard input.")  # fmt: skip
@click.option("--synthetic", is_flag=True,
              help="Store made-up blocks, a function of their hashes: to try a store out.",
              )  # fmt: skip
@click.option("--first-block", type=click.IntRange(min=0), default=0, metavar="N",
              help="The blocks given begin with number N; those before are stored already.",
              )  # fmt: skip
@click.option("--class", "ttl_class", metavar="NAME",
              help="TTL class of what is written; kvctl ttl lists them.")  # fmt: skip
def command(
    settings: Settings, path: str | None, inline: str | None, form: str, source: str | None,
    synthetic: bool, first_block: int, ttl_class: str | None,
) -> int:  # fmt: skip
    """Store the blocks of a prompt.

    What is stored already is not written again. If something is in the way, the blocks before it
    are stored, and the exit code says what it was.
    """
    if (source is None) != synthetic:
        raise InputError("give either --blocks or --synthetic")
    if source == "-" and inline is None and path in (None, "-"):
        raise InputError("tokens and blocks cannot both come from the standard input")
    ids = tokens.read(path, inline, form)
    with common.open_store(settings) as store:
        ns = common.pick_namespace(store, settings)
        whole = ns.hasher(ids)
        if first_block > whole.n_blocks:
            raise InputError(f"--first-block {first_block}: the prompt has {whole.n_blocks} blocks")
        result = {
            **common.heading(store, ns), "tokens": whole.n_tokens, "blocks": whole.n_blocks,
            "remainder_tokens": whole.n_tokens % ns.block_tokens,
        }  # fmt: skip
        with _source(source, ns, whole, first_block) as pieces:
            error = _put(store, ns, whole, first_block, pieces, ttl_class, result)
    _print(settings, result)
    if error is None:
        return EXIT_OK
    output.message(f"kvctl put: {error}")
    return error.exit_code


def _put(
    store: Store, ns: Namespace, whole: PrefixHasher, first: int, pieces: Iterator[Any],
    ttl_class: str | None, result: dict[str, Any],
) -> KvfsError | None:  # fmt: skip
    """Puts piece after piece; returns what was in the way."""
    result.update(stored=0, existing=0, bytes=0, durable=True)
    hasher, at, size = ns.hasher(), first, whole.block_bytes
    hasher.extend(whole.buffer[: first * size])
    error: KvfsError | None = None
    with output.Progress("blocks stored", whole.n_blocks - first) as progress:
        for piece in pieces:
            count = len(piece) // ns.row_bytes
            hasher.extend(whole.buffer[at * size : (at + count) * size])
            done = store.put(ns, hasher, piece, first_block=at, ttl_class=ttl_class)
            at += count
            result["stored"] += done.stored
            result["bytes"] += done.bytes
            result["durable"] = result["durable"] and done.durable
            result["existing"] = max(result["existing"], done.existing + done.stored)
            error = done.error
            progress(count)
            if error is not None:
                break
    result["existing"] = max(0, result["existing"] - result["stored"])
    result["error"] = None if error is None else str(error)
    return error


@contextlib.contextmanager
def _source(
    path: str | None, ns: Namespace, whole: PrefixHasher, first: int
) -> Iterator[Iterator[Any]]:
    """The payloads of blocks first.. in pieces of whole blocks."""
    if path is None:
        yield _synthetic(ns, whole, first)
    elif path == "-":
        yield _read(sys.stdin.buffer, "standard input", ns, whole.n_blocks - first)
    else:
        with output.opened(path, "rb") as file:
            _check_size(file, path, ns, whole.n_blocks - first)
            yield _read(file, path, ns, whole.n_blocks - first)


def _check_size(file: IO[bytes], path: str, ns: Namespace, blocks: int) -> None:
    """A regular file of the wrong size is refused before anything is stored."""
    import stat

    status = os.fstat(file.fileno())
    if stat.S_ISREG(status.st_mode) and status.st_size != blocks * ns.row_bytes:
        raise InputError(_wrong_size(path, f"{status.st_size:,} bytes", ns, blocks))


def _wrong_size(path: str, found: str, ns: Namespace, blocks: int) -> str:
    return (
        f"{path}: {found}; the prompt has {blocks:,} whole blocks of {ns.row_bytes:,} bytes to "
        f"store, which are {blocks * ns.row_bytes:,}"
    )


def _read(file: IO[bytes], path: str, ns: Namespace, blocks: int) -> Iterator[bytearray]:
    """Yields the blocks in pieces. Raises InputError before the last if there are more or fewer."""
    step = max(1, _PIECE_BYTES // ns.row_bytes)
    for at in range(0, blocks, step):
        piece = bytearray(min(step, blocks - at) * ns.row_bytes)
        n = _fill(file, path, piece)
        if n < len(piece):
            found = f"only {at * ns.row_bytes + n:,} bytes"
            raise InputError(_wrong_size(path, found, ns, blocks))
        if at + step >= blocks and _fill(file, path, bytearray(1)):
            raise InputError(_wrong_size(path, "more bytes than that", ns, blocks))
        yield piece


def _fill(file: IO[bytes], path: str, into: bytearray) -> int:
    view, done = memoryview(into), 0
    try:
        while done < len(into):
            n = file.readinto(view[done:])  # type: ignore[attr-defined]
            if not n:
                break
            done += n
    except OSError as e:
        raise InputError(f"{path}: {e.strerror}") from None
    return done


def _synthetic(ns: Namespace, whole: PrefixHasher, first: int) -> Iterator[bytearray]:
    from kvfs.chain import HASH_BYTES
    from kvfs.sim.synth import PayloadSynth

    hashes = ns.hasher(whole.buffer).hashes()
    synth = PayloadSynth(ns.row_bytes)
    step = max(1, _PIECE_BYTES // ns.row_bytes)
    for at in range(first, whole.n_blocks, step):
        end = min(at + step, whole.n_blocks)
        yield synth.make(hashes[at * HASH_BYTES : end * HASH_BYTES])


def _print(settings: Settings, result: dict[str, Any]) -> None:
    if settings.as_json:
        output.json_line(result)
        return
    length, blocks = output.many(result["tokens"], "token"), output.many(result["blocks"], "block")
    stored, existing = output.many(result["stored"], "block"), result["existing"]
    durable, rest = "" if result["durable"] else ", not yet durable", result["remainder_tokens"]
    output.pairs(
        [("prompt", f"{length}, {blocks}"),
         ("stored", f"{stored}, {output.size(result['bytes'])}{durable}"),
         ("existing", output.many(existing, "block") if existing else ""),
         ("left over", output.many(rest, "token") if rest else "")]
    )  # fmt: skip
