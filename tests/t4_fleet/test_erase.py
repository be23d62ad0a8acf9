"""What is removed is gone on every host at once: blocks, copies of them, slots behind them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.follow import checkpoint
from kvfs.gc.purge import Purge
from kvfs.repair.fsck import fsck
from kvfs.repair.rebuild import rebuild
from kvfs.testing.indexcheck import index_faults
from kvfs.testing.peers import L1, Host, prompt
from kvfs.testing.stock import Stock, tokens
from kvfs.vfs import Tree

A, LONG = tokens(1, 40), tokens(9, 20, after=tokens(1, 24))


@pytest.fixture
def fleet(store_dir: Path, tmp_path: Path) -> Iterator[list[Stock]]:
    """Three hosts that stored the same prompt at once, and cut it differently."""
    first = Stock.make(store_dir, grace_seconds=0.0)
    hosts = [first, *(first.another(index=str(tmp_path / name)) for name in "bc")]
    for host, part in zip(hosts, (A, A[:16], A[:28]), strict=True):
        host.put(part)
    hosts[1].put(LONG)
    follow(hosts)
    yield hosts
    for host in hosts:
        assert index_faults(host.store.index) == []
    first.close()


def follow(hosts: list[Stock]) -> None:
    for host in hosts:
        host.store.catch_up()


def found(hosts: list[Stock], prompt: list[int]) -> set[int]:
    return {host.sound(prompt) for host in hosts}


@pytest.mark.parametrize("by", range(3))
def test_every_copy_on_every_host(fleet: list[Stock], by: int) -> None:
    assert found(fleet, A) == {10} and found(fleet, LONG) == {11}
    fleet[by].store.remove(fleet[by].ns, A, from_block=2)
    follow(fleet)
    assert found(fleet, A) == found(fleet, LONG) == {2}
    fleet[(by + 1) % 3].put(A)
    follow(fleet)
    assert found(fleet, A) == {10} and found(fleet, LONG) == {6}


@pytest.mark.parametrize("by", range(3))
def test_a_host_that_comes_later_sees_the_same(fleet: list[Stock], by: int, tmp_path: Path) -> None:
    """From the journals, from a checkpoint, and rebuilt."""
    fleet[by].store.remove(fleet[by].ns, A, from_block=2)
    fleet[by].put(tokens(3, 20, after=A[:12]))
    follow(fleet)
    late = fleet[0].another(index=str(tmp_path / "late"))
    store = fleet[by].store
    checkpoint.write(store.backend, store.index, "host", store.now_ms())
    later = fleet[0].another(index=str(tmp_path / "later"))
    hosts = [*fleet, late, later]
    for host in hosts:
        host.store.catch_up()
    assert found(hosts, A) == {3} and found(hosts, tokens(3, 20, after=A[:12])) == {8}
    for host in hosts:
        rebuild(host.store, source="journals")
    assert found(hosts, A) == {3} and found(hosts, LONG) == {3}
    assert not fsck(late.store).damaged


def test_a_removal_that_a_checkpoint_tells_holds_for_late_runs(
    fleet: list[Stock], tmp_path: Path
) -> None:
    """A host that begins with the checkpoint reads the journal of a copy behind it."""
    first, store = fleet[0], fleet[0].store
    alone = first.another(index=str(tmp_path / "alone"))
    alone.put(tokens(7, 40))
    first.put(tokens(7, 40))  # neither has heard of the other
    store.remove(first.ns, tokens(7, 40))
    checkpoint.write(store.backend, store.index, "host", store.now_ms())
    later = first.another(index=str(tmp_path / "later"))
    follow([*fleet, alone, later])
    assert found([*fleet, alone, later], tokens(7, 40)) == {0}


def test_a_renewal_reaches_what_others_have_cut_otherwise(fleet: list[Stock]) -> None:
    """Whoever hits it, it expires nowhere before its time."""
    first = fleet[0]
    for host in fleet:
        first.clock.now += 2 * 86_400
        host.good(LONG)
        assert host.store.flush_renewals() > 0
        follow(fleet)
        expires = [
            min(e.expires_ms for e in each.store.check(each.ns, LONG).extents) for each in fleet
        ]
        assert min(expires) == int((first.clock.now + 7 * 86_400) * 1000)


def test_a_purge_leaves_no_byte_of_any_copy(fleet: list[Stock]) -> None:
    for host in fleet[1:]:
        host.store.close()
    first = fleet[0]
    receipt = Purge(first.store, first.ns, sleep=lambda s: None).run(
        [(first.ns.hasher(A).digest(1), 1)]
    )
    assert receipt.complete and receipt.blocks == 14 and len(receipt.files) == 3
    assert receipt.ended_ms >= receipt.started_ms > 0
    assert first.sound(A) == first.sound(LONG) == 1
    again = first.another(index=first.store.index.path + "-again")
    assert again.sound(A) == 1
    fleet[1:] = []


def test_a_namespace_is_gone_from_the_tree_of_every_host(fleet: list[Stock]) -> None:
    trees = [Tree(host.store) for host in fleet]
    assert all(len(tree.namespaces()) == 1 for tree in trees)
    fleet[1].store.remove_all(fleet[1].ns, whole=True)
    follow(fleet)
    assert all(tree.namespaces() == {} for tree in trees) and found(fleet, A) == {0}
    for host in fleet:
        assert host.store.listed_namespaces() == [] and len(host.store.namespaces()) == 1
    fleet[2].put(A)  # whoever has it open may go on
    follow(fleet)
    assert all(len(tree.namespaces()) == 1 for tree in trees) and found(fleet, A) == {10}


def test_slots_go_with_their_blocks(host: Callable[..., Host]) -> None:
    a, b = host("a"), host("b")
    for seed in (1, 2):
        a.put(prompt(seed), L1)
    a.tell()
    assert b.load(prompt(1)).source == b.load(prompt(2)).source == a.service.address
    b.store.remove(b.ns, prompt(1), from_block=3)
    b.store.catch_up()
    assert b.store.slot_holders(b.ns, prompt(1), L1) == []
    a.store.catch_up()
    a.tell()
    assert {m.position for m in a.slots.metas()} == {L1} and len(a.slots.metas()) == 1
    assert a.load(prompt(2)).source == "local"
    a.put(prompt(1), L1)
    a.tell()
    assert len(a.slots.metas()) == 2
    assert b.load(prompt(1)).source == a.service.address
    # What was stored again is not touched by the next removal, of another prompt.
    a.store.remove(a.ns, prompt(2), from_block=3)
    a.tell()
    assert a.load(prompt(1)).source == "local" and len(a.slots.metas()) == 1


def test_a_removal_by_a_clock_that_is_behind_empties_slots_too(host: Callable[..., Host]) -> None:
    a, b = host("a"), host("b")
    for seed in (1, 2):
        a.put(prompt(seed), L1)
    b.store.catch_up()
    a.store.clock = lambda: time.time() + 5
    a.store.remove(a.ns, prompt(2), from_block=3)
    a.tell()
    assert len(a.slots.metas()) == 1
    b.store.clock = lambda: time.time() + 2
    b.store.remove(b.ns, prompt(1), from_block=3)  # earlier than what `a` has heard of last
    a.store.catch_up()
    a.tell()
    assert a.slots.metas() == []
