"""The benchmarks run and say what they measured; their figures are not asserted here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvfs.bench import BENCHES, check, cleaner, payload, timing
from kvfs.bench.timing import Row
from kvfs.cli.main import main as root
from kvfs.errors import InputError

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
UNITS = {"ms": 1e-3, "us": 1e-6}


def documented(bench: str) -> dict[str, tuple[float | None, float | None]]:
    """Row -> (limit in seconds, limit of the ratio), as docs/benchmarks.md has them."""
    rows = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith(f"| `{bench}."):
            name, _, limit, _, ratio, _ = (cell.strip("` ") for cell in line.strip("|").split("|"))
            number, _, unit = limit.partition(" ")
            rows[name] = (
                float(number) * UNITS[unit] if limit else None, float(ratio) if ratio else None
            )  # fmt: skip
    return rows


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (("1m", 2000, 4, 1e-3), ("128k", 1000, 2, 0.15e-3))
    monkeypatch.setattr(check, "SIZES", sizes)
    monkeypatch.setattr(payload, "TOKENS", 2000)
    monkeypatch.setattr(payload, "LONG_TOKENS", 6000)
    monkeypatch.setattr(cleaner, "PHASE_SECONDS", 0.3)


def bench(*args: str) -> Any:
    done = CliRunner().invoke(root, ["bench", *args], standalone_mode=False)
    assert done.exception is None, done.output
    return done


@pytest.mark.parametrize("name", BENCHES)
def test_rows(name: str, tmp_path: Path) -> None:
    places = ["--store", str(tmp_path), "--index", str(tmp_path)]
    done = bench(name, "--json", "--runs", "2", "--blocks", "500", *places)
    result = json.loads(done.stdout)
    rows = {row["name"]: row for row in result["rows"]}
    page = documented(name)
    assert rows.keys() == page.keys()
    for row in rows.values():
        assert row["seconds"] > 0
        assert row["samples"] >= 2
        if row["name"] != "state.pull.frozen":  # a deadline, which nothing is beside
            assert row["ratio"] > 0
            assert row["reference"] and row["reference_seconds"] > 0
        assert isinstance(row["within_limits"], bool)
        assert (row["limit_seconds"], row["ratio_limit"]) == pytest.approx(page[row["name"]])
    if name == "check":
        assert rows["check.1m"]["figures"]["index_bytes_per_block"] > 16
    assert {"kvfs", "python", "cpus", "filesystem"} <= result["machine"].keys()
    assert list(tmp_path.iterdir()) == [], "something is left behind"


def test_advice(tmp_path: Path) -> None:
    asked = ["fetch", "--runs", "1", "--clients", "1", "--prefill-tokens-per-second", "2500"]
    done = bench(*asked, "--json", "--store", str(tmp_path), "--index", str(tmp_path))
    result = json.loads(done.stdout)
    assert not any("clients" in row["name"] for row in result["rows"])
    assert result["advice"].keys() == {"warm", "cold"}
    for found in result["advice"].values():
        assert found["from_tokens"] >= 128 and found["load_seconds"] > 0
        assert found["compute_seconds"] == found["tokens"] / 2500
    wrong = CliRunner().invoke(root, ["bench", "put", *asked[5:]])
    assert wrong.exit_code == InputError.exit_code


def test_table(tmp_path: Path) -> None:
    done = bench("check", "--runs", "2", "--blocks", "500", "--store", str(tmp_path))
    assert done.stdout.splitlines()[0].split() == [
        "figure", "median", "limit", "ratio", "limit", "beside",
    ]  # fmt: skip
    assert "index bytes per block" in done.stdout


def test_an_interrupted_run_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "plant", interrupt)
    places = ["--store", str(tmp_path), "--index", str(tmp_path)]
    CliRunner().invoke(root, ["bench", "check", "--blocks", "500", *places])
    assert list(tmp_path.iterdir()) == []


def test_cases_take_turns_and_reverse() -> None:
    order: list[str] = []

    def case(name: str) -> timing.Case:
        def work() -> float:
            order.append(name)
            return float(len(order))

        return work

    found = timing.in_turns({"a": case("a"), "b": case("b")}, 2)
    assert order == ["a", "b", "b", "a"]
    assert found == {"a": [1.0, 4.0], "b": [2.0, 3.0]}
    assert timing.compared([2.0, 8.0], [1.0, 2.0]) == (5.0, 1.5, 3.0)


def test_limits() -> None:
    row = Row("r", 2.0, 1, "", limit_seconds=2.0, ratio=3.0, ratio_limit=3.0)
    assert row.within
    assert not Row("r", 2.0, 1, "", limit_seconds=1.9).within
    assert not Row("r", 2.0, 1, "", ratio=3.1, ratio_limit=3.0).within
    assert not Row("r", 2.0, 1, "", figures={"x": 2.0}, limits={"x": 1.0}).within
