"""Figures of swap-in: `python -m kvfs.gpu.bench`, one line of JSON for each.

swap.control   what the thread of a swap-in computes for 1,022 blocks of a model with 60 layers,
               each with main KV and indexer, from plan to enqueued copies; at most 3 ms. Figure
               `with_torch_calls_ms`: and the calls of torch that enqueue them, on blocks so few
               that copying is nothing; on a GPU they are part of the time itself
swap.copy.*    128 K tokens of DeepSeek-V4.1-Flash by each strategy, beside one large copy of as
               many bytes, pinned where there is a GPU
swap.overlap   on a GPU alone: time of a forward pass that waits for each layer of a swap-in in
               turn; beside: forward alone, and swap-in first and forward then

Makes no store: records lie in memory, as after a fetch.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from kvfs import presets
from kvfs.bench.timing import Case, Options, Row, compared, in_turns, timed
from kvfs.gpu.host_memory import HostBuffer, records_of
from kvfs.gpu.paged import PagedLayout
from kvfs.gpu.strategies import Piece, Staged, available, strategies, submit
from kvfs.gpu.streams import CpuStream, CudaDevice, Work
from kvfs.gpu.swap_in import Swapper
from kvfs.layout import Identity, Span
from kvfs.record import Shape

BLOCKS = 1022
CONTROL_LAYERS, CONTROL_LIMIT = 60, 0.003
_STRETCHES = 5
_RUNS = 7
_WARM_UP = 20
_MATMULS, _SIDE = 4, 4096


class _Namespace(NamedTuple):
    stride: int


class _Range(NamedTuple):
    block: int
    count: int  # type: ignore[assignment]
    offset: int


class Landed:
    """A ticket whose blocks are all there, in five stretches of pinned memory."""

    first = 0
    done = held = True
    reason = ""

    def __init__(self, identity: Identity, blocks: int) -> None:
        self.ns = _Namespace(Shape.of(identity).stride)
        self.wanted = self.good = self.hit_blocks = blocks
        self.memory = HostBuffer(blocks * self.ns.stride)
        each = -(-blocks // _STRETCHES)
        self.ranges = [
            _Range(b, min(each, blocks - b), b * self.ns.stride) for b in range(0, blocks, each)
        ]

    def wait(self, blocks: int | None = None, timeout: float | None = None) -> int:
        return self.good

    def payload(self, block: int) -> memoryview:
        return self.memory.view[block * self.ns.stride :]

    def release(self) -> None:
        """The memory is used again."""


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
    options.progress("swap: control path")
    yield _control(runs)
    options.progress("swap: copies")
    yield from _copies(runs)
    if torch.cuda.is_available():
        options.progress("swap: overlap")
        yield _overlap(runs)


def _table() -> list[int]:
    made = torch.Generator().manual_seed(1)
    return list(torch.randperm(BLOCKS, generator=made).tolist())


def _control(runs: int) -> Row:
    identity = sixty_layers()
    ticket, table, found = Landed(identity, BLOCKS), _table(), []
    tensors = pages(identity, BLOCKS)
    strategy = strategies(PagedLayout(tensors, identity))[0]
    with Swapper(tensors, identity, strategy=strategy) as swapper:
        for _ in range(runs + 1):
            swap = swapper.swap_in(ticket, ticket, table)
            if swap.finish() != BLOCKS:
                raise AssertionError(swap.reason)
            found.append(swap.control_seconds)
        seconds = statistics.median(found[1:])
        calls = seconds if torch.cuda.is_available() else seconds + _calls(swapper, ticket, runs)
    return Row(
        "swap.control", seconds, runs,
        f"plan to enqueued copies, {BLOCKS} blocks and {CONTROL_LAYERS} layers, {strategy.name}",
        limit_seconds=CONTROL_LIMIT, figures={"with_torch_calls_ms": calls * 1000},
        limits={"with_torch_calls_ms": CONTROL_LIMIT * 1000},
    )  # fmt: skip


class _AtOnce(CpuStream):
    """Does what is submitted in the thread that submits it, as a GPU's streams do."""

    def __init__(self) -> None:
        """Has no thread."""

    def submit(self, work: Work) -> None:
        work.attempt()


def _calls(swapper: Swapper, ticket: Landed, runs: int) -> float:
    """Seconds of a thread in torch for a piece of one block."""
    page = torch.zeros(1, dtype=torch.int64)
    piece, found = Piece(0, records_of(ticket, 0, 1), page, page), []
    for _ in range(_WARM_UP + runs):
        start = time.thread_time()
        copies = submit(Staged(), piece, swapper.layout, _AtOnce())
        found.append(time.thread_time() - start)
        if any(copy.error for copy in copies):
            raise AssertionError(copies[0].error)
    return statistics.median(found[_WARM_UP:])


def _copies(runs: int) -> Iterator[Row]:
    identity = presets.get("deepseek-v4.1-flash", weights="none", tokenizer="none")
    ticket, table, tensors = Landed(identity, BLOCKS), _table(), pages(identity, BLOCKS)
    size = BLOCKS * identity.row_bytes
    into = torch.empty(size, dtype=torch.uint8, device=device())
    source = ticket.memory.tensor()[:size]

    def plain() -> None:
        into.copy_(source, non_blocking=True)
        _synchronize()

    reference = "one copy of the same bytes"
    cases: dict[str, Case] = {reference: partial(timed, plain)}
    swappers = {}
    for strategy in strategies(PagedLayout(tensors, identity)):
        swappers[strategy.name] = swapper = Swapper(tensors, identity, strategy=strategy)
        cases[strategy.name] = partial(_whole, swapper, ticket, table)
    for case in cases.values():
        case()
    found = in_turns(cases, runs)
    for name, swapper in swappers.items():
        swapper.close()
        seconds, base, ratio = compared(found[name], found[reference])
        yield Row(
            f"swap.copy.{name}", seconds, runs, f"{BLOCKS} blocks by strategy {name}",
            ratio=ratio, reference=reference, reference_seconds=base,
            figures={"gigabytes_a_second": size / seconds / 1e9},
        )  # fmt: skip


def _whole(swapper: Swapper, ticket: Landed, table: list[int]) -> float:
    return timed(swapper.swap_in(ticket, ticket, table).finish)


def _overlap(runs: int) -> Row:
    """A forward pass is some products of matrices for each layer that has KV of its own."""
    identity = presets.get("deepseek-v4.1-flash", weights="none", tokenizer="none")
    ticket, table, tensors = Landed(identity, BLOCKS), _table(), pages(identity, BLOCKS)
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
    """Prints what is there, then a row a line."""
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    began = time.monotonic()
    print(json.dumps({"device": where, "found": available()}))
    for row in run(Options()):
        print(json.dumps(row.to_json()), flush=True)
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"seconds": seconds, "threads": threading.active_count()}))


if __name__ == "__main__":
    main()
