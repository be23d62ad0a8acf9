"""The connector's two halves against vLLM's own classes, without an engine."""

from __future__ import annotations

import errno
import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-engines")

import torch
from prometheus_client import Counter, Gauge, Histogram
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm_halves import (
    IDLE,
    IDS,
    PAGES,
    TABLE,
    TOKENS,
    config_of,
    full,
    request,
    sliding,
    stored,
    tensors,
    v41,
)

from kvfs.connectors import vllm as vllm_connector
from kvfs.connectors import vllm_layout, vllm_worker
from kvfs.connectors.vllm import KvfsConnector
from kvfs.connectors.vllm_layout import Layout, groups_of, measure
from kvfs.connectors.vllm_meta import COUNTERS, KvfsPromMetrics, KvfsStats, Meta, WorkerNews
from kvfs.connectors.vllm_request import Known
from kvfs.connectors.vllm_window import loaded_group_ids
from kvfs.errors import InputError
from kvfs.gpu.host_memory import Landed
from kvfs.gpu.paged import HOLE
from kvfs.gpu.swap_in import Swapper
from kvfs.testing.faults import CutAt, Fail

pytestmark = pytest.mark.engines

# layout


def test_groups_are_told_by_the_class_of_their_spec() -> None:
    """A full group that carries a window needs all of its blocks nevertheless."""
    config = config_of(full(sliding_window=128), sliding(128), sliding(100, tokens=32))
    first, second, third = groups_of(config)
    assert (first.window, second.window, third.window) == (None, 128, 100)
    assert list(first.needed(512)) == list(range(8))
    assert list(second.needed(512)) == [6, 7]
    assert list(third.needed(512)) == [12, 13, 14, 15]
    assert list(second.needed(0)) == []


def test_a_window_needs_what_vllm_keeps() -> None:
    """The blocks that vLLM does not skip when so many tokens are computed."""
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    for window in (1, 63, 64, 65, 128, 200):
        (group,) = groups_of(config_of(sliding(window)))
        manager = SimpleNamespace(sliding_window=window, extra_retained_tokens=0)
        for tokens in range(64, 640, 64):
            skipped = SlidingWindowManager.get_num_skipped_tokens(manager, tokens)
            assert group.needed(tokens).start <= max(0, skipped) // 64
            assert group.needed(tokens).stop == tokens // 64


def test_an_unknown_kind_is_refused() -> None:
    spec = kv.ChunkedLocalAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=8, dtype=torch.float32, attention_chunk_size=128
    )
    with pytest.raises(InputError, match="ChunkedLocalAttentionSpec is not known"):
        groups_of(config_of(spec))


def test_a_row_comes_back_as_it_was() -> None:
    config = config_of(full(), sliding(128, tokens=32))
    source, target = tensors(config, 1), tensors(config, 2)
    out, into = measure(config, source, 128), measure(config, target, 128)
    assert out.block_tokens == 128 and out.row_bytes == 4 * 128 * 64
    rows = out.gather(([1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11, 12]))
    ticket = Landed(rows[1].numpy(), out.row_bytes, out.row_bytes, 1)
    with into.swapper() as swapper:
        swap = swapper.load(ticket, [[11, 12], [21, 22, HOLE, 24]])
        assert swap.finish() == 1, swap.reason
    for name in config.kv_cache_groups[0].layer_names:
        assert torch.equal(target[name][[11, 12]], source[name][[3, 4]])
    untouched = tensors(config, 2)
    for name in config.kv_cache_groups[1].layer_names:
        assert torch.equal(target[name][[21, 22, 24]], source[name][[9, 10, 12]])
        assert torch.equal(target[name][0], untouched[name][0])


