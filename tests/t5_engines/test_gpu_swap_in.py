"""Swap-in keeps its promises on a device that breaks everything it did not promise."""

from __future__ import annotations

import threading
from random import Random
from typing import Any

import gpu_fakes as fakes
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvfs.errors import InputError
from kvfs.gpu.batched import Batch, Strided
from kvfs.gpu.strategies import Direct, Pages, Staged, Strategy
from kvfs.gpu.streams import CpuDevice, CpuEvent
from kvfs.gpu.swap_in import SwapIn, Swapper

COPIES = fakes.FakeCopies()
STRATEGIES = (Direct(), Pages(), Staged(), Batch(COPIES), Strided(COPIES))
IDENTITY = fakes.identity()
LAYERS = sorted({s.layer for s in IDENTITY.spans})


class Case:
    """One request of `wanted` blocks on a fake device."""

    def __init__(
        self, seed: int, *, wanted: int = 20, per_block: int = 1, fails: Any = lambda copy: False,
        strategy: Strategy = STRATEGIES[0], device: Any = None, **ticket: Any,
    ) -> None:  # fmt: skip
        random = Random(seed)
        self.per_block = per_block
        self.device = device or fakes.FakeDevice(random, fails)
        self.tensors = fakes.pages(IDENTITY, (wanted + 5) * per_block, per_block)
        self.ticket = fakes.FakeTicket(IDENTITY, wanted, random, **ticket)
        self.table = random.sample(range((wanted + 5) * per_block), wanted * per_block)
        self.swapper = Swapper(self.tensors, IDENTITY, strategy=strategy, device=self.device)

    def start(self, hit: int = 1 << 20) -> SwapIn:
        return self.swapper.swap_in(fakes.plan(hit), self.ticket, self.table)

    def check(self, layer: int, blocks: int) -> None:
        """Every byte of the layer of these blocks is in its page."""
        for span in IDENTITY.spans:
            for block in range(blocks) if span.layer == layer else ():
                have = fakes.found(self.tensors, span, self.table, block, self.per_block)
                assert have == fakes.expected(self.ticket.rows[block], span), (span, block)

    def forward(self, swap: SwapIn) -> int:
        """What an engine does; returns the blocks it counted on."""
        usable = swap.usable_blocks()
        for layer in LAYERS:
            assert swap.wait_layer(layer)
            self.check(layer, usable)
        assert swap.finish() == usable
        return usable

    def forward_once(self) -> int:
        return self.forward(self.start())


seeds = st.integers(0, 1 << 32)


@given(seeds, st.sampled_from(STRATEGIES), st.sampled_from([1, 2, 4]), st.data())
def test_a_layer_is_whole_when_its_wait_returns(
    seed: int, strategy: Strategy, per_block: int, data: Any
) -> None:
    wanted = data.draw(st.integers(1, 80))
    lands = data.draw(st.integers(0, wanted))
    case = Case(seed, wanted=wanted, lands=lands, per_block=per_block, strategy=strategy)
    swap = case.start()
    assert case.forward(swap) == lands
    assert swap.reason == ("" if lands == wanted else "checksum")
    assert case.ticket.released == 1


@given(seeds, st.sampled_from(STRATEGIES))
def test_a_stream_that_waits_reads_whole_layers(seed: int, strategy: Strategy) -> None:
    case = Case(seed, strategy=strategy)
    compute = case.device.stream()
    swap = case.start()
    usable = swap.usable_blocks()
    read: dict[int, Any] = {}
    for layer in LAYERS:
        assert swap.wait_layer(layer, compute)
        compute.submit(Read(case, layer, usable, read))
    compute.record().wait()
    assert swap.finish() == usable == 20
    assert read == dict.fromkeys(LAYERS)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_a_thousand_forward_passes(strategy: Strategy) -> None:
    """And another thousand on a worker thread, that really runs beside this one."""
    for seed in range(1000):
        assert Case(seed, strategy=strategy).forward_once() == 20
        case = Case(seed, strategy=strategy, device=CpuDevice())
        with case.swapper:
            assert case.forward_once() == 20


