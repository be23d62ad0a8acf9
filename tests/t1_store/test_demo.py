"""The demonstration: what it prints, and that it leaves nothing behind however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.demo import show, tour
from kvfs.demo.screen import Screen
from kvfs.errors import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, EXIT_USAGE
from kvfs.sim.replay import Result


@pytest.fixture
def _no_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tour, "_mount", lambda place: "there is no /dev/fuse")


@pytest.mark.usefixtures("_no_fuse")
def test_without_fuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show.main(["--requests", "3", "--dir", str(tmp_path)]) == 0
    text, errors = capsys.readouterr()
    assert "FUSE: there is no /dev/fuse" in text
    assert "100%  3 requests" in text
    assert "byte for byte what was put" in text
    assert "\x1b" not in text and not errors
    assert not os.listdir(tmp_path)


@pytest.mark.usefixtures("_no_fuse")
def test_a_kept_store_can_be_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show.main(["--requests", "1", "--dir", str(tmp_path), "--keep"]) == 0
    (kept,) = tmp_path.iterdir()
    assert f"KVFS_STORE={kept}/store" in capsys.readouterr().out
    assert (kept / "store" / "kvfs.json").exists()


@pytest.mark.usefixtures("_no_fuse")
def test_a_failure_is_told_and_cleaned_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show, "MIN_BYTES", 1 << 60)
    assert show.main(["--dir", str(tmp_path)]) == 6
    assert "too little room" in capsys.readouterr().err
    assert show.main(["--dir", str(tmp_path / "none")]) == 6
    assert "no temporary directory" in capsys.readouterr().err
    assert not os.listdir(tmp_path)


@pytest.mark.usefixtures("_no_fuse")
def test_failures_of_the_store_are_in_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = show.replay

    def failing(*args: object, **kwargs: object) -> Result:
        result = real(*args, **kwargs)  # type: ignore[arg-type]
        result.failures["put: SpaceError"] += 1
        result.details["put: SpaceError"] = "no room"
        return result

    monkeypatch.setattr(show, "replay", failing)
    assert show.main(["--requests", "2", "--dir", str(tmp_path)]) == 1
    assert "1 x put: SpaceError: no room" in capsys.readouterr().out


def test_it_needs_a_request() -> None:
    with pytest.raises(SystemExit) as e:
        show.main(["--requests", "0"])
    assert e.value.code == EXIT_USAGE


def start(tmp_path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvfs.demo", "--dir", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    with start(tmp_path) as process:
        assert process.stdout is not None
        while " 25%  " not in process.stdout.readline():
            assert process.poll() is None
        assert os.listdir(tmp_path)
        process.send_signal(number)
        _, errors = process.communicate()
    assert process.returncode == EXIT_INTERRUPTED
    assert "cleaned up" in errors and "Traceback" not in errors
    assert not os.listdir(tmp_path)


def test_a_reader_that_goes_away_ends_it(tmp_path: Path) -> None:
    with start(tmp_path) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        process.wait()
    assert process.returncode == EXIT_BROKEN_PIPE
    assert not errors
    assert not os.listdir(tmp_path)


def test_the_tree_is_shown_with_ordinary_tools(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On plain directories of the mount's shape; the real mount has tests of its own."""
    place = tour.Place(tmp_path)
    node = place.mount / "model-0123" / "000000-abcd"
    (node / "000002-ef01").mkdir(parents=True)
    (place.mount / "README").write_text("read me\n")
    (place.mount / "model-0123" / "namespace.json").write_text("{}")
    for path in (node / "000000.kv", node / "000001.kv", node / "000002-ef01" / "000002.kv"):
        path.write_bytes(bytes(1000))
    monkeypatch.setattr(tour, "_mount", lambda place: "")
    assert tour.show_tree(Screen(), place, "model-0123") == "3 blocks as files"
    text = capsys.readouterr().out
    for shown in ("$ ls\n    README\n", "$ du -sh model-0123\n", "$ df -h .\n"):
        assert shown in text
    assert "namespace.json" in text and "000002-ef01" in text
    assert "$ getfattr -d model-0123/000000-abcd/000000.kv\n" in text
    assert "    model-0123/000000-abcd/000001.kv\n" in text


def test_a_tool_that_is_not_installed_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    tour._show_tool(Screen(), tour.Place(tmp_path), ["getfattr", "-d", "x"])
    assert "(getfattr is not installed)" in capsys.readouterr().out
