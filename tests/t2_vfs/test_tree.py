"""What the tree shows of stores that are made on purpose: expired, grown, huge, damaged."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import pytest

from kvfs.errors import IndexFault
from kvfs.index.schema import run_key
from kvfs.testing.chains import hashes_of, identity, tokens_of
from kvfs.testing.trees import Garden, phantom_runs
from kvfs.vfs import line
from kvfs.vfs.node import BlockFile, Folder, NamespaceDir


def chain(n: int, seed: int = 0) -> bytes:
    """n made-up hashes."""
    return b"".join(
        blake2b(f"{seed}/{i}".encode(), digest_size=16).digest() for i in range(n)
    )  # fmt: skip


def is_stale(work: Callable[[], object]) -> bool:
    with pytest.raises(OSError) as caught:
        work()
    return caught.value.errno == errno.ESTALE


# shape


def test_an_empty_store_has_a_readme_and_the_namespace(place: Garden) -> None:
    assert place.names(place.tree.root) == ["README", place.ns.name]
    assert place.names(place.space) == ["namespace.json"]
    assert isinstance(place.entry(place.tree.root, place.ns.name).node, NamespaceDir)


def test_a_second_namespace_appears(place: Garden) -> None:
    place.names(place.tree.root)
    other = place.store.create_namespace(identity(salt="tenant secret"))
    assert other.name in place.names(place.tree.root)
    entry = place.entry(NamespaceDir(other), "namespace.json")
    text = bytes(place.tree.open(entry.node, entry.stat.ino).read(0, 1 << 20))  # type: ignore[arg-type]
    assert len(text) == entry.stat.size
    assert json.loads(text)["model"] == "test/model"
    assert b"tenant secret" not in text


def test_a_line_goes_over_runs_and_the_earliest_continues_it(place: Garden) -> None:
    place.put(1, 2)
    place.put(1, 2, 3)
    place.put(1, 2, 4, 4)
    place.put(1, 2, 3, 5)
    (folder,) = place.folders(place.space)
    first, second, third, other = (
        hashes_of(place.ns, tokens_of(c))[-1]
        for c in ([1], [1, 2, 3], [1, 2, 3, 5], [1, 2, 4])
    )  # fmt: skip
    assert folder.head == first
    fork = f"000002-{other.hex()[:16]}"
    assert place.names(folder) == [
        "000000.kv", "000001.kv", fork, "000002.kv", "000003.kv", "tokens",
    ]  # fmt: skip
    assert [place.tree.where.place(folder, i).hash for i in (2, 3)] == [second, third]  # type: ignore[union-attr]
    assert place.names(place.folders(folder)[0]) == ["000002.kv", "000003.kv", "tokens"]


def test_what_is_not_there(place: Garden) -> None:
    place.put(1, 2)
    (folder,) = place.folders(place.space)
    name = place.names(place.space)[1].encode()
    for directory, names in (
        (place.tree.root, [b"readme", b"tokens", b"\xff\xfe", place.ns.name.encode()[:-1]]),
        (place.space, [b"000000.kv", b"000001" + name[6:], name[:-1], name + b"00"]),
        (folder, [b"000002.kv", b"000000.KV", b"tokens ", name, b"000002" + name[6:]]),
    ):
        for absent in names:
            assert place.tree.lookup(directory, absent) is None, absent


def test_siblings_whose_short_names_are_equal(place: Garden) -> None:
    """Such hashes can be made on purpose: both are shown, one under its whole hash."""
    heads = [b"same8byt" + bytes([i]) * 8 for i in range(3)]
    phantom_runs(place.store, place.ns, [(0, place.ns.root, h) for h in heads])
    short = f"000000-{b'same8byt'.hex()}"
    names = place.names(place.space)[1:]
    assert names == [short, f"000000-{heads[1].hex()}", f"000000-{heads[2].hex()}"]
    nodes = [place.entry(place.space, name).node for name in names]
    assert [n.head for n in nodes if isinstance(n, Folder)] == heads
    assert place.tree.lookup(place.space, f"000000-{heads[0].hex()}".encode()) is None


def test_a_name_is_found_without_a_look_at_its_siblings(
    place: Garden, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the top of a namespace and behind a block."""
    tops = chain(101)
    first, heads = tops[:16], [tops[at : at + 16] for at in range(16, len(tops), 16)]
    runs = [(0, place.ns.root, first), *((0, place.ns.root, head) for head in heads)]
    forks = [(1, first, chain(1, seed)) for seed in range(1, 101)]
    phantom_runs(place.store, place.ns, [*runs, *forks])
    top = next(f for f in place.folders(place.space) if f.head == first)
    names = [(place.space, f"000000-{heads[50].hex()[:16]}"), (top, place.names(top)[50])]
    get, read = line.get, []

    def look(txn: Any, ns: int, head: bytes) -> line.Piece | None:
        read.append(head)
        return get(txn, ns, head)

    monkeypatch.setattr(line, "get", look)
    for directory, name in names:
        read.clear()
        assert isinstance(place.entry(directory, name).node, Folder)
        assert 0 < len(read) < 10


