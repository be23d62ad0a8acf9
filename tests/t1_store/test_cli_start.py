"""What a process of kvctl loads before it answers: time is a matter of modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvfs.cli.main import MAP
from kvfs.testing.command import environment, kvctl

HEAVY = {"numpy", "trio", "pyfuse3", "torch", "hypothesis", "subprocess", "logging", "asyncio",
         "socket", "secrets", "random", "tomllib"}  # fmt: skip
# All that `kvctl check` needs of kvfs. What writes or reads blocks is not among it.
CHECK = """kvfs kvfs.cli kvfs.cli.main kvfs.cli.output kvfs.cli.check kvfs.cli.common
    kvfs.cli.settings kvfs.cli.tokens kvfs.errors kvfs.filesystems kvfs.chain kvfs.layout
    kvfs.geometry kvfs.store_path kvfs.forking
    kvfs.namespace kvfs.plan kvfs.catalog kvfs.local kvfs.index kvfs.index.index kvfs.index.env
    kvfs.index.guard kvfs.index.lookup kvfs.index.place kvfs.index.schema kvfs.index.tally"""


def loaded_by(*args: str) -> set[str]:
    """All modules in a process at the end of a command."""
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
        "from kvfs.cli.main import main\n"
        "main(sys.argv[1:], prog_name='kvctl')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *args], env=environment(), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return set(done.stderr.split())


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.split(".")[0] == "kvfs"}


def tops(modules: set[str]) -> set[str]:
    return {name.split(".")[0] for name in modules}


def test_help_loads_no_command() -> None:
    modules = loaded_by("--help")
    assert ours(modules) == {"kvfs", "kvfs.cli", "kvfs.cli.main", "kvfs.cli.output", "kvfs.errors"}
    assert not tops(modules) & (HEAVY | {"lmdb", "xxhash"})


def test_check_loads_the_index_and_no_more(cli_store: Path) -> None:
    ids = ",".join(map(str, range(1024)))
    kvctl("put", "--synthetic", "--tokens", ids)
    modules = loaded_by("check", "--tokens", ids)
    assert "kvfs.index.lookup" in modules  # it did its work
    assert ours(modules) - set(CHECK.split()) == set()
    assert not tops(modules) & HEAVY


def test_a_command_loads_no_other_one() -> None:
    names = {name for commands in MAP.values() for name in commands}
    for name in ("put", "ls"):
        modules = loaded_by(name, "--help")
        others = {f"kvfs.cli.{other}" for other in names - {name}}
        assert not modules & others
        assert not tops(modules) & (HEAVY | {"lmdb"})
