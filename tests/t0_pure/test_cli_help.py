"""Every command explains itself, shows how it is called, and speaks JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from kvfs import __version__
from kvfs.cli import manpage
from kvfs.cli.main import main as root
from kvfs.cli.values import FiniteRange


def walk(
    group: click.Group, parent: click.Context | None = None, name: str = "kvctl"
) -> Iterator[tuple[str, click.Command, click.Context]]:
    """(path, command, context) of every visible command below a group."""
    context = click.Context(group, parent, name, **group.context_settings)
    for inner in group.list_commands(context):
        command = group.get_command(context, inner)
        assert command is not None
        if command.hidden:
            continue
        below = click.Context(command, context, inner, **command.context_settings)
        yield f"{name} {inner}", command, below
        if isinstance(command, click.Group):
            yield from walk(command, context, f"{name} {inner}")


COMMANDS = {path: (command, context) for path, command, context in walk(root)}
LEAVES = {p: c for p, (c, _) in COMMANDS.items() if not isinstance(c, click.Group)}
TOP = {p: c for p, (c, _) in COMMANDS.items() if p.count(" ") == 1}


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_lists_every_command(option: str) -> None:
    result = CliRunner().invoke(root, [option], terminal_width=200)
    assert result.exit_code == 0
    shown = dict(re.findall(r"^  (\w+)  +(\S.*)", result.output, re.MULTILINE))
    for path, command in TOP.items():
        name = path.split()[1]
        # The map is written by hand, so that --help loads no command: here it is held to them.
        assert shown[name] == manpage.summary(command)


def test_version_says_who_it_is() -> None:
    result = CliRunner().invoke(root, ["--version"], prog_name="kvctl")
    assert result.output.startswith("kvctl") and "kvfs" in result.output
    assert __version__ in result.output


@pytest.mark.parametrize("path", COMMANDS)
def test_both_help_options(path: str) -> None:
    for option in ("-h", "--help"):
        result = CliRunner().invoke(root, [*path.split()[1:], option])
        assert result.exit_code == 0
        assert "Usage:" in result.output


@pytest.mark.parametrize("path", COMMANDS)
def test_it_explains_itself(path: str) -> None:
    command, context = COMMANDS[path]
    assert len((command.help or "").split()) >= 4, "a help text says what the command is for"
    for parameter in command.get_params(context):
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert parameter.help, f"{parameter.opts} has no help text"


@pytest.mark.parametrize("path", COMMANDS)
def test_it_takes_no_nan(path: str) -> None:
    """click's own types do: a NaN is within all their bounds, and every clock chokes on it."""
    kinds = [parameter.type for parameter in COMMANDS[path][0].params]
    assert all(
        isinstance(k, FiniteRange) for k in kinds if isinstance(k, click.types.FloatParamType)
    )


@pytest.mark.parametrize("path", TOP)
def test_it_has_examples(path: str) -> None:
    """In the epilog, as lines that begin with two blanks and the command's own name."""
    lines = (TOP[path].epilog or "").splitlines()
    assert [line for line in lines if re.match(rf"  .*{re.escape(path)}\b", line)]


@pytest.mark.parametrize("path", LEAVES)
def test_it_speaks_json(path: str) -> None:
    options = {option for parameter in LEAVES[path].params for option in parameter.opts}
    assert "--json" in options