@pytest.mark.parametrize("rows_at_once", [0, 1, 2, 5])
def test_rows_are_put_together_on_a_gpu_as_on_a_cpu(
    rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(full(), sliding(128, tokens=32))
    layout = measure(config, tensors(config, 1), 128)
    tables = (list(range(1, 11)), [*range(20, 30), 0, 0, *range(30, 38)])
    into = torch.zeros(5, layout.row_bytes, dtype=torch.uint8)
    monkeypatch.setattr(vllm_layout, "STAGING_BYTES", rows_at_once * layout.row_bytes)
    vllm_layout._gather_there(layout.pages, tables, into, layout.pieces)
    assert torch.equal(into, layout.gather(tables))


def test_dimensions_in_any_order_in_memory_and_kernel_blocks() -> None:
    config = config_of(full())
    names = config.kv_cache_groups[0].layer_names
    plain = tensors(config, 1)
    turned = {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in plain.items()}
    halved = {n: t.view(PAGES * 2, 1, TOKENS // 2, 16) for n, t in plain.items()}
    rows = [measure(config, c, 128).gather(([3, 4],)) for c in (plain, turned, halved)]
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2])
    strided = {n: torch.zeros((PAGES, 1, TOKENS, 32))[..., ::2] for n in names}
    with pytest.raises(InputError, match="not dense"):
        measure(config, strided, 128)


# the window that vLLM can replay


@pytest.mark.parametrize(
    ("slot", "groups"), [(None, (0,)), (1152, (0,)), (1280, (0, 1)), (1408, (0,))]
)
def test_the_slot_decides_which_groups_are_loaded(slot: int | None, groups: Any) -> None:
    assert loaded_group_ids(v41(), 1280, slot) == groups


def test_a_window_that_is_replayed_is_in_no_block() -> None:
    assert [g.index for g in groups_of(v41())] == [0]


# from one process to another


@pytest.mark.parametrize("specs", [(full(),), (full(), sliding(128)), (sliding(100),)])
def test_blocks_go_from_process_to_process(halves: Any, specs: Any) -> None:
    config = config_of(*specs)
    first, second = stored(halves, config), halves(config, seed=2)
    r, table = request(IDS), list(range(20, 30))
    assert second.scheduler.matched(r, 0) == 512
    assert second.load(r, 512, tuple([table] * len(specs)))
    for group, found in zip(config.kv_cache_groups, groups_of(config), strict=True):
        for name in group.layer_names:
            for i in range(8):
                same = torch.equal(second.caches[name][20 + i], first.caches[name][1 + i])
                assert same == (i in found.needed(512)), (name, i)


def test_blocks_are_swapped_in(halves: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load is one swap-in; one that ends early is a load that failed, and nothing is counted."""
    swaps: list[Any] = []
    load = Swapper.load

    def spy(self: Any, ticket: Any, tables: Any, after: Any) -> Any:
        if len(swaps) == 1:
            ticket.wanted = ticket.good = ticket.good - 1
        swaps.append(load(self, ticket, tables, after))
        return swaps[-1]

    monkeypatch.setattr(Swapper, "load", spy)
    second = stored(halves, config_of(full()))
    for name, whole in (("b", True), ("c", False)):
        r = request(IDS, name)
        assert second.scheduler.matched(r, 0) == 512
        assert second.load(r, 512, (list(range(20, 30)),)) == whole
    assert [swap.finish() for swap in swaps] == [4, 3]


def test_only_what_vllm_has_not_is_loaded(halves: Any) -> None:
    config = config_of(full())
    first, second = stored(halves, config), halves(config, seed=2)
    before = {n: t.clone() for n, t in second.caches.items()}
    r = request(IDS)
    assert second.scheduler.matched(r, 192) == 320
    assert second.load(r, 320, (list(range(20, 30)),))
    for name, cache in second.caches.items():
        assert torch.equal(cache[[20, 21, 22]], before[name][[20, 21, 22]])
        assert torch.equal(cache[23:28], first.caches[name][4:9])


@pytest.mark.parametrize(
    ("length", "hit"), [(1, 0), (128, 0), (129, 128), (256, 128), (257, 256), (600, 512)]
)
def test_a_token_is_left_to_compute(halves: Any, length: int, hit: int) -> None:
    second = stored(halves, config_of(full()))
    assert second.scheduler.matched(request(IDS[:length], "other"), 0) == hit


ERRORS = [
    errno.EIO, errno.EACCES, errno.ESTALE, errno.ENODEV, errno.ETIMEDOUT, errno.EISDIR,
    errno.ENOENT,
]  # fmt: skip


@pytest.mark.parametrize("fault", [*(Fail(e) for e in ERRORS), CutAt(30_000, errno.EIO)], ids=str)
def test_a_read_that_fails_is_computed(halves: Any, backend: Any, fault: Any) -> None:
    """The load fails, the worker lives, and another prompt is served right after it."""
    config = config_of(full(), sliding(128))
    first, second = stored(halves, config), halves(config, seed=2)
    r, tables = request(IDS), (list(range(20, 30)),) * 2
    assert second.scheduler.matched(r, 0) == 512
    with backend.during("readv", "seg/*", do=fault, times=None):
        assert not second.load(r, 512, tables)
    assert second.worker.stats().data["loads_failed"] == 1
    again = second.scheduler.matched(r, 0)
    assert again in (0, 512)  # gone for good, or out of reach for a moment
    if again:
        assert second.load(r, again, tables)
    other = request(IDS[:300], "other")
    assert second.scheduler.matched(other, 0) in (0, 256)
    assert first.worker.stats() is None


def test_a_request_is_not_loaded_for_ever(halves: Any, backend: Any) -> None:
    config = config_of(full())
    stored(halves, config)
    second, r = halves(config, seed=2), request(IDS)
    with backend.during("readv", "seg/*", do=Fail(errno.ETIMEDOUT), times=None):
        for _ in range(2):
            assert second.scheduler.matched(r, 0) == 512
            assert not second.load(r, 512, (list(range(20, 30)),))
        assert second.scheduler.matched(r, 0) == 0


def test_what_a_failed_load_did_not_bring_is_stored_again(halves: Any, backend: Any) -> None:
    config = config_of(full())
    stored(halves, config)
    second, r, tables = halves(config, seed=2), request(IDS), (list(range(20, 30)),)
    assert second.scheduler.matched(r, 0) == 512
    with backend.during("readv", "seg/*", do=Fail(errno.EIO), times=None):
        assert not second.load(r, 512, tables)
    assert second.scheduler.matched(r, 0) == 0
    second.compute(r, 0, 600, tables)
    assert second.worker.flush(10)
    assert second.worker.stats().data["stored_blocks"] == 4
    assert second.scheduler.matched(request(IDS, "again"), 0) == 512


# saving


def test_a_full_disk_drops_saves(halves: Any, backend: Any, expect_logs: Any) -> None:
    expect_logs("not stored")
    half, r = halves(config_of(full())), request(IDS)
    assert half.scheduler.matched(r, 0) == 0
    with backend.during("writev", "seg/*", do=Fail(errno.ENOSPC), times=None):
        half.compute(r, 0, 300, (TABLE,))
        half.compute(r, 300, 300, (TABLE,))
        assert half.worker.flush(10)
    assert half.worker.stats().data["saves_failed"] >= 1


def test_saves_that_do_not_fit_are_dropped(halves: Any) -> None:
    row = 2 * 128 * 64
    half, r = halves(config_of(full()), save_bytes=3 * row), request(IDS)
    assert half.scheduler.matched(r, 0) == 0
    half.compute(r, 0, 600, (TABLE,))
    assert half.worker.flush(10)
    assert half.worker.stats().data == {"saves_dropped_blocks": 4}


def test_blocks_that_cannot_be_copied_are_not_stored(halves: Any, expect_logs: Any) -> None:
    """vLLM's step goes on, and what is taken after them is stored."""
    expect_logs("not stored")
    half, r = halves(config_of(full())), request(IDS)
    assert half.scheduler.matched(r, 0) == 0
    half.compute(r, 0, 600, ([PAGES + i for i in range(10)],))
    other = request(IDS[:300], "other")
    assert half.scheduler.matched(other, 0) == 0
    half.compute(other, 0, 300, (TABLE,))
    assert half.worker.flush(10)
    assert half.worker.stats().data == {
        "saves_failed": 1, "stored_blocks": 2, "stored_bytes": 2 * 2 * 128 * 64,
    }  # fmt: skip


def test_puts_wait_for_loads(halves: Any, backend: Any) -> None:
    config = config_of(full())
    stored(halves, config)
    second, r = halves(config, seed=2), request(IDS)
    other = request(list(range(5000, 5300)), "other")
    held, go = threading.Event(), threading.Event()

    def hold(call: Any) -> Any:
        held.set()
        assert go.wait(10)
        return call.proceed()

    assert second.scheduler.matched(r, 0) == 512
    assert second.scheduler.matched(other, 0) == 0
    with backend.during("readv", "seg/*", do=hold, times=1):
        second.scheduler.allocated(r, (list(range(20, 30)),), 512)
        second.compute(other, 0, 300, ([30, 31, 32, 33, 34],))
        assert held.wait(10)
        assert not second.worker.flush(0.2)
        go.set()
        assert second.worker.flush(10)
    assert second.worker.stats().data["stored_blocks"] == 2


def test_generated_tokens_are_stored_once_they_are_known(halves: Any) -> None:
    """A step may compute drafts, or tokens of which the scheduler has not heard yet."""
    half, r = halves(config_of(full())), request(IDS[:127])
    assert half.scheduler.matched(r, 0) == 0
    half.compute(r, 0, 127, ([1, 2],))
    half.compute(r, 127, 5, ([1, 2, 3],))
    assert half.worker.stats() is None
    r.append_output_token_ids(7)
    half.compute(r, 127, 5, ([1, 2, 3],))
    assert half.worker.flush(10) and half.worker.stats().data["stored_blocks"] == 1


def test_a_window_that_has_passed_is_not_stored(halves: Any) -> None:
    half, r = halves(config_of(full(), sliding(64))), request(IDS)
    assert half.scheduler.matched(r, 0) == 0
    half.compute(r, 512, 88, (TABLE, [0] * 7 + [8, 9, 10]))
    assert half.worker.flush(1) and half.worker.stats() is None


# who is cached


@pytest.mark.parametrize(
    "more",
    [
        {"mm_features": [SimpleNamespace()]},
        {"lora_request": SimpleNamespace(lora_name="unknown")},
    ],
    ids=["image", "adapter that is not known yet"],
)
def test_requests_that_are_not_cached(halves: Any, more: dict[str, Any]) -> None:
    half = stored(halves, config_of(full()))
    half.scheduler.stats.reset()
    r = request(IDS, "other")
    for name, value in more.items():
        setattr(r, name, value)
    assert half.scheduler.matched(r, 0) == 0
    assert half.scheduler.matched(r, 0) == 0
    assert half.scheduler.stats.data == {"requests_not_cacheable": 1}  # however often vLLM asks
    half.compute(r, 0, 600, (TABLE,))
    assert half.worker.flush(1) and half.worker.stats() is None


def test_after_a_reset_nothing_is_served(halves: Any) -> None:
    half = stored(halves, config_of(full()))
    half.scheduler.stop()
    assert half.scheduler.matched(request(IDS, "other"), 0) == 0


# whatever goes wrong


class Tickets:
    """In place of a fetch process: all that is asked for is there at once."""

    def __init__(self) -> None:
        self.hashers: list[Any] = []
        self.held = 0

    def fetch(self, ns: Any, plan: Any, hasher: Any, *, first: int, blocks: int, **_: Any) -> Any:
        self.hashers.append(hasher)
        self.held += 1
        return SimpleNamespace(ns=ns, good=blocks, done=True, reason="", release=self._release)

    def _release(self) -> None:
        self.held -= 1

    def close(self) -> None:
        pass


def hit(half: Any, r: Any, computed: int = 0) -> int:
    while (tokens := half.scheduler.matched(r, computed)) is None:
        pass
    return int(tokens)


@pytest.mark.parametrize("saves", [True, False], ids=["kv_both", "kv_consumer"])
def test_what_was_fetched_is_let_go_of_when_the_request_runs(halves: Any, saves: bool) -> None:
    half = stored(halves, config_of(full()))
    half.scheduler._fetcher, half.scheduler.saves = Tickets(), saves
    r = request(IDS, "other")
    assert hit(half, r) == 512 and half.scheduler._fetcher.held == 1
    half.compute(r, 512, 88, (TABLE,))
    assert half.scheduler._fetcher.held == 0


def test_a_fetch_has_a_hasher_of_its_own(halves: Any) -> None:
    """A hasher belongs to one thread: a fetch that is under way does not see the next look-up."""
    half, tickets = stored(halves, config_of(full())), Tickets()
    half.scheduler._fetcher = tickets
    r = request(IDS, "other")
    assert hit(half, r) == 512
    r.append_output_token_ids([7] * 200)
    assert hit(half, r, 128) == 384  # vLLM's own cache has changed meanwhile
    (_, own), (first, second) = half.scheduler._requests["other"].hashers[0], tickets.hashers
    assert len({id(own), id(first), id(second)}) == 3
    assert (first.n_tokens, second.n_tokens, own.n_tokens) == (600, 800, 800)
    assert first.hashes(4) == own.hashes(4) and first.lineages(4) == own.lineages(4)


def connector_of(half: Any, **more: Any) -> KvfsConnector:
    connector = object.__new__(KvfsConnector)
    connector._scheduler, connector._worker, connector._adapters = half.scheduler, None, None
    for name, value in more.items():
        setattr(connector, name, value)
    return connector


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("can't start new thread")


def test_nothing_raises_into_the_scheduler(
    halves: Any, monkeypatch: pytest.MonkeyPatch, expect_logs: Any
) -> None:
    expect_logs("failed; it counts as a miss: can't start new thread")
    half, r = stored(halves, config_of(full())), request(IDS, "other")
    half.scheduler.stats.reset()
    connector = connector_of(half)
    with monkeypatch.context() as patched:
        for name in ("_matched", "heard", "finished"):
            patched.setattr(half.scheduler, name, broken)
        assert connector.get_num_new_matched_tokens(r, 0) == (0, False)
        connector.update_connector_output(SimpleNamespace(kv_connector_worker_meta=WorkerNews()))
        assert connector.request_finished(r, []) == (False, None)
    assert half.scheduler.stats.data["errors"] == 3
    assert connector.get_num_new_matched_tokens(r, 0) == (512, True)
    assert connector.build_connector_meta(IDLE) == Meta()


def test_a_load_that_cannot_be_handed_over_is_one_that_failed(
    halves: Any, monkeypatch: pytest.MonkeyPatch, expect_logs: Any
) -> None:
    """vLLM waits for it: to say nothing would leave the request waiting for ever."""
    expect_logs("update_state_after_alloc failed")
    half, r = stored(halves, config_of(full())), request(IDS, "other")
    connector = connector_of(half)
    assert connector.get_num_new_matched_tokens(r, 0) == (512, True)
    monkeypatch.setattr(half.scheduler, "allocated", broken)
    blocks = SimpleNamespace(get_block_ids=lambda: (TABLE,))
    connector.update_state_after_alloc(r, blocks, 512)
    half.worker.start_loads(connector.build_connector_meta(IDLE))
    while not (loaded := half.worker.loaded()):
        pass
    assert loaded == {"other": False}


def test_a_save_that_goes_wrong_is_that_requests_alone(halves: Any, expect_logs: Any) -> None:
    """The worker hears of the others' tokens without a gap, or their blocks would be misnamed."""
    expect_logs("_save failed; it counts as a miss")
    half, good, bad = halves(config_of(full())), request(IDS, "good"), request(IDS[1:], "bad")
    for r in (good, bad):
        assert half.scheduler.matched(r, 0) == 0
    cached = SimpleNamespace(req_ids=["good", "bad"], num_computed_tokens=[0, 0])
    tables = {"good": (TABLE,), "bad": None}
    state = SimpleNamespace(get_block_ids=lambda name: tables[name] or broken())
    output = SimpleNamespace(
        scheduled_new_reqs=[], scheduled_cached_reqs=cached, kv_connector_block_state=state,
        num_scheduled_tokens={"good": 300, "bad": 300},
    )  # fmt: skip
    half.step(output)
    tables["bad"] = (TABLE,)
    half.compute(bad, 300, 299, (TABLE,))
    half.compute(good, 300, 300, (TABLE,))
    assert half.worker.flush(10) and half.worker.stats().data["stored_blocks"] == 4
    assert half.scheduler.matched(request(IDS, "again"), 0) == 512


@pytest.mark.parametrize("part", ["SaveMemory", "swapper", "thread"])
def test_a_worker_that_cannot_start_is_off_and_leaves_nothing_open(
    halves: Any, monkeypatch: pytest.MonkeyPatch, expect_logs: Any, part: str
) -> None:
    expect_logs("kvfs is off in this worker, and so in the engine")
    half, closed = halves(config_of(full())), []
    connector = connector_of(
        half, _settings=half.settings, _kv_cache_config=half.config, _vllm_config=None
    )
    store = SimpleNamespace(create_namespace=broken, close=lambda: closed.append(part))
    store.create_namespace = lambda *_, **__: None
    monkeypatch.setattr(vllm_connector, "_open", lambda settings: store)
    monkeypatch.setattr(vllm_connector, "_backends", lambda *_: "b")
    monkeypatch.setattr(KvfsConnector, "_identity", lambda *_: half.identity)
    target = {"SaveMemory": (vllm_worker, part), "swapper": (Layout, part)}
    owner, name = target.get(part, (threading.Thread, "start"))
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, broken)
        connector.register_kv_caches(half.caches)
    assert connector._worker is None and connector.get_handshake_metadata() is None
    assert closed == [part]


def test_a_save_that_fails_behind_its_request_leaves_nothing(
    halves: Any, backend: Any, expect_logs: Any
) -> None:
    expect_logs("not stored")
    half, r = halves(config_of(full())), request(IDS)
    held, go = threading.Event(), threading.Event()

    def fail_late(call: Any) -> Any:
        held.set()
        assert go.wait(60)
        raise OSError(errno.ENOSPC, "no room")

    assert half.scheduler.matched(r, 0) == 0
    with backend.during("writev", "seg/*", do=fail_late, times=None):
        half.compute(r, 0, 600, (TABLE,))
        assert held.wait(60)
        half.scheduler.finished(r)
        half.worker.take_saves(half.scheduler.meta(IDLE))
        go.set()
        half.worker.close()  # behind all that is queued
    assert half.worker._off == set()


# figures and events


def test_news_of_several_workers_stay_apart() -> None:
    one = WorkerNews({"a": {b"1": (0, 4)}, "b": {b"1": (0, 2)}}, {"x"})
    two = WorkerNews({"a": {b"2": (0, 3)}, "c": {b"2": (0, 2)}}, {"y"})
    both = one.aggregate(two)
    assert both.failed == {"x", "y"}
    assert both.stored == {
        "a": {b"1": (0, 4), b"2": (0, 3)}, "b": {b"1": (0, 2)}, "c": {b"2": (0, 2)},
    }  # fmt: skip


def test_stored_is_what_all_workers_have_stored() -> None:
    """Each at its own pace: in another step, of another length, or not at all."""
    r = Known(None, "", "")
    assert r.all_have({b"1": (0, 4)}, 2) is None
    assert r.all_have({b"2": (0, 3)}, 2) == (0, 3)
    assert r.all_have({b"1": (4, 6)}, 2) is None
    assert r.all_have({b"2": (3, 5)}, 2) == (3, 5)
    assert r.all_have({b"2": (3, 5)}, 2) is None
    assert r.all_have({b"2": (8, 9)}, 2) is None  # and nothing is said of what is between
    assert r.all_have({b"1": (6, 9)}, 2) == (8, 9)


def test_stats_add_up() -> None:
    one, two = KvfsStats(data={"loads": 1, "load_seconds": 0.25}), KvfsStats(data={"loads": 2})
    assert one.aggregate(two).reduce() == {"loads": 3, "load_seconds": 0.25}
    assert not one.is_empty() and KvfsStats().is_empty()
    assert KvfsConnector.build_kv_connector_stats({"loads": 1}).data == {"loads": 1}


def test_prometheus_counters() -> None:
    config = SimpleNamespace(kv_transfer_config=None)
    kinds = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    prom = KvfsPromMetrics(config, kinds, ["engine"], {0: ["0"]})
    prom.observe({"loads": 2, "load_bytes": 10, "something newer": 1})
    assert prom._counters["loads"][0]._value.get() == 2
    assert set(prom._counters) == set(COUNTERS)


def test_events_name_blocks_as_vllm_does(halves: Any) -> None:
    half = stored(halves, config_of(full()))
    r = request(IDS)
    r.block_hashes = [bytes([i]) * 32 for i in range(9)]
    connector = object.__new__(KvfsConnector)
    connector._scheduler, connector._events = half.scheduler, True
    connector._kv_cache_config = SimpleNamespace(hash_block_size=64)
    half.scheduler._requests["r"].request = r
    half.scheduler.heard(WorkerNews({"r": {b"w": (2, 4)}}))
    (event,) = connector.take_events()
    named = [maybe_convert_block_hash(h) for h in r.block_hashes]
    assert event.block_hashes == named[4:8] and event.block_size == 64
    assert event.parent_block_hash == named[3] and event.medium == "STORAGE"
    assert event.token_ids == IDS[256:512]
    assert connector.take_events() == []


def test_meta_is_plain_data() -> None:
    import pickle

    assert pickle.loads(pickle.dumps(Meta())) == Meta()
