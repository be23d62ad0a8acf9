"""Figures of swap-in: `kvctl bench swap-in`, or `python -m kvfs.gpu.bench` for a line of JSON each.

swap.control         what the thread of a swap-in computes for 1,022 blocks of a model with 60
                     layers, each with main KV and indexer, from plan to enqueued copies; at most
                     3 ms. Figure `with_torch_calls_ms`: and the calls of torch that enqueue them,
                     on blocks so few that copying is nothing; on a GPU they are in the time itself
swap.control.batch   the same with all addresses computed, for copies in batches; without a GPU
                     nobody takes them
swap.copy.*          128 K tokens of DeepSeek-V4.1-Flash by each strategy, beside one large copy of
                     as many bytes, pinned where there is a GPU. Figure `multiprocessors`: those it
                     takes of the device
swap.overlap         on a GPU alone: time of a forward pass that waits for each layer of a swap-in
                     in turn; beside: forward alone, and swap-in first and forward then

Makes no store: records lie in memory, as after a fetch. Takes less than a minute.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from kvfs import presets
from kvfs.bench.timing import Case, Options, Row, compared, in_turns, timed
from kvfs.gpu.batched import Batch
from kvfs.gpu.choosing import Choice, choose, strategies
from kvfs.gpu.found import look
from kvfs.gpu.host_memory import HostBuffer, Landed
from kvfs.gpu.paged import PagedLayout
from kvfs.gpu.strategies import Strategy
from kvfs.gpu.streams import CpuDevice, CudaDevice
from kvfs.gpu.swap_in import Swapper
from kvfs.layout import Identity, Span
from kvfs.record import Shape

BLOCKS = 1022
CONTROL_LAYERS, CONTROL_LIMIT = 60, 0.003
_STRETCHES = 5
_RUNS = 7
_MATMULS, _SIDE = 4, 4096
_TRIAL_PAGES = 256


class Ticket(Landed):
    """A ticket whose blocks are all there, in five stretches of pinned memory."""

    def __init__(self, identity: Identity, blocks: int) -> None:
        stride = Shape.of(identity).stride
        self.memory = HostBuffer(blocks * stride)
        super().__init__(
            self.memory.view, stride, identity.row_bytes, blocks, stretches=_STRETCHES,
            pinned=self.memory.pin.pinned,
        )  # fmt: skip

    @property
    def hit_blocks(self) -> int:
        """It is its own plan."""
        return self.wanted


def device() -> Any:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pages(identity: Identity, count: int) -> dict[tuple[int, str], Any]:
    return {
        (s.layer, s.part): torch.zeros((count, s.length), dtype=torch.uint8, device=device())
        for s in identity.spans
    }


def sixty_layers() -> Identity:
    """A row of 60 layers with 512 bytes of main KV and 64 of indexer: what is copied is little."""
    spans = []
    for layer in range(CONTROL_LAYERS):
        spans.append(Span(layer, "kv", layer * 576, 512))
        spans.append(Span(layer, "index", layer * 576 + 512, 64))
    return Identity("layers-60", "none", "none", tuple(spans), CONTROL_LAYERS * 576, "opaque")


def run(options: Options) -> Iterator[Row]:
    """Yields the rows `swap.*`."""
    runs = options.runs or _RUNS
    options.progress("swap-in: control path")
    yield _control(runs)
    yield _control_of_batches(runs)
    options.progress("swap-in: copies")
    yield from _copies(runs)
    if torch.cuda.is_available():
        options.progress("swap-in: overlap")
        yield _overlap(runs)
    else:
        options.progress("swap-in: no GPU, so no overlap to measure")


def _table() -> list[int]:
    made = torch.Generator().manual_seed(1)
    return list(torch.randperm(BLOCKS, generator=made).tolist())


def _control(runs: int) -> Row:
    identity = sixty_layers()
    tensors = pages(identity, BLOCKS)
    strategy = strategies(PagedLayout(tensors, identity))[0]
    with Swapper(tensors, identity, strategy=strategy) as swapper:
        seconds = _enqueued(swapper, identity, runs)
        calls = seconds if torch.cuda.is_available() else seconds + _calls(swapper.layout, runs)
    return Row(
        "swap.control", seconds, runs, _control_text(strategy), limit_seconds=CONTROL_LIMIT,
        figures={"with_torch_calls_ms": calls * 1000},
        limits={"with_torch_calls_ms": CONTROL_LIMIT * 1000},
    )  # fmt: skip


def _control_of_batches(runs: int) -> Row:
    identity = sixty_layers()
    tensors, real = pages(identity, BLOCKS), Batch()
    strategy = Batch(_Nobody()) if real.problem(PagedLayout(tensors, identity)) else real
    device = None if strategy is real else CpuDevice(inline=True)
    with Swapper(tensors, identity, strategy=strategy, device=device) as swapper:
        seconds = _enqueued(swapper, identity, runs)
    return Row(
        "swap.control.batch", seconds, runs, _control_text(strategy), limit_seconds=CONTROL_LIMIT
    )


def _control_text(strategy: Strategy) -> str:
    return f"plan to enqueued copies, {BLOCKS} blocks and {CONTROL_LAYERS} layers, {strategy.name}"


def _enqueued(swapper: Swapper, identity: Identity, runs: int) -> float:
    ticket, table, found = Ticket(identity, BLOCKS), _table(), []
    for _ in range(runs + 1):
        swap = swapper.swap_in(ticket, ticket, table)
        if swap.finish() != BLOCKS:
            raise AssertionError(swap.reason)
        found.append(swap.control_seconds)
    return statistics.median(found[1:])


class _Nobody:
    """Takes addresses and copies nothing."""

    def problem(self, call: str) -> str:
        return ""

    def attribute(self, number: int, device: int) -> int:
        return 0

    def batch(self, sources: Any, targets: Any, size: int) -> None: ...

    def rectangle(self, *where: int) -> None: ...


def _calls(layout: PagedLayout, runs: int) -> float:
    """The least seconds of a thread in torch for the copies of a piece of one block, which are the
    calls without the copying."""
    page, found = torch.zeros(1, dtype=torch.int64), []
    row = torch.zeros((1, layout.row_bytes), dtype=torch.uint8)
    for _ in range(10 * runs):
        start = time.thread_time()
        staged = torch.empty_like(row)
        staged.copy_(row)
        for part in layout.parts:
            part.wide.index_copy_(0, page, part.cells(staged))
        found.append(time.thread_time() - start)
    return min(found)


def _copies(runs: int) -> Iterator[Row]:
    identity = presets.get("deepseek-v4.1-flash", weights="none", tokenizer="none")
    ticket, table, tensors = Ticket(identity, BLOCKS), _table(), pages(identity, BLOCKS)
    size = BLOCKS * identity.row_bytes
    into = torch.empty(size, dtype=torch.uint8, device=device())
    source = ticket.memory.tensor()[:size]

    def plain() -> None:
        into.copy_(source, non_blocking=True)
        _synchronize()

    reference = "one copy of the same bytes"
    cases: dict[str, Case] = {reference: partial(timed, plain)}
    swappers = {}
    choice = _chosen()
    for strategy in strategies(PagedLayout(tensors, identity)):
        if strategy.name in choice.seconds:
            swapper = swappers[strategy.name] = Swapper(tensors, identity, strategy=strategy)
            cases[strategy.name] = partial(_whole, swapper, ticket, table)
    for case in cases.values():
        case()
    found = in_turns(cases, runs)
    for name, swapper in swappers.items():
        swapper.close()
        seconds, base, ratio = compared(found[name], found[reference])
        chosen = choice.strategy is not None and name == choice.strategy.name
        yield Row(
            f"swap.copy.{name}", seconds, runs,
            f"{BLOCKS} blocks by strategy {name}" + ", the one that is chosen" * chosen,
            ratio=ratio, reference=reference, reference_seconds=base,
            figures={
                "gigabytes_a_second": size / seconds / 1e9,
                "multiprocessors": swapper.strategy.sms(swapper.layout),
            },
        )  # fmt: skip


def _chosen() -> Choice:
    """What a swapper of that model chooses here."""
    identity = presets.get("deepseek-v4.1-flash", weights="none", tokenizer="none")
    layout = PagedLayout(pages(identity, _TRIAL_PAGES), identity)
    where = CudaDevice(device()) if torch.cuda.is_available() else CpuDevice()
    return choose(layout, where, Shape.of(identity).stride)


def _whole(swapper: Swapper, ticket: Ticket, table: list[int]) -> float:
    return timed(swapper.swap_in(ticket, ticket, table).finish)


def _overlap(runs: int) -> Row:
    """A forward pass is some products of matrices for each layer that has KV of its own."""
    identity = presets.get("deepseek-v4.1-flash", weights="none", tokenizer="none")
    ticket, table, tensors = Ticket(identity, BLOCKS), _table(), pages(identity, BLOCKS)
    a = torch.randn((_SIDE, _SIDE), dtype=torch.bfloat16, device=device())
    layers = sorted({s.layer for s in identity.spans})
    stream = CudaDevice(a.device).current()

    def forward(swap: Any = None) -> None:
        for layer in layers:
            if swap is not None:
                swap.wait_layer(layer, stream)
            for _ in range(_MATMULS):
                torch.mm(a, a)
        _synchronize()

    with Swapper(tensors, identity) as swapper:

        def together() -> None:
            swap = swapper.swap_in(ticket, ticket, table)
            forward(swap)
            swap.finish()

        def in_turn() -> None:
            swapper.swap_in(ticket, ticket, table).finish()
            forward()

        work = {"together": together, "forward": forward, "in turn": in_turn}
        for each in work.values():
            each()
        found = in_turns({k: partial(timed, w) for k, w in work.items()}, runs)
    seconds, base, ratio = compared(found["together"], found["in turn"])
    return Row(
        "swap.overlap", seconds, runs, "forward with swap-in", ratio=ratio,
        reference="swap-in, then forward", reference_seconds=base,
        figures={"forward_alone_ms": statistics.median(found["forward"]) * 1000},
    )  # fmt: skip


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    """Prints what is there, what is chosen and what is not possible, then a row a line."""
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    began = time.monotonic()
    choice = _chosen()
    for fact in look():
        print(json.dumps(fact._asdict()))
    chosen = None if choice.strategy is None else choice.strategy.name
    about = {"device": where, "chosen": chosen, "unavailable": choice.unavailable}
    print(json.dumps(about), flush=True)
    for row in run(Options(progress=_say)):
        print(json.dumps(row.to_json()), flush=True)
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"seconds": seconds, "threads": threading.active_count()}))


def _say(text: str) -> None:
    print(json.dumps({"now": text}), flush=True)


if __name__ == "__main__":
    main()
