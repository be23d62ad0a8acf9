"""Pulling a slot across a link: right, or not at all and in time, whatever happens to the peer."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvfs.bench.netns import Side, Unavailable, pair
from kvfs.peers.client import PeerClient, Pulled
from kvfs.peers.wire import Holder
from kvfs.state.slots import SlotPool
from kvfs.store import Store
from kvfs.testing.peers import FLASH, SECRET, anchor, budget, data_of, kvctl_serve, pool_of

assert FLASH.state is not None
STATE = FLASH.state
PORT = 7420
SECONDS = 20.0
DEADLINE = 0.3
"""Of pulls that have to fail."""
LATE = 10.0
"""How much later than that they may end, on a machine with other things to do: less than it takes
to wait for the peer. `kvctl bench state` says how late they are."""


@pytest.fixture
def link() -> Iterator[tuple[Side, Side]]:
    try:
        with pair() as sides:
            yield sides
    except Unavailable as e:
        pytest.skip(f"no network namespaces here: {e}")


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[Path]:
    with pool_of(tmp_path / "shm", range(4)):
        yield tmp_path / "shm"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with Store.init(tmp_path / "store", index=str(tmp_path / "index")) as made:
        made.create_namespace(FLASH)
    return tmp_path / "store"


class Peer:
    """kvctl serve in the first namespace, asked from the second."""

    def __init__(self, link: tuple[Side, Side], store: Path, slots: Path, index: Path) -> None:
        self.there, self.here = link
        self.address = f"{self.there.ip}:{PORT}"
        self._serve = lambda: kvctl_serve(store, slots, index, self.address, self.there.run)
        self.noticed: list[str] = []
        self.client = PeerClient(SECRET, on_restart=self.noticed.append)
        self.start()

    def start(self) -> None:
        self._served: AbstractContextManager[Any] = self._serve()
        self.process, address = self._served.__enter__()
        assert address == self.address

    def kill(self) -> None:
        self._served.__exit__(None, None, None)

    def close(self) -> None:
        self.client.close()
        self.kill()

    def pull(self, number: int = 1, seconds: float = SECONDS, **of: Any) -> Pulled:
        """Pulls a slot; what there is must be right, and in time."""

        def work() -> tuple[Pulled, float]:
            began = time.monotonic()
            holder = Holder(self.address, **of)
            key = anchor(number)
            pulled = self.client.pull(holder, FLASH.nsid, key, STATE, began + seconds)
            return pulled, time.monotonic() - began

        pulled, took = self.here.run(work)
        assert took < seconds + LATE
        if pulled.slot is not None:
            assert pulled.slot.data == data_of(anchor(number)), "bytes of another slot"
        return pulled

    def pull_again(self) -> Pulled:
        """Until there is a slot: a peer that failed is left alone for a second."""
        deadline = time.monotonic() + SECONDS
        while True:
            pulled = self.pull()
            if pulled.slot is not None or time.monotonic() > deadline:
                return pulled
            time.sleep(0.05)


@pytest.fixture
def peer(link: tuple[Side, Side], store: Path, slots: Path, tmp_path: Path) -> Iterator[Peer]:
    made = Peer(link, store, slots, tmp_path / "index")
    yield made
    made.close()


def test_a_slot_crosses_the_link(peer: Peer) -> None:
    for number in range(4):
        pulled = peer.pull(number)
        assert pulled.slot is not None and len(pulled.slot.data) == 1_415_040
    assert peer.pull(9).reason.startswith("not there")


@contextmanager
def meanwhile(work: Callable[[], object]) -> Iterator[threading.Event]:
    """Does it on a thread of its own, a moment from now; the event says that it is done."""
    done = threading.Event()

    def run() -> None:
        work()
        done.set()

    timer = threading.Timer(0.1, run)
    timer.start()
    try:
        yield done
    finally:
        timer.join()


def pull_until_none(peer: Peer, done: threading.Event) -> None:
    """Pulls one slot after the other until there is none any more."""
    for number in itertools.count():
        lost = done.is_set()
        pulled = peer.pull(number % 4, seconds=DEADLINE if lost else 5.0)
        if pulled.slot is None:
            return
        assert not lost, "a peer that is gone gave a slot"


def test_a_peer_that_was_killed(peer: Peer) -> None:
    assert peer.pull().slot is not None
    peer.kill()
    assert "no connection" in peer.pull(seconds=DEADLINE).reason
    assert "away a moment ago" in peer.pull(seconds=DEADLINE).reason
    peer.start()


def test_a_peer_that_is_killed_in_the_middle(peer: Peer) -> None:
    """Pulls go on while it dies: each is right or a reason, and comes in time."""
    assert peer.pull().slot is not None
    with meanwhile(lambda: os.kill(peer.process.pid, signal.SIGKILL)) as done:
        pull_until_none(peer, done)


def test_a_peer_that_was_restarted_has_its_slots(peer: Peer) -> None:
    """The slots outlive the server, and its hints are still right."""
    slot = peer.pull().slot
    assert slot is not None
    peer.kill()
    peer.start()
    pulled = peer.pull(pool=slot.meta.pool, generation=slot.meta.generation)
    assert pulled.slot is not None and pulled.slot.meta == slot.meta
    assert peer.noticed == [peer.address]


def test_a_peer_whose_memory_was_lost(link: tuple[Side, Side], store: Path, tmp_path: Path) -> None:
    """Another pool at the same address: old hints are stale, whatever is in it now."""
    shm = tmp_path / "shm"
    with pool_of(shm, [1]):
        peer = Peer(link, store, shm, tmp_path / "index")
        slot = peer.pull().slot
        peer.kill()
    assert slot is not None
    for path in shm.iterdir():
        path.unlink()
    with pool_of(shm, [1]):
        peer.start()
        try:
            pulled = peer.pull(pool=slot.meta.pool, generation=slot.meta.generation)
            assert pulled.slot is None and pulled.reason.startswith("stale hint")
            assert peer.noticed == [peer.address]
            assert peer.pull().slot is not None
        finally:
            peer.close()


def test_a_link_that_goes_down(peer: Peer) -> None:
    assert peer.pull().slot is not None
    peer.there.link(False)
    assert "not in time" in peer.pull(seconds=DEADLINE).reason
    peer.there.link(True)
    assert peer.pull_again().slot is not None


def test_a_link_that_goes_down_in_the_middle(peer: Peer) -> None:
    assert peer.pull().slot is not None
    with meanwhile(lambda: peer.there.link(False)) as done:
        pull_until_none(peer, done)
    peer.there.link(True)
    assert peer.pull_again().slot is not None


def test_a_slow_peer(peer: Peer) -> None:
    """One that is stopped, and goes on later: what it sends then belongs to no other request."""
    assert peer.pull(1).slot is not None
    os.kill(peer.process.pid, signal.SIGSTOP)
    assert "not in time" in peer.pull(2, seconds=DEADLINE).reason
    os.kill(peer.process.pid, signal.SIGCONT)
    assert peer.pull_again().slot is not None
    assert peer.pull(3).slot is not None


def test_a_slow_link(peer: Peer) -> None:
    """A slot that would take seconds is given up at the deadline."""
    try:
        peer.there.tc_command("qdisc", "add", "dev", peer.there.device, "root", "tbf",
                              "rate", "4mbit", "burst", "32k", "latency", "10s")  # fmt: skip
    except Unavailable as e:
        pytest.skip(str(e))
    assert "not in time" in peer.pull(seconds=DEADLINE).reason


def test_slots_that_change_while_they_are_pulled(peer: Peer, tmp_path: Path) -> None:
    """The owner stores one slot after the other into a pool of four: never half of one."""
    stop = threading.Event()

    def churn() -> None:
        with SlotPool.open(FLASH, budget(4), directory=str(tmp_path / "shm")) as pool:
            number = 0
            while not stop.is_set():
                number += 1
                pool.write(anchor(number % 8), data_of(anchor(number % 8)))

    work: Callable[[], None] = churn
    thread = threading.Thread(target=work)
    thread.start()
    try:
        found = [peer.pull(n % 8) for n in range(100)]
    finally:
        stop.set()
        thread.join()
    assert all(p.slot is not None or p.reason.startswith("not there") for p in found)
    assert any(p.slot is not None for p in found)
