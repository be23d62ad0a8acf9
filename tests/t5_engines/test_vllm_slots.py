"""The window that vLLM can replay: kept in slots, loaded from there, or replayed. No engine."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-engines")

import torch
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_halves import IDS, TABLE, Half, config_of, request, v41

from kvfs.connectors.vllm import KvfsConnector
from kvfs.connectors.vllm_slots import Finder, Search
from kvfs.connectors.vllm_window import measure_window, window_groups, window_tables
from kvfs.gpu.streams import CpuDevice, CpuEvent
from kvfs.gpu.swap_in import Swapper
from kvfs.peers.client import PeerClient, Pulled
from kvfs.peers.wire import Holder
from kvfs.state.directory import Directory
from kvfs.state.slot import Anchor
from kvfs.state.slots import SlotPool

pytestmark = pytest.mark.engines

WINDOW = 1
"""vLLM's group of the windows; the other one is 0."""
THERE = list(range(20, 30))
PATIENT = {"slot_seconds": 60.0, "slot_bytes": 8 << 20}


def prefilled(halves: Any, ids: list[int] = IDS, **more: Any) -> Half:
    """A process that has computed a prompt in two steps."""
    half: Half = halves(v41(), **PATIENT, **more)
    compute(half, request(ids))
    return half


def compute(half: Half, r: Any, tables: Any = (TABLE, TABLE)) -> None:
    assert asked(half, r) == 0
    half.compute(r, 0, 300, tables)
    half.compute(r, 300, r.num_tokens - 300, tables)
    assert half.worker.flush(10)


def asked(half: Half, r: Any, computed: int = 0) -> int:
    """What vLLM is told to the end, however often it has to ask."""
    while (hit := half.scheduler.matched(r, computed)) is None:
        time.sleep(0.001)
    return int(hit)


def restored(half: Half, r: Any) -> tuple[int, ...]:
    """The groups that vLLM is told are loaded."""
    connector = object.__new__(KvfsConnector)
    connector._scheduler, connector._kv_cache_config = half.scheduler, half.config
    scheduler = SimpleNamespace(
        connector=connector, prefix_replay_tokens=128, prefix_replay_group_ids=(WINDOW,)
    )
    groups = connector.get_loaded_kv_cache_group_ids(r)
    # What vLLM makes of them: whether the window is there, and how many tokens it replays.
    loaded = Scheduler._load_restores_replay_window(scheduler, r)
    assert loaded == (WINDOW in groups)
    assert Scheduler._mark_prefix_replay(scheduler, r, 512, loaded) == (0 if loaded else 128)
    r.replay_start = 0
    return groups


def pool_of(half: Half) -> SlotPool:
    return SlotPool.open(half.identity, directory=half.shm)


def layers(half: Half) -> list[str]:
    return list(half.config.kv_cache_groups[WINDOW].layer_names)


def same_window(one: Half, other: Half) -> bool:
    """Whether the window before 512 is in THERE of `one` as it is in TABLE of the other."""
    return all(
        torch.equal(one.caches[name][THERE[3]], other.caches[name][TABLE[3]])
        for name in layers(one)
    )


# served


def test_a_window_goes_from_process_to_process(halves: Any) -> None:
    first, second = prefilled(halves), halves(v41(), seed=2, **PATIENT)
    assert first.worker.stats().data["slots_stored"] == 1
    before = {name: second.caches[name].clone() for name in layers(second)}
    r = request(IDS)
    assert asked(second, r) == 512 and restored(second, r) == (0, WINDOW)
    assert second.load(r, 512, (THERE, THERE))
    assert same_window(second, first)
    others = [i for i in range(len(next(iter(before.values())))) if i != THERE[3]]
    for name, cache in before.items():
        assert torch.equal(second.caches[name][others], cache[others])
    assert second.worker.stats().data["slots_loaded"] == 1
    assert restored(second, r) == (0, WINDOW)  # vLLM asks again when the load has ended


