"""`kvctl ls`: the tree of a store without a mount. What the tree is, kvfs.vfs says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from kvfs.cli import common, output, places
from kvfs.cli.settings import Settings
from kvfs.errors import InputError

if TYPE_CHECKING:
    from kvfs.store import Store
    from kvfs.vfs import Entry, Tree

MANUAL = {
    "JSON output": """
    An object for each entry:

    path -- path in the tree
    type -- directory or file
    size -- bytes of a file: of a block, those of its payload
    written_ms, used_ms -- when it was stored and last renewed, milliseconds since 1970
    inode -- the inode number the mount shows
    """,
}


@common.command("""
    kvctl ls
    kvctl ls llama-3.1-8b-30c1a20f43cc
    kvctl ls -l llama-3.1-8b-30c1a20f43cc/000000-5a1f0c2277ab03d1
    kvctl ls -R | grep -c kv$
""")
@common.options
@common.namespace_option
@click.option("-l", "--long", "wide", is_flag=True, help="With size and time of writing.")
@click.option("-R", "--recursive", is_flag=True, help="All that is below, by path.")
@click.argument("path", required=False, default="")
def command(settings: Settings, wide: bool, recursive: bool, path: str) -> None:
    """List the tree of a store, without mounting it.

    The names are those that kvctl mount shows. PATH may leave out the name of the namespace if
    --ns says it, or if the store has only one.
    """
    from kvfs.vfs import Tree

    with common.open_store(settings) as store:
        tree = Tree(store)
        top = _find(store, tree, settings, path)
        for where, entry in _entries(tree, top, recursive):
            if settings.as_json:
                output.json_line(_fields(where, entry))
            elif wide:
                kind = "d" if entry.stat.directory else "-"
                size = "" if entry.stat.directory else str(entry.stat.size)
                output.line(f"{kind} {size:>12}  {output.when(entry.stat.written_ms)}  {where}")
            else:
                output.line(where)


def _find(store: Store, tree: Tree, settings: Settings, path: str) -> Entry:
    if settings.namespace is not None:
        known = [store.namespace(settings.namespace)]
    else:
        known = store.listed_namespaces()
    entry = places.walk(tree, path, known[0] if len(known) == 1 else None)
    if entry is None:
        raise InputError(f"{path}: no such node or block")
    return entry


def _entries(tree: Tree, top: Entry, recursive: bool) -> Iterator[tuple[str, Entry]]:
    """(name or path below `top`, entry), in the order of the tree."""
    if not top.stat.directory:
        yield top.name.decode(), top
        return
    waiting: list[tuple[str, Entry]] = [("", top)]
    while waiting:
        prefix, directory = waiting.pop()
        below = []
        for entry in tree.listing(directory.node).entries():  # type: ignore[arg-type]
            path = prefix + entry.name.decode()
            yield path, entry
            if recursive and entry.stat.directory:
                below.append((f"{path}/", entry))
        waiting += reversed(below)


def _fields(path: str, entry: Entry) -> dict[str, Any]:
    stat = entry.stat
    return {
        "path": path, "type": "directory" if stat.directory else "file", "size": stat.size,
        "written_ms": stat.written_ms, "used_ms": stat.used_ms, "inode": stat.ino,
    }  # fmt: skip
