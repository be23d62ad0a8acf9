"""The mount that a store lies on goes away under those who use it, and comes back."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.errors import NoStoreError
from kvfs.follow.following import Following
from kvfs.gc.collector import Collector
from kvfs.testing.command import run
from kvfs.testing.stock import Clock, Stock, tokens

A, B, C = tokens(1, 40), tokens(2, 40), tokens(3, 40)


@pytest.fixture
def point(tmp_path: Path) -> Iterator[Path]:
    """A mount point; what is mounted there is bound to another directory."""
    (tmp_path / "disk").mkdir()
    place = tmp_path / "point"
    place.mkdir()
    try:
        mount(place)
    except subprocess.CalledProcessError as e:
        pytest.skip(f"nothing can be bound here: {e.stderr!r}")
    yield place
    while os.path.ismount(place) or bound(place):
        unmount(place)


def mount(place: Path) -> None:
    disk = place.with_name("disk")
    subprocess.run(["mount", "--bind", disk, place], check=True, capture_output=True)


def unmount(place: Path) -> None:
    subprocess.run(["umount", "--lazy", place], check=True, capture_output=True)


def bound(place: Path) -> bool:
    with open("/proc/self/mountinfo", encoding="utf-8") as f:
        return any(line.split()[4] == str(place) for line in f)


def test_nothing_is_written_lost_or_forgotten(
    point: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFS_STORE", str(point))
    stock = Stock.make(point, clock=Clock(time.time()), grace_seconds=0.0)
    stock.put(A)
    stock = stock.again()
    stock.put(B)
    other = stock.another(index=str(tmp_path / "other"))
    kvctl: Callable[..., int] = lambda *args: run(*args).returncode  # noqa: E731
    ids = " ".join(map(str, A))
    with Following(other.store) as following:
        assert other.good(A) == other.good(B) == 10
        for segment in other.store.index.segments():
            other.store.reader().forget(segment.path)  # an open one could be read on
        turns = following.turns
        unmount(point)
        assert (stock.stored(A), other.stored(A)) == (10, 10)
        for host in (stock, other):
            blocks, reason = host.fetch(A)
            assert blocks == 0 and reason is not None
        assert isinstance(other.put(C).error, NoStoreError)
        # Files that are open lead to the disk that was mounted: what they take is not lost.
        assert stock.put(tokens(4, 40)).complete
        with pytest.raises(NoStoreError):
            Collector(stock.store, force=True).run()
        assert kvctl("put", "--synthetic", "--tokens", ids) == NoStoreError.exit_code
        assert kvctl("gc") == kvctl("rm", "--all") == NoStoreError.exit_code
        assert kvctl("check", "--tokens", ids) == 0
        while following.turns < turns + 3:
            following.turn()
        assert os.listdir(point) == [], "something was written below the mount"
        assert (stock.stored(A), other.stored(B)) == (10, 10), "it was taken for empty"
        mount(point)
        assert stock.good(A) == other.good(A) == 10
        assert other.put(C).complete and other.good(C) == 10
        other.store.catch_up()
        assert other.good(tokens(4, 40)) == 10
        assert kvctl("gc") == 0
    stock.close()
