"""Where a prompt's slot comes from: here, another host, or nowhere; and what stale hints cost.

The directory only hints, the owner decides; a hint that is lost, late or wrong costs a
replay of one window, never a wrong byte. The same prompt again hits, at a stated cost.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvfs.peers import announce
from kvfs.peers.load import load_state
from kvfs.peers.pools import Pools
from kvfs.state.slot import Anchor
from kvfs.testing.peers import L1, SWA, Host, pool_of, prompt


def test_here(host: Callable[..., Host]) -> None:
    a = host("a")
    a.put(prompt(1), L1)
    found = a.load(prompt(1))
    assert (found.source, found.decision.hit_tokens, found.reasons) == ("local", L1, ())
    assert found.to_json()["decision"]["slot"] == L1


def test_at_another_host(host: Callable[..., Host]) -> None:
    a, b = host("a"), host("b")
    a.put(prompt(1), L1)
    a.tell()
    found = b.load(prompt(1))
    assert (found.source, found.decision.hit_tokens) == (a.service.address, L1)
    assert found.slot is not None and found.slot.meta.rotation == L1 % 134
    router = host("r", serves=False)
    assert router.load(prompt(1)).source == a.service.address


def test_nowhere(host: Callable[..., Host]) -> None:
    a = host("a")
    a.put(prompt(1))
    found = a.load(prompt(1))
    assert found.slot is None and found.source == ""
    assert (found.decision.hit_tokens, found.decision.replay_tokens) == (L1 - 128, 128)
    assert found.reasons == (
        "768: no host is known to have it", "640: no host is known to have it",
    )  # fmt: skip


def test_the_slot_before_is_the_next_best(host: Callable[..., Host]) -> None:
    a, b = host("a"), host("b")
    a.put(prompt(1), L1 - 128)
    a.tell()
    found = b.load(prompt(1))
    assert (found.source, found.decision.hit_tokens) == (a.service.address, L1 - 128)
    assert found.decision.replay is None


def test_the_same_prompt_again(host: Callable[..., Host]) -> None:
    """Only the last boundary's slot: beyond what may be hit, so a replay. With the second snapshot
    that a prefill takes: a hit without one."""
    a = host("a")
    a.put(prompt(1), 896)
    assert a.load(prompt(1)).decision.replay_tokens == 128
    a.put(prompt(1), L1)
    assert a.load(prompt(1)).decision.to_json()["hit_tokens"] == L1


def test_a_slot_that_is_gone_without_a_word(host: Callable[..., Host]) -> None:
    a, b = host("a"), host("b")
    a.put(prompt(1), L1)
    a.tell()
    a.slots.remove(Anchor.of(a.ns.hasher(prompt(1)), L1))
    found = b.load(prompt(1))
    assert found.slot is None and found.decision.replay_tokens == 128
    assert f"768 from {a.service.address}: not there: no such slot here any more" in found.reasons
    a.tell()  # the host notices and takes the hint back
    assert b.load(prompt(1)).reasons[0] == "768: no host is known to have it"


def test_the_next_holder_is_asked(host: Callable[..., Host]) -> None:
    hosts = [host(name) for name in "abc"]
    for one in hosts[:2]:
        one.put(prompt(1), L1)
        one.tell()
    c = hosts[2]
    first = c.load(prompt(1)).source
    dead = next(one for one in hosts if one.service.address == first)
    alive = next(one for one in hosts[:2] if one is not dead)
    dead.stop()
    found = c.load(prompt(1))
    assert found.source == alive.service.address
    assert "768" in found.reasons[0] and first in found.reasons[0]
    dead.start(first)


def test_a_dead_holder_is_a_replay_in_time(host: Callable[..., Host]) -> None:
    a, b = host("a"), host("b")
    a.put(prompt(1), L1)
    a.tell()
    address = a.service.address
    a.stop()
    began = time.monotonic()
    found = b.load(prompt(1), seconds=0.3)
    assert found.slot is None and time.monotonic() - began < 3
    a.start(address)


def test_no_time_is_a_replay(host: Callable[..., Host]) -> None:
    a, b = host("a"), host("b")
    a.put(prompt(1), L1)
    a.tell()
    assert "no time left to ask" in b.load(prompt(1), seconds=0.0).reasons[0]


def test_tokens_that_do_not_fit_the_plan(host: Callable[..., Host]) -> None:
    """Nothing is raised into an engine."""
    a = host("a")
    a.put(prompt(1), L1)
    plan = a.store.check(a.ns, prompt(1))
    found = load_state(a.store, a.ns, plan, [1, 2, 3], pool=a.pool)
    assert found.slot is None and "no boundary" in found.reasons[0]


def test_a_directory_that_is_wrong(host: Callable[..., Host]) -> None:
    """Hints of slots that are gone, of generations that were, of another host; some lost: each
    costs a replay of one window at most, and no byte is wrong (Host.load looks)."""
    rng = random.Random(5)
    hosts = [host(name, slots=64) for name in "abc"]
    router = host("r", serves=False)
    prompts = [prompt(n) for n in range(90)]
    for n, tokens in enumerate(prompts):
        hosts[n % 3].put(tokens, L1)
    for one in hosts:
        one.tell()
    for n, tokens in enumerate(prompts):
        key = Anchor.of(router.ns.hasher(tokens), L1)
        if rng.random() < 0.2:
            hosts[n % 3].slots.remove(key)
            if rng.random() < 0.5:
                hosts[n % 3].put(tokens, L1)  # another generation
    router.store.catch_up()
    loaded = replayed = 0
    for tokens in prompts:
        plan = router.store.check(router.ns, tokens)
        hints = [hint for hint in plan.slots if rng.random() > 0.05]
        addresses = [one.service.address for one in hosts]
        hints = [
            hint._replace(address=rng.choice(addresses)) if rng.random() < 0.05 else hint
            for hint in hints
        ]
        found = load_state(router.store, router.ns, plan._replace(slots=tuple(hints)), tokens,
                           20.0, client=router.client)  # fmt: skip
        loaded += found.slot is not None
        replayed += found.decision.replay_tokens == 128
        assert found.decision.hit_tokens in (L1, L1 - 128)
    assert loaded + replayed == len(prompts) and loaded > 50 and replayed > 5


def test_a_restarted_host_tells_again(host: Callable[..., Host]) -> None:
    """What it holds is found again, although nobody who stored it is there any more."""
    a, b = host("a"), host("b")
    a.put(prompt(1), L1)
    a.stop()
    a.start()
    a.tell()
    assert b.load(prompt(1)).source == a.service.address


def test_pools_that_come_later_are_told(
    host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool is let go when nobody needs it, and found again when it changed."""
    monkeypatch.setattr(announce, "ATTACH_SECONDS", 0.0)
    a, b = host("a"), host("b")
    a.tell()
    a.service.pools.close()  # as after a while without use
    a.put(prompt(1), L1)
    a.tell()
    assert b.load(prompt(1)).source == a.service.address


def test_a_pool_that_is_looked_at_is_not_let_go(tmp_path: Path) -> None:
    with (
        pool_of(tmp_path, [1], identity=SWA),
        Pools(lambda: [SWA], str(tmp_path), idle=0.0) as pools,
    ):
        assert pools.get(SWA.nsid) is not None
        with pools.look() as (pool,):
            pools.let_go()
            assert len(pool.metas()) == 1
        pools.let_go()
        with pools.look() as found:
            assert found == []
