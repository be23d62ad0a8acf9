"""The storage that fails on purpose does what its rules say, and nothing else."""

from __future__ import annotations

import errno
import importlib
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.backend import Backend, OpenFile, PosixBackend, WriteCut, read_into, write_all
from kvfs.testing import faults as faults_module
from kvfs.testing.faults import (
    CutAt,
    Delay,
    Fail,
    FaultyBackend,
    Flip,
    Hold,
    Lose,
    Short,
)
from kvfs.testing.unsynced import PAGE

DATA = bytes(range(256)) * 64


@pytest.fixture
def faults(tmp_path: Path) -> FaultyBackend:
    return FaultyBackend(PosixBackend(str(tmp_path)), seed=1)


def store(backend: Backend, path: str = "a", data: bytes = DATA, *, sync: bool = True) -> None:
    file = backend.create(path)
    try:
        write_all(backend, file, [data[:1000], data[1000:]], 0)
        if sync:
            backend.sync(file)
    finally:
        backend.close(file)


def content(backend: Backend, path: str = "a", size: int = len(DATA)) -> bytes:
    file = backend.open(path)
    try:
        buffer = bytearray(size + 1)
        views = [memoryview(buffer)[:777], memoryview(buffer)[777:]]
        return bytes(buffer[: read_into(backend, file, views, 0)])
    finally:
        backend.close(file)


def code_of(work: Callable[[], Any]) -> int | None:
    with pytest.raises(OSError) as caught:
        work()
    return caught.value.errno


def test_without_rules_it_is_the_other_backend(faults: FaultyBackend, tmp_path: Path) -> None:
    store(faults, "d/a")
    assert content(faults, "d/a") == (tmp_path / "d/a").read_bytes() == DATA
    assert faults.size("d/a") == len(DATA) and faults.names("d") == ["a"]
    assert faults.load("d/a", 1 << 20) == DATA
    assert faults.put_new("b", b"1") and not faults.put_new("b", b"2")
    faults.replace("b", b"3")
    assert faults.load("b", 10) == b"3"
    faults.unlink("d/a")
    faults.unlink("d/a")
    assert faults.remove_empty("d") and not faults.remove_empty("d")
    assert faults.free_bytes()[1] > 0
    assert faults.root == str(tmp_path)
    assert faults.calls["writev"] >= 1 and faults.calls["unlink"] == 2


def test_every_operation_of_a_backend_is_there(faults: FaultyBackend) -> None:
    operations = [n for n in vars(Backend) if not n.startswith("_") and callable(vars(Backend)[n])]
    assert [name for name in operations if name not in vars(FaultyBackend)] == []


def test_rules_pick_calls_by_operation_path_and_number(faults: FaultyBackend) -> None:
    rule = faults.on("create", "x/*", nth=2, times=2, do=Fail(errno.EACCES))
    outcome = []
    for n, path in enumerate(["x/1", "y/1", "x/2", "x/3", "x/4"]):
        try:
            store(faults, path)
            outcome.append(n)
        except PermissionError as e:
            assert e.filename == path
    assert outcome == [0, 1, 4]
    assert (rule.seen, rule.hits) == (4, 2)
    faults.on("*", do=Fail(errno.EIO), times=None)
    assert code_of(lambda: faults.names("")) == errno.EIO
    faults.clear()
    assert "x" in faults.names("")
    with faults.during("names", do=Fail(errno.EIO), times=None):
        assert code_of(lambda: faults.names("")) == errno.EIO
    assert "x" in faults.names("")


def test_chances_can_be_repeated(tmp_path: Path) -> None:
    def outcome(seed: int) -> list[bool]:
        faults = FaultyBackend(PosixBackend(str(tmp_path)), seed=seed)
        rule = faults.on("size", do=Fail(errno.EIO), times=None, chance=0.5)
        seen = []
        for _ in range(40):
            before = rule.hits
            assert code_of(lambda: faults.size("none")) in (errno.EIO, errno.ENOENT)
            seen.append(rule.hits > before)
        return seen

    assert outcome(1) == outcome(1) != outcome(2)
    assert 5 < sum(outcome(1)) < 35


@given(limit=st.integers(1, 5000))
def test_short_counts_lose_nothing(tmp_path_factory: pytest.TempPathFactory, limit: int) -> None:
    faults = FaultyBackend(PosixBackend(str(tmp_path_factory.mktemp("short"))))
    faults.on("writev", do=Short(limit), times=None)
    faults.on("readv", do=Short(limit), times=None)
    store(faults)
    assert content(faults) == DATA
    assert faults.calls["readv"] >= len(DATA) // limit


@given(offset=st.integers(0, len(DATA)))
def test_a_disk_that_ends(tmp_path_factory: pytest.TempPathFactory, offset: int) -> None:
    faults = FaultyBackend(PosixBackend(str(tmp_path_factory.mktemp("cut"))))
    faults.on("writev", do=CutAt(offset), times=None)
    if offset == len(DATA):
        store(faults)
    else:
        with pytest.raises(WriteCut) as caught:
            store(faults)
        assert (caught.value.errno, caught.value.written) == (errno.ENOSPC, offset)
    assert content(faults) == DATA[:offset]


