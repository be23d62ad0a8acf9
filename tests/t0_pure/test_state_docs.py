"""docs/state.md: its examples run, its tables are what the code does."""

from __future__ import annotations

import doctest
import re
import struct
from pathlib import Path

import pytest
import xxhash
from click.testing import CliRunner

from kvfs.cli.main import main as root
from kvfs.layout import StateLayout
from kvfs.state.slot import SlotMeta

PATH = Path(__file__).parents[2] / "docs" / "state.md"
PAGE = PATH.read_text(encoding="utf-8")
INT = {"u16": 2, "u32": 4, "u64": 8}


def test_the_examples_run() -> None:
    found = doctest.testfile(str(PATH), module_relative=False, encoding="utf-8")
    assert found.attempted > 25 and not found.failed


def test_the_policy_table_is_what_the_command_prints() -> None:
    shown = re.search(r"<!-- output: policy -->\n```\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    line = "state policy --preset deepseek-v4.1-flash --tokens 131072"
    assert f"`kvctl {line}`" in PAGE
    assert CliRunner().invoke(root, line.split()).stdout == shown.group(1)


def test_the_description_of_a_slot_is_packed_as_the_page_says() -> None:
    layout = StateLayout(128, 6, 20, 528)
    meta = SlotMeta(6, b"p" * 16, b"n" * 16, b"a" * 16, b"l" * 16, 256, layout, 3, 5, 10**12, 77)
    values = [6, b"p" * 16, b"n" * 16, b"a" * 16, b"l" * 16, 256, 128, 6, 20, 528, 3, 5, 10**12, 77]
    shown = re.search(r"<!-- table: slot -->\n((?:\|.*\n)+)", PAGE)
    assert shown is not None
    rows = [[c.strip() for c in row.strip("|").split("|")] for row in shown[1].splitlines()[2:]]
    packed = bytearray()
    for offset, size, kind, what in rows:
        assert int(offset) == len(packed)
        if kind == "zeros":
            packed += bytes(int(size))
        elif what.startswith("magic"):
            packed += what.split("`")[1].encode()
        elif what == "version, 1":
            packed += struct.pack("<H", 1)
        elif what == "xxh3-64 of bytes 0 to 127":
            packed += xxhash.xxh3_64_intdigest(bytes(packed[:128])).to_bytes(8, "little")
        else:
            value = values.pop(0)
            packed += value.to_bytes(INT[kind], "little") if isinstance(value, int) else value
        assert len(packed) == int(offset) + int(size)
    assert not values and bytes(packed) == meta.encode()


@pytest.mark.parametrize("word", ["exact_from", "latest_chunk", "announce_all", "window_of"])
def test_what_the_page_names_is_there(word: str) -> None:
    code = "".join(p.read_text() for p in (PATH.parents[1] / "kvfs" / "state").glob("*.py"))
    assert word in PAGE and f"def {word}(" in code
