"""What tests share: memory to put files in; a store of kvctl, named by the environment."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.testing.command import kvctl, kvctl_json

SHM = Path("/dev/shm")


@pytest.fixture(scope="session")
def ram_dir() -> Iterator[Path]:
    """A directory in memory where there is one: for tests of many small stores, each of which
    would wait for the disk a few times."""
    place = SHM if SHM.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="ram-", dir=place, ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture
def cli_store(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store made by kvctl, with one namespace of the preset tiny; KVFS_STORE names it."""
    monkeypatch.setenv("KVFS_STORE", str(store_dir))
    monkeypatch.delenv("KVFS_NAMESPACE", raising=False)
    monkeypatch.delenv("KVFS_CONFIG", raising=False)
    kvctl("init")
    kvctl("ns", "create", "--preset", "tiny", "--weights", "w", "--tokenizer", "t")
    return store_dir


@pytest.fixture
def cli_namespace(cli_store: Path) -> str:
    """The name of that namespace."""
    name: str = kvctl_json("ns", "list")["namespace"]
    return name
