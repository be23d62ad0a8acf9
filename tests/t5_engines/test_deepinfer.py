"""The DeepInfer mixin in an engine that calls its hooks in the release's order.

What is compared: every byte the engine reads of a hit, every row and slot in the store, and which
of them there are, with what the published arithmetic says of each request.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import deepinfer_fake as fake
import numpy as np
import pytest
import torch

from kvfs import Store
from kvfs.connectors import deepinfer_save
from kvfs.connectors.deepinfer import KvfsMixin, Release, Settings
from kvfs.connectors.deepinfer_layout import measure
from kvfs.connectors.deepinfer_state import Account, Slots
from kvfs.errors import ConfigError, InputError
from kvfs.fetcher import launch
from kvfs.gpu import host_memory
from kvfs.state import Anchor, SlotPool
from kvfs.state.decision import decide_length
from kvfs.state.policy import Policy

BLOCK, RING, WINDOW = fake.BLOCK, fake.RING, fake.WINDOW
_SETTINGS = {f.name for f in fields(Settings)}
RELEASE = Release(SimpleNamespace(block_table=()), 0, "fake")


class Engine(KvfsMixin, fake.FakeEngine):  # type: ignore[misc]
    """Notes what happens to requests, apart from the mixin."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.prefilled: list[tuple[list[int], int]] = []
        self.decoded: list[tuple[list[int], int]] = []
        self.seen: dict[str, Any] = {}

    def _forward(self, seq: Any, prompt: bool) -> list[int]:
        if prompt and not (seq.num_cached_tokens and hasattr(seq, "begun")):
            first = seq.num_cached_tokens
            seq.begun = seq.swa_valid_start or max(0, first - WINDOW)
        if prompt and not seq.chunked_rest_len:
            self.prefilled.append((list(seq.tokens), seq.begun))
            seq.prefill_end = seq.get_len()
        return super()._forward(seq, prompt)

    def finalize_seq(self, seq: Any) -> None:
        self.decoded.append((seq.tokens[: seq.num_cached_tokens], seq.prefill_end))
        self.seen[seq.request_id] = seq
        super().finalize_seq(seq)

    def ask(self, name: str, tokens: list[int], output: int = 4) -> Any:
        prompt = np.asarray(tokens, dtype=np.int32)
        return self.add_request("u", name, {"max_tokens": output}, prompt)

    def run(self) -> None:
        """Until nothing is left to do."""
        left = 100_000
        while self.has_unfinished_requests():
            self.kvfs.loader.settle(60)
            self.step()
            left -= 1
            assert left, "it goes no further"
        self.step()  # the release tells of what ended in the step after
        assert self.kvfs.saver.flush(30)

    @property
    def quiet(self) -> bool:
        """Every block and state slot is free again."""
        both = (self.block_manager, self.state_manager)
        return all(len(m.free) == len(m.count) - 1 for m in both)


