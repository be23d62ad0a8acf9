"""The memory for blocks on their way to the store: what is taken never overlaps."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

pytest.importorskip("torch")

from kvfs.connectors.vllm_memory import SaveMemory

pytestmark = pytest.mark.engines


def test_what_is_taken_stays_as_it_is() -> None:
    draw, memory = random.Random(3), SaveMemory(10_000)
    held: deque[tuple[int, Any]] = deque()
    refused = 0
    for number in range(5_000):
        part = memory.take(draw.randrange(1, 4_000))
        if part is None:
            refused += 1
        else:
            part.fill_(number % 251)
            held.append((number % 251, part))
        while held and draw.random() < 0.45:
            value, part = held.popleft()
            assert bool((part == value).all())
            memory.give_back()
        assert memory.used == bool(held)
    assert 100 < refused < 4_000
    memory.close()


def test_all_of_it_can_be_taken_and_no_more() -> None:
    memory = SaveMemory(1_000)
    assert memory.take(1_001) is None
    for _ in range(3):
        assert len(memory.take(600)) == 600 and len(memory.take(400)) == 400
        assert memory.take(1) is None
        memory.give_back()  # the first 600 are free again
        assert len(memory.take(600)) == 600 and memory.take(1) is None
        for _ in range(2):
            memory.give_back()
    memory.close()
