"""Rings by 3FS's own client library do what our own ones do, and each reads what the other wrote.

KVFS_HF3FS_LIB: the genuine library (make test-threefs); without it one that is made here of the
same calls. KVFS_HF3FS_DIR: a directory on a true mount, else there is a stand-in.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.arena import Arena, sweep
from kvfs.backend import read_into, write_all
from kvfs.backend.threefs import LIBRARY, ThreefsBackend
from kvfs.backend.usrbio_layout import SHM, RingShape
from kvfs.backend.usrbio_library import load
from kvfs.errors import ConfigError
from kvfs.testing.command import kvctl_json
from kvfs.testing.stock import Stock, tokens
from kvfs.testing.threefs.host import Host, cluster, may_serve, shared_memory

TRUE = os.environ.get("KVFS_HF3FS_DIR", "")
CHUNK = 64 << 10


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    if reason := may_serve():
        pytest.skip(reason)
    with cluster(tmp_path, chunk=CHUNK) as (made,):
        yield made


@pytest.fixture
def directory(request: pytest.FixtureRequest) -> Iterator[str]:
    if TRUE:
        with tempfile.TemporaryDirectory(dir=TRUE) as path:
            yield path
    else:
        yield str(request.getfixturevalue("host").point)


@pytest.fixture
def stock(host: Host, hf3fs_library: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stock]:
    monkeypatch.setenv(LIBRARY, hf3fs_library)
    made = Stock.make(host.point / "kv", extent=None)
    yield made
    made.close()


def test_rings_are_of_the_same_size(hf3fs_library: str) -> None:
    for entries in (1, 2, 7, 64, 255, 1024):
        assert load(hf3fs_library).ior_size(entries) == RingShape.size_for(entries)


def test_each_reads_what_the_other_writes(directory: str, hf3fs_library: str) -> None:
    ours, theirs = (
        ThreefsBackend(directory, library=""),
        ThreefsBackend(directory, library=hf3fs_library),
    )
    data = os.urandom(300_000)
    for name, writer, reader in (("ours", ours, theirs), ("theirs", theirs, ours)):
        made = writer.create(name)
        write_all(writer, made, [data], 0)
        there = reader.open(name)
        into = bytearray(len(data))
        assert read_into(reader, there, [memoryview(into)], 0) == len(data)
        assert into == data
        reader.close(there)
        writer.close(made)
        writer.unlink(name)
    ours.release()
    theirs.release()


def test_nothing_of_it_is_left_when_it_is_released(host: Host, hf3fs_library: str) -> None:
    before = shared_memory()
    backend = ThreefsBackend(str(host.point), library=hf3fs_library)
    file = backend.create("x")
    write_all(backend, file, [b"x"], 0)
    assert len(host.links()) == 2
    backend.close(file)
    backend.release()
    assert host.links() == [] and not shared_memory() - before


@pytest.mark.parametrize("ours", [True, False])
def test_results_that_do_not_come_keep_their_memory(
    host: Host, hf3fs_library: str, ours: bool
) -> None:
    backend = ThreefsBackend(
        str(host.point), seconds=0.3, bounce_bytes=1 << 20, library="" if ours else hf3fs_library
    )
    file = backend.create("x")
    data = os.urandom(5 * CHUNK)
    write_all(backend, file, [data], 0)
    bounce = backend.session().bounce
    host.set(drop_every=1, late_ms=1500)
    with pytest.raises(OSError) as e:
        backend.readv(file, [memoryview(bytearray(len(data)))], 0)
    assert e.value.errno == errno.ETIMEDOUT and bounce.kept == 1
    host.set(drop_every=0)
    into = bytearray(len(data))
    assert read_into(backend, file, [memoryview(into)], 0) == len(data) and into == data
    while bounce.kept:  # the session's thread takes what comes late
        time.sleep(0.01)
    assert bounce.free == bounce.total
    backend.close(file)
    backend.release()


@pytest.mark.parametrize("ours", [True, False])
def test_one_completion_that_never_comes_does_not_block_what_follows(
    host: Host, hf3fs_library: str, ours: bool
) -> None:
    """Submissions are taken back in their order, so that a ring fills up behind it."""
    backend = ThreefsBackend(
        str(host.point), seconds=2.0, library="" if ours else hf3fs_library
    )  # fmt: skip
    file = backend.create("x")
    data = os.urandom(5 * CHUNK)
    write_all(backend, file, [data], 0)
    first = backend.session()
    host.set(drop_every=1)
    with pytest.raises(OSError) as e:
        backend.readv(file, [memoryview(bytearray(100))], 0)
    assert e.value.errno == errno.ETIMEDOUT
    host.set(drop_every=0)
    into = bytearray(len(data))
    for _ in range(120):  # 600 I/Os, more than two rings full
        assert read_into(backend, file, [memoryview(into)], 0) == len(data) and into == data
    assert first.worn and backend.session() is not first
    backend.close(file)
    backend.release()


def test_reads_land_in_lent_memory(host: Host, hf3fs_library: str) -> None:
    backend = ThreefsBackend(str(host.point), library=hf3fs_library)
    arena = Arena.create(1 << 20, directory=SHM)
    backend.lend(arena)
    file = backend.create("x")
    data = os.urandom(3 * CHUNK)
    write_all(backend, file, [data], 0)
    view = arena.view[4096 : 4096 + len(data)]
    assert backend.readv(file, [view], 0) == len(data) and view == data
    assert any(name.endswith(".r-16.t0.f11") for name in host.links())
    write_all(backend, file, [b"x"], 9 * CHUNK)
    with pytest.raises(OSError) as e:
        backend.readv(file, [arena.view[:100]], 5 * CHUNK)
    assert e.value.errno == errno.ENODATA
    view.release()
    backend.close(file)
    backend.release()
    arena.close()


def test_a_store_and_its_daemon_that_dies_and_returns(stock: Stock, host: Host) -> None:
    prompt = tokens(3, 400)
    stock.put(prompt)
    assert stock.good(prompt) == 100
    for i in range(2):  # the second time descriptors have numbers that the library knew before
        other = tokens(10 + i, 80)
        host.kill()
        assert stock.fetch(prompt)[0] == 0
        assert stock.put(other).error is not None
        host.start()
        while stock.good(prompt) < 100 or stock.put(other).error is not None:
            time.sleep(0.01)
        assert stock.good(other) == 20


_CLIENT = """
import sys
from kvfs.store import Store
from kvfs.testing.stock import Stock, tokens
store = Store.open(sys.argv[1])
stock = Stock(store, store.namespaces()[0], None)
for i in range(10**9):
    stock.put(tokens(100 + i % 50, 400))
    stock.good(tokens(3, 400))
    if not i:
        print("ready", flush=True)  # it has all the rings that it needs
