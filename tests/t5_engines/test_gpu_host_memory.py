"""Swap-out, pinned memory, the choice of a strategy, and swap-in from a real fetcher."""

from __future__ import annotations

import gc
import threading
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import gpu_fakes as fakes
import pytest
import torch

from kvfs import Store
from kvfs.arena import Arena
from kvfs.errors import ConfigError, InputError
from kvfs.fetcher import launch
from kvfs.gpu import host_memory
from kvfs.gpu.choosing import choose, strategies
from kvfs.gpu.found import look
from kvfs.gpu.host_memory import Arenas, HostBuffer, Landed, Pinned, address_of
from kvfs.gpu.paged import PagedLayout
from kvfs.gpu.strategies import Direct
from kvfs.gpu.streams import CpuDevice
from kvfs.gpu.swap_in import Swapper
from kvfs.record import Shape

IDENTITY = fakes.identity()


class Cudart:
    """CUDA's bookkeeping of pinned memory, with its refusals."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.pinned: dict[int, tuple[int, int]] = {}
        self.registered = self.error = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if self.refuses:
            self.error = 801
            return self.error
        assert address not in self.pinned
        self.pinned[address] = (size, flags)
        self.registered += 1
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if self.refuses:
            self.error = 713
            return self.error
        del self.pinned[address]
        return 0

    def cudaGetLastError(self) -> int:
        """CUDA keeps an error until it is asked for."""
        error, self.error = self.error, 0
        return error


def test_memory_is_pinned_exactly() -> None:
    cudart, memory = Cudart(), bytearray(1_415_040)
    pin = Pinned(memory, cudart=cudart)
    assert pin.pinned
    assert cudart.pinned == {address_of(memoryview(memory)): (1_415_040, 1)}
    pin.close()
    pin.close()
    assert not cudart.pinned and not pin.pinned


@pytest.mark.parametrize("size", [1_415_040, 33 << 20, (32 << 20) + 1])
def test_host_memory_is_as_large_as_it_was_asked_for(size: int) -> None:
    """Not rounded up to a power of two, with a GPU or without: the mapping ends with its page."""
    buffer = HostBuffer(size)
    buffer.tensor().fill_(1)
    address = buffer.pin.address
    with open("/proc/self/maps", encoding="utf-8") as f:
        bounds = [tuple(int(n, 16) for n in line.split()[0].split("-")) for line in f]
    (mapped,) = [end - start for start, end in bounds if start <= address < end]
    assert size <= mapped < size + 4096 and buffer.view.nbytes == size
    buffer.close()


def test_a_refusal_is_reported() -> None:
    cudart = Cudart(refuses=True)
    pin = Pinned(bytearray(4096), cudart=cudart)
    assert not pin.pinned and "801" in pin.problem
    assert not cudart.error, "the next kernel of torch would fail for it"
    pin.close()


def test_no_kernel_fails_for_memory_that_could_not_be_given_back() -> None:
    cudart = Cudart()
    pin = Pinned(bytearray(4096), cudart=cudart)
    cudart.refuses = True
    pin.close()
    assert not cudart.error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_pinned() -> None:
    buffer = HostBuffer(1000)
    assert buffer.view.nbytes == 1000 and buffer.pin.problem == "no CUDA device"
    buffer.close()


def test_arenas_are_pinned_once_and_let_go_with_their_fetcher() -> None:
    cudart, gone = Cudart(), set()
    arenas, maps = Arenas(cudart), [Arena.create(1 << 20) for _ in range(2)]
    readers = [Arena.attach(m.reader_fd()) for m in maps]

    def use(which: int, at: int = 4096) -> int:
        return arenas.use(readers[which].view[at : at + 4096], lambda: which in gone)

    one = use(0)
    assert use(0, 8192) == one and arenas.pinned(one)
    assert list(cudart.pinned.values()) == [(1 << 20, 1 | 8)]  # for reading alone
    arenas.leave(one)
    arenas.leave(one)
    assert list(cudart.pinned) == [one] and not arenas.used, "for the next swap"
    assert use(0) == one and cudart.registered == 1
    gone.add(0)
    two = use(1)
    assert set(cudart.pinned) == {one, two}, "the first one is in use"
    arenas.leave(one)
    assert list(cudart.pinned) == [two] and not arenas.pinned(one)
    arenas.leave(two)
    gone.add(1)
    gone.discard(0)
    use(0)
    assert list(cudart.pinned) == [one], "the second went when nobody used it"
    assert arenas.problems() == []
    arenas.close()
    assert not cudart.pinned
    for m in (*readers, *maps):
        m.close()
    gc.collect()


def test_memory_is_pinned_for_the_device_of_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that does not say which one it works for would open the first GPU."""
    device, seen = fakes.FakeDevice(Random(0)), []

    class Noted(Pinned):
        def __init__(self, memory: Any, **options: Any) -> None:
            super().__init__(memory, **options)
            seen.append(threading.get_ident() in device.threads)

        def close(self) -> None:
            super().close()
            seen.append(threading.get_ident() in device.threads)

    monkeypatch.setattr(host_memory, "Pinned", Noted)
    swapper = Swapper(fakes.pages(IDENTITY, 12), IDENTITY, device=device)
    assert len(seen) == 2, "the trial's"
    swapper.swap_out([1]).rows()
    assert len(seen) == 3
    for begin in (partial(swapper.swap_in, fakes.plan(4)), swapper.load):
        ticket = fakes.FakeTicket(IDENTITY, 4, Random(1))
        ticket.gone = lambda: True  # type: ignore[method-assign]
        assert begin(ticket, range(4)).finish() == 4
    assert len(seen) == 7 and all(seen) and not device.threads