class Place:
    """A store, a directory for slots, and engines that come and go."""

    def __init__(self, path: Path) -> None:
        self.path, self.slots = path / "store", path / "shm"
        self.slots.mkdir()
        with Store.init(self.path) as store:
            self.uuid = store.uuid
        self.engine: Engine | None = None

    def start(self, **options: Any) -> Engine:
        settings = {k: options.pop(k) for k in list(options) if k in _SETTINGS}
        release = options.pop("release", RELEASE)
        self.engine = Engine(**options)
        self.engine.start_kvfs(
            Settings(
                str(self.path), weights="w", tokenizer="t", slot_bytes=16 << 20,
                slot_directory=str(self.slots), arena_bytes=16 << 20,
                **{"fetch_seconds": 300.0, **settings},
            ),
            release=release,
        )  # fmt: skip
        return self.engine

    def stop(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def end_fetcher(self) -> None:
        client = launch.find(self.uuid)
        if client is not None:
            fd = os.pidfd_open(client.fetcher_pid)
            os.kill(client.fetcher_pid, signal.SIGTERM)
            client.close()
            select.select([fd], [], [], 30)
            os.close(fd)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("KVFS_RUNTIME", str(tmp_path))
    place = Place(tmp_path)
    yield place
    place.stop()
    place.end_fetcher()


def some(random: Random, count: int) -> list[int]:
    return [random.randrange(1000) for _ in range(count)]


# the whole way


@pytest.mark.parametrize("extra", [0, 128, pytest.param(256, marks=pytest.mark.slow)])
def test_a_scripted_serve(place: Place, extra: int) -> None:
    """600 steps of everything an engine does; then a restart, and every request again."""
    engine, random = place.start(extra=extra, seed=extra, blocks=19), Random(extra)
    talks = serve(engine, random)
    assert engine.scheduler.preempted and len(engine.prefilled) > 30 and engine.quiet
    assert sum(s is fake.Status.FINISHED_ABORTED for s in engine.ended.values()) > 3
    assert any(seq.cached_hit_tokens for seq in engine.seen.values())
    identity = engine.kvfs.memory.identity
    counts = engine.kvfs.counts
    assert not counts["failed"] and not counts["loads_failed"] and not counts["dropped_blocks"]
    blocks, slots = expected(engine, identity, extra)
    place.stop()
    compare(place, identity, blocks, slots, counts["stored_blocks"])
    again(place, identity, talks, slots, extra)


def serve(engine: Engine, random: Random) -> list[list[int]]:
    """Prompts of all lengths that go on behind each other, aborts; returns the prompts."""
    talks: list[list[int]] = []
    names: list[str] = []
    for step in range(600):
        engine.prefill = random.random() < 0.5
        if engine.get_num_unfinished_requests() < 6 and random.random() < 0.35:
            parent = random.choice(list(engine.seen.values())).tokens if engine.seen else []
            base = parent[: random.randint(0, len(parent))] if random.random() < 0.8 else []
            prompt = (base + some(random, random.choice([60, 128, 140, 300])))[:900]
            talks.append(prompt)
            names.append(f"r{step}")
            engine.ask(names[-1], prompt, random.choice([1, 5, 90, 200]))
        if step % 40 == 39:
            engine.abort_request([n for n in names if n not in engine.ended][-1:])
        # So that what follows does not depend on the machine's speed.
        assert engine.kvfs.saver.flush(60)
        engine.kvfs.loader.settle(60)
        engine.step()
    engine.prefill = True
    engine.run()
    return talks


def expected(engine: Engine, identity: Any, extra: int) -> tuple[dict[bytes, Any], set[Any]]:
    """(chain hash -> (tokens, block), {(position, chain hash)}) that the arithmetic asks for."""
    blocks: dict[bytes, Any] = {}
    slots: set[Any] = set()
    for tokens, begun in engine.prefilled:
        length, oldest = len(tokens), max(begun, len(tokens) - RING - extra)
        anchors = {(length - 1) // BLOCK * BLOCK, max(0, length - RING) // BLOCK * BLOCK}
        slots |= note(identity, blocks, tokens, {a for a in anchors if a - WINDOW >= oldest})
    for tokens, prefill_end in engine.decoded:
        last = len(tokens) // BLOCK * BLOCK
        slots |= note(identity, blocks, tokens, {last} if last > prefill_end else set())
    return blocks, slots


def note(identity: Any, blocks: Any, tokens: list[int], anchors: set[int]) -> set[Any]:
    from kvfs.chain import PrefixHasher

    hasher = PrefixHasher(identity, tokens)
    for block in range(hasher.n_blocks):
        blocks[hasher.digest(block + 1)] = (tokens[: (block + 1) * BLOCK], block)
    return {(a, hasher.digest(a // BLOCK)) for a in anchors if a > 0}


def compare(place: Place, identity: Any, blocks: Any, slots: set[Any], stored: int) -> None:
    """The store and the pool hold exactly these, byte for byte, in a process' fresh eyes."""
    assert stored == len(blocks), "not one block more or less than was computed"
    with (
        Store.open(place.path) as store,
        SlotPool.open(identity, directory=str(place.slots)) as pool,
    ):
        ns = store.create_namespace(identity)
        longest = {tuple(t[: len(t) // BLOCK * BLOCK]) for t, _ in blocks.values()}
        for tokens in longest:
            into = bytearray(len(tokens) // BLOCK * ns.row_bytes)
            probe = [*tokens, *range(RING)]
            got = store.fetch(ns, store.check(ns, probe), probe, into)
            assert got.blocks == len(tokens) // BLOCK, got.reason
            last = len(tokens) // BLOCK - 1
            row = bytes(into[last * ns.row_bytes :])
            assert row == fake.row_of(list(tokens), last)
        assert {(m.position, m.anchor) for m in pool.metas()} == slots
        by_hash = {h: tokens for h, (tokens, _) in blocks.items()}
        ring = identity_ring(identity)
        for position, chain in slots:
            tokens = by_hash[chain]
            slot = pool.read(Anchor.of(ns.hasher(tokens), position))
            assert slot is not None
            have = np.frombuffer(ring.window_of(slot.data, slot.meta.rotation), dtype=np.uint8)
            want = fake.window_of(tokens, position)
            assert np.array_equal(have.reshape(want.shape), want)


def identity_ring(identity: Any) -> Any:
    from kvfs.state import Ring

    return Ring.of(identity)


def again(place: Place, identity: Any, talks: list[list[int]], slots: set[Any], extra: int) -> None:
    """A new engine is given each prompt again: it hits what the arithmetic says. That what it hits
    is right, the engine checks itself, before each chunk."""
    engine = place.start(extra=extra, blocks=60)
    hits = replays = 0
    for number, tokens in enumerate(sorted(talks, key=len)[-20:]):
        hasher = engine.kvfs.ns.hasher(tokens)
        plan = engine.kvfs.store.check(engine.kvfs.ns, hasher)
        # In the pool now, not only from the serve before: this run stores more.
        there = {m.position for m in engine.kvfs.pool.metas()
                 if m.position // BLOCK <= hasher.n_blocks
                 and m.anchor == hasher.digest(m.position // BLOCK)}  # fmt: skip
        want = decide_length(identity, len(tokens), plan.stored_tokens, there)
        engine.ask(f"a{number}", tokens, 1)
        engine.run()
        seq = engine.seen[f"a{number}"]
        replayed = want.replay is not None and want.replay.start > 0
        hit = want.hit_tokens if want.slot is not None or replayed else 0
        assert seq.cached_hit_tokens == hit, want
        hits += hit > 0
        replays += replayed
    assert hits > 5 and (extra == 256 or replays)


# one thing at a time


def test_a_hit_needs_no_prefill_of_what_is_stored(place: Place) -> None:
    engine, tokens = place.start(), some(Random(1), 700)
    engine.ask("one", tokens)
    engine.run()
    place.stop()
    engine = place.start(budget=1000)
    seq = engine.ask("two", tokens)
    assert engine.get_num_unfinished_requests() == 1 and engine.has_unfinished_requests()
    assert not engine.scheduler.waiting, "it waits for its blocks, not in the engine's queue"
    engine.run()
    # 700 - 134 = 566: 512 may be hit. A ring of 262 tokens had only the window at 640 at the end.
    assert seq.cached_hit_tokens == 384 and seq.swa_valid_start == 256
    assert engine.kvfs.counts["hit_tokens"] == seq.cached_hit_tokens


def test_a_slot_needs_no_replay(place: Place) -> None:
    engine, tokens = place.start(), some(Random(1), 700)
    engine.ask("one", tokens)
    engine.run()
    place.stop()
    engine = place.start()
    seq = engine.ask("two", tokens + some(Random(2), 200))
    engine.run()
    assert seq.cached_hit_tokens == 640 and not seq.swa_valid_start
    assert engine.kvfs.counts["replayed_tokens"] == 0


def test_a_replay_leaves_the_stored_block_as_it_is(place: Place) -> None:
    """Without a slot: one window is computed anew, and its block put back afterwards."""
    engine, tokens = place.start(policy="zero"), some(Random(2), 700)
    engine.ask("one", tokens)
    engine.run()
    seq = engine.ask("two", tokens)
    engine.run()
    # 700 - 134 = 566: 512 may be hit, 384 are without a slot, the last block of it replayed.
    assert seq.cached_hit_tokens == 384 and seq.swa_valid_start == 256
    assert engine.kvfs.counts["replayed_tokens"] == 128
    assert not engine.kvfs.counts["failed"] and engine.kvfs.pool is None


def test_a_replay_in_two_chunks(place: Place) -> None:
    engine, tokens = place.start(policy="zero", budget=100), some(Random(2), 700)
    engine.ask("one", tokens)
    engine.run()
    seq = engine.ask("two", tokens)
    engine.run()
    assert seq.cached_hit_tokens == 384 and seq.swa_valid_start == 256


def test_a_replay_that_is_not_put_back_is_found(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, tokens = place.start(policy="zero"), some(Random(2), 700)
    engine.ask("one", tokens)
    engine.run()
    monkeypatch.setattr(type(engine.kvfs.loader), "restore", lambda *a: None)
    engine.ask("two", tokens)
    with pytest.raises(AssertionError, match="two"):
        engine.run()


def test_without_replay_there_is_no_hit_without_a_slot(place: Place) -> None:
    engine, tokens = place.start(policy="zero", replay=False), some(Random(3), 700)
    engine.ask("one", tokens)
    engine.run()
    seq = engine.ask("two", tokens)
    engine.run()
    assert seq.cached_hit_tokens == 0


@pytest.mark.parametrize("when", ["at once", "allocated", "queued", "running"])
def test_an_aborted_request_frees_everything(place: Place, when: str) -> None:
    engine, tokens = place.start(), some(Random(4), 700)
    engine.ask("one", tokens)
    engine.run()
    seq = engine.ask("two", tokens, 50)
    if when != "at once":
        engine.kvfs.loader.poll()
        assert seq.block_table
    if when in ("queued", "running"):
        assert engine.kvfs.loader.settle(20)
    if when == "running":
        engine.step()
    assert engine.abort_request("two") == (1, seq.get_len())
    engine.run()
    assert engine.ended["two"] is fake.Status.FINISHED_ABORTED
    assert engine.quiet and not engine.kvfs.loader.held


def test_a_request_that_gets_no_blocks_is_computed(place: Place) -> None:
    engine, tokens = place.start(fetch_seconds=1.0), some(Random(5), 700)
    engine.ask("one", tokens)
    engine.run()
    taken = engine.block_manager.allocate(len(engine.block_manager.free))
    seq = engine.ask("two", tokens)
    assert not engine.kvfs.loader.settle(20)  # what is stored is there, but no block for it
    while engine.kvfs.loader.held:
        engine.kvfs.loader.poll()
    assert list(engine.scheduler.waiting) == [seq] and not seq.block_table
    engine.block_manager.unpin_blocks(taken)
    engine.run()
    assert seq.cached_hit_tokens == 0 and engine.kvfs.counts["loads_without_room"] == 1


@pytest.mark.expect_logs(r"kvfs\.connectors\.deepinfer_load WARNING: two: no hit")
def test_an_engine_that_takes_no_state_computes(place: Place) -> None:
    engine, tokens = place.start(), some(Random(6), 700)
    engine.ask("one", tokens)
    engine.run()

    def refuse(*args: Any) -> None:
        raise AssertionError("truncation is off")

    cache = engine.driver_worker.cache_engine.gpu_cache
    cache.load_state_from_store_to_prefill_cache = refuse
    seq = engine.ask("two", tokens + some(Random(7), 200))
    engine.run()
    assert seq.cached_hit_tokens == 0 and engine.quiet


@pytest.mark.expect_logs(r"kvfs\.connectors\.deepinfer_load WARNING: two: no hit")
def test_a_request_is_computed_where_there_is_no_thread_for_its_load(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, tokens = place.start(), some(Random(6), 700)
    engine.ask("one", tokens)
    engine.run()
    tickets, fetch = [], engine.kvfs.loader._fetcher.fetch

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("can't start new thread")

    def note(*args: Any, **kwargs: Any) -> Any:
        tickets.append(fetch(*args, **kwargs))
        return tickets[-1]

    monkeypatch.setattr(engine.kvfs.loader._fetcher, "fetch", note)
    monkeypatch.setattr(engine.kvfs.loader._thread, "submit", refuse)
    seq = engine.ask("two", tokens)
    assert list(engine.scheduler.waiting) == [seq] and not engine.kvfs.loader.held
    assert [ticket.held for ticket in tickets] == [False]
    engine.run()
    assert seq.cached_hit_tokens == 0 and engine.quiet
    assert engine.kvfs.counts["loads_failed"] == 1


@pytest.mark.expect_logs(r"kvfs\.connectors\.deepinfer_load (WARNING: one: no hit|ERROR: one: not)")
def test_a_request_the_engine_does_not_take_stops_no_other(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, tokens = place.start(), some(Random(6), 700)
    engine.ask("stored", tokens)
    engine.run()
    add = engine.scheduler.add_sequence

    def refuse(seq: Any) -> None:
        if seq.request_id == "one":
            raise AssertionError("of no use")
        add(seq)

    monkeypatch.setattr(engine.scheduler, "add_sequence", refuse)
    engine.ask("one", tokens)
    two = engine.ask("two", tokens)
    engine.run()
    assert two.cached_hit_tokens and engine.ended["two"] is fake.Status.FINISHED_STOPPED


def test_what_comes_of_a_fetch_is_told_to_the_store(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 5 blocks the third is damaged: a hit of two, and why it was not more."""
    hits, misses = [], []
    monkeypatch.setattr(Store, "note_hit", lambda *args: hits.append(args[-1]))
    monkeypatch.setattr(Store, "note_miss", lambda self, reason: misses.append(reason))
    engine, tokens = place.start(), some(Random(6), 700)
    engine.ask("one", tokens)
    engine.run()
    place.stop()
    assert not hits and not misses
    row = fake.row_of(tokens, 2)
    (path,) = [p for p in place.path.rglob("*.seg") if row in p.read_bytes()]
    path.write_bytes(path.read_bytes().replace(row, bytes(len(row))))
    engine = place.start()
    engine.ask("two", tokens)
    engine.run()
    assert hits == [2] and misses == ["checksum of part kv"]


def test_pictures_are_neither_stored_nor_hit(place: Place) -> None:
    """Their tokens do not say which picture it is."""
    engine, tokens = place.start(), some(Random(7), 700)
    engine.ask("one", tokens)
    engine.run()
    stored = engine.kvfs.counts["stored_blocks"]
    seq = engine.add_request("u", "two", {"max_tokens": 4}, tokens + [1] * 300, {"image": 1})
    engine.run()
    assert seq.cached_hit_tokens == 0 and engine.kvfs.counts["stored_blocks"] == stored


def test_what_does_not_fit_is_not_stored(place: Place) -> None:
    engine = place.start(save_bytes=4 * fake.BLOCK_BYTES)
    engine.ask("one", some(Random(8), 700))
    engine.run()
    # 5 blocks at the end of the prefill, and the same again at the end of the request.
    assert engine.kvfs.counts["stored_blocks"] == 0 and engine.kvfs.counts["dropped_blocks"] == 10
    assert engine.quiet


def pinned(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """Host memory that is registered with CUDA, where there is CUDA, and not given back."""
    live: set[Any] = set()

    class Noted(host_memory.Pinned):
        def __init__(self, memory: Any, **options: Any) -> None:
            super().__init__(memory, **options)
            live.add(self)

        def close(self) -> None:
            super().close()
            live.discard(self)

    monkeypatch.setattr(host_memory, "Pinned", Noted)
    return live


def test_all_memory_is_given_back(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what a replay reads its block into."""
    live = pinned(monkeypatch)
    engine, tokens = place.start(policy="zero"), some(Random(2), 700)
    engine.ask("one", tokens)
    engine.run()
    held = set(live)
    for name in ("two", "three"):
        engine.ask(name, tokens)
        engine.run()
    assert engine.kvfs.counts["replayed_tokens"] == 256
    # Besides the memory of saves there is the arena, which is pinned as long as its fetcher lives.
    assert len(live - held) == 1
    place.stop()
    assert not live


def test_the_memory_for_saves_is_what_they_take(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what they asked for: a state is not put where many rows would fit."""
    live, most = pinned(monkeypatch), 21 * fake.BLOCK_BYTES
    monkeypatch.setattr(deepinfer_save, "_UNIT", 1)
    engine = place.start(save_bytes=most)
    saver, gate = engine.kvfs.saver, threading.Event()
    pages, tokens = engine.block_manager.allocate(20), some(Random(3), 20 * BLOCK)

    def late() -> list[int]:
        gate.wait(60)
        return tokens

    state = deepinfer_save.State(BLOCK, 0, engine.kvfs.memory.states, 1)
    assert saver.take(lambda: tokens, 0, 20, pages, []) and saver.flush(60)
    try:
        assert saver.take(late, 1, 1, [], [state])
        assert saver.take(late, 0, 14, pages[:14], [])
        assert not saver.take(late, 0, 2, pages[:2], []), "both are still there"
        assert sum(pin.size for pin in live) <= most
    finally:
        gate.set()
    assert saver.flush(60) and saver.take(late, 0, 2, pages[:2], []) and saver.flush(60)
    assert not engine.kvfs.counts["failed"]


def test_a_save_that_cannot_begin_gives_its_memory_back(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = pinned(monkeypatch)
    engine = place.start()
    pages, saver = engine.block_manager.allocate(2), engine.kvfs.saver

    def refuse(ids: Any) -> None:
        raise AssertionError("these are nobody's")

    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="nobody's"):
        patch.setattr(engine.block_manager, "pin_blocks", refuse)
        saver.take(lambda: [], 0, 2, pages, [])
    assert saver.flush(60) and len(live) == 1
    assert saver.take(lambda: some(Random(3), 300), 0, 2, pages, []) and saver.flush(60)
    assert len(live) == 1, "it is used again"
    place.stop()
    assert not live


@pytest.mark.expect_logs(r"kvfs\.connectors\.deepinfer_save WARNING: not stored: this copy fails")
def test_a_state_that_was_not_copied_is_no_slot(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any) -> None:
        raise RuntimeError("this copy fails")

    monkeypatch.setattr(deepinfer_save._ToHost, "run", fail)
    engine = place.start()
    engine.ask("one", some(Random(9), 700))
    engine.run()
    assert engine.kvfs.counts["stored_blocks"] == 5 and not engine.kvfs.pool.metas()
    assert engine.quiet


def test_two_steps_under_way_take_a_longer_ring() -> None:
    """Where the next step is scheduled before the last one is known, it may have overwritten what
    the window needs: then nothing is stored, rather than something wrong."""
    memory = measure(fake.FakeEngine(extra=0).driver_worker.cache_engine, model="m", weights="w",
                     tokenizer="t")  # fmt: skip
    assert memory.ring is not None and memory.big is not None
    for in_flight, overshoot, whole in ((0, 5, True), (6, 0, True), (6, 1, False)):
        slots, account = Slots(memory.ring, memory.big, Policy("last"), in_flight), Account()
        slots.begin(account, 1270)
        end = 1280 + overshoot
        assert not slots.wants_copy(account, end - 6)
        assert slots.wants_copy(account, end) == whole
        slots.completed(account)
        assert (slots.at_end(account) is not None) == whole


# refusals


def test_engines_and_settings_that_cannot_work(place: Place) -> None:
    settings = Settings(str(place.path), weights="w", tokenizer="t")
    for change in (
        {"engine_type": SimpleNamespace(name="PROMPT")},
        {"parallel_config": SimpleNamespace(context_parallel_size=2)},
    ):
        engine = Engine()
        vars(engine).update(change)
        with pytest.raises(ConfigError):
            engine.start_kvfs(settings, release=RELEASE)
    with pytest.raises(ConfigError, match="block_table"):
        Engine().start_kvfs(settings, release=RELEASE._replace(sequence=object))
    engine = Engine()
    engine.driver_worker.cache_engine.cache_config.block_size = 96
    with pytest.raises(ConfigError, match="96 tokens"):
        engine.start_kvfs(settings, release=RELEASE)
    for wrong in (
        {"weights": ""}, {"tokenizer": ""}, {"policy": "full"}, {"fetch_seconds": 0.0},
        {"save_bytes": -1}, {"arena_bytes": 0}, {"slot_bytes": -1},
    ):  # fmt: skip
        with pytest.raises(InputError):
            Settings(**{"store": "s", "weights": "w", "tokenizer": "t", **wrong})


def test_two_pages_make_a_block() -> None:
    engine = fake.FakeEngine()
    cache = engine.driver_worker.cache_engine
    cache.cache_config.block_size = 64
    memory = measure(cache, model="m", weights="w", tokenizer="t")
    assert memory.per_block == 2 and memory.identity.block_tokens == 128
    assert memory.identity.row_bytes == 2 * fake.BLOCK_BYTES
    assert {k: tuple(t.shape) for k, t in memory.tensors().items()} == {
        (layer, "kv"): (40, size) for layer, _, size in fake.LAYOUT
    }


def test_padding_of_a_state_is_not_stored() -> None:
    memory = measure(fake.FakeEngine().driver_worker.cache_engine, model="m", weights="w",
                     tokenizer="t")  # fmt: skip
    state = torch.arange(memory.state_bytes, dtype=torch.int64).to(torch.uint8)
    data = memory.slot_of(state)
    assert len(data) == memory.identity.state.slot_bytes
    assert torch.equal(memory.slot_of(memory.state_of(data.numpy().tobytes())), data)
