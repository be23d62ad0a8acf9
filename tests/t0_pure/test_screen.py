"""What the demonstration prints, on a terminal and in a pipe."""

from __future__ import annotations

import io

import pytest

from kvfs.demo.screen import Screen


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
