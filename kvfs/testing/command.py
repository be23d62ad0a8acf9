"""Running kvctl in tests: in this process, which is fast, or in one of its own, which is real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from kvfs.cli.main import main as root

SECONDS = 60.0


def kvctl(*args: object, stdin: bytes = b"", code: int | None = 0) -> Result:
    """Runs a command line here; it must exit with `code` (None: with any)."""
    result = CliRunner().invoke(root, [str(a) for a in args], input=stdin, prog_name="kvctl")
    said = f"{' '.join(map(str, args))}: exit {result.exit_code}\n{result.output}"
    assert code is None or result.exit_code == code, said
    assert result.exit_code != 1, said
    return result


def kvctl_json(*args: object, stdin: bytes = b"", code: int | None = 0) -> Any:
    """The same with --json; returns the object that was printed, a list if there were several."""
    printed = kvctl(*args, "--json", stdin=stdin, code=code).stdout.splitlines()
    objects = [json.loads(line) for line in printed]
    return objects[0] if len(objects) == 1 else objects


def command(*args: object) -> list[str]:
    """The words that run kvctl in a process of its own."""
    return [sys.executable, "-m", "kvfs", *map(str, args)]


def run(*args: object, **how: Any) -> subprocess.CompletedProcess[bytes]:
    """Runs kvctl in a process of its own; `how` is subprocess.run's."""
    how = {"capture_output": True, "stdin": subprocess.DEVNULL, "timeout": SECONDS, **how}
    if "stdout" in how or "stderr" in how:
        how["capture_output"] = False
        how.setdefault("stderr", subprocess.PIPE)
    return subprocess.run(command(*args), env=environment(), check=False, **how)


def environment() -> dict[str, str]:
    """This process's, with the kvfs that is tested on the path."""
    here = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": here}
