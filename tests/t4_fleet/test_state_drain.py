"""A host leaves: its slots move to others, and every router finds them there."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.errors import BackendError, BusyError, InputError
from kvfs.peers.client import PeerClient, Pushed
from kvfs.peers.drain import Drained, drain
from kvfs.state.directory import Directory
from kvfs.state.slot import Anchor
from kvfs.state.slots import Slot
from kvfs.testing import command
from kvfs.testing.peers import KEY, L1, SECRET, Host, kvctl_serve, prompt

Hosts = Callable[..., Host]


def leave(host: Host, *to: Host | str, **how: Any) -> Drained:
    addresses = [one if isinstance(one, str) else one.service.address for one in to]
    client = how.pop("client", host.client)
    return drain(
        [host.slots], client, addresses,
        withdraw=lambda pool, metas: Directory(host.store, pool).withdraw(metas), **how,
    )  # fmt: skip


def filled(host: Host, n: int) -> list[list[int]]:
    prompts = [prompt(seed) for seed in range(n)]
    for tokens in prompts:
        host.put(tokens, L1)
    host.tell()
    return prompts


def test_every_slot_moves_and_is_found(host: Hosts) -> None:
    a, b, c = host("a", slots=12), host("b"), host("c")
    prompts = filled(a, 12)
    result = leave(a, b, c)
    assert (result.moved, result.left, result.kept, result.problems) == (12, 0, 0, [])
    assert result.bytes == 12 * 134 * 16
    assert result.peers == {b.service.address: 6, c.service.address: 6}, "to the emptier one"
    assert a.slots.metas() == []
    for one in (b, c):
        one.tell()
    router = host("r", serves=False)
    sources = {router.load(tokens).source for tokens in prompts}
    assert sources == {b.service.address, c.service.address}


def test_the_leaving_host_is_named_no_more(host: Hosts) -> None:
    """Even before the others have said what they have."""
    a, b = host("a"), host("b")
    (tokens,) = filled(a, 1)
    router = host("r", serves=False)
    assert router.load(tokens).source == a.service.address
    leave(a, b)
    assert router.load(tokens).reasons[0] == "768: no host is known to have it"


def test_what_was_used_last_goes_first(host: Hosts) -> None:
    a, b = host("a"), host("b", slots=2)
    prompts = filled(a, 6)
    time.sleep(0.002)  # the pool's clock counts milliseconds
    for tokens in (prompts[1], prompts[4]):
        a.load(tokens)
    b.slots.clear()
    order: list[bytes] = []

    class Watched(PeerClient):
        def push(self, address: str, slot: Slot, deadline: float) -> Pushed:
            order.append(slot.meta.anchor)
            return super().push(address, slot, deadline)

    with Watched(SECRET) as client:
        leave(a, b, client=client, force=True)
    used = {Anchor.of(a.ns.hasher(prompts[n]), L1).hash for n in (1, 4)}
    assert set(order[:2]) == used and len(order) == 6


def test_too_little_room(host: Hosts) -> None:
    a, b = host("a"), host("b", slots=4)
    filled(a, 3)
    b.put(prompt(99), L1)
    with pytest.raises(BusyError, match="100% full, more than 80%.*--force"):
        leave(a, b)
    assert len(a.slots.metas()) == 3 and len(b.slots.metas()) == 1, "nothing was moved"
    assert leave(a, b, share=1.0).moved == 3


def test_no_slots_there_at_all(host: Hosts) -> None:
    a, b = host("a"), host("b")
    filled(a, 1)
    b.slots.close()
    b.service.pools.close()
    for path in b.shm.iterdir():
        path.unlink()
    with pytest.raises(BusyError, match="no slots for it"):
        leave(a, b)
    result = leave(a, b, force=True)
    assert (result.moved, result.left) == (0, 1) and "no host takes its slots" in result.problems[0]


def test_by_force(host: Hosts) -> None:
    a, b = host("a"), host("b", slots=2)
    filled(a, 6)
    result = leave(a, b, force=True)
    assert (result.moved, result.left, len(b.slots.metas())) == (6, 0, 2)


class Slow(PeerClient):
    """Takes its time for every slot."""

    def push(self, address: str, slot: Slot, deadline: float) -> Pushed:
        time.sleep(0.1)
        return super().push(address, slot, deadline)


def test_the_time_is_over(host: Hosts) -> None:
    a, b = host("a"), host("b")
    filled(a, 10)
    with Slow(SECRET) as client:
        result = leave(a, b, client=client, grace=0.35)
    assert result.left == 10 - result.moved > 0 and result.moved >= 1
    assert result.problems == ["the time of 0.35 s is over"] and result.seconds < 3
    assert len(a.slots.metas()) == result.left, "what is left is here"


def test_a_host_that_dies_meanwhile(host: Hosts) -> None:
    a, b, c = host("a"), host("b", slots=64), host("c", slots=40)
    prompts = filled(a, 10)

    class Deadly(PeerClient):
        pushed = 0

        def push(self, address: str, slot: Slot, deadline: float) -> Pushed:
            self.pushed += 1
            if self.pushed == 4:
                b.stop()
            return super().push(address, slot, deadline)

    with Deadly(SECRET) as client:
        result = leave(a, b, c, client=client)
    assert (result.moved, result.left) == (10, 0)
    assert result.peers == {b.service.address: 3, c.service.address: 7}
    assert result.problems[0].startswith(b.service.address)
    address = b.service.address
    b.start(address)
    for one in (b, c):
        one.tell()
    assert all(c.load(tokens).slot is not None for tokens in prompts)


def test_not_to_itself(host: Hosts) -> None:
    a = host("a")
    filled(a, 1)
    with pytest.raises(InputError, match="this host itself"):
        leave(a, a)
    assert len(a.slots.metas()) == 1


def test_nobody_there(host: Hosts) -> None:
    a, b = host("a"), host("b")
    filled(a, 1)
    address = b.service.address
    b.stop()
    with pytest.raises(BackendError, match="no host to drain to answers"):
        leave(a, address)
    b.start(address)
    with pytest.raises(InputError):
        drain([a.slots], a.client, [])


def test_a_slot_that_the_other_has_already(host: Hosts) -> None:
    a, b = host("a"), host("b")
    filled(a, 2)
    filled(b, 1)
    result = leave(a, b)
    assert (result.moved, result.kept, result.left) == (2, 1, 0)


# the command


@contextlib.contextmanager
def secret() -> Iterator[None]:
    before = os.environ.get("KVFS_PEER_SECRET")
    os.environ["KVFS_PEER_SECRET"] = KEY
    try:
        yield
    finally:
        if before is None:
            del os.environ["KVFS_PEER_SECRET"]
        else:
            os.environ["KVFS_PEER_SECRET"] = before


def test_kvctl(host: Hosts, fleet_store: Path, tmp_path: Path) -> None:
    a, b = host("a"), host("b", slots=4)
    (tokens, *_) = filled(a, 4)
    b.stop()
    words = ["drain", "--store", fleet_store, "--slots", a.shm, "--index", tmp_path / "d"]
    served = kvctl_serve(fleet_store, b.shm, tmp_path / "b" / "index", "127.0.0.1:0")
    with secret(), served as (process, address):
        refused = command.run(*words, "--to", address)
        assert refused.returncode == 5 and b"--force" in refused.stderr
        done = command.run(*words, "--to", address, "--share", "1", "--json")
        found = json.loads(done.stdout)
        assert (found["moved"], found["left"], found["peers"]) == (4, 0, {address: 4})
        assert done.returncode == 0
        deadline = time.monotonic() + 20
        while a.load(tokens).source != address:  # its announcer looks twice a second
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.terminate()
        assert process.wait(20) == 0
        assert process.stdout is not None
        last = json.loads(process.stdout.read())
        assert last["requests"]["put.201"] == 4
    b.start()


def test_kvctl_shows_the_slots_here_and_there(host: Hosts, tmp_path: Path) -> None:
    a, b = host("a"), host("b")
    (tokens, _) = filled(a, 2)
    b.store.catch_up()
    words = ["--store", a.store.path, "--index", tmp_path / "b" / "index"]
    there = ["--at", a.service.address]
    with secret():
        done = command.run("state", "slots", *words, "--slots", b.shm, *there, "--json")
        found = [json.loads(line) for line in done.stdout.splitlines()]
        assert sorted(slot["anchor"] for slot in found) == sorted(
            meta.anchor.hex() for meta in a.slots.metas()
        )
        assert command.run("state", "slots", *words, "--slots", b.shm).stdout == b""
        ids = ",".join(map(str, tokens))
        pull = ["state", "pull", *words, "--slots", b.shm, "--deadline", "20", "--tokens"]
        done = command.run(*pull, ids, "--json")
        found = json.loads(done.stdout)
        assert (done.returncode, found["source"]) == (0, a.service.address)
        assert found["decision"]["hit_tokens"] == L1
        a.slots.clear()
        done = command.run(*pull, ids)
        assert done.returncode == 3 and b"128 to replay" in done.stdout
        assert b"not there" in done.stdout
        done = command.run("state", "slots", *words, "--at", "127.0.0.1:1")
        assert done.returncode == 9 and b"no connection" in done.stderr
