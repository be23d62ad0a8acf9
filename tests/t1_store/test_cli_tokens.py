"""Token ids come in many forms and give one digest, or an error of one line."""

from __future__ import annotations

import array
import json
from pathlib import Path

import pytest

from kvfs.testing.command import kvctl, kvctl_json

IDS = [*range(1, 257), 2**32 - 1]
U32 = array.array("I", IDS).tobytes()

FORMS = {
    "json": json.dumps(IDS).encode(),
    "json with blanks": json.dumps(IDS, indent=2).encode(),
    "json object": json.dumps({"model": "m", "tokens": IDS}).encode(),
    "commas": ",".join(map(str, IDS)).encode(),
    "commas and blanks": ", ".join(map(str, IDS)).encode() + b"\n",
    "lines": "\n".join(map(str, IDS)).encode() + b"\r\n",
    "u32": U32,
}


@pytest.fixture
def stored(cli_store: Path) -> Path:
    """A store that holds the two whole blocks of IDS."""
    kvctl("put", "--synthetic", "--tokens", ",".join(map(str, IDS)))
    return cli_store


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_prompt(stored: Path, tmp_path: Path, form: str) -> None:
    data = FORMS[form]
    file = tmp_path / "prompt"
    file.write_bytes(data)
    plans = [
        kvctl_json("check", file),
        kvctl_json("check", "-", stdin=data),
        kvctl_json("check", stdin=data),
        kvctl_json("check", file, "--tokens-format", "u32" if form == "u32" else _named(form)),
    ]
    if form != "u32":
        plans.append(kvctl_json("check", "--tokens", data.decode()))
    assert all(plan == plans[0] for plan in plans)
    assert plans[0]["tokens"] == len(IDS) and plans[0]["stored_tokens"] == 256


def _named(form: str) -> str:
    return "json" if form.startswith("json") else "text"


BAD = {
    "pairs": b"[[1, 2], [3, 4]]",
    "floats": b"[1.5, 2]",
    "bools": b"[1, true]",
    "strings": b'["1"]',
    "null": b"[null]",
    "negative": b"[1, -1]",
    "too large": b"[4294967296]",
    "an object without tokens": b'{"ids": [1]}',
    "not JSON": b"[1, 2",
    "a word": b"1 2 three",
    "hex": b"0x10",
    "an underscore": b"1_000",
    "negative text": b"1 -1",
    "half a number": b"\0\0\0\0\0",
}


@pytest.mark.parametrize("what", BAD)
def test_anything_else_is_refused_in_a_line(cli_store: Path, what: str) -> None:
    for args in (["check", "-"], ["put", "--synthetic", "-"], ["fetch", "-"], ["rm", "-"]):
        result = kvctl(*args, stdin=BAD[what], code=2)
        assert result.stdout == ""
        assert result.stderr.startswith("kvctl: standard input: ")
        assert result.stderr.count("\n") == 1


def test_no_tokens_are_no_tokens(cli_store: Path) -> None:
    for data in (b"", b" \n", b"[]"):
        assert kvctl_json("check", "-", stdin=data, code=3)["reason"] == "no tokens"


def test_tokens_once_only(cli_store: Path, tmp_path: Path) -> None:
    assert "twice" in kvctl("check", tmp_path, "--tokens", "1", code=2).stderr
    assert "No such file" in kvctl("check", tmp_path / "absent", code=2).stderr
    assert "directory" in kvctl("check", tmp_path, code=2).stderr


def test_the_form_can_be_forced(cli_store: Path) -> None:
    """Ids of 2**24 and more may lack a zero byte, and digits may be meant as ids."""
    assert kvctl_json("check", "-", stdin=b"1234", code=3)["tokens"] == 1
    assert (
        kvctl_json("check", "-", "--tokens-format", "u32", stdin=b"12345678", code=3)["tokens"] == 2
    )
