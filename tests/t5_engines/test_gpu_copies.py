"""Ways to copy that a GPU makes: their addresses against a plain scatter, and what is missing."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import gpu_fakes as fakes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvfs.errors import ConfigError
from kvfs.gpu import cudart
from kvfs.gpu.batched import Batch, Column, Strided, runs
from kvfs.gpu.gather import Gather
from kvfs.gpu.host_memory import Landed
from kvfs.gpu.paged import HOLE, PagedLayout, Spans
from kvfs.gpu.strategies import Direct, Pages, Staged, Strategy
from kvfs.gpu.swap_in import Swapper
from kvfs.layout import Span

COPIES = fakes.FakeCopies()
STRATEGIES: tuple[Strategy, ...] = (
    Direct(), Pages(), Staged(), Batch(COPIES), Strided(COPIES),
)  # fmt: skip
seeds = st.integers(0, 1 << 32)


class Model:
    """Two groups: one whose block is a page, one whose block is `per_block` pages with holes."""

    def __init__(self, seed: int, blocks: int, per_block: int) -> None:
        random = Random(seed)
        self.per_block, self.blocks = per_block, blocks
        unit = random.choice([1, 2, 4, 8])
        sizes = [unit * random.randint(1, 9) for _ in range(4)]
        spans, at = [], random.randint(0, 9)
        for i, size in enumerate(sizes):
            length = size * (per_block if i % 2 else 1)
            spans.append(Span(i // 2, "kv" if i % 2 else "index", at, length))
            at += length + random.randint(0, 9)
        self.row = Spans(tuple(spans), at)
        self.groups = {(s.layer, s.part): int(s.part == "kv") for s in spans}
        counts = [blocks + 3, blocks * per_block + 3]
        self.tensors = {}
        for span, size in zip(spans, sizes, strict=True):
            pitch = size + random.randint(0, 9)  # other things lie between pages
            memory = torch.full((counts[span.part == "kv"], pitch), fakes.POISON, dtype=torch.uint8)
            self.tensors[span.layer, span.part] = memory[:, :size]
        self.tables = [random.sample(range(counts[0]), blocks),
                       random.sample(range(counts[1]), blocks * per_block)]  # fmt: skip
        for table in self.tables:
            for i in range(len(table)):
                if random.random() < 0.3:
                    table[i] = HOLE
        self.rows = bytearray(random.randbytes(blocks * self.row.row_bytes))

    def swap(self, strategy: Strategy, device: Any = None, *, pinned: bool = False) -> int:
        size = self.row.row_bytes
        ticket = Landed(self.rows, size, size, self.blocks, stretches=3, pinned=pinned)
        with Swapper(
            self.tensors, self.row, groups=self.groups, strategy=strategy, device=device
        ) as swapper:
            swap = swapper.swap_in(SimpleNamespace(hit_blocks=self.blocks), ticket, self.tables)
            swap.usable_blocks()
            return swap.finish()

    def wrong(self) -> list[Any]:
        """Pages that are not what a plain scatter makes of them."""
        out = []
        for span in self.row.spans:
            n = self.per_block if span.part == "kv" else 1
            tensor, size = self.tensors[span.layer, span.part], span.length // n
            want = {page: bytes([fakes.POISON]) * size for page in range(len(tensor))}
            for cell, page in enumerate(self.tables[self.groups[span.layer, span.part]]):
                at = cell // n * self.row.row_bytes + span.offset + cell % n * size
                if page != HOLE:
                    want[page] = bytes(self.rows[at : at + size])
            out += [(span, p) for p, data in want.items() if tensor[p].numpy().tobytes() != data]
            rest = tensor.as_strided((len(tensor) - 1, tensor.stride(0)), (tensor.stride(0), 1))
            assert bool((rest[:, size:] == fakes.POISON).all()), "something between pages changed"
        return out


@given(seeds, st.integers(1, 20), st.integers(1, 4), st.sampled_from(STRATEGIES))
def test_any_layout(seed: int, blocks: int, per_block: int, strategy: Strategy) -> None:
    """Groups, holes, gaps between parts and between pages, odd sizes: what a scatter makes."""
    model = Model(seed, blocks, per_block)
    assert model.swap(strategy, fakes.FakeDevice(Random(seed))) == blocks
    assert not model.wrong()


def test_addresses_that_are_off_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails if a single call copies from one byte further on."""
    copy = fakes.FakeCopies._copy

    def off(self: Any, both: list[tuple[int, int]], size: int) -> None:
        copy(self, [(source + 1, target) for source, target in both], size)

    monkeypatch.setattr(fakes.FakeCopies, "_copy", off)
    for strategy in STRATEGIES[-2:]:
        model = Model(1, 10, 2)
        model.swap(strategy)
        assert model.wrong()


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(-2, 3)), max_size=40), st.integers(1, 2))
def test_runs_cover_a_column(steps: list[tuple[int, int]], longest: int) -> None:
    at = np.cumsum([(1000, 500), *steps], axis=0)
    column = Column(0, at[:, 0].astype(np.uint64), at[:, 1].astype(np.uint64))
    found = list(runs(column, longest))
    cells = [
        (int(at[r.first, 0]) + i * r.source, int(at[r.first, 1]) + i * r.pages)
        for r in found
        for i in range(r.count)
    ]
    assert cells == [tuple(pair) for pair in at.tolist()]
    assert all(r.count == 1 or (r.source > 0 and 0 < r.pages <= longest) for r in found)


