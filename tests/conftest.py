"""Fixtures and guards of all tests.

Every test gets an index root of its own and is followed by two guards. The leak guard fails a test
that leaves a mount, a process or a shared-memory file behind, and removes what it found so that
the next test starts clean. The log guard fails a test in which kvfs logged a WARNING or worse that
the test had not announced: a fault that is swallowed and logged is a fault all the same.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import hypothesis
import pytest

from kvfs.arena import sweep
from kvfs.testing.leaks import LeakGuard
from kvfs.testing.threefs.host import cluster, may_serve

hypothesis.settings.register_profile("dev", deadline=None, max_examples=50, print_blob=True)
hypothesis.settings.register_profile(
    "ci", deadline=None, max_examples=100, derandomize=False, print_blob=True
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


_ON_3FS = os.environ.get("KVFS_TEST_BACKEND") == "3fs"


class ExpectLogs(Protocol):
    def __call__(self, *patterns: str, optional: bool = False) -> None: ...


# leaks


@pytest.fixture(scope="session", autouse=True)
def _session_leaks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LeakGuard]:
    """Mark every process of the run, keep temporary files below its directory, check at the end."""
    base = tmp_path_factory.getbasetemp()
    scratch = base / "scratch"
    scratch.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(scratch))
        patch.setattr(tempfile, "tempdir", str(scratch))
        patch.setenv("KVFS_INDEX", str(base / "index"))
        # A container's temporary directory is often on overlayfs, which an index refuses elsewhere.
        patch.setenv("KVFS_INDEX_FORCE", "1")
        patch.setenv("KVFS_RUNTIME", str(base))
        patch.delenv("KVFS_STORE", raising=False)
        patch.setenv("XDG_CONFIG_HOME", str(base / "config"))
        patch.setenv("XDG_CACHE_HOME", str(base / "cache"))
        guard = LeakGuard(base, marker=uuid.uuid4().hex)
        patch.setenv(guard.variable, guard.marker)
        before = guard.snapshot()
        yield guard
        left = guard.clean_up(before)
        left += [f"open file {path}" for path in guard.open_files()]
    assert not left, "the test run left behind: " + "; ".join(left)


@pytest.fixture(autouse=True)
def _test_leaks(_session_leaks: LeakGuard) -> Iterator[None]:
    before = _session_leaks.snapshot()
    yield
    if _ON_3FS:  # there an arena has a name, and that of a fetcher that is killed the next removes
        sweep("/dev/shm")
    left = _session_leaks.clean_up(before)
    assert not left, "the test left behind (removed now): " + "; ".join(left)


# logs


class _Unexpected(logging.Handler):
    """Collects what kvfs logs at WARNING and above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        self.expected: dict[str, bool] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(f"{record.name} {record.levelname}: {record.getMessage()}")

    def expect(self, *patterns: str, optional: bool = False) -> None:
        self.expected.update(dict.fromkeys(patterns, optional))

    def faults(self) -> list[str]:
        """What was logged and not expected, then what was expected and not logged."""
        faults = [
            message
            for message in self.messages
            if not any(re.search(pattern, message) for pattern in self.expected)
        ]
        for pattern, optional in self.expected.items():
            if not optional and not any(re.search(pattern, m) for m in self.messages):
                faults.append(f"expected, but not logged: {pattern}")
        return faults


@pytest.fixture(autouse=True)
def expect_logs(request: pytest.FixtureRequest) -> Iterator[ExpectLogs]:
    """`expect_logs(r"segment \\w+ sealed")` announces a warning that the test provokes.

    The same as the marker `expect_logs`. A pattern is searched in "logger LEVEL: message"; one
    that is not optional and never logged fails the test as well. Child processes are not seen.
    """
    handler = _Unexpected()
    for marker in request.node.iter_markers("expect_logs"):
        handler.expect(*marker.args, **marker.kwargs)
    logger = logging.getLogger("kvfs")
    logger.addHandler(handler)
    yield handler.expect
    logger.removeHandler(handler)
    faults = handler.faults()
    assert not faults, "kvfs logged:\n  " + "\n  ".join(faults)


