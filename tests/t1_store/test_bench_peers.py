"""The comparison with peers: what it measures holds, and what it cannot measure is in the report.

Figures are not asserted. The peers that need nothing installed run for real, with small sizes; a
peer that fails, hangs or is not installed is one that the tests make up.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvfs.bench import check, payload, peers
from kvfs.bench.peers import __main__ as command
from kvfs.bench.peers import contract, figures, install, measure, report, runner
from kvfs.bench.peers.contract import BLOCK_TOKENS, Peer, chain
from kvfs.bench.peers.files import Files
from kvfs.bench.peers.lmdb_values import LmdbValues
from kvfs.bench.peers.work import Work
from kvfs.bench.timing import Options
from kvfs.errors import EXIT_INTERRUPTED, ConfigError

SIZES = (("1m", 2100, 4, 1e-3), ("128k", 1000, 2, 0.15e-3))
MATCH = ["match.1m", "match.1m.array", "match.1m.lookup", "match.128k", "match.128k.array",
         "match.miss"]  # fmt: skip
MOVE = ["put", "put.durable", "fetch.warm", "fetch.cold"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "SIZES", SIZES)
    monkeypatch.setattr(payload, "TOKENS", 2000)


def wanted(place: Path) -> figures.Wanted:
    return figures.Wanted(Options(500, directory=str(place)), runs=2)


class InMemory(Peer):
    """A peer of a dictionary; what it gets wrong is set by subclasses."""

    in_memory = True
    packages = ("numpy",)
    api = {"put": "dict"}

    def __init__(self, work: Work, place: Path) -> None:
        super().__init__(work, place)
        self.kept: dict[bytes, bytes] = {}
        self.closed = False

    def keys(self, tokens: Any) -> Sequence[bytes]:
        return list(chain(tokens))

    def as_array(self, tokens: Any) -> None:
        return None

    def found(self, keys: Sequence[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.kept), len(keys))

    def plant(self, keys: Sequence[bytes]) -> None:
        self.kept |= dict.fromkeys(keys, b"")

    def put(self, keys: Sequence[bytes], *, durable: bool = False) -> None:
        for i, key in enumerate(keys):
            self.kept[key] = bytes(self.work.part(self.work.payload, i))

    def fetch(self, keys: Sequence[bytes]) -> None:
        for i, key in enumerate(keys):
            self.work.part(self.work.into, i)[:] = self.kept[key]

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            del self.kept[key]

    def close(self) -> None:
        self.closed = True


class TakesAll(InMemory):
    """Says that everything is stored."""

    def found(self, keys: Sequence[bytes]) -> int:
        return len(keys)


class Flips(InMemory):
    """Brings a wrong byte."""

    def fetch(self, keys: Sequence[bytes]) -> None:
        super().fetch(keys)
        self.work.into[-1] ^= 1


class Keeps(InMemory):
    """Removes nothing."""

    def remove(self, keys: Sequence[bytes]) -> None:
        pass


def test_rows_of_kvfs_itself(tmp_path: Path) -> None:
    rows = {row.name: row for row in figures.figures(None, wanted(tmp_path))}
    assert list(rows) == [*MATCH, *MOVE, "copy", "remove"]
    assert all(row.seconds > 0 for row in rows.values())
    assert rows["match.1m"].figures["metadata_bytes"] > 16
    assert rows["fetch.warm"].figures["kvfs_unverified_seconds"] > 0
    assert list(tmp_path.iterdir()) == [], "something is left behind"


@pytest.mark.parametrize("peer", [Files, LmdbValues])
def test_rows_of_peers_on_disk(peer: type[Peer], tmp_path: Path) -> None:
    rows = {row.name: row for row in figures.figures(peer, wanted(tmp_path))}
    assert list(rows) == [*MATCH, *MOVE, "remove"]
    for name, row in rows.items():
        assert row.figures["peer_per_kvfs"] > 0, name
        assert (row.ratio is None) == (name in ("match.1m.lookup", "remove"))
    assert rows["match.1m"].figures["metadata_bytes"] > 0
    assert rows["match.1m"].figures["kvfs_metadata_bytes"] > 16
    assert {"peer_per_kvfs_unverified", "kvfs_unverified_ratio"} <= rows[
        "fetch.cold"
    ].figures.keys()
    assert list(tmp_path.iterdir()) == [], "something is left behind"


def test_rows_of_a_peer_in_memory(tmp_path: Path) -> None:
    """It is not cold, not durable, and takes no arrays; its limit is a copy."""
    rows = {row.name: row for row in figures.figures(InMemory, wanted(tmp_path))}
    assert list(rows) == ["match.1m", "match.1m.lookup", "match.128k", "match.miss", "put",
                          "fetch.warm", "remove"]  # fmt: skip
    assert rows["put"].reference == rows["fetch.warm"].reference == figures.COPIED


@pytest.mark.parametrize(
    ("peer", "words"),
    [(TakesAll, "blocks are said to be stored"), (Flips, "fetched bytes differ"),
     (Keeps, "removed blocks are said to be stored")],
)  # fmt: skip
def test_a_peer_that_is_wrong_has_no_figures(
    peer: type[InMemory], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    monkeypatch.setattr(peer, "close", lambda self: closed.append(self))
    with pytest.raises(AssertionError, match=words):
        list(figures.figures(peer, wanted(tmp_path)))
    assert closed, "its servers and files were left open"
    assert list(tmp_path.iterdir()) == []


def test_keys_are_the_same_from_a_list_and_from_an_array() -> None:
    import numpy as np

    tokens = np.arange(3 * BLOCK_TOKENS + 5, dtype=np.int32)
    keys = list(chain(tokens))
    assert keys == list(chain(tokens.tolist()))
    assert len(set(keys)) == 3
    tokens[0] += 1
    assert not set(keys) & set(chain(tokens)), "a block's key stands for all before it"
    assert contract.as_ids(tokens).tolist() == tokens.tolist()


def test_work_is_the_same_everywhere() -> None:
    one, other = Work(3, 1000), Work(3, 1000)
    assert bytes(one.payload) == bytes(other.payload)
    assert one.next_prompt().tolist() == other.next_prompt().tolist()
    aligned = Work(3, 1000, 4096)
    assert (aligned.block_bytes, aligned.row_total, aligned.total) == (4096, 3000, 3 * 4096)


# The processes of the peers


def test_a_peer_that_is_not_installed_is_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "ENVIRONMENTS", tmp_path / "environments")
    asked = runner.Asked(directory=str(tmp_path))
    (outcome,) = runner.measure_all(["redis"], asked, lambda text: None)
    assert outcome["status"] == "failed"
    assert "make bench-peers" in outcome["reason"]
    failed = tmp_path / "environments" / "redis"
    failed.mkdir(parents=True)
    (failed / ".failed").write_text("ERROR: no such version")
    (outcome,) = runner.measure_all(["redis"], asked, lambda text: None)
    text = "\n".join(report.lines([outcome]))
    assert "NOT MEASURED redis" in text and "ERROR: no such version" in text


def test_an_installation_that_fails_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a program in place of the one that makes environments and installs packages."""
    python, place = tmp_path / "python", tmp_path / "environments"
    monkeypatch.setattr(install, "ENVIRONMENTS", place)
    monkeypatch.setattr("sys.executable", str(python))

    def runs(script: str) -> None:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o700)
        installed = place / "redis" / "bin" / "python"
        installed.parent.mkdir(parents=True, exist_ok=True)
        installed.write_text(python.read_text())
        installed.chmod(0o700)

    runs("echo ERROR: no such version >&2; echo more >&2; exit 1")
    assert not install.install("redis")
    assert install.interpreter("redis") == (None, "not installed: ERROR: no such version")
    runs(f'echo "$*" >> {tmp_path}/calls')
    assert install.install("redis")
    assert install.interpreter("redis") == (place / "redis" / "bin" / "python", "")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2
    assert calls[0] == f"-m venv {place / 'redis'}"
    assert calls[1].endswith(f"--no-deps -r {install.REQUIREMENTS / 'redis.txt'}")
    runs("exit 1")
    assert install.install("redis"), "what is there is not made again"
    requirements = tmp_path / "requirements"
    requirements.mkdir()
    (requirements / "redis.txt").write_text("redis==0.0.0")
    monkeypatch.setattr(install, "REQUIREMENTS", requirements)
    assert install.interpreter("redis")[0] is None, "its file has changed"


