"""The command group: the map of all commands, and how a process of this program ends.

A command is a module here, loaded when it is called, so that each starts fast; the map says of
each in advance what `--help` prints, and a test compares that with the command's own help text.

Whatever ends a command is turned into one of kvfs.errors.EXIT_CODES here and nowhere else.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from kvfs import __version__
from kvfs.cli import output
from kvfs.errors import (
    EXIT_BROKEN_PIPE,
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_OUTPUT,
    KvfsError,
)

# Heading -> command -> the first sentence of its help. A module of the command's name has it.
MAP: dict[str, dict[str, str]] = {
    "Set up": {
        "init": "Make a store in an empty directory",
        "ns": "Make and show namespaces, one for each model and KV layout",
        "ttl": "Show and set how long blocks are kept",
        "doctor": "Look at what kvfs needs of this machine and of a store",
    },
    "Use": {
        "check": "Say how much of a prompt is stored",
        "fetch": "Read the stored blocks of a prompt and verify them",
        "fetcher": "Fetch for all engines of this host, until told to end",
        "put": "Store the blocks of a prompt",
    },
    "Look": {
        "mount": "Show a store as a directory tree",
        "umount": "End a mount and wait until its process has ended",
        "ls": "List the tree of a store, without mounting it",
        "show": "Show all there is to know about a block, and verify it",
        "stats": "Show figures of a store and of this host's index",
        "status": "Show how far this host is behind each writer, and who keeps house",
    },
    "Keep in order": {
        "serve": "Follow the other writers of a store and keep house, until it is told to end",
        "drain": "Move this host's slots to other hosts, before it leaves",
        "rm": "Evict blocks: those of a prompt, a node, a namespace, or a tenant",
        "gc": "Give back the room of what has expired or was evicted",
        "limits": "Show and set how much a store may hold, and how fast it is cleaned",
        "fsck": "Read everything, verify it and report",
        "rebuild": "Make this host's index anew, from journals or stored blocks",
    },
    "Try out and measure": {
        "bench": "Measure check, put, fetch and start-up beside the limits of this machine",
        "replay": "Drive a store with a request trace and say what hit",
        "plan": "Say what a fleet would ask of its storage",
        "state": "Look at the sliding-window state that models keep beside blocks",
        "version": "Say which version of kvfs this is, and which formats it reads",
    },
}


class Commands(click.Group):
    """A group whose commands are modules, imported when they are called."""

    headings = MAP

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for commands in MAP.values() for name in commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if not any(cmd_name in commands for commands in MAP.values()):
            return None
        command: click.Command = importlib.import_module(f"kvfs.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(len(name) for name in self.list_commands(ctx))
        for heading, commands in MAP.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), text) for name, text in commands.items()])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Runs the command line and exits with a documented code."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode, **extra)
        name = prog_name or program()
        self._main_shell_completion(extra, name, complete_var)
        sys.exit(self._run(name, sys.argv[1:] if args is None else list(args), extra))

    def _run(self, name: str, args: list[str], extra: dict[str, Any]) -> int:
        output.guard_streams()
        try:
            code = self._invoke(name, args, extra)
            output.flush()
            return code
        except output.OutputFailed as e:
            output.give_up()
            return _output_failed(name, e)
        except KeyboardInterrupt:
            output.give_up()
            return EXIT_INTERRUPTED

    def _invoke(self, name: str, args: list[str], extra: dict[str, Any]) -> int:
        """Returns the exit code of what the user asked for; raises what _run deals with."""
        try:
            with self.make_context(name, args, **extra) as ctx:
                code = self.invoke(ctx)
            return code if isinstance(code, int) else EXIT_OK
        except click.exceptions.Exit as e:
            return e.exit_code
        except click.Abort:
            raise KeyboardInterrupt from None
        except click.ClickException as e:
            return _bad_usage(name, e)
        except KvfsError as e:
            output.message(f"{name}: {e}")
            return e.exit_code
        except (output.OutputFailed, KeyboardInterrupt):
            raise
        except Exception as e:
            if _interrupted(e):
                raise KeyboardInterrupt from None
            _internal_error(name)
            return EXIT_INTERNAL


def program() -> str:
    """The name this process was called by: kvctl, or its second name kvfs."""
    name = os.path.basename(sys.argv[0])
    return name if name in ("kvfs", "kvctl") else "kvctl"


def _bad_usage(name: str, error: click.ClickException) -> int:
    context = getattr(error, "ctx", None)
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
        error.show()
        return error.exit_code
    path = name if context is None else context.command_path
    text = error.format_message().rstrip(".")
    output.message(f"{path}: {text}; see {path} --help")
    return error.exit_code


def _output_failed(name: str, error: output.OutputFailed) -> int:
    if error.errno == errno.EPIPE and not error.path:
        return EXIT_BROKEN_PIPE
    output.message(f"{name}: {error}")
    return EXIT_OUTPUT


def _interrupted(error: BaseException) -> bool:
    """An interrupt came first: what it broke off may fail on its way out."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


def _internal_error(name: str) -> None:
    import traceback

    output.message(traceback.format_exc().rstrip(), one_line=False)
    output.message(f"{name}: internal error; this is a bug of kvfs {__version__}")


@click.command(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  kvctl init --store /srv/kvfs
  kvctl ns create --store /srv/kvfs --preset llama-3.1-8b --weights REV --tokenizer DIGEST
  kvctl check --store /srv/kvfs prompt.u32

`kvctl COMMAND --help` and the page kvctl-COMMAND(1) say more. `kvfs` is the same command.
""",
)
@click.version_option(__version__, message="%(prog)s (kvfs) %(version)s")
def main() -> None:
    """Store, check, fetch and see LLM KV-cache prefixes."""
