"""The guards in conftest.py are themselves tested: a guard that sees nothing passes everything."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest

from kvfs.testing import leaks
from kvfs.testing.leaks import LeakGuard

SLEEPER = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]


@pytest.fixture
def guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LeakGuard:
    guard = LeakGuard(tmp_path, marker=uuid.uuid4().hex)
    monkeypatch.setenv(guard.variable, guard.marker)
    monkeypatch.setattr(leaks, "GRACE_SECONDS", 0.2)
    return guard


def test_a_clean_test_leaves_nothing(guard: LeakGuard) -> None:
    assert guard.clean_up(guard.snapshot()) == []


def test_a_child_is_found_and_ended(guard: LeakGuard) -> None:
    before = guard.snapshot()
    with subprocess.Popen(SLEEPER, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout and child.stdout.readline()
        left = guard.clean_up(before)
        assert [f"process {child.pid} " in line for line in left] == [True]
        assert child.wait() == -9


def test_a_daemon_is_found_by_its_environment(guard: LeakGuard) -> None:
    """It has left the process tree: its parent has ended, and init is its parent now."""
    before = guard.snapshot()
    daemonise = (
        "import os, subprocess, sys\n"
        f"p = subprocess.Popen({SLEEPER!r}, stdin=int(sys.argv[1]), start_new_session=True,"
        " stdout=subprocess.DEVNULL)\n"
        "print(p.pid, flush=True)\n"
        "os._exit(0)"
    )
    read, write = os.pipe()
    try:
        command = [sys.executable, "-c", daemonise, str(read)]
        done = subprocess.run(command, pass_fds=[read], stdout=subprocess.PIPE, check=True)
        pid = int(done.stdout.split()[0])
        assert [f"process {pid} " in line for line in guard.clean_up(before)] == [True]
    finally:
        os.close(read)
        os.close(write)


def test_a_forked_worker_is_found(guard: LeakGuard) -> None:
    before = guard.snapshot()
    gate = multiprocessing.get_context("fork").Event()
    worker = multiprocessing.get_context("fork").Process(target=gate.wait)
    worker.start()
    assert len(guard.clean_up(before)) == 1
    worker.join()
    worker.close()


def test_a_thread_is_found(guard: LeakGuard) -> None:
    before = guard.snapshot()
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, name="stays")
    thread.start()
    left = guard.clean_up(before)
    gate.set()
    thread.join()
    assert left == ["thread stays"]


def test_unused_shared_memory_is_removed(guard: LeakGuard) -> None:
    before = guard.snapshot()
    path = leaks.SHM / f"{leaks.SHM_PREFIX}-guard-{guard.marker}"
    path.write_bytes(b"x")
    assert guard.clean_up(before) == [f"shared memory {path}"]
    assert not path.exists()


def test_shared_memory_in_use_is_left_alone(guard: LeakGuard) -> None:
    """It may be of another run on the same machine."""
    before = guard.snapshot()
    path = leaks.SHM / f"{leaks.SHM_PREFIX}-guard-{guard.marker}"
    with path.open("wb"):
        assert guard.clean_up(before) == []
    path.unlink()


def test_open_files_are_listed(guard: LeakGuard, tmp_path: Path) -> None:
    with (tmp_path / "held").open("wb"):
        assert guard.open_files() == [str(tmp_path / "held")]
    assert guard.open_files() == []


@pytest.mark.expect_logs(r"kvfs\.test WARNING: announced \d+")
def test_an_announced_warning_passes() -> None:
    logging.getLogger("kvfs.test").warning("announced %d", 7)


INNER = """
import logging
import pytest

def test_silent():
    logging.getLogger("kvfs.store").info("fine")

def test_swallowed():
    logging.getLogger("kvfs.store").warning("something fishy")

@pytest.mark.expect_logs("never said")
def test_stale_expectation():
    pass

def test_by_fixture(expect_logs):
    expect_logs("fishy")
    expect_logs("rare", optional=True)
    logging.getLogger("kvfs.store").error("something fishy")

def test_leaves_a_process():
    import subprocess, sys
    global child
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
"""


def test_the_guards_fail_the_tests_they_should(tmp_path: Path) -> None:
    """A run of pytest with the real conftest.py and a handful of bad tests."""
    conftest = Path(__file__).parents[1] / "conftest.py"
    (tmp_path / "conftest.py").write_text(conftest.read_text())
    (tmp_path / "test_inner.py").write_text(INNER)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = expect_logs\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", "--tb=line"]
    command += ["--basetemp", str(tmp_path / "inner"), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    errors = set(re.findall(r"^ERROR \S+::(\w+)", done.stdout, re.MULTILINE))
    assert errors == {"test_swallowed", "test_stale_expectation", "test_leaves_a_process"}
    assert "something fishy" in done.stdout and "never said" in done.stdout
