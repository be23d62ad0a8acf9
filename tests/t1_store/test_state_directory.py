"""The directory of slots: hints that every host comes to know, and never more than hints."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs import presets
from kvfs.errors import InputError
from kvfs.follow import checkpoint
from kvfs.frames import NamespaceEntry
from kvfs.index import Index
from kvfs.index.schema import POOL, POOLS, PURGE, SERVING, SLOT, SLOTS, scan_copies
from kvfs.index.slots import IDLE_MS, all_entries, forget_pools, idle_pools
from kvfs.namespace import Namespace
from kvfs.plan import Plan, SlotHint
from kvfs.repair.rebuild import rebuild
from kvfs.slot_entries import WHOLE_POOL, SlotEntry, SlotGoneEntry
from kvfs.state import Anchor, SlotPool, decide
from kvfs.state.directory import Directory
from kvfs.state.poolfile import Geometry
from kvfs.store import Store

SWA = presets.get("tiny-swa", weights="w", tokenizer="t")
SLOT_BYTES = 134 * 16
NOW = 1_800_000_000_000
TTL = 3_600_000
Told = SlotEntry | SlotGoneEntry


class Clock:
    """Seconds for stores, milliseconds for pools: of one time."""

    def __init__(self) -> None:
        self.ms = NOW

    def __call__(self) -> float:
        return self.ms / 1000

    def pool(self) -> int:
        return self.ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(store_dir: Path, clock: Clock) -> Iterator[Store]:
    with Store.init(store_dir, durability="none", clock=clock) as made:
        yield made


@pytest.fixture
def ns(store: Store) -> Namespace:
    return store.create_namespace(SWA)


@pytest.fixture
def open_pool(tmp_path: Path, clock: Clock) -> Iterator[Callable[[str], SlotPool]]:
    """Pools of other hosts: each in a directory of its own."""
    pools = []

    def make(host: str, n: int = 8) -> SlotPool:
        (tmp_path / host).mkdir(exist_ok=True)
        pools.append(
            SlotPool.open(
                SWA,
                Geometry(n, SLOT_BYTES).file_bytes,
                directory=str(tmp_path / host),
                ttl_seconds=TTL / 1000,
                clock=clock.pool,
            )  # fmt: skip
        )
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def prompt(n: int, seed: int = 0) -> list[int]:
    return [(seed * 100_003 + i * 7) % 50_000 for i in range(n)]


def put(store: Store, ns: Namespace, tokens: list[int]) -> None:
    blocks = len(tokens) // 128
    result = store.put(ns, tokens, bytes(blocks * ns.row_bytes))
    assert result.error is None


def keep(directory: Directory, ns: Namespace, tokens: list[int], position: int) -> None:
    """Stores a slot, and tells so."""
    anchor = Anchor.of(ns.hasher(tokens), position)
    directory.stored(directory.pool.write(anchor, bytes(SLOT_BYTES)))


# from end to end


def test_a_request_from_one_end_to_the_other(
    store: Store, ns: Namespace, open_pool: Callable[[str], SlotPool]
) -> None:
    tokens = prompt(4096)
    pool = open_pool("a")
    directory = Directory(store, pool)
    put(store, ns, tokens)
    plan = store.check(ns, tokens)
    assert plan.slots == () and decide(plan, SWA).replay_tokens == 128
    hasher = ns.hasher(tokens)
    from kvfs.state.ring import Ring

    ring = Ring.of(SWA)
    assert ring is not None
    for position in ring.after_prefill(4096).anchors:
        anchor = Anchor.of(hasher, position)
        directory.stored(pool.write(anchor, bytes([position % 251]) * SLOT_BYTES))
    plan = store.check(ns, tokens)
    (hint,) = plan.slots
    assert hint.position == plan.hit_tokens == 3840
    assert (hint.host, hint.pool) == (store.host, pool.pool_id)
    decision = decide(plan, SWA)
    assert (decision.hit_tokens, decision.slot, decision.replay) == (3840, 3840, None)
    assert decision.holders == (hint,)
    slot = pool.read(Anchor.of(hasher, 3840))
    assert slot is not None and slot.data == bytes([3840 % 251]) * SLOT_BYTES
    assert slot.meta.generation == hint.generation
    # Six tokens more, and the other slot is the one.
    longer = decide(store.check(ns, tokens + [1] * 6), SWA)
    assert (longer.hit_tokens, longer.slot) == (3968, 3968)


def test_a_retry_with_the_last_slot_alone_says_why(
    store: Store, ns: Namespace, open_pool: Callable[[str], SlotPool]
) -> None:
    tokens = prompt(4096)
    put(store, ns, tokens)
    keep(Directory(store, open_pool("a")), ns, tokens, 3968)
    plan = store.check(ns, tokens)
    assert [hint.position for hint in plan.slots] == [3968]
    decision = decide(plan, SWA)
    assert (decision.l1, decision.hit_tokens, decision.replay_tokens) == (3840, 3712, 128)
    assert "3968 is beyond what may be hit" in decision.reason and decision.holders == ()


def test_plans_carry_hints_as_json(
    store: Store, ns: Namespace, open_pool: Callable[[str], SlotPool]
) -> None:
    tokens = prompt(4096)
    put(store, ns, tokens)
    keep(Directory(store, open_pool("a"), address="10.0.0.1:7"), ns, tokens, 3840)
    plan = store.check(ns, tokens)
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan and again.slots[0].address == "10.0.0.1:7"
    older = plan.to_json()
    del older["slots"]
    assert Plan.from_json(older) == plan._replace(slots=())
    with pytest.raises(InputError):
        Plan.from_json({**plan.to_json(), "slots": [{"position": 1}]})
    json.dumps(decide(plan, SWA).to_json())


def test_a_model_without_a_window_has_no_hints(store: Store) -> None:
    dense = store.create_namespace(presets.get("tiny", weights="w", tokenizer="t"))
    put(store, dense, prompt(512))
    assert store.check(dense, prompt(512)).slots == ()


# who is asked first


def test_this_host_first_then_who_holds_fewest(
    store: Store, ns: Namespace, open_pool: Callable[[str], SlotPool]
) -> None:
    tokens, other = prompt(4096), prompt(4096, 1)
    put(store, ns, tokens)
    held = {"busy": 3, "idle": 0, store.host: 5}
    for host, more in held.items():
        directory = Directory(store, open_pool(host), host=host, address=f"{host}:7")
        keep(directory, ns, tokens, 3840)
        for i in range(more):
            keep(directory, ns, other, 128 * (i + 1))
    hints = store.check(ns, tokens).slots
    assert [hint.host for hint in hints] == [store.host, "idle", "busy"]
    assert [h.host for h in store.slot_holders(ns, tokens, 3840)] == [store.host, "idle", "busy"]
    assert [h.host for h in store.slot_holders(ns, other, 384)] == [store.host, "busy"]
    assert store.slot_holders(ns, tokens, 128) == []
    with pytest.raises(InputError):
        store.slot_holders(ns, tokens, 100)


def test_the_best_anchor_comes_first(
    store: Store, ns: Namespace, open_pool: Callable[[str], SlotPool]
) -> None:
    tokens = prompt(4096)
    put(store, ns, tokens)
    keep(Directory(store, open_pool("near"), host="near"), ns, tokens, 3712)
    assert decide(store.check(ns, tokens), SWA).slot == 3712
    keep(Directory(store, open_pool("far"), host="far"), ns, tokens, 3840)
    plan = store.check(ns, tokens)
    assert [hint.position for hint in plan.slots] == [3840, 3712]
    decision = decide(plan, SWA)
    assert decision.slot == 3840 and [hint.host for hint in decision.holders] == ["far"]


def test_the_hash_comes_from_the_index_also_behind_trimmed_and_short_runs(
    store: Store, ns: Namespace, open_pool: Callable[[str], SlotPool]
) -> None:
    """A prompt whose prefix lies in several runs; every boundary of it is found."""
    tokens = prompt(4096)
    fork = tokens[:1000] + prompt(3096, 9)
    directory = Directory(store, open_pool("a", 64))
    for n in (300, 1024, 2000, 4096):
        put(store, ns, tokens[:n])
    put(store, ns, fork)
    for text in (tokens, fork):
        for position in range(128, 4097, 128):
            keep(directory, ns, text, position)
    for text in (tokens, fork):
        for n in range(300, 4096, 97):
            for asked in (text[:n], ns.hasher(text[:n])):
                plan = store.check(ns, asked)
                decision = decide(plan, SWA)
                assert decision.slot == (plan.hit_tokens or None)


# hints go stale


def test_hints_expire_and_are_renewed(
    store: Store, ns: Namespace, open_pool: Callable[[str], SlotPool], clock: Clock
) -> None:
    tokens = prompt(4096)
    put(store, ns, tokens)
    pool = open_pool("a")
    directory = Directory(store, pool)
    keep(directory, ns, tokens, 3840)
    clock.ms += TTL - 1000
    assert pool.read(Anchor.of(ns.hasher(tokens), 3840)) is not None  # in use: it lives on
    assert store.check(ns, tokens).slots[0].expires_ms == NOW + TTL
    assert directory.announce_all() == 1
    clock.ms += 2000
    assert store.check(ns, tokens).slots[0].expires_ms == NOW + 2 * TTL - 1000
    clock.ms += TTL
    assert store.check(ns, tokens).slots == ()
    assert directory.announce_all() == 0


def test_what_is_evicted_or_withdrawn_is_named_no_more(
    store: Store, ns: Namespace, open_pool: Callable[[str], SlotPool]
) -> None:
    tokens = prompt(4096)
    put(store, ns, tokens)
    directory = Directory(store, open_pool("a", 2))
    keep(directory, ns, tokens, 3840)
    for i in range(3):
        keep(directory, ns, prompt(500, i + 1), 256)
    assert store.check(ns, tokens).slots == ()
    keep(directory, ns, tokens, 3840)  # stored again: a later generation
    assert len(store.check(ns, tokens).slots) == 1
    meta = directory.pool.lookup(Anchor.of(ns.hasher(tokens), 3840))
    assert meta is not None
    directory.withdraw([meta])
    assert store.check(ns, tokens).slots == ()
    assert directory.announce([meta]) == 1  # told by mistake that it was gone: it stays gone
    assert store.check(ns, tokens).slots == ()
    directory.pool.remove(Anchor.of(ns.hasher(tokens), 3840))
    keep(directory, ns, tokens, 3840)
    directory.withdraw_all()
    assert store.check(ns, tokens).slots == ()
    directory.pool.clear()
    keep(directory, ns, tokens, 3840)
    assert len(store.check(ns, tokens).slots) == 1


def test_a_host_that_was_started_anew_takes_the_place_of_what_it_was(
    store: Store, ns: Namespace, open_pool: Callable[[str], SlotPool], clock: Clock, tmp_path: Path
) -> None:
    tokens = prompt(4096)
    put(store, ns, tokens)
    pool = open_pool("a")
    keep(Directory(store, pool, host="a", address="a:7"), ns, tokens, 3840)
    keep(Directory(store, open_pool("b"), host="b", address="b:7"), ns, tokens, 3840)
    pool.close()
    for path in (tmp_path / "a").iterdir():
        path.unlink()
    clock.ms += 1
    keep(Directory(store, open_pool("a"), host="a", address="a:7"), ns, prompt(500, 3), 256)
    assert [hint.host for hint in store.check(ns, tokens).slots] == ["b"]


# every host, and after losses


def test_other_hosts_hear_of_it_and_a_lost_index_too(
    store: Store, ns: Namespace, open_pool: Callable[[str], SlotPool], tmp_path: Path, clock: Clock
) -> None:
    tokens = prompt(4096)
    put(store, ns, tokens)
    keep(Directory(store, open_pool("a"), host="a", address="a:7"), ns, tokens, 3840)
    index = str(tmp_path / "elsewhere")
    with Store.open(store.path, index=index, clock=clock) as other:
        mine = other.namespace(ns.name)
        assert other.check(mine, tokens).slots == store.check(ns, tokens).slots != ()
        keep(Directory(store, open_pool("b"), host="b"), ns, tokens, 3840)
        assert len(other.check(mine, tokens).slots) == 1
        other.catch_up()
        assert len(other.check(mine, tokens).slots) == 2
        rebuild(other)
        assert len(other.check(mine, tokens).slots) == 2


def test_three_hosts_of_a_thousand_slots_are_found_again(
    store: Store, ns: Namespace, tmp_path: Path, clock: Clock
) -> None:
    """An index that starts empty knows them all; what is lost or stale costs a replay each."""
    rng = random.Random(3)
    told: list[Told] = []
    for host in ("a", "b", "c"):
        for i in range(1000):
            told.append(slot(host, i, 2 * i + 2))
    store.publish_slots(told)
    lost = rng.sample(told, len(told) // 20)  # evicted, and nobody was told
    with Store.open(store.path, index=str(tmp_path / "new"), clock=clock) as other:
        number = other.namespace(ns.name).number
        found = {
            (hint.host, i)
            for i in range(1000)
            for hint in other.index.slot_holders(number, anchor(i), NOW, "")
        }
        assert found == {(host, i) for host in "abc" for i in range(1000)}
    for entry in lost:
        # What a reader does with a hint that turns out to be stale: it decides anew without it.
        assert isinstance(entry, SlotEntry)
        hint = SlotHint(3840, entry.host, "", entry.pool, entry.generation, entry.expires_ms)
        plan = Plan("n", ns.nsid, 4096, 128, 4096, 3840, "hit", (), (hint,))
        with_hint, without = decide(plan, SWA), decide(plan, SWA, ())
        assert with_hint.replay is None
        assert without.compute_tokens - with_hint.compute_tokens == 128
        assert without.replay_tokens == 128


def test_a_checkpoint_carries_them(
    store: Store, ns: Namespace, open_pool: Callable[[str], SlotPool], clock: Clock
) -> None:
    tokens = prompt(4096)
    put(store, ns, tokens)
    keep(Directory(store, open_pool("a"), host="a", address="a:7"), ns, tokens, 3840)
    gone = Directory(store, open_pool("b"), host="b")
    keep(gone, ns, tokens, 3840)
    gone.withdraw_all()
    dropped = Directory(store, open_pool("c"), host="c")
    keep(dropped, ns, tokens, 3840)
    dropped.withdraw(dropped.pool.metas())
    before = store.check(ns, tokens).slots
    assert [hint.host for hint in before] == ["a"]
    with store.index.env().read() as txn:
        rows = {name: dict(scan_copies(txn, name)) for name in (SLOTS, PURGE)}
    made = checkpoint.write(store.backend, store.index, "w" * 8, clock.ms)
    store.index.write(lambda a: checkpoint.load(store.backend, a, made, store.uuid))
    assert store.check(ns, tokens).slots == before
    with store.index.env().read() as txn:
        again = {name: dict(scan_copies(txn, name)) for name in (SLOTS, PURGE)}
    assert again[SLOTS].keys() <= rows[SLOTS].keys()
    # What was gone stays gone, whatever comes in late.
    for directory in (gone, dropped):
        directory.announce_all()
    assert store.check(ns, tokens).slots == before


# entries in any order


def pool_id(host: str) -> bytes:
    return host.encode().ljust(16, b"p")


def anchor(number: int) -> bytes:
    return (number + 1).to_bytes(16, "big")  # all zeros are no anchor


def slot(
    host: str, number: int, generation: int, *, expires: int = NOW + TTL, when: int = NOW,
    address: str = "", life: str = "",
) -> SlotEntry:  # fmt: skip
    return SlotEntry(
        SWA.nsid, pool_id(host + life), anchor(number), 3840, generation, expires, when, host,
        address,
    )  # fmt: skip


def gone(host: str, number: int, generation: int, when: int = NOW, life: str = "") -> SlotGoneEntry:
    where = WHOLE_POOL if number < 0 else anchor(number)
    return SlotGoneEntry(SWA.nsid, pool_id(host + life), where, generation, when)


@pytest.fixture
def paper(tmp_path: Path) -> Iterator[Index]:
    index = Index(str(tmp_path / "paper"), bytes(16))
    yield index
    index.close()


def fresh(index: Index, entries: list[Told]) -> None:
    """Makes the index one that has heard these entries, in this order."""
    from kvfs.index.wipe import wipe

    def work(applier: Any) -> None:
        wipe(applier, journals=True)
        applier.apply(NamespaceEntry(SWA.nsid, "{}"))
        for entry in entries:
            applier.apply(entry)

    index.write(work)


def named(index: Index, now: int = NOW) -> set[tuple[str, int, int, int]]:
    number = index.namespaces()[SWA.nsid][0]
    return {
        (hint.host, i, hint.generation, hint.expires_ms)
        for i in range(6)
        for hint in index.slot_holders(number, anchor(i), now, "")
    }


def faults(index: Index) -> list[str]:
    """What does not fit together in the tables of slots."""
    with index.env().read() as txn:
        slots, pools = dict(scan_copies(txn, SLOTS)), dict(scan_copies(txn, POOLS))
        purge = {key for key, _ in scan_copies(txn, PURGE)}
    found = []
    counts: dict[bytes, int] = dict.fromkeys((key[1:] for key in pools), 0)
    for key, value in slots.items():
        _, _, expires, ms = SLOT.unpack(value)
        if PURGE + ms.to_bytes(8, "big") + key[1:] not in purge:
            found.append(f"{key.hex()} has no row in purge")
        if key[21:] not in counts:
            found.append(f"{key.hex()} is of no pool")
        counts[key[21:]] = counts.get(key[21:], 0) + (expires > 0)
    if len(purge) != len(slots):
        found.append(f"{len(purge)} rows in purge, {len(slots)} slots")
    for key, value in pools.items():
        if POOL.unpack_from(value)[1] != counts[key[1:]]:
            found.append(f"pool {key[1:].hex()} counts {POOL.unpack_from(value)[1]}")
    return found


histories = st.lists(
    st.one_of(
        st.builds(
            lambda host, number, generation, longer: slot(
                host, number, 2 * generation, expires=NOW + TTL + longer
            ),
            st.sampled_from("ab"), st.integers(0, 2), st.integers(1, 4), st.integers(0, 3),
        ),
        st.builds(
            lambda host, number, generation: gone(host, number, 2 * generation),
            st.sampled_from("ab"), st.integers(-1, 2), st.integers(1, 4),
        ),
    ),
    max_size=12,
)  # fmt: skip


def expected(entries: list[Told]) -> set[tuple[str, int, int, int]]:
    """The rule, plainly: the latest generation counts, and of it the longest life; a slot of a
    generation up to one that is gone is gone."""
    out = set()
    for host in "ab":
        whole = max(
            (e.generation for e in entries if isinstance(e, SlotGoneEntry)
             and e.pool == pool_id(host) and e.anchor == WHOLE_POOL), default=0,
        )  # fmt: skip
        for number in range(3):
            mine = [e for e in entries if e.pool == pool_id(host) and e.anchor == anchor(number)]
            ended = max((e.generation for e in mine if isinstance(e, SlotGoneEntry)), default=0)
            live = [
                (e.generation, e.expires_ms) for e in mine
                if isinstance(e, SlotEntry) and e.generation > max(whole, ended)
            ]  # fmt: skip
            if live:
                out.add((host, number, *max(live)))
    return out


@given(histories, st.randoms(use_true_random=False))
def test_any_order_and_any_repetition_means_the_same(
    tmp_path_factory: pytest.TempPathFactory, entries: list[Told], rng: random.Random
) -> None:
    index = _index(tmp_path_factory)
    fresh(index, entries)
    assert named(index) == expected(entries) and not faults(index)
    shuffled = entries * 2
    rng.shuffle(shuffled)
    fresh(index, shuffled)
    assert named(index) == expected(entries) and not faults(index)
    # And what a checkpoint would say is the same again.
    number = index.namespaces()[SWA.nsid][0]
    with index.env().read() as txn:
        saved = list(all_entries(txn, {number: SWA.nsid}))
    fresh(index, saved)
    assert named(index) == expected(entries) and not faults(index)


_made: dict[str, Index] = {}


def _index(factory: pytest.TempPathFactory) -> Index:
    """One index for all examples: making one takes longer than an example."""
    if "index" not in _made:
        _made["index"] = Index(str(factory.mktemp("paper")), bytes(16))
    return _made["index"]


@pytest.fixture(scope="module", autouse=True)
def _close_index() -> Iterator[None]:
    yield
    if "index" in _made:
        _made.pop("index").close()


def test_the_pool_heard_of_last_at_an_address_counts(paper: Index) -> None:
    old = [slot("a", i, 2, address="a:7", when=NOW) for i in range(3)]
    new = [slot("a", 1, 2, address="a:7", when=NOW + 5, life="2")]
    other = [slot("b", 1, 2, address="b:7", when=NOW + 9)]
    for order in (old + new + other, new + other + old, other + old + new):
        fresh(paper, order)
        assert {(h, i) for h, i, _, _ in named(paper)} == {("a", 1), ("b", 1)}
    # Two pools without an address do not stand in each other's way.
    fresh(paper, [slot("a", 0, 2), slot("a", 1, 2, life="2", when=NOW + 5)])
    assert {i for _, i, _, _ in named(paper)} == {0, 1}


def test_who_does_not_say_where_it_answers_takes_nothing_back(paper: Index) -> None:
    """An engine stores slots, and the service of its host answers for them; each tells of both."""
    engine, service = slot("a", 0, 2), slot("a", 0, 2, address="a:7", when=NOW + 1)
    later = slot("a", 1, 4, when=NOW + 2)
    for order in itertools.permutations([engine, service, later]):
        fresh(paper, list(order))
        assert addresses(paper) == {"a:7"} and not faults(paper), order
    # One that was started anew answers elsewhere.
    moved = slot("a", 0, 2, address="a:9", when=NOW + 9)
    for order in itertools.permutations([engine, service, later, moved]):
        fresh(paper, list(order))
        assert addresses(paper) == {"a:9"} and not faults(paper), order


def addresses(index: Index) -> set[str]:
    """Where the holders are said to answer."""
    number = index.namespaces()[SWA.nsid][0]
    return {h.address for i in range(6) for h in index.slot_holders(number, anchor(i), NOW, "")}


def test_rows_whose_time_is_over_go_by_and_by(paper: Index) -> None:
    """The tables hold what lives, not what ever lived."""
    entries: list[Told] = []
    for step in range(3000):
        when = NOW + 10_000 * step
        entry = slot("a", step, 2 * step + 2, expires=when + 60_000, when=when)
        entries.append(entry)
        if step % 3 == 0:
            entries.append(dataclasses.replace(gone("a", step, 2 * step + 2), when_ms=when))
    fresh(paper, entries)
    assert not faults(paper)
    with paper.env().read() as txn:
        rows = {name: len(dict(scan_copies(txn, name))) for name in (SLOTS, PURGE, POOLS)}
    # A minute of life, ten minutes of memory, one every ten seconds.
    assert rows[SLOTS] == rows[PURGE] < 150 and rows[POOLS] == 1


def test_pools_that_hold_nothing_are_forgotten_after_a_day(paper: Index) -> None:
    ended = [slot("a", 0, 2, address="a:7"), gone("a", -1, 2), gone("c", -1, 2)]
    lives = slot("b", 1, 2, address="b:7", expires=NOW + 4 * IDLE_MS)
    later = slot("d", 1, 2, address="d:7", when=NOW + TTL + IDLE_MS, expires=NOW + 4 * IDLE_MS)
    fresh(paper, [*ended, lives])

    def tidied(now: int) -> set[bytes]:
        idle, _ = paper.query(lambda a: idle_pools(a.txn))
        paper.write(lambda a: forget_pools(a, idle, now))
        assert not faults(paper)
        with paper.env().read() as txn:
            left = {bytes(key[1:]) for key, _ in scan_copies(txn, POOLS)}
            assert {bytes(v[:16]) for _, v in scan_copies(txn, SERVING)} <= left
        return left

    a, b, c, d = map(pool_id, "abcd")
    assert tidied(NOW) == tidied(NOW + IDLE_MS - 1) == {a, b, c}
    assert tidied(NOW + IDLE_MS) == {a, b}  # of one a slot may still be heard of
    paper.write(lambda a: a.apply(later))  # with it goes what has expired
    assert tidied(NOW + 2 * IDLE_MS) == {a, b, d}
    assert tidied(NOW + 3 * IDLE_MS) == {b, d}
    assert not paper.query(lambda a: idle_pools(a.txn))[1]


def test_one_wrong_clock_loses_few(paper: Index) -> None:
    good: list[Told] = [slot("a", i, 2 * i + 2) for i in range(6)]
    far = [slot("b", 0, 2, when=NOW + 10**12, expires=NOW + 10**12 + TTL)]
    fresh(paper, good + far)
    assert len(named(paper)) >= 3
    fresh(paper, far + good)
    assert len(named(paper)) == 7


def test_entries_that_make_no_sense_are_left_out(paper: Index) -> None:
    bad = [
        dataclasses.replace(slot("a", 0, 2), host="h" * 256),
        dataclasses.replace(slot("a", 0, 2), address="a\0b"),
        dataclasses.replace(slot("a", 0, 2), anchor=WHOLE_POOL),
        dataclasses.replace(slot("a", 0, 2), expires_ms=0),
        dataclasses.replace(slot("a", 0, 2), nsid=b"?" * 16),
        dataclasses.replace(gone("a", 0, 2), nsid=b"?" * 16),
    ]
    fresh(paper, bad)
    assert named(paper) == set() and not faults(paper)


def test_names_have_a_length(
    store: Store, ns: Namespace, open_pool: Callable[[str], SlotPool]
) -> None:
    pool = open_pool("a")
    for host, address in (("h" * 256, ""), ("h", "é" * 128), ("h\0", "")):
        with pytest.raises(InputError):
            Directory(store, pool, host=host, address=address)


def test_kvctl_check_names_the_holder(
    store: Store, ns: Namespace, open_pool: Callable[[str], SlotPool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from kvfs.testing.command import kvctl, kvctl_json

    monkeypatch.setenv("KVFS_STORE", store.path)
    tokens = prompt(4096)
    put(store, ns, tokens)
    directory = Directory(store, open_pool("a"), host="gpu-7", address="gpu-7:7000")
    keep(directory, ns, tokens, 3968)
    text = ",".join(map(str, tokens))
    # The clock of the command is a real one, and before that of the test.
    found = kvctl_json("check", "--tokens", text)
    decision = found["decision"]
    assert (found["stored_tokens"], decision["l1"], decision["hit_tokens"]) == (4096, 3840, 3712)
    assert (decision["compute_tokens"], decision["replay"]["tokens"]) == (384, 128)
    assert "3968 is beyond what may be hit" in decision["reason"]
    keep(directory, ns, tokens, 3840)
    decision = kvctl_json("check", "--tokens", text)["decision"]
    assert (decision["hit_tokens"], decision["replay"]) == (3840, None)
    assert decision["holders"][0]["address"] == "gpu-7:7000"
    assert "slot at 3840 on gpu-7" in kvctl("check", "--tokens", text).stdout
