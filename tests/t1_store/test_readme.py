"""README.md: what it shows runs as it is printed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from kvfs.store import Store
from kvfs.testing.blocks import small_identity
from kvfs.testing.command import command, environment

PAGE = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SECONDS = 300


def blocks(heading: str, language: str = "") -> list[str]:
    """The blocks of code below a heading."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def test_five_minutes_with_kvctl(tmp_path: Path) -> None:
    """Nothing fails but the check that is shown for what it says of a part."""
    (lines,) = blocks("Five minutes with kvctl")
    assert "kvctl replay weka" in lines
    quicker = lines.replace("kvctl replay ", "kvctl replay --limit 100 ")
    words = " ".join(f"'{word}'" for word in command())
    script = f'kvctl() {{ {words} "$@"; }}\ntrap "echo failed: \\$BASH_COMMAND: \\$? >&2" ERR\n'
    done = subprocess.run(
        ["bash", "-c", script + quicker], cwd=tmp_path, env=environment(), capture_output=True,
        text=True, check=False, timeout=SECONDS,
    )  # fmt: skip
    assert done.stderr.splitlines() == ["failed: kvctl check - --explain: 4"]
    assert "block 4 (tokens 512 to 639) is the first that is not stored" in done.stdout
    assert (tmp_path / "blocks.bin").stat().st_size > 0


def test_as_a_library(store_dir: Path) -> None:
    code, _ = blocks("As a library", "python")
    identity = small_identity(model="deepseek")
    with Store.init(store_dir) as store:
        ns = store.create_namespace(identity)
    tokens = list(range(4 * ns.block_tokens))
    names = {"tokens": tokens, "more_tokens": tokens, "blocks": bytes(8 * ns.row_bytes)}
    assert '"/srv/kvfs"' in code
    exec(code.replace("/srv/kvfs", str(store_dir)), names)
    with Store.open(store_dir) as store:
        plan = store.check(store.namespace(ns.name), tokens * 2)
        assert plan.stored_blocks == 8
