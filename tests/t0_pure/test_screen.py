"""What the demonstration prints, on a terminal and in a pipe."""

from __future__ import annotations

import io

import pytest

from kvfs.sim.screen import Screen, duration, size


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def _colourful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_a_pipe_gets_plain_lines() -> None:
    out = io.StringIO()
    screen = Screen(out)
    screen.heading("Title")
    for i in range(101):
        screen.progress(i / 100, f"{i} done")
    screen.progress_done()
    screen.shell("ls", "a\nb\n")
    text = out.getvalue()
    assert "\x1b" not in text and "\r" not in text
    assert text.count(" done") == 4
    assert "  $ ls\n    a\n    b\n" in text


@pytest.mark.usefixtures("_colourful")
def test_a_terminal_gets_colour_and_one_progress_line() -> None:
    out = Terminal()
    screen = Screen(out)
    for i in range(101):
        screen.progress(i / 100, f"{i} done")
    screen.progress_done()
    text = out.getvalue()
    assert "\x1b[32m" in text and "█" in text
    assert text.endswith("100 done\n") and text.count("\n") == 1


@pytest.mark.usefixtures("_colourful")
def test_no_color_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    Screen(out).shell("ls", "a")
    assert out.getvalue() == "  $ ls\n    a\n"


def test_long_output_is_cut_and_counted() -> None:
    out = io.StringIO()
    Screen(out).shell("seq", "\n".join(map(str, range(1000))), lines=3)
    assert out.getvalue() == "  $ seq\n    0\n    1\n    2\n    ... 997 more lines\n"


def test_one_line_too_many_is_shown_instead_of_counted() -> None:
    out = io.StringIO()
    Screen(out).shell("seq", "0\n1\n2\n3\n", lines=3)
    assert out.getvalue().endswith("    3\n")


def test_tables_line_up() -> None:
    out = io.StringIO()
    Screen(out).table([("a", "1", "x"), ("long", "22", "")])
    assert out.getvalue() == "  a      1  x\n  long  22\n"


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (114_688, "115 kB"), (1.5e6, "1.50 MB")]
    + [(2e9, "2.00 GB"), (5e12, "5000.00 GB")],
)
def test_sizes(n: float, text: str) -> None:
    assert size(n) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (12.34, "12.3 s"), (0.0042, "4.2 ms"), (9e-5, "90 us")]
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text