class Read(fakes.Work):
    def __init__(self, case: Case, layer: int, blocks: int, into: dict[int, Any]) -> None:
        super().__init__()
        self.act = lambda: case.check(layer, blocks)
        self.layer, self.into = layer, into

    def run(self) -> None:
        self.into[self.layer] = "wrong bytes"
        self.act()
        self.into[self.layer] = None

    def attempt(self) -> None:
        try:
            self.run()
        except AssertionError as e:
            self.into[self.layer] = e


@given(seeds, st.sampled_from(STRATEGIES), st.sampled_from(IDENTITY.spans), st.integers(0, 79))
def test_a_part_that_was_not_copied_ends_the_prefix(
    seed: int, strategy: Strategy, span: Any, block: int
) -> None:
    """Main KV is of no use without its indexer, and the other way round."""
    failed = []

    def fails(copy: Any) -> bool:
        size = sum(map(len, copy.piece.records))
        bad = copy.part.name == (span.layer, span.part)
        if bad and copy.piece.first <= block < copy.piece.first + size:
            failed.append(copy.piece.first)
            return True
        return False

    case = Case(seed, wanted=80, fails=fails, strategy=strategy)
    swap = case.start()
    promised = swap.usable_blocks()
    whole = all([swap.wait_layer(layer) for layer in LAYERS])
    usable = swap.finish()
    assert failed == [usable] and usable <= block
    assert whole == (promised == usable)
    assert f"{span.part} of layer {span.layer}" in swap.reason
    for layer in LAYERS:
        case.check(layer, usable)


@given(seeds, st.integers(0, 60), st.sampled_from(STRATEGIES), st.booleans())
def test_after_an_abort_the_pages_belong_to_others(
    seed: int, steps: int, strategy: Strategy, enqueued: bool
) -> None:
    case = Case(seed, wanted=60, strategy=strategy)
    swap = case.start()
    if enqueued:
        assert swap.usable_blocks() == 60
    for _ in range(steps):
        case.device.step()
    assert swap.abort()
    assert case.ticket.released == 1
    for tensor in case.tensors.values():
        tensor.fill_(0x77)
    case.device.drain()
    assert all(bool((t == 0x77).all()) for t in case.tensors.values())
    assert swap.usable_blocks() == swap.finish() == 0


@given(seeds, st.integers(0, 60), st.booleans())
def test_an_abort_lets_go_of_everything(seed: int, steps: int, enqueued: bool) -> None:
    """Ticket, arena, copies and thread, wherever it was."""
    case = Case(seed, wanted=60)
    swap = case.start()
    if enqueued:
        assert swap.usable_blocks() == 60
    for _ in range(steps):
        case.device.step()
    assert swap.abort() and swap.over(0)
    assert case.ticket.released == 1
    assert not case.swapper.arenas.used
    assert not any(swap._copies.values())
    swap._thread.join(60)
    assert not swap._thread.is_alive()


def test_an_abort_does_not_wait_for_a_fetch_that_never_ends() -> None:
    case = Case(1, wanted=20, lands=3)
    case.ticket.never_ends = True
    swap = case.start()
    assert case.ticket.moved.wait(10)
    assert swap.abort(10)
    assert case.ticket.released == 1
    assert not swap.wait_layer(0)


@given(seeds)
def test_a_late_fetch_is_a_shorter_prefix(seed: int) -> None:
    case = Case(seed, wanted=40, lands=17)
    case.ticket.never_ends = True
    swap = case.start()
    assert case.ticket.moved.wait(10)
    assert swap.usable_blocks(0.001) == 17
    for layer in LAYERS:
        assert swap.wait_layer(layer)
        case.check(layer, 17)
    assert swap.finish() == 17


@given(seeds, st.integers(1, 7))
def test_blocks_that_were_lost_while_they_were_copied_do_not_count(seed: int, at: int) -> None:
    copied = []

    def loses(copy: Any) -> bool:
        copied.append(copy)
        case.ticket.lost = case.ticket.lost or len(copied) == at
        return False

    case = Case(seed, fails=loses)
    swap = case.start()
    promised = swap.usable_blocks()
    assert promised in (0, 20)
    sound = [swap.wait_layer(layer) for layer in LAYERS]
    assert swap.finish() == 0
    assert "lost" in swap.reason
    if at == 1 and promised:
        assert not any(sound)


