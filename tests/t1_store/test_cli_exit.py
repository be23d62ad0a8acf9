"""How a process of kvctl ends: a documented code for each way, and no word too many."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from kvfs.errors import EXIT_CODES
from kvfs.testing.command import command, environment, kvctl, run

PROMPT = ",".join(map(str, range(1024)))


def test_hit_partial_and_miss_differ(cli_store: Path) -> None:
    kvctl("put", "--synthetic", "--tokens", PROMPT)
    codes = [
        run("check", "--quiet", "--tokens", text).returncode
        for text in (PROMPT, PROMPT + ",1" * 500, "7," + PROMPT)
    ]
    assert codes == [0, 4, 3]
    kvctl("check", "--tokens", PROMPT.rpartition(",")[0])
    for action in ("fetch", "check"):
        for code, text in ((0, PROMPT), (4, PROMPT + ",1" * 500), (3, "7," + PROMPT)):
            kvctl(action, "--tokens", text, code=code)


def shell(script: str) -> subprocess.CompletedProcess[bytes]:
    """Runs a line of bash in which kvctl is a function."""
    words = " ".join(f"'{word}'" for word in command())
    line = f'kvctl() {{ {words} "$@"; }}; {script}'
    return subprocess.run(
        ["bash", "-c", line], env=environment(), capture_output=True, check=False, timeout=60
    )


def test_a_closed_pipe_is_no_error(cli_store: Path) -> None:
    many = ",".join(map(str, range(128 * 2000)))
    kvctl("put", "--synthetic", "-", stdin=many.encode())
    done = shell("kvctl ls -R --json | head -1 > /dev/null; exit ${PIPESTATUS[0]}")
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("line", ["kvctl --help", "kvctl ns list", "kvctl stats --json"])
@pytest.mark.parametrize("target", [">/dev/full", ">&-"])
def test_what_cannot_be_printed_is_no_success(cli_store: Path, line: str, target: str) -> None:
    done = shell(f"{line} {target}")
    assert done.returncode == 14
    assert done.stderr.startswith(b"kvctl: standard output: ")
    assert done.stderr.count(b"\n") == 1


def test_nothing_is_written_into_a_closed_descriptor(cli_store: Path) -> None:
    """With 0, 1 and 2 closed, the index would get their numbers, and print into it."""
    assert shell("kvctl check --tokens 1,2,3 <&- >&- 2>&-").returncode == 14
    assert shell("kvctl check -q --tokens 1,2,3 <&- >&- 2>&-").returncode == 3
    assert kvctl("ns", "list").exit_code == 0


def test_data_that_cannot_be_written(cli_store: Path) -> None:
    kvctl("put", "--synthetic", "--tokens", PROMPT)
    for target in ("-o /dev/full", "-o - > /dev/full"):
        done = shell(f"kvctl fetch --tokens {PROMPT} {target}")
        assert done.returncode == 14 and b"No space left on device" in done.stderr
    assert Path("/dev/full").is_char_device()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(cli_store: Path, tmp_path: Path, number: signal.Signals) -> None:
    """SIGINT exits with 130; SIGTERM ends it as any program, since there is nothing to tidy up."""
    fifo = tmp_path / "tokens"
    os.mkfifo(fifo)
    process = subprocess.Popen(
        command("check", fifo), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with open(fifo, "wb"):  # returns when the command has opened it
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert (out, err) == (b"", b"")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_replay_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    words = command("replay", "--temporary", "--dir", tmp_path, "weka_claude_code_small")
    process = subprocess.Popen(
        words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while not list(tmp_path.glob("kvfs-replay-*/store/seg/**/*.seg")):  # it is under way
        assert process.poll() is None
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (err, process.returncode, out) == (b"", 130, b"")
    assert os.listdir(tmp_path) == []


# errors


def test_errors_of_the_user_are_one_line(cli_store: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for code, args in (
        (2, ["nonsense"]),
        (2, ["check", "--nonsense"]),
        (2, ["ns", "show"]),
        (2, ["ns", "show", "absent"]),
        (2, ["put", "--tokens", "1"]),
        (2, ["put", "--synthetic", "--class", "absent", "--tokens", PROMPT]),
        (2, ["ns", "create", "--preset", "absent", "--weights", "w", "--tokenizer", "t"]),
        (2, ["ls", "absent"]),
        (2, ["show", "absent"]),
        (2, ["show", "abcdef"]),
        (2, ["replay", "absent"]),
        (7, ["init"]),
        (8, ["check", "--tokens", "1", "--store", tmp_path / "empty"]),
        (8, ["check", "--tokens", "1", "--store", tmp_path / "absent"]),
    ):
        result = kvctl(*args, code=code)
        assert result.stdout == ""
        assert result.stderr.startswith("kvctl"), result.stderr
        assert result.stderr.count("\n") == 1, result.stderr


def test_no_store_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFS_STORE", raising=False)
    assert "KVFS_STORE" in kvctl("stats", code=2).stderr


def test_a_bug_is_a_traceback_and_1(monkeypatch: pytest.MonkeyPatch, cli_store: Path) -> None:
    from click.testing import CliRunner

    from kvfs.cli.main import main as root
    from kvfs.store import Store

    def broken(*args: object, **how: object) -> Store:
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(Store, "open", broken)
    result = CliRunner().invoke(root, ["stats"], prog_name="kvctl")
    assert result.exit_code == 1
    assert "ZeroDivisionError: broken" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("kvctl: internal error")


def test_what_an_interrupt_breaks_off_is_no_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from kvfs.cli.main import main as root
    from kvfs.store import Store

    def broken(*args: object, **how: object) -> Store:
        try:
            raise KeyboardInterrupt
        finally:
            raise ZeroDivisionError("on the way out")

    monkeypatch.setattr(Store, "open", broken)
    result = CliRunner().invoke(root, ["stats", "--store", "/nowhere"], prog_name="kvctl")
    assert (result.exit_code, result.stderr) == (130, "")


def test_every_error_has_a_documented_code() -> None:
    from kvfs import errors

    kinds = [k for k in vars(errors).values() if isinstance(k, type)]
    codes = [k.exit_code for k in kinds if issubclass(k, errors.KvfsError)]
    assert len(set(codes)) == len(codes)
    assert set(codes) <= set(EXIT_CODES)


def test_called_without_a_command_it_explains_itself() -> None:
    done = run()
    assert done.returncode == 2
    assert b"Usage:" in done.stderr and done.stdout == b""


def test_it_answers_to_both_names(tmp_path: Path) -> None:
    for name in ("kvctl", "kvfs"):
        link = tmp_path / name
        link.write_text("from kvfs.cli.main import main\nmain()\n")
        words = [command()[0], str(link), "nonsense"]
        done = subprocess.run(words, env=environment(), capture_output=True, check=False)
        assert done.returncode == 2
        assert done.stderr.decode().startswith(f"{name}: ")
