"""Listing: every entry exactly once, however many there are and whatever happens meanwhile."""

from __future__ import annotations

import os
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

import pytest

from kvfs.index.apply import Applier
from kvfs.testing.mounts import Mounted, mounted, until
from kvfs.testing.trees import phantom_runs

MANY = 50_000


def head(kind: str, i: int) -> bytes:
    return blake2b(f"{kind}/{i}".encode(), digest_size=16).digest()


def name(h: bytes) -> str:
    return f"000000-{h[:8].hex()}"


def by_ls(path: Path) -> list[str]:
    done = subprocess.run(["ls", "-f", path], capture_output=True, text=True, check=True)
    return [n for n in done.stdout.splitlines() if n not in (".", "..", "namespace.json")]


def by_scandir(path: Path) -> list[str]:
    return [e.name for e in os.scandir(path) if e.name != "namespace.json"]


@pytest.mark.parametrize("count", [0, 1, 22, 23, 24, 500])
def test_any_number_of_children(place: Mounted, count: int) -> None:
    heads = [head("stable", i) for i in range(count)]
    phantom_runs(place.store, place.ns, [(0, place.ns.root, h) for h in heads])
    place.mount()
    for listing in (by_ls, by_scandir):
        assert sorted(listing(place.space)) == sorted(name(h) for h in heads)


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    with mounted(tmp_path_factory.mktemp("crowd")) as place:
        heads = [head("stable", i) for i in range(MANY)]
        phantom_runs(place.store, place.ns, [(0, place.ns.root, h) for h in heads])
        place.mount()
        yield place


class Churn:
    """Adds and removes nodes, some hundred a second, until it is stopped."""

    def __init__(self, place: Mounted) -> None:
        self.place = place
        self.done = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        place, ns = self.place, self.place.ns
        while not self._stop.wait(0.02):
            h = head("passing", self.done)
            phantom_runs(place.store, ns, [(0, ns.root, h)])
            self.done += 1
            if self.done > 5:
                place.store.index.write(lambda a: remove(a, ns.number, self.done - 5))

    def __enter__(self) -> Churn:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()


def remove(applier: Applier, ns: int, i: int) -> None:
    run = applier.run(ns, head("passing", i))
    if run is not None:
        applier.remove(run)


@pytest.mark.parametrize("listing", [by_ls, by_scandir])
def test_a_crowd_that_comes_and_goes(
    crowd: Mounted, listing: Callable[[Path], list[str]]
) -> None:  # fmt: skip
    stable = {name(head("stable", i)) for i in range(MANY)}
    with Churn(crowd) as churn:
        for _ in range(3):
            seen = Counter(listing(crowd.space))
            assert max(seen.values()) == 1, "an entry was listed twice"
            assert stable <= seen.keys(), "a stable entry was not listed"
            others = seen.keys() - stable
            passing = {name(head("passing", i)) for i in range(churn.done + 1000)}
            assert others <= passing
        until(lambda: churn.done > 20)


def test_rewinding_looks_again(place: Mounted) -> None:
    place.put(1)
    place.mount()
    file = os.open(place.space, os.O_RDONLY)
    try:
        assert len(os.listdir(file)) == 2
        place.put(2)
        assert len(os.listdir(file)) == 3
    finally:
        os.close(file)


def test_a_long_folder(place: Mounted) -> None:
    """100,000 blocks in one folder, with forks, through find, ls and du."""
    hashes = b"".join(head("block", i) for i in range(100_000))
    forks = [(i, hashes[(i - 1) * 16 : i * 16], head("fork", i)) for i in range(1000, 90_000, 997)]
    phantom_runs(
        place.store, place.ns, [(0, place.ns.root, hashes), *forks], heads=hashes[:16]
    )  # fmt: skip
    place.mount()
    (node,) = place.space.glob("000000-*")
    found = subprocess.run(
        ["find", node, "-name", "*.kv"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert len(found) == len(set(found)) == 100_000 + len(forks)
    listed = subprocess.run(["ls", "-f", node], capture_output=True, text=True, check=True).stdout
    kv = [n for n in listed.splitlines() if n.endswith(".kv")]
    assert kv == [f"{i:06d}.kv" for i in range(100_000)], "in the order of the chain"
    used = subprocess.run(["du", "-sb", node], capture_output=True, text=True, check=True).stdout
    blocks, row = 100_000 + len(forks), place.ns.row_bytes
    assert int(used.split()[0]) == blocks * (row + 128 * 11)


def test_forgotten_nodes_leave_the_map(crowd: Mounted) -> None:
    assert len(by_scandir(crowd.space)) >= MANY
    assert int(os.getxattr(crowd.point, "user.kvfs.inodes")) >= MANY
    try:
        Path("/proc/sys/vm/drop_caches").write_text("2\n")
    except OSError:
        pytest.skip("the kernel's caches cannot be dropped here")
    until(lambda: int(os.getxattr(crowd.point, "user.kvfs.inodes")) < 100)
