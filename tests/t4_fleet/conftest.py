"""What tests of several hosts share. A host is an index directory of its own, and often a process
of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SHM = Path("/dev/shm")


@pytest.fixture
def ram_dir() -> Iterator[Path]:
    """A directory in memory where there is one, of this test alone."""
    place = SHM if SHM.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="fleet-", dir=place) as path:
        yield Path(path)