def test_what_no_fetcher_lends_is_not_pinned() -> None:
    """A row in between, in memory that is never used again: the arena stays as it is."""
    row, cudart = IDENTITY.row_bytes, Cudart()
    with Swapper(fakes.pages(IDENTITY, 12), IDENTITY, strategy=Direct()) as swapper:
        swapper.arenas = Arenas(cudart)
        ticket = fakes.FakeTicket(IDENTITY, 4, Random(1))
        ticket.gone = lambda: False  # type: ignore[method-assign]
        assert swapper.swap_in(fakes.plan(4), ticket, range(4)).finish() == 4
        pinned = dict(cudart.pinned)
        assert len(pinned) == 1
        for block in range(4, 8):
            landed = Landed(bytes(row), row, row, 1)
            assert swapper.load(landed, [block]).finish() == 1
        assert cudart.pinned == pinned and cudart.registered == 1
    assert not cudart.pinned


# strategies


def test_the_fastest_is_chosen() -> None:
    layout = PagedLayout(fakes.pages(IDENTITY, 16), IDENTITY)
    choice = choose(layout, CpuDevice(), Shape.of(IDENTITY).stride)
    assert set(choice.seconds) == {"direct", "staged", "pages"}
    assert choice.seconds[choice.strategy.name] == min(choice.seconds.values())
    assert set(choice.unavailable) == {"batch", "strided", "gather"}
    assert all(choice.unavailable.values())
    assert choice.pinned == torch.cuda.is_available()


def test_what_does_not_work_is_never_chosen() -> None:
    layout = PagedLayout(fakes.pages(IDENTITY, 16), IDENTITY)
    device = fakes.FakeDevice(Random(0), fails=lambda copy: type(copy).__name__ != "_StagedCopy")
    choice = choose(layout, device, Shape.of(IDENTITY).stride)
    assert choice.strategy.name == "staged"
    assert set(choice.seconds) == {"staged"}
    assert {"pages", "direct"} < set(choice.unavailable)
    assert "this copy fails" in choice.unavailable["direct"]


def test_where_nothing_works_there_is_no_swapper() -> None:
    device = fakes.FakeDevice(Random(0), fails=lambda copy: True)
    with pytest.raises(ConfigError, match="this copy fails"):
        Swapper(fakes.pages(IDENTITY, 16), IDENTITY, device=device)


def test_what_is_there_is_looked_for() -> None:
    found = look()
    names = [each.name for each in found]
    assert names == ["cuda", "cudart", "torch", "triton", "cuda-python", "nixl", "gds"]
    assert dict(zip(names, found, strict=True))["torch"].there
    assert all(each.text for each in found)


@pytest.mark.parametrize("sizes", [(96, 40), (97, 41), (98, 42), (100, 44)])
def test_any_alignment(sizes: tuple[int, int]) -> None:
    identity = fakes.identity(kv=sizes[0], index=sizes[1], gap=0)
    tensors, random = fakes.pages(identity, 20), Random(1)
    ticket = fakes.FakeTicket(identity, 20, random)
    with Swapper(tensors, identity) as swapper:
        table = random.sample(range(20), 20)
        swap = swapper.swap_in(fakes.plan(20), ticket, table)
        assert swap.usable_blocks() == swap.finish() == 20
    for span in identity.spans:
        for block in range(20):
            have = fakes.found(tensors, span, table, block, 1)
            assert have == fakes.expected(ticket.rows[block], span)


# swap-out


def filled(count: int, per_block: int = 1) -> dict[Any, Any]:
    made = torch.Generator().manual_seed(5)
    return {
        key: torch.randint(0, 256, t.shape, dtype=torch.uint8, generator=made)
        for key, t in fakes.pages(IDENTITY, count, per_block).items()
    }


