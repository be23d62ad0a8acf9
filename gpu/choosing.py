"""Which way to copy: measured at the start, on memory of its own, with what this machine has.

What is best depends on the machine and the layout, so nothing is decided by name. A strategy that
cannot be used here, or fails when it is tried, is reported with the reason and never chosen.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from kvfs.gpu.batched import Batch, Strided
from kvfs.gpu.gather import Gather
from kvfs.gpu.host_memory import HostBuffer, Records
from kvfs.gpu.paged import PagedLayout, Target
from kvfs.gpu.strategies import Direct, Pages, Piece, Staged, Strategy, submit
from kvfs.gpu.streams import Device, Stream

_TRIAL_BYTES, _TRIAL_BLOCKS, _TRIAL_RUNS = 16 << 20, 64, 3


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen and why.

    seconds: by strategy, for `trial_bytes` in pages all over the memory; unavailable: strategy ->
    why it was not measured, or failed; pinned: the trial's host memory was.
    """

    strategy: Strategy | None
    seconds: dict[str, float]
    unavailable: dict[str, str]
    trial_bytes: int
    pinned: bool


def strategies(layout: PagedLayout) -> tuple[Strategy, ...]:
    """All there are, whether they can be used or not; the first one is the simplest that can."""
    first = (Direct(), Staged()) if layout.device.type == "cpu" else (Staged(), Direct())
    return (*first, Pages(), Batch(), Strided(), Gather())


def choose(layout: PagedLayout, device: Device, stride: int) -> Choice:
    """Measures every strategy on memory of its own; the fastest is chosen, none if none works.

    stride: bytes of a record. Takes some tens of milliseconds and a few megabytes on the device,
    and some seconds the first time a kernel is compiled.
    """
    pages = min(g.num_pages // g.per_block for g in layout.groups)
    blocks = max(1, min(_TRIAL_BLOCKS, _TRIAL_BYTES // stride, pages))
    trial, host, stream = layout.scratch(blocks), HostBuffer(blocks * stride), device.stream()
    piece = _piece(trial, host, blocks, stride)
    seconds: dict[str, float] = {}
    unavailable: dict[str, str] = {}
    candidates = strategies(layout)
    try:
        for strategy in candidates:
            problem = strategy.problem(layout)
            if not problem and strategy.pinned_only and not piece.pinned:
                problem = f"host memory is not pinned: {host.pin.problem}"
            found = problem or _measure(strategy, piece, trial, stream)
            if isinstance(found, str):
                unavailable[strategy.name] = found
            else:
                seconds[strategy.name] = found
    finally:
        stream.close()
        host.close()
    usable = [s for s in candidates if s.name in seconds]
    best = min(usable, key=lambda s: seconds[s.name], default=None)
    return Choice(best, seconds, unavailable, blocks * layout.row_bytes, piece.pinned)


def _piece(trial: PagedLayout, host: HostBuffer, blocks: int, stride: int) -> Piece:
    targets = []
    for group in trial.groups:
        pages = torch.randperm(blocks * group.per_block)
        targets.append(Target(pages, pages.to(trial.device)))
    records = Records(host.tensor().view(blocks, stride), host.view)
    return Piece(0, (records,), targets, host.pin.pinned)


def _measure(strategy: Strategy, piece: Piece, layout: PagedLayout, stream: Stream) -> float | str:
    """The least seconds of some runs, or why it does not work here."""
    best = float("inf")
    for _ in range(_TRIAL_RUNS):
        start = time.perf_counter()
        try:
            copies = submit(strategy, piece, layout, stream)
            stream.record().wait()
        except Exception as e:  # of a driver or a compiler, whatever it is: another way is taken
            return f"failed: {e!r}"
        failed = next((copy.error for copy in copies if copy.error is not None), None)
        if failed is not None:
            return f"failed: {failed!r}"
        best = min(best, time.perf_counter() - start)
    return best
