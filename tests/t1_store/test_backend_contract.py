"""What every backend promises, shown of each: a directory, and 3FS through a stand-in's rings, our
own and those of its client library."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.arena import Arena
from kvfs.backend import Backend, OpenFile, PosixBackend, read_into, write_all
from kvfs.backend.threefs import ThreefsBackend
from kvfs.testing.faults import FaultyBackend
from kvfs.testing.threefs.host import Host, cluster, may_serve

CHUNK = 64 << 10


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host | None]:
    if may_serve():
        yield None
        return
    with cluster(tmp_path_factory.mktemp("3fs"), chunk=CHUNK, seconds=30) as (host,):
        yield host


# A directory on a true 3FS mount to hold to the same contract.
TRUE = os.environ.get("KVFS_HF3FS_DIR", "")


_KINDS = ["posix", "3fs", "3fs library", "faulty"]


@pytest.fixture(params=[*_KINDS, *(["true 3fs", "true 3fs library"] if TRUE else [])])
def backend(request: pytest.FixtureRequest, tmp_path: Path, host: Host | None) -> Iterator[Backend]:
    made: Backend
    library = ""
    if request.param.endswith("library"):
        library = request.getfixturevalue("hf3fs_library")
    if request.param.startswith("true 3fs"):
        root = Path(TRUE) / f"kvfs-contract-{os.getpid()}-{tmp_path.name}"
        root.mkdir()
        made = ThreefsBackend(str(root), library=library)
        yield made
        made.release()
        shutil.rmtree(root)
        return
    if request.param.startswith("3fs"):
        if host is None:
            pytest.skip(may_serve())
        root = host.point / tmp_path.name
        root.mkdir()
        made = ThreefsBackend(str(root), bounce_bytes=1 << 20, library=library)
    else:
        made = PosixBackend(str(tmp_path / "root"))
        (tmp_path / "root").mkdir()
        made = FaultyBackend(made) if request.param == "faulty" else made
    yield made
    made.release()


def new(backend: Backend, path: str, data: bytes) -> None:
    file = backend.create(path)
    write_all(backend, file, [data], 0)
    backend.sync(file)
    backend.close(file)


def read(backend: Backend, file: OpenFile, size: int, offset: int = 0) -> bytes:
    data = bytearray(size)
    return bytes(data[: read_into(backend, file, [memoryview(data)], offset)])


@pytest.mark.parametrize("size", [1, 4096, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 777, 9 << 20])
def test_bytes_come_back(backend: Backend, size: int) -> None:
    data = os.urandom(size)
    new(backend, "a/b/x", data)
    file = backend.open("a/b/x")
    assert read(backend, file, size + 100) == data
    assert read(backend, file, 50, size // 2) == data[size // 2 :][:50]
    assert read(backend, file, 10, size) == b""
    backend.close(file)
    assert backend.size("a/b/x") == size


def test_vectors_of_odd_sizes(backend: Backend) -> None:
    parts = [os.urandom(n) for n in (1, 0, 70_000, 3, CHUNK, 4097)]
    file = backend.create("x")
    assert write_all(backend, file, parts, 1000) == sum(map(len, parts))
    data = b"".join(parts)
    into = [memoryview(bytearray(n)) for n in (5, CHUNK + 1, 0, len(data))]
    assert read_into(backend, file, into, 1000) == len(data)
    assert b"".join(into)[: len(data)] == data
    backend.close(file)


def test_what_is_written_is_read_at_once_by_those_who_have_it_open(backend: Backend) -> None:
    writer = backend.create("log")
    reader = backend.open("log")
    assert read(backend, reader, 10) == b""
    for i in range(20):
        write_all(backend, writer, [b"%03d" % i], 3 * i)
        assert read(backend, reader, 10, 3 * i) == b"%03d" % i
    backend.close(writer)
    backend.close(reader)


def test_a_hole_reads_as_zeros(backend: Backend) -> None:
    file = backend.create("x")
    write_all(backend, file, [b"a" * 100], 0)
    write_all(backend, file, [b"b" * 100], 3 * CHUNK + 50)
    want = (b"a" * 100).ljust(3 * CHUNK + 50, b"\0") + b"b" * 100
    assert read(backend, file, 4 * CHUNK) == want
    backend.close(file)


def test_room_that_was_reserved_and_cut(backend: Backend) -> None:
    file = backend.create("x")
    backend.reserve(file, 8 * CHUNK)
    write_all(backend, file, [b"x" * 100], 0)
    backend.write_behind(file, 0, 100)
    backend.truncate(file, 50)
    assert read(backend, file, 100) == b"x" * 50
    backend.close(file)
    assert backend.size("x") == 50


def test_making_what_is_there_and_opening_what_is_not(backend: Backend) -> None:
    new(backend, "d/x", b"1")
    with pytest.raises(FileExistsError):
        backend.create("d/x")
    with pytest.raises(FileNotFoundError):
        backend.open("d/y")
    with pytest.raises(FileNotFoundError):
        backend.load("nothing/y", 10)


def test_small_files(backend: Backend) -> None:
    assert backend.put_new("d/small", b"one")
    assert not backend.put_new("d/small", b"two")
    assert backend.load("d/small", 3) == b"one"
    backend.replace("d/small", b"three" * 50_000)
    assert backend.load("d/small", 1 << 20) == b"three" * 50_000
    with pytest.raises(OSError) as e:
        backend.load("d/small", 249_999)
    assert e.value.errno == errno.EFBIG
    assert backend.names("d") == ["small"]


def test_directories(backend: Backend) -> None:
    assert backend.names("") == [] and backend.names("none") == []
    for name in ("b", "a", "c"):
        new(backend, f"d/{name}", b"")
    assert backend.names("d") == ["a", "b", "c"] and backend.names("") == ["d"]
    assert not backend.remove_empty("d")
    for name in ("b", "a", "c"):
        backend.unlink(f"d/{name}")
        backend.unlink(f"d/{name}")
    assert backend.remove_empty("d") and not backend.remove_empty("d")
    free, total = backend.free_bytes()
    assert 0 < free <= total


def test_a_tree_goes_as_a_whole(backend: Backend) -> None:
    for path in ("d/day/a/x", "d/day/a/y", "d/day/b/z", "d/other/w"):
        new(backend, path, b"1" * 100)
    (Path(backend.root) / "d/day/link").symlink_to(Path(backend.root) / "d/other")
    reader = backend.open("d/day/a/x")
    paces: list[int] = []
    backend.remove_tree("d/day", paces.append)
    backend.close(reader)
    assert backend.names("d") == ["other"] and backend.names("d/other") == ["w"]
    with pytest.raises(FileNotFoundError):
        backend.open("d/day/a/x")
    assert set(paces) == {1}, "each removal waits for its turn"
    backend.remove_tree("d/day")
    backend.remove_tree("nothing/at/all")
    new(backend, "d/day/a/x", b"2")
    assert backend.names("d/day") == ["a"]


def test_many_threads(backend: Backend) -> None:
    data = os.urandom(1 << 20)
    new(backend, "x", data)
    wrong: list[object] = []

    def work(seed: int) -> None:
        try:
            file = backend.open("x")
            for i in range(30):
                at = (seed * 7919 + i * 104_729) % (1 << 20)
                if read(backend, file, 100_000, at) != data[at : at + 100_000]:
                    wrong.append((seed, i))
            backend.close(file)
        except BaseException as e:
            wrong.append(e)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_reads_into_memory_that_was_lent(backend: Backend) -> None:
    data = os.urandom(3 * CHUNK + 5000)
    new(backend, "x", data)
    directory = backend.memory_directory()
    arena = Arena.create(1 << 20, directory=directory)
    try:
        backend.lend(arena)
        file = backend.open("x")
        for place in (0, 4096, (1 << 20) - len(data)):
            view = arena.view[place : place + len(data)]
            assert backend.readv(file, [view[:7], view[7:]], 0) == len(data)
            assert view == data
            view.release()
        outside = memoryview(bytearray(100))  # some of it there, some here
        assert backend.readv(file, [arena.view[:100], outside], 0) == 200
        assert bytes(outside) == data[100:200]
        backend.close(file)
    finally:
        backend.release()
        arena.close()