# the backend that stores are on


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With KVFS_TEST_BACKEND=3fs only those tests are of interest that have a store on it."""
    if not _ON_3FS:
        return
    kept = [i for i in items if _on_3fs(i)]
    config.hook.pytest_deselected(items=[i for i in items if not _on_3fs(i)])
    items[:] = kept


def _on_3fs(item: pytest.Item) -> bool:
    fixtures = {"store_dir", "quick_store"} & set(getattr(item, "fixturenames", ()))
    return bool(fixtures) and item.get_closest_marker("posix") is None


# places


@pytest.fixture(autouse=True)
def index_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of this test's indexes, for its process and its children (KVFS_INDEX)."""
    path = tmp_path / "index"
    monkeypatch.setenv("KVFS_INDEX", str(path))
    return path


@pytest.fixture(scope="session")
def _threefs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """With KVFS_TEST_BACKEND=3fs, the mount of a stand-in for 3FS in which stores are made; what
    Stock opens as another host is on a second mount of the same directory.

    Its chunks are as small as a record of most tests, so that segments look as they do elsewhere;
    tests look at files behind the store's back, so what the kernel remembers of them is true.
    """
    if not _ON_3FS:
        yield None
        return
    if reason := may_serve():
        pytest.skip(reason)
    place = tmp_path_factory.mktemp("3fs")
    with cluster(place, hosts=2, chunk=4 << 10, names=5, seconds=0) as (host, _):
        yield host.point


@pytest.fixture(scope="session")
def hf3fs_library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The path of 3FS's client library: KVFS_HF3FS_LIB, else one of the same calls made here."""
    if given := os.environ.get("KVFS_HF3FS_LIB"):
        yield given
        return
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler for the stand-in of 3FS's client library")
    # Beside the run's directory: whoever has loaded it has it open to the end.
    beside = tmp_path_factory.getbasetemp().parent
    with tempfile.TemporaryDirectory(prefix="hf3fs-", dir=beside) as directory:
        made = os.path.join(directory, "libhf3fs_api_shared.so")
        source = Path(__file__).parent / "fixtures" / "hf3fs_usrbio.c"
        words = [compiler, "-O1", "-shared", "-fPIC", "-o", made, source, "-lpthread", "-lrt"]
        subprocess.run(words, check=True)
        yield made


@pytest.fixture
def store_dir(tmp_path: Path, _threefs: Path | None) -> Iterator[Path]:
    """A path below the test's own directory at which no store exists yet."""
    if _threefs is None:
        yield tmp_path / "store"
        return
    (_threefs / tmp_path.name).mkdir()
    yield _threefs / tmp_path.name / "store"
    # Through the mount: the stand-in holds open what the kernel remembers.
    shutil.rmtree(_threefs / tmp_path.name, ignore_errors=True)


@pytest.fixture
def quick_store(request: pytest.FixtureRequest, tmp_path: Path, _threefs: Path | None) -> Path:
    """As `store_dir`, but in memory where there is some: for tests of many small stores."""
    if _threefs is None:
        ram: Path = request.getfixturevalue("ram_dir")
        return ram / tmp_path.name
    place: Path = request.getfixturevalue("store_dir")
    return place


@pytest.fixture
def place(
    request: pytest.FixtureRequest, tmp_path: Path, _threefs: Path | None, quick_store: Path
) -> Path:
    """A directory for indexes and, at `place / "store"`, a store: in memory where there is some.

    On 3FS the store's path is a link that leads there.
    """
    ram: Path = request.getfixturevalue("ram_dir")
    path = ram / tmp_path.name
    path.mkdir()
    if _threefs is not None:
        quick_store.mkdir()
        (path / "store").symlink_to(quick_store)
    return path
