"""What only a GPU can show: real streams, pinned memory, copies by DMA. Skipped without one."""

from __future__ import annotations

from random import Random
from typing import Any

import gpu_fakes as fakes
import pytest
import torch

from kvfs.gpu.choosing import choose, strategies
from kvfs.gpu.host_memory import HostBuffer
from kvfs.gpu.paged import PagedLayout
from kvfs.gpu.strategies import Strategy
from kvfs.gpu.streams import CudaDevice
from kvfs.gpu.swap_in import Swapper
from kvfs.record import Shape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

IDENTITY = fakes.identity(layers=8, kv=4096, index=1024)
BLOCKS = 200


def on_device(per_block: int) -> dict[Any, Any]:
    return {k: t.cuda() for k, t in fakes.pages(IDENTITY, BLOCKS * per_block, per_block).items()}


def by_name(name: str, layout: PagedLayout) -> Strategy:
    """A strategy that this machine has; the test is skipped where it has it not."""
    (found,) = [s for s in strategies(layout) if s.name == name]
    problem = found.problem(layout)
    if problem:
        pytest.skip(f"{name}: {problem}")
    return found


@pytest.mark.parametrize("per_block", [1, 4])
@pytest.mark.parametrize("name", ["pages", "staged", "batch", "strided", "gather", ""])
def test_in_and_out(name: str, per_block: int) -> None:
    """A kernel that runs behind `wait_layer` reads the layer's bytes, 20 times in a row."""
    tensors = on_device(per_block)
    strategy = by_name(name, PagedLayout(tensors, IDENTITY)) if name else None
    with Swapper(tensors, IDENTITY, strategy=strategy) as swapper:
        assert isinstance(swapper.device, CudaDevice)
        for seed in range(20):
            random = Random(seed)
            ticket = fakes.FakeTicket(IDENTITY, BLOCKS, random)
            table = random.sample(range(BLOCKS * per_block), BLOCKS * per_block)
            for tensor in tensors.values():
                tensor.fill_(fakes.POISON)
            swap = swapper.swap_in(fakes.plan(BLOCKS), ticket, table)
            assert swap.usable_blocks() == BLOCKS
            read = {}
            for layer in range(8):
                assert swap.wait_layer(layer, swapper.device.current())
                read |= {key: t.clone() for key, t in tensors.items() if key[0] == layer}
            assert swap.finish() == BLOCKS and ticket.released == 1
            host = {key: t.cpu() for key, t in read.items()}
            for span in IDENTITY.spans:
                for block in range(BLOCKS):
                    have = fakes.found(host, span, table, block, per_block)
                    assert have == fakes.expected(ticket.rows[block], span)
            rows = swapper.swap_out(table).rows()
            size = IDENTITY.row_bytes
            for span in IDENTITY.spans:
                for block in range(BLOCKS):
                    at = block * size + span.offset
                    want = fakes.expected(ticket.rows[block], span)
                    assert rows[at : at + span.length] == want


def test_memory_is_pinned_as_large_as_it_is() -> None:
    buffer = HostBuffer(33 << 20)
    assert buffer.pin.pinned, buffer.pin.problem
    assert buffer.tensor().is_pinned()
    buffer.close()
    assert not buffer.tensor().is_pinned()


def test_every_strategy_is_measured_or_explained() -> None:
    layout = PagedLayout(on_device(1), IDENTITY)
    choice = choose(layout, CudaDevice(layout.device), Shape.of(IDENTITY).stride)
    assert choice.pinned and choice.strategy is not None
    assert not [why for why in choice.unavailable.values() if why.startswith("failed")]
    assert set(choice.seconds) | set(choice.unavailable) == {s.name for s in strategies(layout)}
