"""docs/formats.md and the code say the same, byte for byte.

Records, headers and entries are packed here by hand from the tables of the page, and compared with
what the code writes. The page's labels (HTML comments) say which table is which. kvfs(5) has the
same tables and is held to the page.
"""

from __future__ import annotations

import dataclasses
import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kvfs import frames, journal, limits, presets, record, segment
from kvfs.catalog import namespace_path
from kvfs.chain import PrefixHasher
from kvfs.chain_entries import KeepEntry, RemoveEntry
from kvfs.config import MARKER, StoreConfig
from kvfs.errors import FormatError
from kvfs.follow import checkpoint
from kvfs.gc import lease, passes
from kvfs.geometry import Geometry
from kvfs.index import schema
from kvfs.record import RunBlocks, Shape
from kvfs.slot_entries import SlotEntry, SlotGoneEntry

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
MAN = (ROOT / "man" / "kvfs.5").read_text(encoding="utf-8")
INT = {"u8": 1, "u16": 2, "u32": 4, "u64": 8}

SEGMENT_ID = bytes(range(16))
WRITER, NUMBER = SEGMENT_ID[:12], int.from_bytes(SEGMENT_ID[12:], "little")
NSID, STORE, PARENT = b"n" * 16, b"u" * 16, b"p" * 16
FINGERPRINT = NSID + b"f" * 16
TIME, TTL = 1_700_000_000_123, 259_200


def table(label: str) -> list[list[str]]:
    """The rows behind the comment <!-- label -->, without the heading, as lists of cells."""
    found = re.search(rf"<!-- {re.escape(label)} -->\n\|[^\n]*\n\|[-| ]*\n((?:\|.*\n)+)", PAGE)
    assert found, f"docs/formats.md has no table {label}"
    lines = found.group(1).strip().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def evaluated(expression: str, **names: int) -> float:
    return eval(expression.strip("`"), {"__builtins__": {"round": round}}, names)


def packed(label: str, values: list[Any], size: int) -> bytes:
    """`size` bytes with the values at the offsets of a table; zeros where it says nothing.

    A value is bytes, or an int; a callable gets the bytes so far and returns one: a checksum.
    """
    out = bytearray(size)
    queue = list(values)
    end = 0
    for offset, length, kind, _ in table(f"table: {label}"):
        at, n = int(offset), int(length)
        assert at >= end, f"{label}: fields overlap at {at}"
        end = at + n
        if kind == "zeros":
            continue
        value = queue.pop(0)
        if callable(value):
            value = value(bytes(out))
        if kind == "bytes":
            assert len(value) == n, f"{label}: field at {at} has {n} bytes"
            out[at:end] = value
        else:
            assert INT[kind] == n, f"{label}: a {kind} at {at} has {n} bytes"
            out[at:end] = value.to_bytes(n, "little")
    assert not queue, f"{label}: the table has fewer fields"
    assert end <= size
    return bytes(out)


def body(label: str, values: list[Any]) -> bytes:
    """An entry's body: the values one behind the other, by the types of a table."""
    out, queue = bytearray(), list(values)
    for kind, _ in table(f"body: {label}"):
        value = queue.pop(0)
        if kind in INT:
            out += value.to_bytes(INT[kind], "little")
        elif kind in ("string", "text"):
            data = value.encode()
            out += len(data).to_bytes(2 if kind == "string" else 4, "little") + data
        else:
            assert kind in ("hash", "hashes", "sources", "rest")
            assert kind != "hash" or len(value) == 16
            out += value
    assert not queue
    return bytes(out)


def framed(kind: int, data: bytes, seed: int) -> bytes:
    """A frame; seed: that of the file plus the frame's offset."""

    def check(so_far: bytes) -> int:
        return xxhash.xxh3_64_intdigest(so_far[:8] + data, seed=seed % 2**64)

    return packed("frame", [len(data), kind, check], 16) + data + bytes(-len(data) % 8)


def whole_sum(size: int) -> Any:
    return lambda so_far: xxhash.xxh3_64_intdigest(so_far[:size])


# records


