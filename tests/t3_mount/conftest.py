"""Real mounts. Without /dev/fuse these tests are skipped, each saying so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.testing.mounts import Mounted, may_mount, mounted

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.mount)
            if not may_mount():
                item.add_marker(pytest.mark.skip(reason="/dev/fuse cannot be used here"))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Mounted]:
    """A store that is not mounted yet."""
    with mounted(tmp_path / "kvfs") as made:
        yield made
