"""Readers of a mount while others put, evict and collect, on storage that is slow or hangs."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.store import Store
from kvfs.testing.chains import grow, hashes_of, payload, tokens_of
from kvfs.testing.mounts import Mounted, in_uninterruptible_sleep, mounted, until, wait_ended

ROW = 64 << 10


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Mounted]:
    with mounted(tmp_path / "kvfs", row_bytes=ROW) as made:
        yield made


class Readers:
    """Threads that walk the mount and read every block, comparing it with what its hash says."""

    def __init__(self, place: Mounted, count: int) -> None:
        self.place = place
        self.reads = self.missed = 0
        self.wrong: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(count)]

    def _run(self, seed: int) -> None:
        while not self._stop.is_set():
            try:
                for path in self._blocks():
                    self._read(path)
                    if self._stop.is_set():
                        return
            except OSError as e:
                if e.errno in (errno.ENOTCONN, errno.ECONNABORTED):
                    return
                self._miss(e, "walk")

    def _blocks(self) -> Iterator[str]:
        for directory, _, files in os.walk(self.place.space):
            yield from (f"{directory}/{f}" for f in files if f.endswith(".kv"))

    def _read(self, path: str) -> None:
        try:
            file = os.open(path, os.O_RDONLY)
            try:
                hash_ = bytes.fromhex(os.getxattr(file, "user.kvfs.hash").decode())
                data = os.read(file, 1 << 20)
            finally:
                os.close(file)
        except OSError as e:
            self._miss(e, path)
            return
        self.reads += 1
        if data != payload(hash_, ROW):
            self.wrong.append(path)

    def _miss(self, error: OSError, path: str) -> None:
        """Gone, or gone between two questions: nothing else is an answer."""
        self.missed += 1
        if error.errno not in (errno.ENOENT, errno.ESTALE, errno.EIO, errno.ENOTCONN,
                               errno.ECONNABORTED):  # fmt: skip
            self.wrong.append(f"{path}: {error}")

    def __enter__(self) -> Readers:
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(20)
        assert not any(t.is_alive() for t in self._threads), "a reader hangs"

    def __exit__(self, *exc: object) -> None:
        self._stop.set()


def churn(place: Mounted, steps: int) -> None:
    """Chains that share beginnings come and go; some segments' files go as well, as gc does."""
    for step in range(steps):
        kind = step % 5
        place.put(1, 2, kind, step)
        place.put(step, kind, 7)
        if step >= 5:
            old = step - 5
            place.store.remove(place.ns, tokens_of([old], 128))
        if kind == 4:
            place.store.remove(place.ns, tokens_of([1, 2, kind], 128), from_block=2)


def test_reading_while_others_put_and_evict(place: Mounted) -> None:
    place.mount()
    pid = place.pid
    with Readers(place, 3) as readers:
        churn(place, 60)
        until(lambda: readers.reads > 200)
        readers.stop()
    assert not readers.wrong
    assert place.pid == pid and "Traceback" not in place.log()


def test_slow_reads_while_blocks_go(place: Mounted) -> None:
    """50 blocks open with slow reads under way while they are evicted and their file is removed;
    then umount, at once and with nobody stuck in the kernel."""
    with Store.open(place.store.path, index=str(place.index)) as other:  # with segments of its own
        grow(other, other.namespaces()[0], range(50))
    place.mount_slowly(0.02)
    process = place.process
    assert process is not None
    (node,) = place.space.glob("000000-*")
    files = [os.open(node / f"{i:06d}.kv", os.O_RDONLY) for i in range(50)]
    segment = os.getxattr(node / "000000.kv", "user.kvfs.segment").decode()
    outcomes: list[int] = []

    def read(file: int) -> None:
        try:
            outcomes.append(len(os.pread(file, ROW, 0)))
        except OSError as e:
            outcomes.append(-(e.errno or 0))

    threads = [threading.Thread(target=read, args=(f,)) for f in files]
    for thread in threads:
        thread.start()
    until(lambda: len(outcomes) >= 5)
    with Readers(place, 2) as readers:
        place.store.remove(place.ns, tokens_of([0], 128))
        Path(place.store.path, segment).unlink()
        place.put(77, 78, 79)
        churn(place, 10)
        for thread in threads:
            thread.join(20)
        assert not any(t.is_alive() for t in threads)
        until(lambda: readers.reads > 20)
        readers.stop()
    assert not readers.wrong
    assert set(outcomes) <= {ROW, -errno.EIO} and ROW in outcomes
    for file in files:
        os.close(file)
    assert not in_uninterruptible_sleep({process.pid, os.getpid()})
    began = time.monotonic()
    assert place.umount().returncode == 0
    assert time.monotonic() - began < 5 and process.wait(5) == 0


