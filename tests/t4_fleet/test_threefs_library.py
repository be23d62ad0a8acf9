"""Our rings beside those of the genuine library, where KVFS_HF3FS_LIB names it (make test-threefs).

The library is a client of the stand-in, which so is shown to speak as the true daemon does; what it
writes kvfs reads, and the other way round. KVFS_HF3FS_DIR: a directory on a true mount to use.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.backend import read_into, write_all
from kvfs.backend.threefs import ThreefsBackend
from kvfs.backend.usrbio_layout import RingShape
from kvfs.filesystems import mount_of
from kvfs.testing.threefs.host import cluster, may_serve
from kvfs.testing.threefs.library import Library

PATH = os.environ.get("KVFS_HF3FS_LIB", "")
TRUE = os.environ.get("KVFS_HF3FS_DIR", "")
pytestmark = pytest.mark.skipif(not PATH, reason="KVFS_HF3FS_LIB does not name the library")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[str]:
    if TRUE:
        with tempfile.TemporaryDirectory(dir=TRUE) as path:
            yield path
        return
    if reason := may_serve():
        pytest.skip(reason)
    with cluster(tmp_path) as (host,):
        yield str(host.point)


def test_rings_are_of_the_same_size() -> None:
    library = Library(PATH)
    for entries in (1, 2, 7, 64, 255, 1024):
        assert library.ring_size(entries) == RingShape.size_for(entries)


def test_each_reads_what_the_other_writes(directory: str) -> None:
    library, mount = Library(PATH), mount_of(directory)[0]
    backend, data = ThreefsBackend(directory), os.urandom(300_000)
    file = backend.create("ours")
    write_all(backend, file, [data], 0)
    assert library.transfer(mount, file.fd, 0, len(data)) == data
    assert library.transfer(mount, file.fd, 1 << 20, data[::-1]) == len(data)
    into = bytearray(len(data))
    assert read_into(backend, file, [memoryview(into)], 1 << 20) == len(data)
    assert into == data[::-1]
    backend.close(file)
    backend.unlink("ours")
    backend.release()
