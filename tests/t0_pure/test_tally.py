"""The counters beside the index: shared, added up, and never worth a failure."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from kvfs.index.tally import NAME, Tally


def _add(directory: str, times: int) -> None:
    for _ in range(times):
        Tally(directory).add({"check.hit": 1, "check.miss": 2})


def test_processes_add_up(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_add, args=(str(tmp_path), 50)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert Tally(str(tmp_path)).read() == {"check.hit": 200, "check.miss": 400}


@pytest.mark.parametrize("content", [b"", b"\0" * 40, b"[1]", b'{"a": 1', b'{"a": "x", "b": 2}'])
def test_a_spoilt_file_counts_as_empty(tmp_path: Path, content: bytes) -> None:
    tally = Tally(str(tmp_path))
    assert tally.read() == {}
    (tmp_path / NAME).write_bytes(content)
    expected = {"b": 2} if b'"b"' in content else {}
    assert tally.read() == expected
    tally.add({"b": 1})
    assert tally.read() == {"b": expected.get("b", 0) + 1}