"""


def test_a_killed_client_leaves_nothing(stock: Stock, host: Host) -> None:
    stock.put(tokens(3, 400))
    stock.store.backend.release()
    before = shared_memory()
    client = subprocess.Popen(
        [sys.executable, "-c", _CLIENT, str(stock.store.path)], text=True, stdout=subprocess.PIPE
    )
    assert client.stdout is not None and client.stdout.readline() == "ready\n"
    assert len(host.links()) >= 3
    client.kill()
    client.wait()
    client.stdout.close()
    while host.links():
        time.sleep(0.01)
    assert stock.good(tokens(3, 400)) == 100
    stock.store.backend.release()
    while shared_memory() - before:  # a ring that was being made has a name: who comes next sees it
        sweep(SHM)


def test_doctor_says_whose_rings(stock: Stock, hf3fs_library: str) -> None:
    facts = {f["name"]: f for f in kvctl_json("doctor", "--store", stock.store.path, code=None)}
    assert facts["rings"]["state"] == "ok" and hf3fs_library in facts["rings"]["text"]


def test_a_library_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib.so").write_bytes(b"no")
    for path in (str(tmp_path / "none.so"), str(tmp_path / "lib.so"), "libm.so.6"):
        monkeypatch.setenv(LIBRARY, path)
        with pytest.raises(ConfigError, match=r"the 3FS client library"):
            ThreefsBackend(str(tmp_path))
