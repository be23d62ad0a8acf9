"""What `rm` and `ttl set` work on: the stored part of a prompt, a node, or a whole namespace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvfs.cli import places, tokens
from kvfs.errors import InputError

if TYPE_CHECKING:
    from kvfs.namespace import Namespace
    from kvfs.store import Store

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
_BATCH = 1000


def options(function: F) -> F:
    """--node, also called --prefix, and --all: arguments `node` and `everything`."""
    function = click.option(
        "--node", "--prefix", "node", metavar="NODE",
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
    def given(self) -> bool:
        """Any of the options was given."""
        by_tokens = self.path is not None or self.inline is not None or self.form != "auto"
        return by_tokens or self.node is not None or self.everything

    @property
    def kind(self) -> str:
        """ "tokens", "node" or "all". Raises InputError if more than one was given."""
        by_tokens = self.path is not None or self.inline is not None
        if by_tokens + (self.node is not None) + self.everything > 1:
            raise InputError("give one of: token ids, --node, --all")
        if self.form != "auto" and (self.everything or self.node is not None):
            raise InputError("--tokens-format is of token ids, and there are none")
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

            run, keep = places.find(store, ns, self.node or "")
            yield run.head
            yield from (r.head for r in descendants(store.index, ns, run, keep))


def batches(items: Iterable[T]) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, _BATCH)):
        yield batch