def test_a_load_waits_for_what_vllm_has_enqueued(
    halves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For window and blocks, in vLLM's own thread, which alone knows the stream it computes in."""
    prefilled(halves)
    second, r, load = halves(v41(), seed=2, **PATIENT), request(IDS), Swapper.load
    fences: list[tuple[int, Any]] = []
    waited: list[tuple[int, Any]] = []

    def fence(self: Any) -> Any:
        event = CpuEvent()
        event.set()
        fences.append((threading.get_ident(), event))
        return event

    def spy(self: Any, ticket: Any, tables: Any, after: Any = None) -> Any:
        waited.append((threading.get_ident(), after))
        return load(self, ticket, tables, after)

    monkeypatch.setattr(CpuDevice, "fence", fence)
    monkeypatch.setattr(Swapper, "load", spy)
    assert asked(second, r) == 512 and restored(second, r) == (0, WINDOW)
    assert second.load(r, 512, (THERE, THERE))
    ((thread, event),) = fences
    assert thread == threading.get_ident()
    assert [after is event for _, after in waited] == [True, True]
    assert thread not in dict(waited)


def test_windows_of_blocks_of_any_size(halves: Any) -> None:
    """Two groups, whose windows begin within a block, and end with different ones."""
    mla = kv.MLAAttentionSpec(block_size=128, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    windows = [
        kv.SlidingWindowMLASpec(
            block_size=size, num_kv_heads=1, head_size=64, dtype=torch.bfloat16,
            sliding_window=200, bounded_replay=True,
        )
        for size in (32, 64)
    ]  # fmt: skip
    config, table = config_of(mla, *windows), list(range(1, 25))
    first, second = halves(config, **PATIENT), halves(config, seed=2, **PATIENT)
    r = request(IDS)
    compute(first, r, (table, table, table))
    other = [*range(25, 40), *range(10, 19)]
    assert asked(second, r) == 512
    assert second.load(r, 512, ([*range(5)], other, other))
    for group, needed in ((1, range(9, 16)), (2, range(4, 8))):
        for name in config.kv_cache_groups[group].layer_names:
            for i in needed:
                assert torch.equal(second.caches[name][other[i]], first.caches[name][table[i]])


def test_a_short_prompt_has_a_short_window() -> None:
    (group,) = window_groups(v41(), 128)
    long = replace(group, window=300)
    assert window_tables([[], [7, 8, 9, 10]], [long], 512) == ([8, 9, 10],)
    assert window_tables([[], [7, 8]], [long], 256) == ([0, 7, 8],)
    assert window_tables([[], [7, 0, 9, 10]], [long], 512) == ()
    assert window_tables([[], [7, 8, 9]], [long], 512) == ()


def test_a_model_without_such_windows_has_no_slots() -> None:
    mla = kv.MLAAttentionSpec(block_size=128, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    assert measure_window(config_of(mla), {}, 128) is None
    assert window_groups(v41(), 64) == ()  # its blocks are longer than ours


def test_of_what_is_generated_the_last_window_is_kept(halves: Any) -> None:
    half, r = prefilled(halves), request(IDS, "other")
    assert asked(half, r) == 512
    r.append_output_token_ids(list(range(3000, 3300)))
    for done in range(600, 890, 10):
        half.compute(r, done, 10, (TABLE, TABLE))
    assert half.worker.flush(10)
    with pool_of(half) as pool:
        assert sorted(meta.position for meta in pool.metas()) == [512, 768]


def test_a_search_has_hashers_of_its_own(halves: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on while the request's are extended and asked for lineages."""
    half, seen = prefilled(halves), []
    search = Finder.search

    def spy(self: Finder, pool: Any, hashers: Any, end: int) -> Search:
        seen.extend(hashers)
        return search(self, pool, hashers, end)

    monkeypatch.setattr(Finder, "search", spy)
    assert asked(half, request(IDS, "other")) == 512
    ((_, own),) = half.scheduler._requests["other"].hashers
    assert seen and own not in seen


# not served


def gone(half: Half) -> None:
    with pool_of(half) as pool:
        assert len(pool.clear()) == 1


def damaged(half: Half) -> None:
    with pool_of(half) as pool:
        path, at = Path(pool.path), pool.file_bytes
    data = bytearray(path.read_bytes())
    with pool_of(half) as pool:
        (meta,) = pool.metas()
        slot = pool.read(Anchor(meta.anchor, meta.position, meta.lineage))
    assert slot is not None
    at = data.find(bytes(slot.data)[:64])
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([data[at] ^ 1]))


def of_other_tokens(half: Half) -> None:
    """The chain's hash is the same, as if it had been forged; the lineage is not."""
    with pool_of(half) as pool:
        (meta,) = pool.clear()
        pool.write(Anchor(meta.anchor, meta.position, b"x" * 16), bytes(pool.slot_bytes))


@pytest.mark.parametrize("spoil", [gone, damaged, of_other_tokens])
def test_without_its_slot_the_window_is_replayed(halves: Any, spoil: Any) -> None:
    first, second = prefilled(halves), halves(v41(), seed=2, **PATIENT)
    spoil(first)
    before = {name: second.caches[name].clone() for name in layers(second)}
    r = request(IDS)
    assert asked(second, r) == 512 and restored(second, r) == (0,)
    assert second.load(r, 512, (THERE, THERE))
    for name, cache in before.items():
        assert torch.equal(second.caches[name], cache)


def test_a_slot_elsewhere_is_of_no_use(halves: Any) -> None:
    second = prefilled(halves)
    r = request(IDS[:300], "shorter")
    assert asked(second, r) == 256 and restored(second, r) == (0,)
    longer = request([*IDS, *range(4000, 4300)], "longer")
    assert asked(second, longer) == 512 and restored(second, longer) == (0, WINDOW)


@pytest.mark.parametrize("room", [True, False], ids=["given away", "no room"])
def test_a_slot_that_is_lost_behind_the_offer_fails_the_load(halves: Any, room: bool) -> None:
    first, second = prefilled(halves), halves(v41(), seed=2, **PATIENT)
    r = request(IDS)
    assert asked(second, r) == 512 and restored(second, r) == (0, WINDOW)
    if room:
        gone(first)
    assert not second.load(r, 512, (THERE, THERE if room else [0] * 10))
    assert second.worker.stats().data["loads_failed"] == 1
    assert asked(second, r) == 512 and restored(second, r) == (0,)
    assert second.load(r, 512, (THERE, THERE))


def test_a_replayed_window_is_not_kept(halves: Any) -> None:
    """Nor one that reaches back into the replay; those behind it are."""
    half, r = halves(v41(), **PATIENT), request([*IDS, *range(4000, 4200)])
    assert asked(half, r) == 0
    r.replay_start = 384  # of a hit of 512 tokens
    half.compute(r, 0, 600, (TABLE, TABLE))
    assert half.worker.flush(10) and "slots_stored" not in half.worker.stats().data
    half.compute(r, 600, 200, (TABLE, TABLE))
    assert half.worker.flush(10) and half.worker.stats().data["slots_stored"] == 1


def test_a_tenant_has_windows_of_its_own(halves: Any) -> None:
    half = prefilled(halves)
    gone(half)
    compute(half, request(IDS, "s", cache_salt="tenant"))
    own, other = request(IDS, "own", cache_salt="tenant"), request(IDS, "other")
    assert asked(half, own) == asked(half, other) == 512
    assert (restored(half, own), restored(half, other)) == ((0, WINDOW), (0,))


def test_who_looks_too_long_replays() -> None:
    """vLLM's scheduler does not wait: it is told to ask again, and then that there is none."""
    never: Future[bool] = Future()
    assert Search(512, time.monotonic() + 1000, never).there() is None
    assert Search(512, time.monotonic() - 1, never).there() is False
    never.set_exception(OSError())
    assert Search(512, time.monotonic() + 1000, never).there() is False


def test_without_memory_for_slots_all_is_replayed(halves: Any) -> None:
    half = halves(v41(), slot_bytes=0)
    compute(half, request(IDS))
    r = request(IDS, "again")
    assert asked(half, r) == 512 and restored(half, r) == (0,)


def test_a_pool_of_another_worker_is_not_used(halves: Any, expect_logs: Any) -> None:
    expect_logs("is not the pool of its worker")
    half = prefilled(halves)
    other = Finder.open(half.settings, half.scheduler.store, [(half.identity, b"o" * 16)], half.shm)
    assert other is None


# from another host


class Neighbour:
    """Another host, which answers for its pool as kvfs.peers does; in place of the client."""

    def __init__(self, half: Half) -> None:
        self.half = half

    def pull(
        self, holder: Holder, nsid: bytes, anchor: Anchor, layout: Any, deadline: float, into: Any
    ) -> Pulled:
        with pool_of(self.half) as pool:
            meta = pool.lookup(anchor)
            assert holder.pool == pool.pool_id and nsid == self.half.identity.nsid
            if meta is None or meta.generation != holder.generation:
                return Pulled(None, "another generation")
            return Pulled(pool.read(anchor), "")

    def close(self) -> None:
        pass


@pytest.mark.parametrize("stale", [False, True])
def test_another_hosts_window(halves: Any, tmp_path: Path, stale: bool) -> None:
    """A hint of a generation that is gone is of no use, though there is a newer slot."""
    secret = tmp_path / "secret"
    secret.write_text("a secret of the fleet, long enough")
    secret.chmod(0o600)
    first = prefilled(halves)
    second = halves(v41(), seed=2, shm="other", secret_file=str(secret), **PATIENT)
    finder = second.scheduler._finder
    assert isinstance(finder._client, PeerClient)
    finder._client = Neighbour(first)
    with pool_of(first) as pool:
        Directory(first.worker.store, pool, address="192.0.2.1:7").announce(pool.metas())
        second.scheduler.store.catch_up()
        if stale:
            (meta,) = pool.metas()
            anchor = Anchor(meta.anchor, meta.position, meta.lineage)
            slot = pool.read(anchor)
            assert slot is not None
            pool.clear()
            pool.write(anchor, slot.data)
    r = request(IDS)
    assert asked(second, r) == 512
    assert restored(second, r) == ((0,) if stale else (0, WINDOW))
    if not stale:  # it is on this host now, and the other one is not needed any more
        assert second.load(r, 512, (THERE, THERE))
        assert same_window(second, first)
