"""What is printed where: results, progress, and numbers for people."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path

import click
import pytest

from kvfs.cli import output
from kvfs.cli.values import BYTES, DURATION, MILLISECONDS, FiniteRange
from kvfs.testing.command import command, environment, kvctl, run


def on_a_terminal(*args: object) -> tuple[bytes, bytes]:
    """(standard output, standard error) of kvctl with a terminal as its standard error."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        command(*args), env={**environment(), "TERM": "xterm"}, stdout=subprocess.PIPE, stderr=slave
    )
    os.close(slave)
    drawn = b""
    while True:
        try:
            drawn += os.read(master, 65536)
        except OSError:  # EIO: the other end is closed
            break
    os.close(master)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, drawn
    return printed, drawn


def test_progress_is_for_a_terminal(tmp_path: Path) -> None:
    printed, drawn = on_a_terminal(
        "replay", "--temporary", "--json", "--limit", "600", "weka_claude_code_small"
    )
    assert json.loads(printed)["requests"] == 600
    lines = drawn.split(b"\r\x1b[K")
    assert any(b"of 600 requests" in line for line in lines)
    assert lines[-1] == b"", "the line is wiped at the end"


def test_json_is_one_object_a_line(cli_store: Path) -> None:
    kvctl("put", "--synthetic", "--tokens", ",".join(map(str, range(1024))))
    printed = kvctl("ls", "-R", "--json").stdout
    assert printed.endswith("\n")
    assert all(json.loads(line)["path"] for line in printed.splitlines())


def test_verbose_logs_to_the_standard_error(cli_store: Path) -> None:
    done = run("stats", "--json", "-vv")
    assert json.loads(done.stdout) and done.returncode == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (7 * 86400, "7 d"), (36 * 3600, "36 h"), (90, "90 s"), (120, "2 min"), (1.5, "1.5 s"),
        (0.0123, "12.3 ms"), (4.2e-6, "4.2 us"), (0, "0 us"),
    ],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert output.duration(seconds) == text


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 30, "3.0 GiB")]
)
def test_sizes(n: int, text: str) -> None:
    assert output.size(n) == text


def test_times_left() -> None:
    assert output.left(5 * 86400_000, 0) == "5 d"
    assert output.left(90_000, 0) == "90 s"
    assert output.left(0, 3 * 3600_000) == "-3 h"
    assert output.many(1, "block") == "1 block" and output.many(0, "block") == "0 blocks"


def test_tables_line_up(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(("NAME", "N"), [("a", "1"), ("long name", "1,000")], right="lr")
    assert capsys.readouterr().out == "NAME           N\na              1\nlong name  1,000\n"
    output.pairs([("a", "1"), ("gone", ""), ("longer", "2")])
    assert capsys.readouterr().out == "a       1\nlonger  2\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [("4M", 4 << 20), ("256MiB", 256 << 20), ("1kB", 1024), ("1.5g", 3 << 29), ("512", 512)],
)
def test_sizes_as_people_write_them(text: str, value: int) -> None:
    assert BYTES.convert(text, None, None) == value


@pytest.mark.parametrize(
    ("text", "value"), [("90s", 90), ("90", 90), ("12h", 43200), ("3d", 259200), ("2w", 1209600)]
)
def test_times_as_people_write_them(text: str, value: int) -> None:
    assert DURATION.convert(text, None, None) == value


@pytest.mark.parametrize("kind", [BYTES, DURATION, MILLISECONDS])
def test_no_quantity_is_too_large_to_reckon_with(kind: click.ParamType[int]) -> None:
    for text in ("9" * 400, "9" * 25, "9" * 5000):
        with pytest.raises(click.BadParameter, match="larger than any"):
            kind.convert(text, None, None)
    assert kind.convert("9" * 8, None, None) > 0


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999", "-NaN", "x", ""])
def test_numbers_are_finite(text: str) -> None:
    with pytest.raises(click.BadParameter):
        FiniteRange().convert(text, None, None)
    with pytest.raises(click.BadParameter):
        FiniteRange(0, min_open=True).convert(text, None, None)


def test_what_is_not_finite_is_bad_usage(cli_store: Path) -> None:
    much = "9" * 400
    for args in (
        ("gc", "--removals", "nan"), ("gc", "--rate", much), ("limits", "--removals", "inf"),
        ("limits", "--clean-share", "nan"), ("limits", "--capacity", much),
        ("ttl", "define", "long", much), ("fetch", "--tokens", "1", "--deadline", much),
        ("plan", "--rate", "inf"), ("plan", "--prefill", much), ("serve", "--interval", "nan"),
        ("replay", "--temporary", "--limit", much, "weka_claude_code_small"),
        ("ns", "create", "--preset", "tiny", "--weights", "w", "--tokenizer", "t",
         "--tp", f"1/{much * 20}"),
    ):  # fmt: skip
        kvctl(*args, code=2)


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON"):
            output.json_line({"rate": value})
    assert capsys.readouterr().out == ""


STRANGE = os.fsdecode(b"\xff\xfe")


@pytest.mark.posix("a stand-in takes only names in UTF-8")
def test_a_store_whose_path_is_not_utf_8(
    cli_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is printed says so by an escape, of which a reader of JSON makes the same path."""
    ids = ",".join(map(str, range(1024)))
    store = cli_store.rename(cli_store.with_name(STRANGE))
    monkeypatch.setenv("KVFS_STORE", str(store))
    for args in (
        ("put", "--synthetic", "--tokens", ids), ("check", "--tokens", ids), ("stats",),
        ("fetch", "--tokens", ids), ("status",), ("fsck",), ("gc",), ("limits",), ("ttl",),
        ("ls", "-R"), ("rm", "--all"), ("rebuild",), ("ns", "list"),
    ):  # fmt: skip
        done = run(*args, "--json")
        assert done.returncode == 0, done.stderr
        for text in done.stdout.splitlines():
            said = json.loads(text)
            assert said.get("store", str(store)) == str(store)
    assert rb"\udcff\udcfe" in run("stats").stdout
    assert run("stats", "--index", tmp_path / f"{STRANGE}-index").returncode == 0


def test_arguments_that_are_not_utf_8(cli_store: Path) -> None:
    where = f"{STRANGE}/x"
    for args in (
        ("ls", STRANGE), ("ls", where), ("show", where), ("rm", "--node", where),
        ("ttl", "set", "agent", "--node", where), ("check", "--tokens", STRANGE),
        ("check", STRANGE), ("check", "--ns", STRANGE, "--tokens", "1"), ("rm", "--tenant", where),
    ):  # fmt: skip
        done = run(*args)
        assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1), done.stderr
