"""The man pages in man/ are what the commands say of themselves, and they are well formed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from kvfs.cli import manpage
from kvfs.cli.main import main as root
from kvfs.errors import EXIT_CODES

ROOT = Path(__file__).parents[2]
MAN = ROOT / "man"
PAGES = manpage.pages(root)
FULL = {name: text for name, text in PAGES.items() if not text.startswith(".so ")}


def test_pages_are_in_step_with_the_commands() -> None:
    kept = {path.name: path.read_text() for path in MAN.glob("kvctl*.1")}
    kept |= {name: (MAN / name).read_text() for name in PAGES if (MAN / name).exists()}
    assert kept == PAGES, "run `make man` and commit what it writes"


@pytest.mark.parametrize("name", FULL)
def test_every_exit_code_is_explained(name: str) -> None:
    status = FULL[name].split(".SH EXIT STATUS\n")[1].split("\n.SH ")[0]
    assert re.findall(r"\\fB(\d+)\\fR", status) == [str(code) for code in EXIT_CODES]


def test_every_variable_is_explained() -> None:
    """Every KVFS_* name in the code is in ENVIRONMENT, or is an option's and so in its page."""
    used = set()
    for directory in ("kvfs", "cli", "gpu"):
        for path in (ROOT / directory).rglob("*.py"):
            if "testing" not in path.parts:
                used |= set(re.findall(r"\bKVFS_[A-Z][A-Z_]*\b", path.read_text()))
    text = "".join(FULL.values())
    assert {name for name in used if f"\\fB{name}\\fR" not in text} == set()


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="mandoc is not installed")
def test_pages_are_well_formed() -> None:
    """The written pages and the hand-written ones; the date is left out on purpose."""
    pages = [str(p) for s in "158" for p in MAN.glob(f"*.{s}") if p.read_text()[:4] != ".so "]
    command = ["mandoc", "-T", "lint", "-W", "warning", *pages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    faults = [line for line in done.stdout.splitlines() if "missing date" not in line]
    assert not faults, "\n".join(faults)


# the writer itself, on commands that need every part of it


MANUAL = {
    "json output": "An object:\n\nhit_tokens -- tokens that may\nbe hit\nreason -- why\n\n  {}"
}


@click.group()
def sample() -> None:
    """Keep KV caches. And more."""


@sample.command(epilog="\b\nExamples:\n  kvctl look --all\n  .hidden a\\b")
@click.option("--all/--few", "-a", help="Look at all.", envvar="KVFS_ALL")
@click.option("--kind", type=click.Choice(["x-y", "z"]), default="z", show_default=True)
@click.option("--secret", hidden=True)
@click.argument("path", nargs=-1)
def look() -> None:
    """Look around in PATH.

    'Quoted' text with --all in it.

    \b
    as it
      stands
    """


@sample.group()
def ttl() -> None:
    """Show classes."""


@ttl.command("set")
@click.option("--json", is_flag=True, help="Print JSON.")
def set_ttl() -> None:
    """Set a class."""


@sample.command(hidden=True)
def inner() -> None:
    """Not for readers."""


def section(page: str, title: str) -> str:
    return page.split(f".SH {title}\n")[1].split("\n.SH ")[0]


@pytest.fixture(scope="module")
def sample_pages() -> dict[str, str]:
    return manpage.pages(sample)


def test_sample_has_a_page_for_each_visible_command(sample_pages: dict[str, str]) -> None:
    assert set(sample_pages) == {"kvctl.1", "kvctl-look.1", "kvctl-ttl.1", "kvfs.1"}
    assert sample_pages["kvfs.1"] == ".so man1/kvctl.1\n"
    commands = section(sample_pages["kvctl.1"], "COMMANDS")
    assert re.findall(r"kvctl\\-(\w+)", commands) == ["look", "ttl"]


def test_sample_name_line(sample_pages: dict[str, str]) -> None:
    assert section(sample_pages["kvctl-look.1"], "NAME") == (r"kvctl\-look \- look around in PATH")


def test_sample_text(sample_pages: dict[str, str]) -> None:
    text = section(sample_pages["kvctl-look.1"], "DESCRIPTION")
    assert "\n\\&'Quoted' text with \\-\\-all in it.\n" in text
    assert "\nas it\n  stands\n.fi" in text


def test_sample_options(sample_pages: dict[str, str]) -> None:
    text = section(sample_pages["kvctl-look.1"], "OPTIONS")
    assert r"\fB\-a\fR, \fB\-\-all\fR / \fB\-\-few\fR" in text
    assert r"\fB\-\-kind\fR \fI[x\-y|z]\fR" in text
    assert "secret" not in text


def test_sample_examples_keep_their_letters(sample_pages: dict[str, str]) -> None:
    text = section(sample_pages["kvctl-look.1"], "EXAMPLES")
    assert "\nkvctl look \\-\\-all\n\\&.hidden a\\eb\n" in text
    assert "Examples" not in text


def test_sample_manual(sample_pages: dict[str, str]) -> None:
    text = section(sample_pages["kvctl-look.1"], "JSON OUTPUT")
    assert ".TP\n\\fBhit_tokens\\fR\ntokens that may be hit\n.TP\n\\fBreason\\fR\nwhy" in text


def test_sample_nested_commands_share_the_page(sample_pages: dict[str, str]) -> None:
    text = section(sample_pages["kvctl-ttl.1"], "COMMANDS")
    assert text.startswith(".SS \\fBkvctl ttl set\\fR")
    assert r"\fB\-\-json\fR" in text


def test_sample_environment(sample_pages: dict[str, str]) -> None:
    text = section(sample_pages["kvctl-look.1"], "ENVIRONMENT")
    assert "\\fBKVFS_ALL\\fR\nThe value of \\-\\-all." in text
    assert "\\fBKVFS_STORE\\fR" in text


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="mandoc is not installed")
def test_sample_is_well_formed(sample_pages: dict[str, str], tmp_path: Path) -> None:
    for name, text in sample_pages.items():
        (tmp_path / name).write_text(text)
    pages = [str(tmp_path / name) for name in sample_pages if name != "kvfs.1"]
    command = ["mandoc", "-T", "lint", "-W", "warning", *pages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert {line.split("WARNING: ")[1] for line in done.stdout.splitlines()} == {
        'missing date, using "": TH'
    }


def test_main_writes_and_removes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kvctl-gone.1").touch()
    (tmp_path / "kvfs.5").touch()
    manpage.main([str(tmp_path)])
    assert {path.name for path in tmp_path.glob("*.[158]")} == PAGES.keys() | {"kvfs.5"}
    manpage.main([])
    assert set(capsys.readouterr().out.split()) == PAGES.keys()