@pytest.mark.parametrize("preset", presets.names())
def test_record(preset: str) -> None:
    identity = presets.get(preset, weights="w", tokenizer="t")
    shape = Shape.of(identity)
    n, bt = 3, identity.block_tokens
    tokens = list(range(1000, 1000 + n * bt))
    hasher = PrefixHasher(identity, tokens)
    rows = [bytes([i]) * identity.row_bytes for i in range(n)]
    run = RunBlocks.of(hasher, 1, n)
    views = [memoryview(row) for row in rows[1:]]
    metas = list(record.encode_metas(shape, run, TIME, views))

    names = {"P": identity.row_bytes, "T": bt, "S": shape.stride}
    whole = identity.row_bytes + 4 * bt + 128
    assert shape.stride % 4096 == 0 and shape.stride - 4096 < whole <= shape.stride
    places = [(evaluated(a, **names), evaluated(n, **names)) for a, n, _ in table("table: record")]
    assert places[0][0] == 0 and sum(places[-1]) == shape.stride
    for (at, size), (following, _) in zip(places, places[1:], strict=False):
        assert at + size == following
    (_, pad), (_, token_bytes), (_, trailer) = places[1:]
    smaller = [
        xxhash.xxh3_64_intdigest(
            b"".join(rows[1][s.offset : s.offset + s.length] for s in identity.spans if s.part == p)
        )
        for p in identity.parts[1:]
    ]
    ids = b"".join(t.to_bytes(4, "little") for t in tokens[bt : 2 * bt])
    assert len(ids) == token_bytes
    values = [
        b"KVR1", 1, 0, identity.nsid, hasher.digest(2), hasher.digest(1), 1, identity.row_bytes,
        xxhash.xxh3_64_intdigest(rows[1]), *(smaller + [0, 0])[:2], hasher.lineages(2)[16:], TIME,
        0, 2, lambda so_far: xxhash.xxh3_64_intdigest(ids + so_far[:120]),
    ]  # fmt: skip
    assert metas[0] == bytes(int(pad)) + ids + packed("trailer", values, int(trailer))
    second = memoryview(metas[1])[-128:]
    assert (second[112], second[116], second[56]) == (1, 2, 2)


def test_sizes() -> None:
    identity = presets.get("deepseek-v4.1-flash", weights="w", tokenizer="t")
    config = StoreConfig(bytes(16))
    names = {
        "row": identity.row_bytes, "stride": Shape.of(identity).stride, "extent": config.extent,
        "segment": config.segment_bytes, "run": schema.RUN.size,
    }  # fmt: skip
    rows = table("numbers")
    for number, what, how in rows:
        assert evaluated(how, **names) == float(number.replace(",", "")), what
    found = {what: float(number.replace(",", "")) for number, what, _ in rows}
    assert found["bytes of a record, its stride"] == names["stride"]
    geometry = Geometry.fit(names["stride"], config.extent)
    assert found["records in a segment"] == geometry.slots_within(config.segment_bytes)
    hit = identity.hit_cap(131_072) // identity.block_tokens
    assert found["blocks of a prompt of 131,072 tokens that may be hit"] == hit


def test_sizes_in_the_man_page() -> None:
    identity = presets.get("deepseek-v4.1-flash", weights="w", tokenizer="t")
    stride = Shape.of(identity).stride
    assert f"P is {identity.row_bytes:,} and S {stride:,}: {stride // 4096} pages" in MAN


def test_directory_layout() -> None:
    block = PAGE.split("## Directory layout")[1].split("```")[1]
    paths = [line.split()[0].removeprefix("<store>/") for line in block.strip().splitlines()]
    writer, ns = "<writer>", "<namespace>"
    number = "<number>"
    assert paths == [
        MARKER,
        namespace_path(ns),
        segment.segment_path("<class>", "<yyyymmdd>", ns, writer, 7).replace("000007", number),
        journal.journal_path(writer, 7).replace("000007", number),
        f"{checkpoint.DIRECTORY}/<milliseconds>-{writer}.ckpt",
        lease.PATH,
        passes.PATH,
        limits.PATH,
    ]


# segments