# time


def test_what_expired_is_not_shown_nor_what_follows_it(place: Garden) -> None:
    place.put(1, 2, ttl_class="agent")
    place.put(1, 2, 3, ttl_class="chatbot")
    place.put(1, 9, ttl_class="chatbot")
    (folder,) = place.folders(place.space)
    (fork,) = place.folders(folder)
    tail = place.entry(folder, "000002.kv")
    assert place.names(fork) == ["000001.kv", "tokens"]
    place.store.touch(place.ns, tokens_of([1, 2]), ttl_class="agent")
    place.clock.now += 101
    assert place.names(place.space) == ["namespace.json"]
    assert is_stale(lambda: place.tree.listing(folder))
    assert is_stale(lambda: place.tree.listing(fork)), "its own run lives, its prefix does not"
    for node in (folder, fork, tail.node):
        assert is_stale(lambda node=node: place.tree.stat(node))
    assert place.tree.lookup(folder, b"000002.kv") is None


def test_times_of_writing_and_of_renewal(place: Garden) -> None:
    place.put(1)
    (folder,) = place.folders(place.space)
    before = place.entry(folder, "000000.kv").stat
    assert before.written_ms == before.used_ms
    assert abs(before.written_ms - place.clock.now * 1000) < 1000
    place.clock.now += 500
    place.store.touch(place.ns, tokens_of([1]))
    after = place.entry(folder, "000000.kv").stat
    assert after.written_ms == before.written_ms
    assert abs(after.used_ms - before.used_ms - 500_000) < 1000
    assert place.tree.stat(folder).used_ms == after.used_ms


# identity of inodes


def test_the_same_tokens_stored_again_are_another_inode(place: Garden) -> None:
    place.put(1, 2, 3)
    (folder,) = place.folders(place.space)
    old = place.entry(folder, "000001.kv")
    assert isinstance(old.node, BlockFile)
    place.store.remove(place.ns, tokens_of([1, 2, 3]), from_block=1)
    assert place.tree.lookup(folder, b"000001.kv") is None
    assert is_stale(lambda: place.tree.open(old.node, old.stat.ino))  # type: ignore[arg-type]
    place.put(1, 2, 3)
    new = place.entry(folder, "000001.kv")
    assert new.stat.ino != old.stat.ino
    assert is_stale(lambda: place.tree.open(old.node, old.stat.ino))  # type: ignore[arg-type]


def test_tokens_are_another_inode_once_the_line_has_grown(place: Garden) -> None:
    place.put(1, 2)
    (folder,) = place.folders(place.space)
    old = place.entry(folder, "tokens")
    place.put(1, 2, 3)
    new = place.entry(folder, "tokens")
    assert (new.stat.ino != old.stat.ino) and new.stat.size * 2 == old.stat.size * 3


def test_new_blocks_appear_at_once(place: Garden) -> None:
    place.put(1)
    (folder,) = place.folders(place.space)
    for end in range(2, 30):
        assert place.tree.lookup(folder, f"{end - 1:06d}.kv".encode()) is None
        place.put(*range(1, end + 1))
        assert place.tree.lookup(folder, f"{end - 1:06d}.kv".encode()) is not None


# size


