"""The arena: reserved, exact, sealed, owned for as long as its owner lives; and its ranges."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvfs.arena import Arena, Ranges, sweep
from kvfs.errors import ConfigError
from kvfs.fetcher import launch
from kvfs.fetcher.launch import Options
from kvfs.testing.stock import Stock, tokens
from tests.t2_fetch.conftest import Connect, end

MIB = 1 << 20
PAGE = 4096


# ranges


class RangesModel(RuleBasedStateMachine):
    """Against pages that are coloured by whom they belong to."""

    START, PAGES = 3 * PAGE, 64

    def __init__(self) -> None:
        super().__init__()
        self.ranges = Ranges(self.START, self.START + self.PAGES * PAGE)
        self.owner: list[int | None] = [None] * self.PAGES
        self.sizes: dict[int, int] = {}

    @rule(size=st.integers(1, 20 * PAGE))
    def take(self, size: int) -> None:
        pages = -(-size // PAGE)
        free = "".join("." if o is None else "x" for o in self.owner)
        first = free.find("." * pages)
        start = self.ranges.take(size)
        if first < 0:
            assert start is None
            return
        assert start == self.START + first * PAGE
        self.owner[first : first + pages] = [start] * pages
        self.sizes[start] = pages

    @precondition(lambda self: self.sizes)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(sorted(self.sizes)))
        self.ranges.give(start)
        self._free(start)

    def _free(self, start: int) -> None:
        first = (start - self.START) // PAGE
        pages = self.sizes.pop(start)
        self.owner[first : first + pages] = [None] * pages

    @rule(offset=st.integers(0, 80).map(lambda n: n * PAGE))
    def give_what_nobody_has(self, offset: int) -> None:
        if offset not in self.sizes:
            with pytest.raises(ValueError):
                self.ranges.give(offset)

    @invariant()
    def free_bytes_are_true(self) -> None:
        assert self.ranges.free_bytes == self.owner.count(None) * PAGE

    def teardown(self) -> None:
        for start in list(self.sizes):
            self.ranges.give(start)
        assert self.ranges.take(self.PAGES * PAGE) == self.START, "free ranges were not merged"


TestRanges = RangesModel.TestCase


# one arena


def test_clients_can_read_but_not_write_or_resize() -> None:
    arena = Arena.create(10_000)
    assert arena.size == 12288
    arena.view[5000] = 7
    client = Arena.attach(arena.reader_fd())
    assert client.view[5000] == 7
    with pytest.raises(TypeError):
        client.view[5000] = 8
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    arena.close()
    arena.close()
    assert client.view[5000] == 7, "a client loses its mapping with the owner's"
    client.close()


def test_an_arena_beyond_all_memory_is_refused_with_both_figures() -> None:
    """The kernel would begin, and then kill some process."""
    size = 1 << 50
    with pytest.raises(ConfigError, match=rf"{size} bytes.* \d+"):
        Arena.create(size)


def test_sizes_are_exact() -> None:
    """No rounding up to a power of two, in address space or in memory."""
    code = """if True:
        from kvfs.arena import Arena
        def rss():
            return next(int(x.split()[1]) for x in open("/proc/self/status") if "VmRSS" in x) << 10
        for size in (33 << 20, 24 * 1_415_040):
            before = rss()
            arena = Arena.create(size)
            assert arena.size - size < 4096
            grown = rss() - before
            assert size <= grown + 4096 <= size * 1.05, (size, grown)
            view, arena.view = arena.view, memoryview(b"")
            view.release(); arena.close()
            assert rss() - before < size * 0.05
    """
    subprocess.run([sys.executable, "-c", code], check=True)


# what dead owners leave


def _owner(directory: Path, size: int = 8 * MIB) -> int:
    """The pid of a child that owns a named arena and does nothing more."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            arena = Arena.create(size, directory=str(directory), tag="test")
            arena.view[PAGE : PAGE + 4] = b"mine"
            os.write(writer, b"1")
            signal.pause()
        os._exit(1)
    os.close(writer)
    assert os.read(reader, 1) == b"1"
    os.close(reader)
    return pid


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    path = tmp_path / "shm"
    path.mkdir()
    return path


def test_fifty_killed_owners_leave_one_arena_at_most(shm: Path) -> None:
    for _ in range(50):
        _kill(_owner(shm))
        assert len(list(shm.iterdir())) == 1
    assert len(sweep(str(shm))) == 1
    assert not list(shm.iterdir())


