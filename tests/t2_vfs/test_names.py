"""Names, inode numbers and positions: what is computed, without a store."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.vfs import node
from kvfs.vfs.inodes import Inodes
from kvfs.vfs.listing import Listing, Single
from kvfs.vfs.node import Entry, NamespaceDir, Root, Stat, Text

hashes = st.binary(min_size=16, max_size=16)


@given(st.integers(0, 2**32 - 1))
def test_block_names_come_back(number: int) -> None:
    assert node.parse_block(node.block_name(number)) == number


@given(st.integers(0, 2**32 - 1), hashes, st.booleans())
def test_folder_names_come_back(number: int, head: bytes, whole: bool) -> None:
    parsed = node.parse_folder(node.folder_name(number, head, whole=whole))
    assert parsed == (number, head if whole else head[:8])


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "0.kv", "00000.kv", "0000000.kv", "000000.KV", "000000.kv ", "000000.kv\n",
     "-00001.kv", "000000", "tokens", "\xff", "000000.kv\0", "99999999999.kv"],
)  # fmt: skip
def test_what_is_no_block(name: str) -> None:
    assert node.parse_block(name.encode()) is None


@pytest.mark.parametrize(
    "name",
    ["000000-", "000000-0123456789abcde", "000000-0123456789ABCDEF", "0-0123456789abcdef",
     "000000-0123456789abcdef0", "000000-0123456789abcdef\n", "0000000-0123456789abcdef"],
)  # fmt: skip
def test_what_is_no_folder(name: str) -> None:
    assert node.parse_folder(name.encode()) is None


@given(st.binary(max_size=40))
def test_any_name_is_at_most_one_thing(name: bytes) -> None:
    number, folder = node.parse_block(name), node.parse_folder(name)
    assert number is None or node.block_name(number) == name
    assert folder is None or number is None


@given(hashes, hashes, st.integers(0, 2**32 - 1))
def test_inode_numbers_are_usable_and_differ_by_place(ns: bytes, h: bytes, slot: int) -> None:
    segment = b"s" * 16
    ino = node.block_ino(ns, h, segment, slot)
    assert 1 < ino < 2**64
    other = node.block_ino(ns, h, segment, slot ^ 1)
    assert ino != other, "the same tokens stored again may have other payload bytes"
    assert ino not in (node.folder_ino(ns, h), node.tokens_ino(ns, h, h), node.namespace_ino(ns))


def test_inode_numbers_do_not_depend_on_the_process() -> None:
    assert node.block_ino(b"n" * 16, b"h" * 16, b"s" * 16, 7) == 8918974620760987293


# positions


def entry(i: int) -> Entry:
    return Entry(b"%d" % i, Text(b"%d" % i, None), Stat(i + 2, False, 0, 0, 0))


@given(st.integers(0, 50), st.integers(0, 60))
def test_a_listing_goes_on_from_any_position(total: int, start: int) -> None:
    entries = [entry(i) for i in range(total)]
    listing = Listing([Single(e) for e in entries])
    assert len(listing) == total
    assert list(listing.entries(start)) == entries[start:]


# inode map


def test_files_beyond_the_limit_fall_out_and_directories_stay() -> None:
    inodes = Inodes(Root(), files=3)
    directory = NamespaceDir(None)  # type: ignore[arg-type]
    inodes.hand_out(1000, directory)
    for i in range(5):
        inodes.hand_out(entry(i).stat.ino, entry(i).node)
    assert [inodes.get(i + 2) is None for i in range(5)] == [True, True, False, False, False]
    assert inodes.get(1000) is directory
    assert inodes.get(1) == Root()


@given(st.lists(st.tuples(st.integers(2, 6), st.integers(-3, 1)), max_size=60))
def test_lookup_counts(steps: list[tuple[int, int]]) -> None:
    """A number is known exactly as long as it was handed out more often than forgotten."""
    inodes, counts = Inodes(Root()), dict.fromkeys(range(2, 7), 0)
    for ino, change in steps:
        if change > 0:
            inodes.hand_out(ino, entry(ino).node)
        elif change < 0:  # also of what is not known
            inodes.forget(ino, -change)
        counts[ino] = max(0, counts[ino] + change)
        assert {i for i in counts if inodes.get(i)} == {i for i, n in counts.items() if n}
    inodes.forget(1, 10)
    assert inodes.get(1) == Root()
