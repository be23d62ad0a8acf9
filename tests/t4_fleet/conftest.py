"""What tests of several hosts share. A host is an index directory of its own, and often a process
of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.store import Store
from kvfs.testing.peers import Host

SHM = Path("/dev/shm")


@pytest.fixture
def ram_dir() -> Iterator[Path]:
    """A directory in memory where there is one, of this test alone."""
    place = SHM if SHM.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="fleet-", dir=place) as path:
        yield Path(path)


@pytest.fixture
def fleet_store(store_dir: Path, tmp_path: Path) -> Path:
    """A store that no host has opened yet."""
    Store.init(store_dir, index=str(tmp_path / "first"), durability="none").close()
    return store_dir


@pytest.fixture
def host(fleet_store: Path, tmp_path: Path) -> Iterator[Callable[..., Host]]:
    """Makes hosts by name; options: of kvfs.testing.peers.Host."""
    made: list[Host] = []

    def make(name: str, **options: Any) -> Host:
        made.append(Host(fleet_store, tmp_path / name, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
