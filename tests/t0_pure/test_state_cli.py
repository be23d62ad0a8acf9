"""`kvctl state policy`: its figures are those of the arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvfs import presets
from kvfs.cli.main import main as root
from kvfs.state.slot import Anchor


def run(*args: str) -> str:
    result = CliRunner().invoke(root, ["state", "policy", *args])
    assert result.exit_code == 0, result.output
    return result.output


def fields(*args: str) -> dict[str, Any]:
    out: dict[str, Any] = json.loads(run(*args, "--json"))
    return out


def test_the_reference_case() -> None:
    found = fields("--preset", "deepseek-v4.1-flash", "--tokens", "131072")
    assert {name: found[name] for name in (
        "cap", "l1", "compute_with_slot", "compute_without_slot", "replay_without_slot",
        "slot_bytes", "window", "ring", "layers", "anchors", "latest_chunk", "exact_replay",
    )} == {
        "cap": 130_938, "l1": 130_816, "compute_with_slot": 256, "compute_without_slot": 384,
        "replay_without_slot": 128, "slot_bytes": 1_415_040, "window": 128, "ring": 134,
        "layers": 20, "anchors": [130_816, 130_944], "latest_chunk": 130_822,
        "exact_replay": 2541,
    }  # fmt: skip
    table = {row["policy"]: row["slots"] for row in found["policies"]}
    assert table == {"full": 1024, "periodic:4096": 32, "last": 2, "last:1": 1, "zero": 0}


def test_a_model_without_a_window() -> None:
    found = fields("--preset", "llama-3.1-8b", "--tokens", "4096")
    assert (found["cap"], found["l1"], found["compute_with_slot"]) == (4095, 3968, 128)
    assert (found["compute_without_slot"], found["replay_without_slot"]) == (128, 0)
    assert (found["slot_bytes"], found["ring"], found["policies"]) == (0, 0, [])
    assert "no slots, no replay" in run("--preset", "llama-3.1-8b", "--tokens", "4096")


@pytest.mark.parametrize("tokens", [0, 1, 128, 262, 5000])
def test_the_table_has_a_row_for_each_policy(tokens: int) -> None:
    text = run("--preset", "tiny-swa", "--tokens", str(tokens), "--period", "256")
    first = [line.split()[0] for line in text.splitlines() if line]
    assert first[first.index("POLICY") :] == [
        "POLICY", "full", "periodic:256", "last", "last:1", "zero",
    ]  # fmt: skip


def test_bad_questions() -> None:
    for args in (["--preset", "none", "--tokens", "1"], ["--preset", "tiny-swa"],
                 ["--preset", "tiny-swa", "--tokens", "-1"],
                 ["--preset", "tiny-swa", "--tokens", "9", "--period", "100"]):  # fmt: skip
        assert CliRunner().invoke(root, ["state", "policy", *args]).exit_code == 2


def test_pools(tmp_path: Path) -> None:
    from kvfs.state.slots import SlotPool

    def pools(*args: str, code: int = 0) -> list[dict[str, Any]]:
        line = ["state", "pools", "--dir", str(tmp_path), "--json", *args]
        result = CliRunner().invoke(root, line)
        assert result.exit_code == code, result.output
        return [json.loads(text) for text in result.stdout.splitlines()]

    swa = presets.get("tiny-swa", weights="w", tokenizer="t")
    assert pools() == []
    with SlotPool.open(swa, 100_000, directory=str(tmp_path)) as pool:
        pool.write(Anchor(b"a" * 16, 128, b"l" * 16), bytes(pool.slot_bytes))
        (found,) = pools("--remove", "--live")
        assert (found["path"], found["namespace"], found["live"]) == (pool.path, swa.name, 1)
        assert found["in_use"] and not found["removed"]
        assert (found["slots"], found["bytes"]) == (pool.slots, pool.file_bytes)
    assert [p["removed"] for p in pools("--remove")] == [False]  # its slot is still of use
    text = CliRunner().invoke(root, ["state", "pools", "--dir", str(tmp_path)]).stdout
    assert swa.name in text
    assert [p["removed"] for p in pools("--remove", "--live")] == [True]
    assert pools() == [] and pools("--live", code=2) == []
