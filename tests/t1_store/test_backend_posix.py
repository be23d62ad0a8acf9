"""What the backend for directories does beyond the contract of all: how large reads begin."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.backend import OpenFile, PosixBackend
from kvfs.backend.posix import _LARGE_BYTES, _SMALL_BYTES

SIZE = 3 << 20


@pytest.fixture
def backend(tmp_path: Path) -> PosixBackend:
    made = PosixBackend(str(tmp_path))
    made._local_disk = True
    return made


@pytest.fixture
def file(backend: PosixBackend, tmp_path: Path) -> Iterator[OpenFile]:
    (tmp_path / "f").write_bytes(os.urandom(SIZE))
    opened = backend.open("f")
    yield opened
    backend.close(opened)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the reads that the kernel is asked for."""
    sizes: list[int] = []
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        sizes.append(sum(map(len, buffers)))
        return real(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    return sizes


def test_a_large_read_begins_small_and_what_follows_does_not(
    backend: PosixBackend, file: OpenFile, calls: list[int], tmp_path: Path
) -> None:
    got = bytearray(SIZE)
    views = [memoryview(got)[at : at + 100_000] for at in range(0, SIZE, 100_000)]
    half = len(views) // 2
    first = sum(map(len, views[:half]))
    assert backend.readv(file, views[:half], 0) == first
    assert calls == [_SMALL_BYTES] * 3 + [first - 3 * _SMALL_BYTES]
    calls.clear()
    assert backend.readv(file, views[half:], first) == SIZE - first
    assert calls == [SIZE - first]
    assert got == (tmp_path / "f").read_bytes()


def test_reads_of_a_few_records_are_one_call(
    backend: PosixBackend, file: OpenFile, calls: list[int]
) -> None:
    assert backend.readv(file, [memoryview(bytearray(_LARGE_BYTES - 1))], 4096) == _LARGE_BYTES - 1
    assert calls == [_LARGE_BYTES - 1]


@pytest.mark.parametrize("left", [0, 1, _SMALL_BYTES, 2 * _SMALL_BYTES + 5])
def test_the_end_of_the_file_is_a_short_count(
    backend: PosixBackend, file: OpenFile, left: int
) -> None:
    assert backend.readv(file, [memoryview(bytearray(_LARGE_BYTES))], SIZE - left) == left


def test_an_error_behind_the_first_bytes_is_a_short_count(
    backend: PosixBackend, file: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = os.preadv, []

    def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        asked.append(offset)
        if len(asked) == 3:
            raise OSError(5, "bad sector")
        return real(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    assert backend.readv(file, [memoryview(bytearray(SIZE))], 0) == 2 * _SMALL_BYTES
