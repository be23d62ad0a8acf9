"""Evicting, renewing and moving through the tree."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest

from kvfs.errors import InputError
from kvfs.testing.chains import tokens_of
from kvfs.testing.trees import Garden
from kvfs.vfs import change
from kvfs.vfs.change import Changes
from kvfs.vfs.node import BlockFile, Directory, Folder, NamespaceDir, Node, folder_name


@pytest.fixture
def changes(place: Garden) -> Changes:
    place.put(1, 2)
    place.put(1, 2, 3, 4)
    place.put(1, 2, 9, 9)
    place.put(1, 7)
    place.put(1, 7, 8)
    place.put(5)
    return Changes(place.tree)


@pytest.fixture
def folder(place: Garden, changes: Changes) -> Folder:
    return next(f for f in place.folders(place.space) if len(place.names(f)) > 2)


def raises(code: int, work: Callable[[], object]) -> None:
    with pytest.raises(OSError) as caught:
        work()
    assert caught.value.errno == code, os.strerror(caught.value.errno or 0)


def stored(place: Garden, *blocks: int) -> int:
    return place.store.check(place.ns, tokens_of(blocks)).stored_blocks


def test_evicting_a_block_takes_what_follows(
    place: Garden, changes: Changes, folder: Folder
) -> None:
    changes.unlink(folder, b"000002.kv")
    assert stored(place, 1, 2, 3, 4) == 2
    assert stored(place, 1, 2, 9, 9) == 4, "a fork beside it stays"
    changes.unlink(folder, b"000001.kv")
    assert stored(place, 1, 2, 9, 9) == 1
    assert stored(place, 1, 7, 8) == 3
    assert place.names(folder)[:1] == ["000000.kv"]


def remove_all(place: Garden, changes: Changes, directory: Directory, name: str) -> None:
    """`rm -r`: list once, remove what was listed, directories from inside, each name looked up."""
    entry = place.tree.lookup(directory, name.encode())
    entry = entry or changes.gone_entry(directory, name.encode())
    assert entry is not None, name
    if not isinstance(entry.node, Folder):
        changes.unlink(directory, name.encode())
        return
    try:
        inside = place.names(entry.node)
    except OSError:
        assert changes.is_gone(entry.node)
        inside = []
    for inner in inside:
        remove_all(place, changes, entry.node, inner)
    changes.rmdir(directory, name.encode())


@pytest.mark.parametrize("reverse", [False, True])
def test_rm_r_in_any_order(
    place: Garden, changes: Changes, folder: Folder, reverse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = place.names

    def ordered(directory: Directory) -> list[str]:
        return names(directory)[::-1] if reverse else names(directory)

    monkeypatch.setattr(place, "names", ordered)
    name = folder_name(0, folder.head).decode()
    remove_all(place, changes, place.space, name)
    assert len(place.folders(place.space)) == 1
    assert stored(place, 1) == 0 and stored(place, 5) == 1


def test_names_that_went_along_do_not_stay(
    place: Garden, changes: Changes, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes.unlink(folder, b"000001.kv")
    ghost = changes.gone_entry(folder, b"000003.kv")
    assert ghost is not None and ghost.stat.size == 0
    assert changes.gone_entry(folder, b"000000.kv") is None
    assert "000003.kv" not in place.names(folder)
    now = change.time.monotonic()
    monkeypatch.setattr(change.time, "monotonic", lambda: now + 2 * change.GONE_SECONDS)
    assert changes.gone_entry(folder, b"000003.kv") is None
    raises(errno.ENOENT, lambda: changes.unlink(folder, b"000003.kv"))


def test_what_cannot_be_removed(place: Garden, changes: Changes, folder: Folder) -> None:
    raises(errno.ENOENT, lambda: changes.unlink(folder, b"000009.kv"))
    raises(errno.ENOENT, lambda: changes.unlink(folder, b"anything"))
    raises(errno.EPERM, lambda: changes.unlink(place.space, b"namespace.json"))
    raises(errno.EPERM, lambda: changes.unlink(place.tree.root, b"README"))
    raises(errno.EPERM, lambda: changes.rmdir(place.tree.root, place.ns.name.encode()))
    for name in place.names(place.space)[1:]:
        raises(errno.ENOTEMPTY, lambda name=name: changes.rmdir(place.space, name.encode()))
    before = place.names(folder)
    changes.unlink(folder, b"tokens")
    assert place.names(folder) == before


def expiries(place: Garden, *blocks: int) -> list[tuple[int, str]]:
    """(seconds left, class) of each run of a prompt."""
    names = place.store.index.class_names()
    found = place.store.index.check(
        place.ns.number, place.ns.hasher(tokens_of(blocks)), place.store.now_ms()
    )
    now = place.clock.now * 1000
    return [(round((m.expires_ms - now) / 1000), names[m.class_id]) for m in found.runs]


def renew(changes: Changes, place: Garden, node: Node) -> None:
    changes.renew(node, place.tree.stat(node).ino)


def test_renewing_a_block_renews_what_it_builds_on(
    place: Garden, changes: Changes, folder: Folder
) -> None:
    place.clock.now += 600
    fork = place.folders(folder)
    seven = next(f for f in fork if f.block == 1)
    renew(changes, place, BlockFile(seven, 2))
    assert [left for left, _ in expiries(place, 1, 7, 8)] == [1000, 1000, 1000]
    assert [left for left, _ in expiries(place, 1, 2, 3, 4)] == [1000, 400]
    renew(changes, place, folder)
    assert [left for left, _ in expiries(place, 1, 2, 3, 4)] == [1000, 1000]
    assert [left for left, _ in expiries(place, 1, 2, 9, 9)] == [1000, 400]
    renew(changes, place, place.entry(place.folders(folder)[1], "tokens").node)
    assert [left for left, _ in expiries(place, 1, 2, 9, 9)] == [1000, 1000]


def test_changing_the_class(place: Garden, changes: Changes, folder: Folder) -> None:
    block = BlockFile(folder, 3)
    changes.set_class(block, place.tree.stat(block).ino, b"agent")
    assert expiries(place, 1, 2, 3, 4) == [(1000, "chatbot"), (100, "agent")]
    changes.set_class(folder, 0, b"agent")
    assert expiries(place, 1, 2, 3, 4) == [(100, "agent"), (100, "agent")]
    changes.set_class(folder, 0, b"chatbot")
    assert expiries(place, 1, 2, 3, 4) == [(1000, "chatbot"), (1000, "chatbot")]
    for name in (b"", b"nope", b"\xff", b"agent "):
        with pytest.raises(InputError, match="no TTL class"):
            changes.set_class(folder, 0, name)


def test_what_cannot_be_renewed(place: Garden, changes: Changes, folder: Folder) -> None:
    for node in (place.tree.root, place.space, place.entry(place.space, "namespace.json").node):
        raises(errno.EPERM, lambda node=node: changes.renew(node, 0))
        raises(errno.EPERM, lambda node=node: changes.set_class(node, 0, b"agent"))
    raises(errno.ESTALE, lambda: changes.renew(BlockFile(folder, 99), 7))
    raises(errno.ESTALE, lambda: changes.renew(BlockFile(folder, 3), 7))
    raises(errno.ESTALE, lambda: changes.set_class(BlockFile(folder, 3), 7, b"agent"))
    assert isinstance(place.space, NamespaceDir)
