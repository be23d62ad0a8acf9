"""The dictionary model, and what it says of the real traces with synthetic tokens."""

from __future__ import annotations

import pytest

from kvfs.sim import trace
from kvfs.sim.model import PrefixModel
from kvfs.sim.synth import TokenSynth


def tokens(*blocks: bytes) -> bytes:
    return b"".join(block * 128 for block in blocks)


A, B, C = (bytes([n, 0, 0, 0]) for n in (1, 2, 3))


def test_the_model_by_hand() -> None:
    model = PrefixModel()
    assert model.step(tokens(A, B)) == 0
    assert model.step(tokens(A, B, C)) == 256
    assert model.step(tokens(A, C, B)) == 128
    assert model.step(tokens(B, A)) == 0
    assert model.step(tokens(A, C, B)[:-4]) == 256
    assert model.step(b"") == 0
    assert model.blocks == 7


@pytest.mark.parametrize(
    ("name", "stored", "blocks"),
    [
        # The first total is what a simulator over the chain ids alone gives for an ideal cache.
        ("weka_claude_code_small", 250_535_552, 112_615),
        ("mooncake_conversation_2000", 8_069_632, 150_402),
    ],
)
def test_totals_of_real_traces(name: str, stored: int, blocks: int) -> None:
    opened = trace.find(name)
    synth = TokenSynth(opened.header.block_tokens, name)
    model = PrefixModel()
    assert sum(model.step(synth.tokens(r)) for r in opened.requests()) == stored
    assert model.blocks == blocks