def test_the_process_of_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a program in place of the interpreter: it writes what measure.py would."""
    python = tmp_path / "python"

    def run(script: str, limit: float = 60.0) -> runner.Outcome:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o700)
        monkeypatch.setattr(runner, "interpreter", lambda name: (python, ""))
        asked = runner.Asked(directory=str(tmp_path), limit_seconds=limit)
        (outcome,) = runner.measure_all(["files"], asked, lambda text: None)
        return outcome

    # $3: "files", $5: the file for the result
    assert run("""echo '{"rows": [], "api": {}}' > "$5" """)["status"] == "measured"
    failed = run("""echo '{"error": "OSError: no room"}' > "$5" """)
    assert (failed["status"], failed["reason"]) == ("failed", "OSError: no room")
    killed = run("echo killed by something >&2; exit 9")
    assert killed["reason"] == "exit 9: killed by something"
    hanging = run("sleep 1000 & echo waiting; wait", limit=0.5)
    assert hanging["reason"].startswith("stopped after")
    assert [p.name for p in tmp_path.iterdir()] == ["python"], "something is left behind"


def test_measure_writes_rows_or_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(name: str) -> Any:
        words = ["measure", name, "--output", str(tmp_path / "result"), "--store", str(tmp_path),
                 "--runs", "2", "--blocks", "500"]  # fmt: skip
        monkeypatch.setattr("sys.argv", words)
        assert measure.main() == 0
        return json.loads((tmp_path / "result").read_text())

    monkeypatch.setattr(measure, "peer_class", {"redis": InMemory, "rocksdb": Flips}.get)
    found = run("redis")
    assert [row["name"] for row in found["rows"]][-1] == "fetch.warm"
    assert (found["verifies"], found["api"]) == ("nothing", {"put": "dict"})
    assert set(found["packages"]) == {"numpy"}
    assert "fetched bytes differ" in run("rocksdb")["error"]
    assert "redis: fetch.warm" in capfd.readouterr().err


def test_measure_finds_the_class_of_a_peer() -> None:
    assert measure.peer_class("files") is Files
    assert measure.peer_class("kvfs") is None


# The report


def row(name: str, seconds: float, ratio: float | None = None, **figures: float) -> dict[str, Any]:
    reference = None if ratio is None else "one plain read"
    return {
        "name": name, "seconds": seconds, "ratio": ratio, "reference": reference,
        "reference_seconds": None if ratio is None else seconds / ratio, "figures": figures,
    }  # fmt: skip


OUTCOMES: list[runner.Outcome] = [
    {
        "peer": "kvfs", "title": "kvfs itself", "status": "measured", "packages": {}, "api": {},
        "note": "", "verifies": "",
        "rows": [row("match.1m", 9e-3, 60.0, metadata_bytes=40.4), row("copy", 17e-3),
                 row("fetch.warm", 12e-3, 1.5, kvfs_unverified_ratio=1.25)],
    },
    {
        "peer": "files", "title": "one file per block", "status": "measured",
        "packages": {"x": "1"}, "api": {"fetch": "preadv"}, "note": "a note",
        "verifies": "nothing",
        "rows": [
            row("match.1m", 0.1, 600.0, peer_per_kvfs=11.0, kvfs_ratio=55.0),
            row("fetch.warm", 24e-3, 3.0, peer_per_kvfs=2.0, peer_per_kvfs_unverified=2.4,
                kvfs_ratio=1.5),
            row("put", 20e-3, 0.6, peer_per_kvfs=0.5, kvfs_ratio=1.2),
            row("put.durable", 20e-3, 0.5, peer_per_kvfs=0.5, kvfs_ratio=1.0),
        ],
    },
    {"peer": "redis", "title": "Redis", "status": "failed", "reason": "ConnectionError: refused"},
]  # fmt: skip


def test_table() -> None:
    lines = list(report.lines(OUTCOMES))
    text = "\n".join(lines)
    assert "copy in memory 17.0 ms" in text and "plain read, warm 8.00 ms" in text
    match, move = (line for line in lines if line.startswith("| one file per block"))
    cells = [cell.strip() for cell in match.strip("|").split("|")]
    assert cells == ["one file per block", "100 ms · 600 · 11.0", *["–"] * 6]
    assert "24.0 ms · 3.0 · 2.00/2.40" in move
    own = next(line for line in lines if line.startswith("| kvfs itself"))
    cells = [cell.strip() for cell in own.strip("|").split("|")]
    assert (cells[1], cells[-1]) == ("9.00 ms · 60", "40")
    assert "12.0 ms · 1.50/1.25" in text, "kvfs itself: verified and not"
    assert "fetch: preadv" in text and "x 1; verifies nothing" in text and "a note" in text


def test_where_kvfs_is_behind_is_said() -> None:
    measured = [o for o in OUTCOMES if o["status"] == "measured"]
    behind, level = report.behind(measured)
    assert behind == (
        "BEHIND one file per block, put: 0.50 of kvfs's time; it takes 0.60 times one plain read, "
        "kvfs 1.20 times"
    )
    assert level.startswith("LEVEL WITH one file per block, put.durable: 0.50 of kvfs's time")


def test_a_peer_that_failed_is_in_text_and_json(tmp_path: Path) -> None:
    assert list(report.lines(OUTCOMES))[-1] == (
        "NOT MEASURED redis (Redis): ConnectionError: refused"
    )
    told = report.to_json(OUTCOMES, runner.Asked(directory=str(tmp_path)))
    assert told["peers"][2]["reason"] == "ConnectionError: refused"
    assert {"cpus", "filesystem"} <= told["machine"].keys()
    assert (told["runs"], told["index_blocks"]) == (runner.RUNS, runner.BLOCKS)


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[runner.Asked] = []

    def measured(names: Sequence[str], asked: runner.Asked, progress: Any) -> list[runner.Outcome]:
        seen.append(asked)
        return [o for o in OUTCOMES if o["peer"] in names]

    monkeypatch.setattr(command, "measure_all", measured)
    assert command.main(["--peer", "files", "redis", "--quick", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [p["peer"] for p in told["peers"]] == ["files", "redis"]
    assert (seen[0].runs, seen[0].removal) == (runner.QUICK_RUNS, False)
    assert command.main([]) == 0
    assert "NOT MEASURED redis" in capsys.readouterr().out
    assert (seen[1].runs, seen[1].removal) == (runner.RUNS, True)
    with pytest.raises(SystemExit):
        command.main(["--peer", "nobody"])


def test_an_interrupted_command_tells_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*_: Any) -> Iterator[runner.Outcome]:
        yield OUTCOMES[0]
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measure_all", measured)
    assert command.main(["--json"]) == EXIT_INTERRUPTED
    assert [p["peer"] for p in json.loads(capsys.readouterr().out)["peers"]] == ["kvfs"]
    monkeypatch.undo()
    assert command.main(["--store", "/nowhere", "--peer", "files"]) == ConfigError.exit_code
    assert "/nowhere" in capsys.readouterr().err


def test_every_peer_has_what_it_names() -> None:
    """Their modules need their environments, so the source is read."""
    for name, spec in peers.PEERS.items():
        if spec.module is None:
            continue
        source = (Path(peers.__file__).parent / f"{spec.module}.py").read_text()
        assert f"class {spec.name}(" in source, name
        if spec.environment is not None:
            assert (install.REQUIREMENTS / f"{spec.environment}.txt").exists(), name
