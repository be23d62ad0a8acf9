"""Where slots lie, and the header and end of a segment."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvfs.errors import FormatError
from kvfs.geometry import PAGE, Geometry
from kvfs.segment import (
    END_BYTES,
    Header,
    decode_end,
    encode_end,
    segment_id,
    segment_number,
    segment_path,
)

# geometry


@st.composite
def geometries(draw: Any) -> Geometry:
    stride = PAGE * draw(st.integers(1, 40))
    extent = PAGE * draw(st.integers(1, 64))
    return Geometry.fit(stride, extent, PAGE * draw(st.integers(1, 3)) if stride < extent else PAGE)


def test_the_reference_layout() -> None:
    """114,688-byte records in 4 MiB extents: 36 behind the header, then as many in each."""
    g = Geometry.fit(114_688, 4 << 20)
    assert (g.in_first, g.in_extent) == (36, 36)
    assert [g.offset(k) for k in (0, 1, 35, 36)] == [4096, 118_784, 4_018_176, 4 << 20]


@given(g=geometries(), slot=st.integers(0, 10_000))
def test_a_slot_crosses_no_extent_and_meets_no_other(g: Geometry, slot: int) -> None:
    at = g.offset(slot)
    assert at >= g.first and at % PAGE == 0
    assert at // g.extent == (at + g.stride - 1) // g.extent
    assert g.offset(slot + 1) >= at + g.stride


@given(g=geometries(), slot=st.integers(0, 3000))
def test_no_room_is_wasted(g: Geometry, slot: int) -> None:
    """A gap between two slots is there only because a record would not fit into it."""
    end, after = g.offset(slot) + g.stride, g.offset(slot + 1)
    if after != end:
        assert after % g.extent == 0 and after - end < g.stride


@given(g=geometries(), slot=st.integers(0, 500), count=st.integers(0, 300), data=st.data())
def test_pieces_cover_the_slots_exactly(g: Geometry, slot: int, count: int, data: Any) -> None:
    most = data.draw(st.sampled_from([0, 1, g.stride, 3 * g.stride, 1 << 30]))
    at = slot
    for offset, n in g.pieces(slot, count, most):
        assert n > 0 and offset == g.offset(at)
        assert g.offset(at + n - 1) == offset + (n - 1) * g.stride
        assert offset // g.extent == (offset + n * g.stride - 1) // g.extent
        assert not most or n == 1 or n * g.stride <= most
        at += n
    assert at == slot + count


@given(g=geometries(), size=st.integers(0, 1 << 24))
def test_slots_within_is_the_inverse_of_offset(g: Geometry, size: int) -> None:
    n = g.slots_within(size)
    assert not n or g.offset(n - 1) + g.stride <= size
    assert g.offset(n) + g.stride > size


# the header


HEADER = Header(
    segment_id(b"w" * 12, 7), b"n" * 16, b"f" * 32, Geometry.fit(8192, 1 << 20), 5000,
    1_700_000_000_123, "agent", 259_200, b"s" * 16,
)  # fmt: skip

headers = st.builds(
    Header,
    segment_id=st.builds(
        segment_id, st.binary(min_size=12, max_size=12), st.integers(0, 2**32 - 1)
    ),
    nsid=st.binary(min_size=16, max_size=16),
    fingerprint=st.binary(min_size=32, max_size=32),
    geometry=geometries(),
    payload=st.integers(0, 2**32 - 1),
    created_ms=st.integers(0, 2**62 - 1),
    ttl_class=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}", fullmatch=True),
    ttl_seconds=st.integers(0, (2**62 - 1) // 1000),
    store=st.binary(min_size=16, max_size=16),
)


@given(header=headers)
def test_a_header_comes_back(header: Header) -> None:
    page = header.encode()
    assert len(page) == PAGE
    assert Header.decode(page, "seg/x") == header


def test_every_bit_of_a_header_counts() -> None:
    page = bytearray(HEADER.encode())
    bits = [bit for byte in (*range(168), *range(168, 4088, 97), *range(4088, 4096))
            for bit in range(byte * 8, byte * 8 + 8)]  # fmt: skip
    for bit in bits:
        page[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError, match="seg/x"):
            Header.decode(bytes(page), "seg/x")
        page[bit // 8] ^= 1 << bit % 8
    assert Header.decode(bytes(page), "seg/x") == HEADER


def test_another_version_is_refused_by_number() -> None:
    page = bytearray(HEADER.encode())
    struct.pack_into("<I", page, 8, 2)
    struct.pack_into("<Q", page, 4088, xxhash.xxh3_64_intdigest(bytes(page[:4088])))
    with pytest.raises(FormatError, match=r"seg/x: segment version 2; this kvfs reads version 1"):
        Header.decode(bytes(page), "seg/x")


@pytest.mark.parametrize(
    "changes",
    [
        {"geometry": Geometry(0, 4096, 0)},
        {"geometry": Geometry(8192, 4096, 0)},
        {"geometry": Geometry(4096, 4096, 8192)},
        {"created_ms": 1 << 62},
        {"ttl_seconds": 1 << 62},
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    page = replace(HEADER, **changes).encode()
    with pytest.raises(FormatError, match="seg/x: a segment header that cannot be"):
        Header.decode(page, "seg/x")


def test_a_class_that_is_no_text_is_refused() -> None:
    page = bytearray(HEADER.encode())
    page[112] = 0xFF
    struct.pack_into("<Q", page, 4088, xxhash.xxh3_64_intdigest(bytes(page[:4088])))
    with pytest.raises(FormatError, match="seg/x: a segment header that cannot be"):
        Header.decode(bytes(page), "seg/x")


@pytest.mark.parametrize("page", [b"", b"KVFSSEG1", bytes(PAGE), b"KVFSLOG1".ljust(PAGE, b"\0")])
def test_what_is_no_segment_is_refused(page: bytes) -> None:
    with pytest.raises(FormatError, match="not a segment"):
        Header.decode(page, "seg/x")


# the end


@given(footer=st.binary(max_size=200), slots=st.integers(0, 2**32 - 1), at=st.integers(0, 2**40))
def test_an_end_comes_back(footer: bytes, slots: int, at: int) -> None:
    end = decode_end(encode_end(footer, slots, at))
    assert end is not None
    assert (end.slots, end.offset, end.length) == (slots, at, len(footer))
    assert end.checksum == xxhash.xxh3_64_intdigest(footer)


def test_what_is_no_end_is_none() -> None:
    tail = encode_end(b"footer", 3, 8192)
    assert decode_end(tail[1:]) is None and decode_end(tail + b"\0") is None
    assert decode_end(bytes(END_BYTES)) is None
    assert decode_end(b"KVFSEND2" + tail[8:]) is None
    assert decode_end(tail[:8] + struct.pack("<I", 2) + tail[12:]) is None
    assert decode_end(tail[:24] + struct.pack("<Q", 1 << 40) + tail[32:]) is None


# names


@given(number=st.integers(0, 2**32 - 1), writer=st.binary(min_size=12, max_size=12))
def test_an_id_holds_writer_and_number(number: int, writer: bytes) -> None:
    assert segment_number(segment_id(writer, number)) == number
    assert len(segment_id(writer, number)) == 16


def test_one_class_and_day_is_one_directory() -> None:
    path = segment_path("agent", "20260102", "model-0123", "host-boot-id", 3)
    assert path == "seg/agent/20260102/model-0123/host-boot-id-000003.seg"
