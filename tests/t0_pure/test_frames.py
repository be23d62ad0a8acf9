"""Frames: what was appended whole is read back, what was not is not there."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.chain_entries import KeepEntry, RemoveEntry
from kvfs.errors import FormatError
from kvfs.frames import (
    ClassEntry,
    CutEntry,
    DropEntry,
    Entry,
    MovedEntry,
    MoveEntry,
    NamespaceEntry,
    RenewEntry,
    RunEntry,
    SealEntry,
    SegmentEntry,
    Source,
    decode_all,
    encode,
)
from kvfs.slot_entries import SlotEntry, SlotGoneEntry

u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
ms, seconds = st.integers(0, 2**62 - 1), st.integers(0, (2**62 - 1) // 1000)
slots = st.integers(0, 2**31)  # as first and as count
geometries = st.lists(st.integers(1, 2**32 - 1), min_size=3, max_size=3).map(sorted)
id16 = st.binary(min_size=16, max_size=16)
text = st.text(max_size=20)
names = st.text(st.characters(exclude_characters="/.\0", codec="utf-8"), max_size=20)
paths = names.map(lambda name: f"seg/{name}.seg")


def hashes(least: int, most: int) -> Any:
    return st.lists(id16, min_size=least, max_size=most).map(b"".join)


# By type number, from 1.
ENTRIES: list[Any] = [
    st.builds(NamespaceEntry, id16, st.text(max_size=200)),
    st.builds(ClassEntry, names, seconds, ms),
    st.builds(
        lambda id_, ns, g, *more: SegmentEntry(id_, ns, g[1], g[2], g[0], *more),
        id16,
        id16,
        geometries,
        ms,
        seconds,
        text,
        paths,
    ),
    st.builds(RunEntry, id16, id16, slots, slots, ms, ms, id16, hashes(0, 3), hashes(1, 6)),
    st.builds(RenewEntry, id16, id16, ms, ms, text, st.booleans()),
    st.builds(CutEntry, id16, id16, slots, slots, ms),
    st.builds(DropEntry, id16, ms),
    st.builds(SealEntry, ms, st.booleans()),
]
BY_HASH: list[Any] = [
    st.builds(KeepEntry, id16, ms, ms, u32, text, st.booleans(), hashes(0, 3), hashes(1, 6)),
    st.builds(RemoveEntry, id16, ms, u32, hashes(0, 3), hashes(0, 6)),
]
BY_TYPE = dict(enumerate(ENTRIES, 1)) | dict(enumerate(BY_HASH, 13))
entries = st.one_of(*BY_TYPE.values())
seeds = u64
offsets = st.integers(0, 2**30).map(lambda n: 8 * n)


def joined(items: list[Entry], seed: int, offset: int) -> tuple[bytes, list[int]]:
    """The frames of entries one behind the other, and where each ends."""
    data, ends = b"", []
    for item in items:
        data += encode(item, seed, offset + len(data))
        ends.append(offset + len(data))
    return data, ends


def decoded(data: bytes, seed: int, offset: int) -> list[tuple[Entry | None, int]]:
    return list(decode_all(memoryview(data), seed, offset))


@given(items=st.lists(entries, max_size=6), seed=seeds, offset=offsets)
def test_entries_come_back(items: list[Entry], seed: int, offset: int) -> None:
    data, ends = joined(items, seed, offset)
    assert len(data) % 8 == 0
    assert decoded(data, seed, offset) == list(zip(items, ends, strict=True))


@given(items=st.lists(entries, min_size=1, max_size=4), seed=seeds, offset=offsets)
@settings(max_examples=20)
def test_torn_anywhere_the_leading_entries_are_read_and_no_more(
    items: list[Entry], seed: int, offset: int
) -> None:
    data, ends = joined(items, seed, offset)
    for cut in range(len(data) + 1):
        whole = [(e, end) for e, end in zip(items, ends, strict=True) if end <= offset + cut]
        assert decoded(data[:cut], seed, offset) == whole
        zeros = data[:cut].ljust(len(data) + 100, b"\0")  # the length came before the bytes
        found = decoded(zeros, seed, offset)
        assert found[: len(whole)] == whole
        # What a cut took off may have been zeros: then the entry is whole after all.
        assert found == list(zip(items, ends, strict=True))[: len(found)]


@given(items=st.lists(entries, min_size=1, max_size=3), seed=seeds, data=st.data())
def test_any_bit_ends_the_reading_before_its_frame(
    items: list[Entry], seed: int, data: Any
) -> None:
    raw, ends = joined(items, seed, 64)
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    bad = bytearray(raw)
    bad[bit // 8] ^= 1 << bit % 8
    before = [(e, end) for e, end in zip(items, ends, strict=True) if end <= 64 + bit // 8]
    found = decoded(bytes(bad), seed, 64)
    assert found[: len(before)] == before
    if len(found) > len(before):  # padding and the three zeros in the head are not looked at
        assert found == list(zip(items, ends, strict=True))


@given(item=entries, seed=seeds, offset=offsets, other=seeds, shift=st.integers(-50, 50))
def test_bytes_of_another_file_or_place_are_no_frames(
    item: Entry, seed: int, offset: int, other: int, shift: int
) -> None:
    data = encode(item, seed, offset)
    if other != seed:
        assert decoded(data, other, offset) == []
    if shift and offset + 8 * shift >= 0:
        assert decoded(data, seed, offset + 8 * shift) == []


def framed(kind: int, body: bytes, seed: int) -> bytes:
    """A frame made by hand, of any type."""
    lead = struct.pack("<IB3x", len(body), kind)
    check = xxhash.xxh3_64_intdigest(lead + body, seed=seed)
    return lead + struct.pack("<Q", check) + body + bytes(-len(body) % 8)


def test_an_unknown_type_is_passed_over() -> None:
    known = [SealEntry(5, False), SealEntry(6, True)]
    data = encode(known[0], 9, 0)
    data += framed(99, b"something newer", 9 + len(data))
    end = len(data)
    data += encode(known[1], 9, end)
    assert [entry for entry, _ in decoded(data, 9, 0)] == [known[0], None, known[1]]


@pytest.mark.parametrize("kind", BY_TYPE)
@pytest.mark.parametrize("size", [0, 1, 7])
def test_a_body_that_does_not_fit_its_type_is_refused(kind: int, size: int) -> None:
    """Its checksum is right, so somebody wrote it so: that is not damage, but another layout."""
    with pytest.raises(FormatError, match=f"type {kind}"):
        decoded(framed(kind, bytes(size), 0), 0, 0)


@pytest.mark.parametrize("kind", BY_TYPE)
@given(data=st.data())
@settings(max_examples=20)
def test_a_shortened_body_never_gives_another_entry(kind: int, data: Any) -> None:
    """Sound checksum, missing bytes: refused, never an entry made of what is left."""
    item = data.draw(BY_TYPE[kind])
    body = item.body()
    for end in range(len(body)):
        with pytest.raises(FormatError):
            decoded(framed(kind, body[:end], 0), 0, 0)


ID, NS, RUN = b"i" * 16, b"n" * 16, b"h" * 32
LATE = 1 << 62
OUT_OF_RANGE: list[Entry] = [
    ClassEntry("brief", LATE // 1000 + 1, 0),
    ClassEntry("brief", 1, LATE),
    ClassEntry("x" * 256, 1, 1),
    SegmentEntry(ID, NS, 0, 4096, 0, 0, 0, "", "seg/x"),
    SegmentEntry(ID, NS, 8192, 4096, 0, 0, 0, "", "seg/x"),
    SegmentEntry(ID, NS, 4096, 4096, 4097, 0, 0, "", "seg/x"),
    SegmentEntry(ID, NS, 4096, (1 << 33) + 1, 0, 0, 0, "", "seg/x"),
    SegmentEntry(ID, NS, 4096, 4096, 0, LATE, 0, "", "seg/x"),
    SegmentEntry(ID, NS, 4096, 4096, 0, 0, LATE, "", "seg/x"),
    SegmentEntry(ID, NS, 4096, 4096, 0, 0, 0, "x" * 256, "seg/x"),
    SegmentEntry(ID, NS, 4096, 4096, 0, 0, 0, "", "/seg/x"),
    SegmentEntry(ID, NS, 4096, 4096, 0, 0, 0, "", "seg/../kvfs.json"),
    SegmentEntry(ID, NS, 4096, 4096, 0, 0, 0, "", "seg/\0"),
    ClassEntry("..", 1, 1),
    ClassEntry("/etc", 1, 1),
    RunEntry(NS, ID, 2**32 - 1, 0, 0, 0, ID, b"", RUN),
    RunEntry(NS, ID, 0, 2**32 - 1, 0, 0, ID, b"", RUN),
    RunEntry(NS, ID, 0, 0, LATE, 0, ID, b"", RUN),
    RunEntry(NS, ID, 0, 0, 0, LATE, ID, b"", RUN),
    RenewEntry(NS, ID, LATE, 0, "", False),
    CutEntry(NS, ID, 2**32 - 1, 2, 0),
    DropEntry(ID, LATE),
    SealEntry(LATE, True),
    MoveEntry(LATE, (Source(ID, 0, 2),), RunEntry(NS, ID, 0, 0, 0, 0, ID, b"", RUN)),
    MoveEntry(0, (Source(ID, 0, 3),), RunEntry(NS, ID, 0, 0, 0, 0, ID, b"", RUN)),
    MoveEntry(0, (Source(ID, 2**32 - 1, 2),), RunEntry(NS, ID, 0, 0, 0, 0, ID, b"", RUN)),
    MovedEntry(NS, Source(ID, 2**32 - 1, 2), ID, 0, ID, 0),
    MovedEntry(NS, Source(ID, 0, 2), ID, 2**32 - 1, ID, 0),
    SlotEntry(NS, ID, ID, 0, 0, LATE, 0, "", ""),
    SlotGoneEntry(NS, ID, ID, 0, LATE),
    KeepEntry(NS, LATE, 0, 0, "", False, b"", RUN),
    KeepEntry(NS, 0, 0, 0, "x" * 256, False, b"", RUN),
    RemoveEntry(NS, LATE, 0),
]


@pytest.mark.parametrize("entry", OUT_OF_RANGE, ids=lambda e: type(e).__name__)
def test_what_no_index_can_hold_is_refused(entry: Entry) -> None:
    with pytest.raises(FormatError, match="does not fit"):
        decoded(encode(entry, 9, 64), 9, 64)


@pytest.mark.parametrize("length", [0xFFFFFFFF, (64 << 20) + 1])
def test_an_absurd_length_is_where_reading_ends(length: int) -> None:
    head = struct.pack("<IB3xQ", length, 1, 0)
    assert decoded(head + bytes(4096), 0, 0) == []