def test_a_write_that_lies(faults: FaultyBackend) -> None:
    faults.on("writev", do=Lose(10))
    store(faults)
    assert content(faults) == DATA[:10]


def test_flipped_bits_are_of_what_was_read(faults: FaultyBackend) -> None:
    store(faults)
    for bits in (1, 5):
        faults.on("readv", do=Flip(bits))
        got = content(faults)
        wrong = [bin(a ^ b).count("1") for a, b in zip(got, DATA, strict=True)]
        assert 1 <= sum(wrong) <= bits and sum(wrong) % 2 == bits % 2
    assert content(faults) == DATA


def test_a_call_waits_until_it_is_released(faults: FaultyBackend, tmp_path: Path) -> None:
    reached: list[int] = []
    hold = Hold(0.5, on_reach=lambda: reached.append(1))
    faults.on("writev", do=hold)
    writer = threading.Thread(target=store, args=(faults,))
    writer.start()
    assert hold.reached.wait(30) and reached == [1]
    assert (tmp_path / "a").read_bytes() == DATA[: len(DATA) // 2]
    hold.release()
    writer.join()
    assert content(faults) == DATA
    faults.on("names", do=Delay(0.001))
    assert faults.names("") == ["a"]


# a machine that goes down


@pytest.fixture
def volatile(tmp_path: Path) -> FaultyBackend:
    return FaultyBackend(PosixBackend(str(tmp_path)), seed=3, volatile=True)


def append(backend: Backend, data: bytes, offset: int) -> OpenFile:
    """Writes into a file that is open for writing; only its maker has one."""
    file = backend.create("grows")
    write_all(backend, file, [data[:offset]], 0)
    backend.sync(file)
    write_all(backend, file, [data[offset:]], offset)
    return file


def test_what_was_synced_stays(volatile: FaultyBackend) -> None:
    store(volatile)
    volatile.put_new("small", b"durable")
    volatile.crash()
    assert content(volatile) == DATA and volatile.load("small", 100) == b"durable"


def test_what_was_never_synced_is_gone(volatile: FaultyBackend) -> None:
    store(volatile, sync=False)
    volatile.crash()
    assert volatile.names("") == []


@pytest.mark.parametrize("offset", [1, 100, PAGE, PAGE + 1, 3 * PAGE])
def test_a_file_is_as_it_was_synced(volatile: FaultyBackend, offset: int) -> None:
    volatile.close(append(volatile, DATA, offset))
    assert content(volatile, "grows") == DATA
    volatile.crash()
    assert content(volatile, "grows") == DATA[:offset]


def test_pages_may_survive_out_of_order(volatile: FaultyBackend) -> None:
    synced = PAGE + 100
    volatile.close(append(volatile, DATA, synced))
    volatile.crash(survive=0.5)
    found = content(volatile, "grows")
    assert found[:synced] == DATA[:synced]
    for at in range(2 * PAGE, len(found), PAGE):
        page = found[at : at + PAGE]
        assert page in (DATA[at : at + len(page)], bytes(len(page)))


def test_all_or_nothing_survives_at_the_ends(tmp_path: Path) -> None:
    for survive in (0.0, 1.0):
        place = tmp_path / str(survive)
        place.mkdir()
        backend = FaultyBackend(PosixBackend(str(place)), volatile=True)
        store(backend, sync=False)
        backend.crash(survive=survive)
        assert bool(os.listdir(place)) == (survive == 1.0)
        if survive:
            assert content(backend) == DATA


def test_only_what_is_volatile_can_crash(faults: FaultyBackend) -> None:
    with pytest.raises(ValueError, match="volatile"):
        faults.crash()


def test_a_failed_sync_makes_nothing_durable(volatile: FaultyBackend) -> None:
    volatile.on("sync", do=Fail(errno.EIO))
    with pytest.raises(OSError):
        store(volatile)
    volatile.crash()
    assert volatile.names("") == []


def test_the_docstring_names_every_effect() -> None:
    named = set(re.findall(r"^  ([A-Z]\w+)\(", faults_module.__doc__ or "", re.MULTILINE))
    assert named == {"Fail", "Short", "CutAt", "Lose", "Flip", "Delay", "Hold"}


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(example, "docs/testing.md", "exec"), {"path": str(tmp_path / "store")})
    effects = re.findall(r"`(\w+)`", page.partition("What to do is one of")[2].partition(", or")[0])
    assert all(hasattr(faults_module, effect) for effect in effects) and len(effects) == 7
    for module in re.findall(r"^\| `(kvfs\.testing\.\w+)`", page, re.MULTILINE):
        importlib.import_module(module)