def test_consecutive_pages_are_one_call() -> None:
    identity = fakes.identity(layers=3)
    copies = fakes.FakeCopies()
    ticket = fakes.FakeTicket(identity, 20, Random(1))
    ticket.ranges = [ticket.ranges[0]._replace(count=20)]
    with Swapper(fakes.pages(identity, 30), identity, strategy=Strided(copies)) as swapper:
        assert swapper.swap_in(fakes.plan(20), ticket, range(5, 25)).finish() == 20
    pieces = 1
    assert copies.calls == pieces * len(identity.spans)


# what is missing


def test_without_a_runtime_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudart, "loaded", lambda: None)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    layout: Any = SimpleNamespace(device=torch.device("cuda"))
    for strategy in (Batch(), Strided()):
        assert strategy.problem(layout) == "neither libcudart nor cuda-python is there"
        with pytest.raises(ConfigError):
            strategy.copies.batch(None, None, 0)


def test_a_library_that_is_none_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "libcudart.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(ConfigError, match="libcudart"):
        cudart.Library(str(broken))


class Refusing:
    """A libcudart, or the module of cuda-python, whose copies fail."""

    def __init__(self, version: Any, code: Any, kind: Any) -> None:
        self.cudaRuntimeGetVersion = self.getLocalRuntimeVersion = version
        self.cudaMemcpy2DAsync = Function(lambda *args: self._fail(code))
        self.cudaGetErrorName = Function(lambda code: b"cudaErrorInvalidValue")
        self.cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1)
        self.kept, self.kind = 0, kind

    def _fail(self, code: Any) -> Any:
        self.kept = 1
        return code

    def cudaGetLastError(self) -> Any:
        self.kept = 0
        return self.kind(1)


class Function:
    """As ctypes has them: their types may be set."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


@pytest.mark.parametrize("which", ["library", "cuda-python"])
def test_an_error_is_taken_back(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's next kernel would fail for one that is kept."""
    monkeypatch.setattr(cudart, "_current_stream", lambda: 0)
    copies: Any
    if which == "library":
        runtime = Refusing(lambda version: 0, 1, int)
        monkeypatch.setattr(ctypes, "CDLL", lambda path: runtime)
        copies = cudart.Library("libcudart.so")
    else:
        runtime = Refusing(lambda: (0, 12090), (1,), lambda code: (code,))
        copies = cudart.CudaPython(runtime)
    with pytest.raises(ConfigError, match="CUDA"):
        copies.rectangle(0, 1, 0, 1, 1, 1)
    assert not runtime.kept


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gather_without_a_gpu_says_why() -> None:
    problem = Gather().problem(PagedLayout(fakes.pages(fakes.identity(), 4), fakes.identity()))
    assert problem in ("Triton is not installed", "no CUDA device")


def test_memory_that_is_not_pinned_is_never_gathered() -> None:
    """Its kernel would fault, and take the engine along: another way is taken for that piece."""
    identity = fakes.identity()
    ticket = fakes.FakeTicket(identity, 10, Random(3))
    with Swapper(fakes.pages(identity, 20), identity, strategy=Gather()) as swapper:
        assert swapper.strategy_for(pinned=True).name == "gather"
        assert swapper.strategy_for(pinned=False).name == "staged"
        swap = swapper.swap_in(fakes.plan(10), ticket, range(10))
        assert swap.usable_blocks() == swap.finish() == 10, swap.reason


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_in_the_interpreter() -> None:
    """Triton's own interpreter runs the kernel on this CPU's memory."""
    script = Path(__file__).with_name("gpu_interpreted.py")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "24 layouts"
