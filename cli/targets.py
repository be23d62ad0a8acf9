"""What `rm` and `ttl set` work on: the stored part of a prompt, a node, or a whole namespace.

Also how a command names a node or a block: by the hash of a block, a unique beginning of it, or the
path the mounted tree shows it under.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvfs.cli import tokens
from kvfs.errors import InputError

if TYPE_CHECKING:
    from kvfs.index.schema import Run
    from kvfs.namespace import Namespace
    from kvfs.store import Store

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
_BATCH = 1000
_HEX = frozenset("0123456789abcdef")


def options(function: F) -> F:
    """--node and --all: arguments `node` and `everything`."""
    function = click.option(
        "--node", metavar="NODE",
        help="In place of a prompt: a node or a block and all behind it, by hash, beginning of a "
             "hash, or path in the tree.",
    )(function)  # fmt: skip
    return click.option(
        "--all", "everything", is_flag=True, help="In place of a prompt: the whole namespace."
    )(function)


@dataclass(frozen=True, slots=True)
class Target:
    """What the options say; exactly one of the three kinds. Fields are those of the options."""

    path: str | None
    inline: str | None
    form: str
    node: str | None
    everything: bool

    @property
    def kind(self) -> str:
        """ "tokens", "node" or "all". Raises InputError if more than one was given."""
        by_tokens = self.path is not None or self.inline is not None
        if by_tokens + (self.node is not None) + self.everything > 1:
            raise InputError("give one of: token ids, --node, --all")
        return "all" if self.everything else "node" if self.node is not None else "tokens"

    def tokens(self) -> memoryview:
        return tokens.read(self.path, self.inline, self.form)

    def heads(self, store: Store, ns: Namespace) -> Iterator[bytes]:
        """First hashes of all runs meant. Raises InputError."""
        if self.kind == "tokens":
            hasher = ns.hasher(self.tokens())
            found = store.index.check(ns.number, hasher, store.now_ms())
            yield from (hasher.digest(m.block + 1) for m in found.runs)
        elif self.kind == "all":
            yield from (run.head for run in store.index.all_runs(ns.number))
        else:
            from kvfs.removal import descendants

            run, keep = find(store, ns, self.node or "")
            yield run.head
            yield from (r.head for r in descendants(store.index, ns, run, keep))


def batches(items: Iterable[T]) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, _BATCH)):
        yield batch


def find(store: Store, ns: Namespace, name: str) -> tuple[Run, int]:
    """The run that holds a block, and the block's position in it. Raises InputError.

    name: hex digits of its hash, or a path in the tree: the hash is behind the last "-", and a
    file NUMBER.kv below it is the block of that number.
    """
    digits, number = _parse(name)
    runs = _by_head(store, ns, digits)
    if not runs and number is None:
        inside = _inside(store, ns, digits)
        if inside is not None:
            return inside
    if len(runs) != 1:
        what = "no block" if not runs else f"{len(runs)} nodes"
        raise InputError(f"{name}: {what} in {ns.name} with a hash that begins with {digits}")
    run = runs[0]
    if number is None:
        return run, 0
    return _follow(store, ns, run, number, name)


def _parse(name: str) -> tuple[str, int | None]:
    parts = [part for part in name.split("/") if part]
    number = None
    if parts and parts[-1].endswith(".kv"):
        block = parts.pop().removesuffix(".kv")
        if not block.isdecimal():
            raise InputError(f"{name}: not a block's file; those are called NUMBER.kv")
        number = int(block)
    digits = parts[-1].rpartition("-")[2].lower() if parts else ""
    if not 4 <= len(digits) <= 32 or not _HEX.issuperset(digits):
        raise InputError(f"{name}: name a block by 4 to 32 hex digits of its hash, or by its path")
    return digits, number


def _by_head(store: Store, ns: Namespace, digits: str) -> list[Run]:
    """The runs whose first hash begins with the digits."""
    whole = bytes.fromhex(digits[: len(digits) // 2 * 2])
    runs = store.index.runs_with_prefix(ns.number, whole)
    return [run for run in runs if run.head.hex().startswith(digits)]


def _inside(store: Store, ns: Namespace, digits: str) -> tuple[Run, int] | None:
    """The first block within a run with such a hash: looks at every run of the namespace."""
    for run in store.index.all_runs(ns.number):
        for i in range(1, run.count):
            if run.hash(i).hex().startswith(digits):
                return run, i
    return None


def _follow(store: Store, ns: Namespace, run: Run, number: int, name: str) -> tuple[Run, int]:
    """The block of a number on the main line from the start of a run on."""
    while number >= run.block + run.count:
        heads = store.index.children(ns.number, run.hash(run.count - 1))
        runs = [r for r in (store.index.run(ns.number, h) for h in heads) if r is not None]
        if not runs:
            break
        run = min(runs, key=lambda r: (r.written_ms, r.head))
    if not run.block <= number < run.block + run.count:
        raise InputError(f"{name}: no such block")
    return run, number - run.block