def test_a_folder_of_100_000_blocks(place: Garden) -> None:
    hashes = chain(100_000)
    fork = chain(1, seed=1)
    phantom_runs(
        place.store, place.ns,
        [(0, place.ns.root, hashes), (50_000, hashes[49_999 * 16 : 50_000 * 16], fork)],
        heads=hashes[:16],
    )  # fmt: skip
    (folder,) = place.folders(place.space)
    began = time.perf_counter()
    listing = place.tree.listing(folder)
    names = [e.name for e in listing.entries()]
    took = time.perf_counter() - began
    assert len(listing) == len(names) == len(set(names)) == 100_002
    assert names[50_000].startswith(b"050000-") and names[50_001] == b"050000.kv"
    assert names[-2:] == [b"099999.kv", b"tokens"]
    assert [e.name for e in listing.entries(99_999)] == names[99_999:]
    inodes = {e.stat.ino for e in listing.entries()}
    assert len(inodes) == 100_002
    assert took < 10, "0.4 s here; a walk that is quadratic takes minutes"


def test_a_chain_of_a_million_tokens_in_7812_runs(place: Garden) -> None:
    hashes = chain(7812)
    parts = [hashes[i * 16 : (i + 1) * 16] for i in range(7812)]
    runs = [(i, parts[i - 1] if i else place.ns.root, h) for i, h in enumerate(parts)]
    phantom_runs(place.store, place.ns, runs)
    (folder,) = place.folders(place.space)
    began = time.perf_counter()
    assert place.names(folder) == [*(f"{i:06d}.kv" for i in range(7812)), "tokens"]
    for number in range(0, 7812, 11):
        assert place.tree.where.place(folder, number).hash == parts[number]  # type: ignore[union-attr]
    assert time.perf_counter() - began < 10
    assert place.entry(folder, "tokens").stat.size == 7812 * 4 * 11


def test_forks_of_forks_to_any_depth(place: Garden) -> None:
    """Deeper than a recursion would get."""
    hashes = chain(1200)
    runs = []
    for i in range(1200):
        before = place.ns.root if i == 0 else hashes[(i - 1) * 16 : i * 16]
        # Each block is followed by a line of its own first, so that the chain we walk forks off.
        runs.append((i, before, hashes[i * 16 : (i + 1) * 16]))
        runs.append((i, before, chain(2, seed=i + 1)))
    runs.sort(key=lambda run: (run[0], len(run[2]) == 16))
    phantom_runs(place.store, place.ns, runs)
    head = hashes[:16]
    folder = next(f for f in place.folders(place.space) if f.head == head)
    for i in range(1, 1200):
        forks = [f for f in place.folders(folder) if f.head == hashes[i * 16 : (i + 1) * 16]]
        if not forks:
            break
        folder = forks[0]
    assert folder.block > 1000
    assert place.tree.stat(folder).directory
    assert place.tree.lookup(folder, f"{folder.block:06d}.kv".encode()) is not None


# damage


@pytest.mark.expect_logs(r"damaged run")
@pytest.mark.parametrize("row", [b"", b"junk", bytes(64), bytes(72), b"\xff" * 200])
def test_a_garbled_row_hides_nothing_else(place: Garden, row: bytes) -> None:
    place.put(1, 2)
    place.put(5)
    place.put(1, 7)
    first = next(f for f in place.folders(place.space) if len(place.names(f)) > 2)
    (fork,) = place.folders(first)
    key = run_key(place.ns.number, fork.head)
    place.store.index.write(lambda a: a.txn.put(key, row))
    assert place.names(first) == ["000000.kv", "000001.kv", "tokens"]
    assert len(place.folders(place.space)) == 2
    with pytest.raises(IndexFault, match="damaged run"):
        place.tree.stat(fork)
    with pytest.raises(IndexFault, match="damaged run"):
        place.tree.listing(fork)


@pytest.mark.expect_logs(r"unknown segment 999")
def test_a_run_in_a_segment_nobody_knows(place: Garden) -> None:
    place.put(1)
    place.put(2)
    bad = place.folders(place.space)[0]

    def spoil(applier: object) -> None:
        txn = applier.txn  # type: ignore[attr-defined]
        key = run_key(place.ns.number, bad.head)
        txn.put(key, (999).to_bytes(4, "little") + bytes(txn.get(key))[4:])

    place.store.index.write(spoil)
    assert len(place.folders(place.space)) == 2
    assert place.names(bad) == ["tokens"]
    with pytest.raises(IndexFault):
        place.tree.stat(BlockFile(bad, 0))
