"""The figures of swap-in: that they are made, of what, and what is said where they cannot be."""

from __future__ import annotations

import sys

import pytest
import torch

from kvfs.bench import report
from kvfs.bench.timing import Options
from kvfs.errors import ConfigError
from kvfs.gpu import bench


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_figures_of_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of the control path is not asserted here: it is a figure, not a test."""
    monkeypatch.setattr(bench, "BLOCKS", 40)
    said: list[str] = []
    rows = {row.name: row for row in bench.run(Options(runs=1, progress=said.append))}
    assert set(rows) == {
        "swap.control", "swap.control.batch", "swap.copy.direct", "swap.copy.pages",
        "swap.copy.staged",
    }  # fmt: skip
    assert rows["swap.control"].limit_seconds == bench.CONTROL_LIMIT == 0.003
    assert rows["swap.control"].limits["with_torch_calls_ms"] == 3.0
    assert [name for name, row in rows.items() if row.what.endswith("chosen")]
    assert said[-1] == "swap-in: no GPU, so no overlap to measure"


def test_without_torch_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvfs.gpu.bench", None)
    with pytest.raises(ConfigError, match=r"swap-in needs the package kvfs.gpu.bench"):
        report.measure(["swap-in"], Options())