def test_no_more_than_the_hit_and_the_table() -> None:
    case = Case(4)
    assert case.forward(case.start(hit=7)) == 7
    case = Case(4)
    case.table = case.table[:11]
    assert case.forward(case.start()) == 11
    case = Case(4, first=5)
    assert case.forward(case.start(hit=12)) == 7


@pytest.mark.parametrize("table", [[0, 1, 999], [0, -1], [3, 3], "abc", [None], [1.5, "x"]])
def test_a_block_table_that_does_not_fit_is_a_miss(table: Any) -> None:
    case = Case(5)
    before = {k: t.clone() for k, t in case.tensors.items()}
    case.table = table
    swap = case.start()
    assert swap.usable_blocks() == 0 and "block table" in swap.reason
    assert swap.finish() == 0 and case.ticket.released == 1
    case.device.drain()
    assert all(torch.equal(before[k], t) for k, t in case.tensors.items())


@pytest.mark.expect_logs(r"kvfs\.gpu\.swap_in ERROR: swap-in")
def test_a_ticket_that_raises_is_a_miss() -> None:
    case = Case(6)
    case.ticket.wait = lambda *a: 1 / 0  # type: ignore[method-assign]
    swap = case.start()
    assert swap.usable_blocks() == 0 and "ZeroDivisionError" in swap.reason
    assert swap.finish() == 0 and case.ticket.released == 1


def test_without_a_thread_it_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(6)

    def refuse(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    swap = case.start()
    assert swap.usable_blocks() == swap.finish() == 0 and "thread" in swap.reason
    assert swap.abort() and case.ticket.released == 1


@given(seeds, st.booleans())
def test_copies_wait_for_who_used_the_pages_before(seed: int, load: bool) -> None:
    case = Case(seed)
    compute = case.device.stream()
    seen: list[int] = []
    compute.submit(Former(case, seen))
    if load:
        swap = case.swapper.load(case.ticket, case.table, compute.record())
    else:
        swap = case.swapper.swap_in(fakes.plan(99), case.ticket, case.table, compute.record())
    assert case.forward(swap) == 20
    case.device.drain()
    assert seen == [fakes.POISON]


class Former(fakes.Work):
    """Reads the pages, as a kernel of their former owner does."""

    def __init__(self, case: Case, seen: list[int]) -> None:
        super().__init__()
        self.case, self.seen = case, seen

    def run(self) -> None:
        for tensor in self.case.tensors.values():
            self.seen.extend(v for v in tensor.unique().tolist() if v not in self.seen)


# mutations: what was left out must be found by the tests above


def _no_wait(self: SwapIn, layer: int, stream: Any = None) -> bool:
    self._decided.wait()
    return True


def _events_come_early(self: SwapIn, piece: Any, last: bool) -> None:
    if last:
        for layer in self._layout.layers:
            self._events[layer] = self._swapper.stream.record()
    ENQUEUE(self, piece, False)


def _settle_at_once(self: SwapIn) -> None:
    self._settled = True
    self._ticket.release()


ENQUEUE = SwapIn._enqueue
MUTATIONS = [
    ("wait_layer", _no_wait),
    ("_settle", _settle_at_once),
    ("_enqueue", _events_come_early),
]


def _caught(case: Case) -> bool:
    try:
        case.forward(case.start())
    except AssertionError:
        return True
    finally:
        case.device.drain()
    return False


@pytest.mark.parametrize(("name", "mutant"), MUTATIONS)
def test_a_missing_wait_is_found(name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(_caught(Case(seed)) for seed in range(10))
    monkeypatch.setattr(SwapIn, name, mutant)
    assert any(_caught(Case(seed)) for seed in range(200))


def test_an_abort_that_keeps_something_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwapIn, "_settle", lambda self: None)
    with pytest.raises(AssertionError):
        test_an_abort_lets_go_of_everything.hypothesis.inner_test(1, 5, True)  # type: ignore


def test_blocks_that_are_counted_on_too_early_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    usable = SwapIn.usable_blocks

    def too_many(self: SwapIn, timeout: float | None = None) -> int:
        usable(self, timeout)  # ends the wait for a fetch that never does
        wanted: int = self._ticket.wanted
        return wanted

    monkeypatch.setattr(SwapIn, "usable_blocks", too_many)
    with pytest.raises(AssertionError):
        test_a_late_fetch_is_a_shorter_prefix.hypothesis.inner_test(1)  # type: ignore


def test_a_missing_drain_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwapIn, "_settle", _settle_at_once)
    with pytest.raises(AssertionError):
        for seed in range(200):
            test_after_an_abort_the_pages_belong_to_others.hypothesis.inner_test(  # type: ignore
                seed, 5, STRATEGIES[0], True
            )