def test_a_live_owner_keeps_its_arena_and_a_reader_that_of_a_dead_one(shm: Path) -> None:
    dying = _owner(shm)
    (old,) = shm.iterdir()
    with open(old, "rb") as f:
        mapped = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
    living = _owner(shm)
    assert old.exists() and len(list(shm.iterdir())) == 2
    _kill(dying)
    last = _owner(shm)
    assert not old.exists() and len(list(shm.iterdir())) == 2
    assert mapped[PAGE : PAGE + 4] == b"mine" and mapped[-1] == 0
    for pid in (living, last):
        _kill(pid)
    mapped.close()


def test_what_is_not_an_arena_of_ours_stays(shm: Path) -> None:
    uid = os.geteuid()
    names = [f"kvfs-{uid + 1}-test-0.arena", f"kvfs-{uid}-test-0", "other", "psm_1234"]
    for name in names:
        (shm / name).write_bytes(b"")
    (shm / f"kvfs-{uid}-link.arena").symlink_to(shm / "other")
    assert sweep(str(shm)) == []
    with pytest.raises(ConfigError, match="no arena can be made here"):
        sweep(str(shm / "absent"))


def test_a_directory_that_cannot_hold_one_is_a_setting_that_is_wrong(shm: Path) -> None:
    with pytest.raises(ConfigError, match="no arena can be made here"):
        Arena.create(PAGE, directory="/proc/self")


def test_killed_fetchers_leave_one_arena_at_most(stock: Stock, connect: Connect, shm: Path) -> None:
    prompt = tokens(1, 16 * 20)
    stock.put(prompt)
    plan = stock.store.check(stock.ns, prompt)
    for _ in range(5):
        client = connect(shm=str(shm), arena_bytes=4 * MIB)
        with client.fetch(stock.ns, plan, prompt, deadline=10) as ticket:
            assert ticket.wait() == plan.hit_blocks
            before = bytes(ticket.payload(0))
            end(client.fetcher_pid)
            launch.start(stock.store.path, Options(4 * MIB, shm=str(shm), parent=os.getpid()))
            assert len(list(shm.iterdir())) == 1
            assert bytes(ticket.payload(0)) == before, "what is mapped was changed"
            assert ticket.held
    client = connect()
    end(client.fetcher_pid, signal.SIGTERM)
    assert not list(shm.iterdir())


# a small file system


@pytest.fixture
def small_shm(tmp_path: Path) -> Iterator[Path]:
    """64 MiB, as /dev/shm is in a container."""
    point = tmp_path / "small"
    point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "kvfs-test", str(point)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True)


def test_too_small_a_file_system_is_a_setting_and_no_bus_error(
    stock: Stock, small_shm: Path
) -> None:
    options = Options(256 * MIB, shm=str(small_shm))
    with pytest.raises(ConfigError) as failure:
        launch.start(stock.store.path, options)
    assert str(256 * MIB + (128 << 10)) in str(failure.value)
    assert str(64 * MIB) in str(failure.value)
    assert not list(small_shm.iterdir())
    with pytest.raises(ConfigError):
        launch.private(stock.store.path, options)
    assert os.statvfs(small_shm).f_bfree * os.statvfs(small_shm).f_frsize == 64 * MIB


def test_a_small_arena_works_and_stays_when_the_file_system_fills(
    stock: Stock, small_shm: Path
) -> None:
    prompts = [tokens(seed, 16 * 200) for seed in range(6)]  # 12.5 MiB each
    for prompt in prompts:
        stock.put(prompt)
    with launch.private(stock.store.path, Options(32 * MIB, shm=str(small_shm))) as client:

        def fetch_all() -> None:
            for prompt in prompts:
                plan = stock.store.check(stock.ns, prompt)
                with client.fetch(stock.ns, plan, prompt, deadline=10) as ticket:
                    assert ticket.wait() == 199, ticket.reason

        fetch_all()
        assert client.stats()["blocks_evicted"] > 0
        fill = f"f=open({str(small_shm / 'hog')!r},'wb',0)\nwhile True: f.write(bytes(65536))"
        hog = subprocess.run([sys.executable, "-c", fill], capture_output=True, text=True)
        assert "No space left" in hog.stderr
        fetch_all()
        assert client.stats()["arena_free_bytes"] < 32 * MIB
    assert [p.name for p in small_shm.iterdir()] == ["hog"]