def header() -> segment.Header:
    return segment.Header(
        SEGMENT_ID, NSID, FINGERPRINT, Geometry(8192, 1 << 20, 4096), 7000, TIME, "agent", TTL,
        STORE,
    )  # fmt: skip


def test_segment_header() -> None:
    values = [
        b"KVFSSEG1", 1, NUMBER, WRITER, 8192, NSID, FINGERPRINT, 1 << 20, 4096, TIME, TTL,
        b"agent".ljust(32, b"\0"), STORE, 7000, whole_sum(4088),
    ]  # fmt: skip
    page = packed("segment-header", values, 4096)
    assert page == header().encode()
    assert segment.Header.decode(page, "x.seg") == header()


def test_slots() -> None:
    """The formulas of the page against every slot of some geometries."""
    text = PAGE.split("### Slots")[1].split("### Footer")[0]
    assert "(extent - first) // S" in text and "((k - n0) % n)*S" in text
    for stride, extent, first in ((8192, 1 << 20, 4096), (12288, 65536, 4096), (4096, 8192, 8192)):
        g = Geometry(stride, extent, first)
        n0, n = (extent - first) // stride, extent // stride
        for k in range(200):
            place = (
                first + k * stride if k < n0
                else ((k - n0) // n + 1) * extent + ((k - n0) % n) * stride
            )  # fmt: skip
            assert g.offset(k) == place
            assert place // extent == (place + stride - 1) // extent


def test_segment_end() -> None:
    footer = b"frames"
    values = [b"KVFSEND1", 1, 9, 81920, len(footer), xxhash.xxh3_64_intdigest(footer)]
    assert packed("segment-end", values, 40) == segment.encode_end(footer, 9, 81920)


# frames and entries

HASHES = bytes(range(48))
ENTRIES: dict[str, tuple[Any, list[Any]]] = {
    "1 NAMESPACE": (frames.NamespaceEntry(NSID, '{"é": 1}'), [NSID, '{"é": 1}']),
    "2 CLASS": (frames.ClassEntry("agent", TTL, TIME), ["agent", TTL, TIME]),
    "3 SEGMENT": (
        frames.SegmentEntry(SEGMENT_ID, NSID, 8192, 1 << 20, 4096, TIME, TTL, "agent", "seg/x"),
        [SEGMENT_ID, NSID, 8192, 1 << 20, 4096, TIME, TTL, "agent", "seg/x"],
    ),
    "4 RUN": (
        frames.RunEntry(NSID, SEGMENT_ID, 5, 7, TIME, TIME + 1, PARENT, HASHES[:32], HASHES),
        [NSID, SEGMENT_ID, 5, 7, TIME, TIME + 1, PARENT, 2, HASHES[:32], 3, HASHES],
    ),
    "5 RENEW": (
        frames.RenewEntry(NSID, PARENT, TIME + 9, TIME, "chatbot", True),
        [NSID, PARENT, TIME + 9, TIME, "chatbot", 1],
    ),
    "6 CUT": (frames.CutEntry(NSID, SEGMENT_ID, 5, 2, TIME), [NSID, SEGMENT_ID, 5, 2, TIME]),
    "7 DROP": (frames.DropEntry(SEGMENT_ID, TIME), [SEGMENT_ID, TIME]),
    "8 SEAL": (frames.SealEntry(TIME, True), [TIME, 1]),
    "9 MOVE": (
        frames.MoveEntry(
            TIME,
            (frames.Source(SEGMENT_ID, 4, 1), frames.Source(PARENT, 1, 2)),
            frames.RunEntry(NSID, SEGMENT_ID, 5, 7, TIME, TIME + 1, PARENT, b"", HASHES),
        ),
        [
            TIME,
            2,
            struct.pack("<16sII16sII", SEGMENT_ID, 4, 1, PARENT, 1, 2),
            frames.RunEntry(NSID, SEGMENT_ID, 5, 7, TIME, TIME + 1, PARENT, b"", HASHES).body(),
        ],
    ),
    "10 MOVED": (
        frames.MovedEntry(NSID, frames.Source(SEGMENT_ID, 4, 2), SEGMENT_ID, 9, HASHES[:16], TIME),
        [NSID, SEGMENT_ID, 4, 2, SEGMENT_ID, 9, HASHES[:16], TIME],
    ),
    "11 SLOT": (
        SlotEntry(NSID, STORE, PARENT, 256, 6, TIME + 9, TIME, "host", "host:7000"),
        [NSID, STORE, PARENT, 256, 6, TIME + 9, TIME, "host", "host:7000"],
    ),
    "12 SLOTGONE": (
        SlotGoneEntry(NSID, STORE, PARENT, 6, TIME),
        [NSID, STORE, PARENT, 6, TIME],
    ),
    "13 KEEP": (
        KeepEntry(NSID, TIME + 9, TIME, 7, "chatbot", True, HASHES[:32], HASHES),
        [NSID, TIME + 9, TIME, 7, "chatbot", 1, 2, HASHES[:32], 3, HASHES],
    ),
    "14 REMOVE": (
        RemoveEntry(NSID, TIME, 7, HASHES[:16], HASHES[16:]),
        [NSID, TIME, 7, 1, HASHES[:16], 2, HASHES[16:]],
    ),
}


def test_every_entry_is_described() -> None:
    assert re.findall(r"<!-- body: (\d+ [A-Z]+) -->", PAGE) == list(ENTRIES)
    assert {type(entry) for entry, _ in ENTRIES.values()} == set(frames.Entry.__args__)


@pytest.mark.parametrize("label", ENTRIES)
def test_entry(label: str) -> None:
    entry, values = ENTRIES[label]
    seed, offset = 2**64 - 50, 128
    mine = framed(int(label.split()[0]), body(label, values), seed + offset)
    assert mine == frames.encode(entry, seed, offset)
    assert list(frames.decode_all(memoryview(mine), seed, offset)) == [(entry, offset + len(mine))]


def test_limits_of_entries() -> None:
    assert f"at most {frames.MAX_PATH_HEADS}" in PAGE
    assert frames.MAX_BODY == 64 << 20 and "A body is at most 64\nMiB" in PAGE


def test_journal() -> None:
    values = [b"KVFSLOG1", 1, 3, WRITER, 4711, STORE, TIME, whole_sum(56)]
    mine = packed("journal-header", values, 64)
    assert mine == journal.Header(WRITER, 3, 4711, STORE, TIME).encode()
    # The first entry of the journal, from the page's words on its seed.
    seed = int.from_bytes(WRITER[:8], "little") + 3 * 2**40
    assert seed == journal.frame_seed(WRITER, 3)
    assert journal.HEADER_BYTES == 64 and journal.ROLL_BYTES == 64 << 20
    assert journal.IDLE_SECONDS == 3600


def test_footer_is_framed_as_the_page_says() -> None:
    entry, values = ENTRIES["3 SEGMENT"]
    seed = int.from_bytes(SEGMENT_ID[:8], "little")
    assert framed(3, body("3 SEGMENT", values), seed) == frames.encode(entry, seed, 0)


def test_checkpoint() -> None:
    values = [b"KVFSCKP1", 1, 0, STORE, TIME, whole_sum(56)]
    fixed = checkpoint._HEADER.pack(checkpoint.MAGIC, checkpoint.VERSION, 0, STORE, TIME)
    mine = packed("checkpoint-header", values, checkpoint.HEADER_BYTES)
    assert mine == fixed + xxhash.xxh3_64_digest(fixed)[::-1]
    tail = checkpoint._END.pack(checkpoint.END_MAGIC, checkpoint.VERSION, 0, 100, 20, 7)
    assert packed("checkpoint-end", [b"KVFSCKE1", 1, 0, 100, 20, 7], 40) == tail
    assert checkpoint._seed(STORE, TIME) == int.from_bytes(STORE[:8], "little") ^ TIME


# JSON and the index


def test_marker() -> None:
    data = json.loads(StoreConfig(STORE).encode())
    assert [key.strip("`") for key, _ in table("json: kvfs.json")] == list(data)


def test_index_rows() -> None:
    assert schema.KEY.pack(HASHES[:16], 7) == HASHES[:16] + (7).to_bytes(4, "little")
    run = schema.Run(1, HASHES[:16], 2, 3, 3, 4, TIME, TIME + 1, 5, PARENT, HASHES)
    assert packed("index-run", [2, 3, 3, 4, TIME, TIME + 1, 5, PARENT], 56) + HASHES == run.value()
    row = schema.Segment(
        9, SEGMENT_ID, 1, 5, schema.GONE, Geometry(8192, 1 << 20, 4096), TIME, TTL, TIME + 2, "seg"
    )
    values = [SEGMENT_ID, 1, 5, 2, 8192, 1 << 20, 4096, TIME, TTL, TIME + 2]
    assert packed("index-segment", values, 68) + b"seg" == row.value()
    assert (schema.LIVE, schema.DROPPED, schema.GONE) == (0, 1, 2)


def test_index_tables() -> None:
    named = {
        name.lower(): value.decode()
        for name, value in vars(schema).items()
        if name.isupper() and isinstance(value, bytes) and len(value) == 1 and value.isalpha()
    }
    assert {n: b.strip("`") for n, b, _, _ in table("tables: index")} == named


# versions


def test_another_version_is_refused_by_name() -> None:
    page = bytearray(header().encode())
    page[8] = 2
    with pytest.raises(FormatError, match=r"x\.seg: segment version 2; this kvfs reads"):
        segment.Header.decode(bytes(page), "x.seg")
    head = bytearray(journal.Header(WRITER, 0, 0, STORE, TIME).encode())
    head[8] = 2
    with pytest.raises(FormatError, match=r"x\.log: journal version 2"):
        journal.decode_header(bytes(head), "x.log", STORE)
    marker = StoreConfig(STORE).encode().replace(b'"kvfs": 1', b'"kvfs": 2')
    with pytest.raises(FormatError, match="store format 2"):
        StoreConfig.decode(marker, "kvfs.json")


def test_the_exit_code_of_an_unknown_version() -> None:
    assert f"exit code {FormatError('x').exit_code}" in PAGE.replace("\n", " ")
    assert f"exit code {FormatError('x').exit_code}" in MAN


def test_an_unknown_entry_is_passed_over() -> None:
    known, values = ENTRIES["2 CLASS"]
    data = framed(99, b"?", 0)
    data += framed(2, body("2 CLASS", values), len(data))
    found = [entry for entry, _ in frames.decode_all(memoryview(data), 0, 0)]
    assert found == [None, known]


# the reader's copy


def man_table(label: str) -> list[list[str]]:
    found = re.search(rf'\.\\" {re.escape(label)}\n\.Bd [^\n]*\n(.*?)\.Ed', MAN, re.DOTALL)
    assert found, f"man/kvfs.5 has no table {label}"
    return [line.split(maxsplit=3) for line in found.group(1).strip().splitlines()[1:]]


@pytest.mark.parametrize("label", re.findall(r"<!-- (table: (?!index|record)[a-z-]+) -->", PAGE))
def test_the_man_page_has_the_same_tables(label: str) -> None:
    ours = [row[:3] for row in table(label)]
    assert [row[:3] for row in man_table(label)] == ours


@pytest.mark.parametrize("label", [f"body: {name}" for name in ENTRIES])
def test_the_man_page_has_the_same_bodies(label: str) -> None:
    found = re.search(rf"^{label.split(': ')[1]} +(.*?)\n(?=[^ ])", MAN, re.DOTALL | re.MULTILINE)
    assert found, f"man/kvfs.5 does not describe {label}"
    kinds = re.findall(r"\b(hash|hashes|string|text|u8|u16|u32|u64)\b", found.group(1))
    assert kinds == [kind for kind, _ in table(label) if kind not in ("sources", "rest")]


def test_fields_are_what_they_are_called() -> None:
    """A field that is added to a structure has to come into the tables."""
    names = {
        segment.Header: 9, journal.Header: 5, record.Trailer: 12, frames.RunEntry: 9,
        frames.SegmentEntry: 9,
    }  # fmt: skip
    assert {kind: len(dataclasses.fields(kind)) for kind in names} == names
