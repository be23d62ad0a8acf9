"""A small store and its tree, in process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.testing.trees import Garden, garden


@pytest.fixture
def place(store_dir: Path, index_dir: Path) -> Iterator[Garden]:
    with garden(store_dir, index_dir) as made:
        yield made