@pytest.mark.parametrize("per_block", [1, 2])
def test_rows_hold_all_parts_and_zeros_between(per_block: int) -> None:
    tensors, table = filled(12, per_block), [7, 3, 9, 0, 11, 4]
    device = fakes.FakeDevice(Random(2))
    swapper = Swapper(tensors, IDENTITY, strategy=strategies_of(tensors)[0], device=device)
    out = swapper.swap_out(table)
    assert out.blocks == len(table) // per_block
    rows = bytes(out.rows())
    assert out.wait(1)
    size = IDENTITY.row_bytes
    for block in range(out.blocks):
        row, want = rows[block * size : (block + 1) * size], bytearray(size)
        for span in IDENTITY.spans:
            want[span.offset : span.end] = fakes.found(tensors, span, table, block, per_block)
        assert row == want


def strategies_of(tensors: Any) -> Any:
    return strategies(PagedLayout(tensors, IDENTITY))


def test_swap_out_waits_for_who_writes_the_pages() -> None:
    tensors, device = filled(12), fakes.FakeDevice(Random(3))
    swapper = Swapper(tensors, IDENTITY, strategy=strategies_of(tensors)[0], device=device)
    compute = device.stream()
    compute.submit(Fill(tensors))
    out = swapper.swap_out([1, 2], after=compute.record())
    at = IDENTITY.spans[0]
    assert set(out.rows()[at.offset : at.end]) == {0x55}


class Fill(fakes.Work):
    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self.tensors = tensors

    def run(self) -> None:
        for tensor in self.tensors.values():
            tensor.fill_(0x55)


def test_a_block_table_that_does_not_fit_gives_no_rows() -> None:
    with Swapper(filled(4), IDENTITY) as swapper:
        out = swapper.swap_out([3, 4])
        assert out.blocks == 0 and not out.rows()
        with pytest.raises(InputError):
            out.put(None, None, None)
        buffer = HostBuffer(IDENTITY.row_bytes)
        assert swapper.swap_out([1, 2], buffer).blocks == 0  # does not fit either
        assert swapper.swap_out([1], buffer).rows().nbytes == IDENTITY.row_bytes


# the whole way


@pytest.mark.parametrize("part", ["index", "kv"])
def test_a_damaged_part_ends_the_prefix(store: Store, part: str) -> None:
    """20 stored blocks, one byte of one part of block 7 wrong: 7 blocks, whatever the part."""
    ns = store.create_namespace(IDENTITY)
    tokens, table = list(range(20 * 128 + 1)), list(range(20))
    source, target = filled(20), fakes.pages(IDENTITY, 20)
    with Swapper(source, IDENTITY) as swapper:
        assert swapper.swap_out(table).put(store, ns, tokens).error is None
    damage(Path(store.path), source[2, part][7].numpy().tobytes())
    with (
        launch.private(store.path, launch.Options(8 << 20)) as client,
        Swapper(target, IDENTITY) as swapper,
    ):
        plan = store.check(ns, tokens)
        swap = swapper.swap_in(plan, client.fetch(ns, plan, tokens, deadline=30), table)
        assert swap.usable_blocks() == 7 and swap.reason
        assert all([swap.wait_layer(layer) for layer in range(4)])
        assert swap.finish() == 7
    for key, tensor in target.items():
        assert torch.equal(tensor[:7], source[key][:7])
        assert bool((tensor[7:] == fakes.POISON).all()), "nothing behind it was delivered"


def damage(store: Path, data: bytes) -> None:
    """Flips a bit of what a segment holds."""
    (path,) = [p for p in store.rglob("*.seg") if data in p.read_bytes()]
    at = path.read_bytes().index(data) + 3
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([data[3] ^ 1]))


def test_out_to_a_store_and_in_again(store: Store, tmp_path: Path) -> None:
    """Pages, rows, segments, another process, shared memory, other pages: the same bytes."""
    ns = store.create_namespace(IDENTITY)
    blocks = 50
    tokens = list(range(blocks * 128 + 1))
    source = filled(blocks + 4)
    random = Random(9)
    out_table = random.sample(range(blocks + 4), blocks)
    with Swapper(source, IDENTITY) as swapper:
        put = swapper.swap_out(out_table).put(store, ns, tokens)
    assert put.error is None and put.stored == blocks
    options = launch.Options(8 << 20)
    target, table = fakes.pages(IDENTITY, 60), random.sample(range(60), blocks)
    with (
        launch.private(store.path, options) as client,
        Swapper(target, IDENTITY) as swapper,
    ):
        for _ in range(2):  # from storage, and from the arena
            plan = store.check(ns, tokens)
            swap = swapper.swap_in(plan, client.fetch(ns, plan, tokens, deadline=30), table)
            assert swap.usable_blocks() == blocks
            assert all([swap.wait_layer(layer) for layer in range(4)])
            for span in IDENTITY.spans:
                a, b = source[span.layer, span.part], target[span.layer, span.part]
                assert torch.equal(a[out_table], b[table])
                b.fill_(0)
            assert swap.finish() == blocks
        assert client.stats()["tickets"] == 0