def test_storage_that_does_not_answer(place: Mounted) -> None:
    """A read waits, everything that needs the index alone goes on, and a signal still ends it."""
    place.put(1, 2)
    place.put(3)
    gate = place.mount_slowly(0)
    (node, other) = sorted(place.space.glob("000000-*"), key=lambda n: -len(os.listdir(n)))
    gate.touch()
    code = "import sys; open(sys.argv[1], 'rb').read()"
    reader = subprocess.Popen(
        [sys.executable, "-c", code, node / "000000.kv"], stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: place.requests()["read"] > 0)
        began = time.monotonic()
        assert len(os.listdir(node)) == 3 and os.stat(other / "000000.kv").st_size == ROW
        assert os.getxattr(other / "000000.kv", "user.kvfs.block") == b"0"
        assert time.monotonic() - began < 2, "the index waits for nobody"
        assert place.process is not None and reader.poll() is None
        began = time.monotonic()
        place.process.send_signal(signal.SIGTERM)
        assert place.process.wait(10) == 0
        assert time.monotonic() - began < 5
        assert reader.wait(5) != 0, "the reader got an error, not a wrong byte"
        assert not place.is_mounted()
        assert "leaving the index to the kernel" in (place.root / "output").read_text()
    finally:
        gate.unlink()
        reader.kill()
        reader.wait()


def test_killed_readers_freeze_nothing(place: Mounted) -> None:
    """Requests that are withdrawn just as they are read: the process goes on at once."""
    place.put(1, 2)
    place.mount()
    for _ in range(25):
        clients = [
            subprocess.Popen(["stat", place.space / f"x{i}"], stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL)
            for i in range(2)
        ]  # fmt: skip
        for client in clients:
            client.kill()
        for client in clients:
            client.wait()
        began = time.monotonic()
        assert place.ns.name in os.listdir(place.point)
        assert time.monotonic() - began < 1
    assert wait_ended(place.pid, 0) is False


def test_other_hosts_blocks_appear(place: Mounted, tmp_path: Path) -> None:
    """Another host has an index of its own; the mount follows its journal."""
    place.put(1)
    place.mount()
    with Store.open(place.store.path, index=str(tmp_path / "other")) as other:
        ns = other.namespaces()[0]
        grow(other, ns, [5, 6])
        until(lambda: len(list(place.space.glob("000000-*"))) == 2, 10)
        name = f"000000-{hashes_of(ns, tokens_of([5], 128))[0].hex()[:16]}"
        assert (place.space / name / "000001.kv").stat().st_size == ROW
        other.remove(ns, tokens_of([5], 128))
        until(lambda: not (place.space / name / "000000.kv").exists(), 20)


def test_a_mount_does_not_outlive_its_store_quietly(place: Mounted) -> None:
    """The store's directory goes: what was seen can be listed, reading says EIO, df too."""
    place.put(1)
    place.mount()
    (node,) = place.space.glob("000000-*")
    os.rename(place.store.path, f"{place.store.path}.away")
    try:
        assert os.listdir(node) != []
        with pytest.raises(OSError) as caught:
            (node / "000000.kv").read_bytes()
        assert caught.value.errno == errno.EIO
        with contextlib.suppress(OSError):
            os.statvfs(place.point)
        assert place.pid
    finally:
        os.rename(f"{place.store.path}.away", place.store.path)
    assert len((node / "000000.kv").read_bytes()) == ROW


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_minute_of_everything(place: Mounted) -> None:
    """Readers, killed readers, puts, evictions and removed segments on slow storage, for long."""
    place.put(1, 2, 3)
    place.mount_slowly(0.005)
    process, ending = place.process, time.monotonic() + 60
    assert process is not None
    with Readers(place, 4) as readers:
        for round_ in itertools.count(1):
            with Store.open(place.store.path, index=str(place.index)) as other:
                ns = other.namespaces()[0]
                for i in range(5):
                    grow(other, ns, [1, 2, 3, round_, i, i])
                extent = other.check(ns, tokens_of([1, 2, 3, round_, 0], 128)).extents[-1]
            churn(place, 6)
            client = subprocess.Popen(["find", place.space], stdout=subprocess.DEVNULL)
            client.kill()
            client.wait()
            place.store.remove(place.ns, tokens_of([1, 2, 3, round_], 128), from_block=3)
            Path(place.store.path, extent.segment).unlink()
            assert not readers.wrong and process.poll() is None
            if time.monotonic() > ending:
                break
        readers.stop()
    assert readers.reads > 1000 and not readers.wrong
    assert not in_uninterruptible_sleep({process.pid, os.getpid()})
    began = time.monotonic()
    assert place.umount().returncode == 0 and time.monotonic() - began < 5
    assert process.wait(5) == 0