def test_a_missing_fence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes.FakeStream, "wait_for", lambda self, event: None)
    with pytest.raises(AssertionError):
        for seed in range(200):
            test_copies_wait_for_who_used_the_pages_before.hypothesis.inner_test(  # type: ignore
                seed, False
            )


# the CPU device


@pytest.mark.parametrize("strategy", [*STRATEGIES, None], ids=lambda s: s and s.name)
@pytest.mark.parametrize("per_block", [1, 4])
def test_on_a_cpu(strategy: Strategy | None, per_block: int) -> None:
    case = Case(8, wanted=100, strategy=strategy, device=CpuDevice(), per_block=per_block)
    with case.swapper as swapper:
        assert case.forward(case.start()) == 100
        assert (swapper.choice is None) == (strategy is not None)


@given(seeds, st.integers(0, 30), st.sampled_from(STRATEGIES))
def test_a_load_is_done_when_it_returns(seed: int, lands: int, strategy: Strategy) -> None:
    """In the calling thread, and without one for the stream."""
    device = CpuDevice(inline=True)
    case = Case(seed, wanted=30, lands=lands, strategy=strategy, device=device)
    before = threading.active_count()
    swap = case.swapper.load(case.ticket, case.table)
    assert threading.active_count() == before
    assert swap.over(0) and case.ticket.released == 1
    for layer in LAYERS:
        case.check(layer, lands)
    assert swap.finish() == swap.usable_blocks() == lands
    case.swapper.close()


def test_requests_at_once() -> None:
    cases = [Case(seed, device=CpuDevice(), wanted=50) for seed in range(4)]
    threads = [threading.Thread(target=c.forward, args=(c.start(),)) for c in cases]
    for thread in threads:
        thread.start()
    for case, thread in zip(cases, threads, strict=True):
        thread.join()
        case.swapper.close()
        assert case.ticket.released == 1


def test_cpu_streams_wait_for_each_other() -> None:
    device = CpuDevice()
    one, two = device.stream(), device.stream()
    gate, seen = CpuEvent(), []
    one.wait_for(gate)
    one.submit(Append(seen, 1))
    two.wait_for(one.record())
    two.submit(Append(seen, 2))
    event = two.record()
    assert not event.wait(0)
    gate.set()
    assert event.wait() and seen == [1, 2]
    one.close()
    two.close()


class Append(fakes.Work):
    def __init__(self, to: list[int], value: int) -> None:
        super().__init__()
        self.to, self.value = to, value

    def run(self) -> None:
        self.to.append(self.value)


# what is refused at the start


@pytest.mark.parametrize("change", ["missing", "dtype", "size", "count", "extra"])
def test_tensors_that_do_not_fit_are_refused(change: str) -> None:
    tensors = fakes.pages(IDENTITY, 8)
    if change == "missing":
        del tensors[1, "index"]
    elif change == "extra":
        tensors[9, "kv"] = tensors[0, "kv"]
    else:
        shape = {"size": (8, 90), "count": (9, 96)}.get(change, (8, 96))
        dtype = torch.int8 if change == "dtype" else torch.uint8
        tensors[0, "kv"] = torch.zeros(shape, dtype=dtype)
    with pytest.raises(InputError):
        Swapper(tensors, IDENTITY)
