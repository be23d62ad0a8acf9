"""What is printed where: results, progress, and numbers for people."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path

import pytest

from kvfs.cli import output
from kvfs.cli.values import BYTES, DURATION
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
