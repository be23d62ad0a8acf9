"""Records: what is written comes back, and no bit may be wrong without a reason that names it."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.chain import PrefixHasher
from kvfs.errors import InputError
from kvfs.layout import Identity, Span
from kvfs.record import (
    MAX_SIDE_PARTS,
    PAGE,
    TRAILER_BYTES,
    Landing,
    RunBlocks,
    Shape,
    Trailer,
    check_payload,
    encode_metas,
    parse,
    verify,
)
from kvfs.testing.blocks import payload, small_identity

IDENTITY = small_identity()
SHAPE = Shape.of(IDENTITY)


def records(
    identity: Identity, tokens: list[int], first: int = 0, end: int | None = None
) -> tuple[RunBlocks, bytearray]:
    """A run of a prompt and its records, as they lie in a segment."""
    hasher = PrefixHasher(identity, tokens)
    run = RunBlocks.of(hasher, first, hasher.n_blocks if end is None else end)
    shape = Shape.of(identity)
    rows = [
        memoryview(payload(run.lineages[i * 16 : (i + 1) * 16], shape.payload))
        for i in range(run.count)
    ]
    metas = encode_metas(shape, run, 1234, rows)
    return run, bytearray(
        b"".join(bytes(row) + meta for row, meta in zip(rows, metas, strict=True))
    )


def verified(shape: Shape, data: bytes | bytearray, run: RunBlocks) -> tuple[int, str | None]:
    """`verify` over whole records and over split ones: both must say the same."""
    whole = verify(Landing.whole(shape, memoryview(data)), run)
    step, n = shape.stride, run.count
    dense = b"".join(data[i * step : i * step + shape.payload] for i in range(n))
    rests = b"".join(data[i * step + shape.payload : (i + 1) * step] for i in range(n))
    split = verify(Landing.split(shape, memoryview(dense), memoryview(rests)), run)
    assert whole == split
    return whole


@st.composite
def identities(draw: Any) -> Identity:
    """Layouts of one to three parts over some layers, with gaps."""
    names = ["kv", "index", "scales"][: draw(st.integers(1, MAX_SIDE_PARTS + 1))]
    spans, at = [], 0
    for layer in range(draw(st.integers(1, 3))):
        for name in names:
            at += draw(st.integers(0, 3))
            length = draw(st.integers(1, 200))
            spans.append(Span(layer, name, at, length))
            at += length
    return small_identity(
        row_bytes=at + draw(st.integers(0, 100)),
        spans=tuple(spans),
        block_tokens=draw(st.integers(1, 40)),
    )


@given(identity=identities(), blocks=st.integers(1, 5), data=st.data())
def test_what_is_encoded_verifies(identity: Identity, blocks: int, data: Any) -> None:
    shape = Shape.of(identity)
    tokens = list(range(blocks * identity.block_tokens))
    first = data.draw(st.integers(0, blocks - 1))
    run, raw = records(identity, tokens, first)
    assert len(raw) == run.count * shape.stride and shape.stride % PAGE == 0
    assert verified(shape, raw, run) == (run.count, None)
    hasher = PrefixHasher(identity, tokens)
    for i in range(run.count):
        meta = Landing.whole(shape, memoryview(raw)).meta(i)
        trailer = parse(meta)
        assert isinstance(trailer, Trailer)
        assert trailer.nsid == identity.nsid and trailer.block == first + i
        assert trailer.hash == hasher.digest(first + i + 1)
        assert trailer.parent == hasher.digest(first + i)
        assert (trailer.run_index, trailer.run_count) == (i, run.count)
        assert (trailer.written_ms, trailer.payload) == (1234, shape.payload)


def test_a_record_built_by_hand_from_the_table() -> None:
    """The byte offsets of the table in kvfs.record, packed without its code."""
    tokens = list(range(8))
    run, raw = records(IDENTITY, tokens)
    hasher = PrefixHasher(IDENTITY, tokens)
    s, p = 4096, IDENTITY.row_bytes
    record = bytearray(s)
    row = payload(hasher.lineages(2)[16:32], p)
    record[:p] = row
    record[s - 128 - 16 : s - 128] = struct.pack("<4I", 4, 5, 6, 7)
    struct.pack_into("<4sHH", record, s - 128, b"KVR1", 1, 0)
    record[s - 120 : s - 104] = IDENTITY.nsid
    record[s - 104 : s - 88] = hasher.digest(2)
    record[s - 88 : s - 72] = hasher.digest(1)
    struct.pack_into("<II", record, s - 72, 1, p)
    struct.pack_into("<Q", record, s - 64, xxhash.xxh3_64_intdigest(row))
    struct.pack_into("<Q", record, s - 56, xxhash.xxh3_64_intdigest(row[:24]))  # the index part
    record[s - 40 : s - 24] = hasher.lineages(2)[16:32]
    struct.pack_into("<QII", record, s - 24, 1234, 1, 2)
    tail = record[s - 144 : s - 8]
    struct.pack_into("<Q", record, s - 8, xxhash.xxh3_64_intdigest(tail))
    assert raw[s : 2 * s] == record


def reason_for(bit: int) -> set[str]:
    """What may be said of a record in which one bit is turned over."""
    at = bit // 8
    if at < SHAPE.payload:
        # Spans of small_identity: the index part is the first quarter of the row.
        index = at < SHAPE.payload // 4
        return {"checksum of part index"} if index else {"checksum of part kv"}
    if at < SHAPE.meta_at:
        return set()
    return {"bad trailer", "foreign namespace", "payload length"}


def test_every_single_bit_of_a_record_counts() -> None:
    """Each bit of a record turned over: found, in the right record, and named; padding does not
    matter, since it is not delivered."""
    run, raw = records(IDENTITY, list(range(12)))
    base, size = SHAPE.stride, SHAPE.stride
    outside = range(SHAPE.payload + 40, SHAPE.meta_at - 40)
    for bit in range(size * 8):
        at = bit // 8
        if at in outside and at % 512:
            continue  # a sample of the padding is enough
        raw[base + at] ^= 1 << bit % 8
        good, reason = verified(SHAPE, raw, run)
        raw[base + at] ^= 1 << bit % 8
        allowed = reason_for(bit)
        if not allowed:
            assert (good, reason) == (3, None), f"bit {bit} of the padding: {reason}"
        elif at in range(size - 124, size - 122):
            assert good == 1 and reason is not None and reason.startswith("record version"), bit
        else:
            assert good == 1 and reason in allowed, f"bit {bit}: {good} good, {reason!r}"
    assert verified(SHAPE, raw, run) == (3, None)


@given(identity=identities(), data=st.data())
def test_the_damaged_part_is_named(identity: Identity, data: Any) -> None:
    shape = Shape.of(identity)
    run, raw = records(identity, list(range(identity.block_tokens)))
    span = data.draw(st.sampled_from(identity.spans))
    at = span.offset + data.draw(st.integers(0, span.length - 1))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    assert verified(shape, raw, run) == (0, f"checksum of part {span.part}")


@given(data=st.data(), blocks=st.integers(1, 6))
@settings(max_examples=30)
def test_the_first_bad_record_ends_the_prefix(data: Any, blocks: int) -> None:
    run, raw = records(IDENTITY, list(range(4 * blocks)))
    bad = sorted(data.draw(st.sets(st.integers(0, blocks - 1), min_size=1)))
    kinds = data.draw(st.lists(st.sampled_from(["payload", "tail", "zeros"]), min_size=blocks))
    for block in bad:
        at = block * SHAPE.stride
        if kinds[block] == "zeros":
            raw[at : at + SHAPE.stride] = bytes(SHAPE.stride)
        else:
            raw[at + (0 if kinds[block] == "payload" else SHAPE.stride - 20)] ^= 1
    good, reason = verified(SHAPE, raw, run)
    assert good == bad[0]
    expected = {"payload": "checksum of part index", "tail": "bad trailer", "zeros": "no record"}
    assert reason == expected[kinds[bad[0]]]


# records that are sound, but not the ones asked for


def asked(tokens: list[int], first: int, identity: Identity = IDENTITY) -> RunBlocks:
    hasher = PrefixHasher(identity, tokens)
    return RunBlocks.of(hasher, first, hasher.n_blocks)


def test_a_sound_record_of_another_place_is_a_mismatch() -> None:
    _, raw = records(IDENTITY, list(range(8)))
    one = raw[SHAPE.stride :]
    other_tokens = asked([0, 1, 2, 3, 9, 9, 9, 9], 1)
    assert verified(SHAPE, one, other_tokens) == (0, "identity mismatch: tokens")
    same_tokens_elsewhere = asked([4, 5, 6, 7], 0)
    assert verified(SHAPE, one, same_tokens_elsewhere) == (0, "identity mismatch: another block")
    swapped = raw[SHAPE.stride :] + raw[: SHAPE.stride]
    assert verified(SHAPE, swapped, asked(list(range(8)), 0))[0] == 0


def test_a_record_of_another_namespace_is_foreign() -> None:
    """Equal sizes, equal tokens, other weights."""
    other = small_identity(weights="w1")
    _, raw = records(other, [1, 2, 3, 4])
    assert verified(SHAPE, raw, asked([1, 2, 3, 4], 0)) == (0, "foreign namespace")


def test_a_colliding_hash_is_found_by_the_lineage() -> None:
    """A prefix that differs in an earlier block and collides in the fast hash."""
    run, raw = records(IDENTITY, list(range(8)), 1)
    lineage = bytes([run.lineages[0] ^ 1]) + run.lineages[1:]
    forged = RunBlocks(run.parent, run.block, run.hashes, lineage, run.tokens)
    assert verified(SHAPE, raw, forged) == (0, "identity mismatch: another block")


def resummed(record: bytearray) -> bytearray:
    """A record whose trailer checksum is made right again after a change."""
    tail = record[SHAPE.meta_at : SHAPE.stride - 8]
    struct.pack_into("<Q", record, SHAPE.stride - 8, xxhash.xxh3_64_intdigest(bytes(tail)))
    return record


def test_an_unknown_version_is_not_read() -> None:
    run, raw = records(IDENTITY, [1, 2, 3, 4])
    struct.pack_into("<H", raw, SHAPE.stride - 124, 2)
    assert verified(SHAPE, resummed(raw), run) == (0, "record version 2")
    assert parse(Landing.whole(SHAPE, memoryview(raw)).meta(0)) == "record version 2"


def test_a_payload_of_another_length_is_not_read() -> None:
    run, raw = records(IDENTITY, [1, 2, 3, 4])
    struct.pack_into("<I", raw, SHAPE.stride - 68, IDENTITY.row_bytes - 1)
    assert verified(SHAPE, resummed(raw), run) == (0, "payload length")


def test_the_payload_checksum_can_be_left_out() -> None:
    run, raw = records(IDENTITY, [1, 2, 3, 4])
    raw[0] ^= 1
    landing = Landing.whole(SHAPE, memoryview(raw))
    assert verify(landing, run, payloads=False) == (1, None)
    trailer = parse(landing.meta(0))
    assert isinstance(trailer, Trailer)
    assert check_payload(SHAPE, landing.payload(0), trailer) == "checksum of part index"


# the shape


@given(row=st.integers(1, 20_000), tokens=st.integers(1, 512))
def test_a_stride_is_the_least_number_of_pages(row: int, tokens: int) -> None:
    shape = Shape.of(small_identity(row_bytes=row, block_tokens=tokens))
    need = row + 4 * tokens + TRAILER_BYTES
    assert shape.stride - PAGE < need <= shape.stride
    assert row <= shape.meta_at


def test_a_layout_with_too_many_parts_is_refused() -> None:
    spans = tuple(Span(0, f"part{i}", i, 1) for i in range(MAX_SIDE_PARTS + 2))
    with pytest.raises(InputError, match="at most 3 parts"):
        Shape.of(small_identity(row_bytes=100, spans=spans))


def test_payloads_may_come_from_numpy() -> None:
    rows = np.arange(2 * IDENTITY.row_bytes, dtype=np.uint8).reshape(2, -1)
    run = asked(list(range(8)), 0)
    metas = encode_metas(SHAPE, run, 1, [memoryview(row) for row in rows])
    raw = b"".join(row.tobytes() + meta for row, meta in zip(rows, metas, strict=True))
    assert verified(SHAPE, raw, run) == (2, None)
