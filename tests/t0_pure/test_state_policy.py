"""Policies: their names, where they take slots, what they cost."""

from __future__ import annotations

import pytest

from kvfs import presets
from kvfs.errors import InputError
from kvfs.layout import StateLayout
from kvfs.state.policy import Policy, cost
from kvfs.state.ring import Ring

FLASH = presets.get("deepseek-v4.1-flash", weights="w", tokenizer="t")
RING = Ring.of(FLASH)
assert RING is not None
SLOT = 1_415_040


@pytest.mark.parametrize("name", ["full", "periodic:4096", "last", "last:1", "zero"])
def test_names_are_read_as_they_are_written(name: str) -> None:
    assert str(Policy.parse(name)) == name


@pytest.mark.parametrize(
    "name", ["", "all", "full:1", "periodic", "periodic:0", "periodic:x", "periodic:-128",
             "periodic:1 ", "last:2", "last:", "zero:1"],
)  # fmt: skip
def test_names_that_are_no_policy(name: str) -> None:
    with pytest.raises(InputError):
        Policy.parse(name)


def test_a_period_is_whole_blocks() -> None:
    assert RING is not None
    with pytest.raises(InputError):
        Policy.parse("periodic:100").in_prefill(RING, 1000)


def chunks(tokens: int, size: int) -> list[tuple[int, int]]:
    return [(a, min(a + size, tokens)) for a in range(0, tokens, size)]


@pytest.mark.parametrize("size", [128, 500, 512, 1000, 8192])
@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 300, 4096, 4097, 4230, 5000])
def test_anchors_of_a_chunked_prefill(tokens: int, size: int) -> None:
    assert RING is not None
    taken: dict[str, list[int]] = {}
    for name in ("full", "periodic:256", "last", "zero"):
        policy, taken[name] = Policy.parse(name), []
        for chunk, end in chunks(tokens, size):
            points = policy.in_prefill(RING, tokens, chunk=chunk, end=end)
            taken[name] += points.anchors
            if name != "last":
                assert not points.left_out
            elif end < tokens:
                assert points == ((), {})  # only the last chunk
    assert taken["full"] == list(range(128, tokens + 1, 128))
    assert taken["periodic:256"] == list(range(256, tokens + 1, 256))
    assert taken["zero"] == []
    last = RING.after_prefill(tokens, chunk=(tokens - 1) // size * size)
    assert tuple(taken["last"]) == last.anchors


def test_a_ring_that_was_begun_late_has_no_early_windows() -> None:
    assert RING is not None
    points = Policy("full").in_prefill(RING, 1000, chunk=512, start=512)
    assert points.anchors == (640, 768, 896)
    points = Policy("full").in_prefill(RING, 1000, chunk=512, start=600)
    assert points.anchors == (768, 896) and list(points.left_out) == [640]


def test_bad_chunks() -> None:
    assert RING is not None
    for chunk, end in [(-1, 10), (11, 10), (0, 101)]:
        with pytest.raises(InputError):
            Policy("full").in_prefill(RING, 100, chunk=chunk, end=end)


def test_costs_of_the_reference_case() -> None:
    length = 131_072
    table = {n: cost(Policy.parse(n), FLASH, length)
             for n in ("full", "periodic:8192", "last", "last:1", "zero")}  # fmt: skip
    assert {n: c.slots for n, c in table.items()} == {
        "full": 1024, "periodic:8192": 16, "last": 2, "last:1": 1, "zero": 0,
    }  # fmt: skip
    assert all(c.slot_bytes == c.slots * SLOT for c in table.values())
    retry = {n: (c.retry.compute_tokens, c.retry.replay_tokens) for n, c in table.items()}
    assert retry == {
        "full": (256, 0), "periodic:8192": (384, 128), "last": (256, 0), "last:1": (384, 128),
        "zero": (384, 128),
    }  # fmt: skip
    # 131,072 is a boundary: whatever comes next hits there under `full` and `periodic`, one block
    # before it under `last`, whose slots leave at least one token.
    turn = {n: (c.turn.hit_tokens, c.turn.replay_tokens) for n, c in table.items()}
    assert turn == {
        "full": (length, 0), "periodic:8192": (length, 0), "last": (length - 128, 0),
        "last:1": (length - 128, 0), "zero": (length - 128, 128),
    }  # fmt: skip


def test_forks_cost_what_trying_each_of_them_costs() -> None:
    ring_tokens = 2000
    blocks = ring_tokens // 128
    # zero: each shared prefix loses a block, and all but the first replay a window.
    zero = cost(Policy("zero"), FLASH, ring_tokens)
    assert zero.fork_lost == 128
    assert zero.fork_replay == pytest.approx(128 * (blocks - 1) / blocks)
    full = cost(Policy("full"), FLASH, ring_tokens)
    assert (full.fork_lost, full.fork_replay) == (0, 0)
    # periodic: of every four boundaries one has a slot, and the next one finds it a block back.
    every = cost(Policy.parse("periodic:512"), FLASH, 2048)
    assert every.fork_lost == 128 * 3 / 4
    assert every.fork_replay == 128 * 2 / 4


def test_a_prompt_that_is_too_short_costs_nothing() -> None:
    for name in ("full", "last", "zero"):
        for tokens in (0, 1, 127):
            found = cost(Policy.parse(name), FLASH, tokens)
            assert (found.slots, found.fork_lost, found.retry.hit_tokens) == (0, 0, 0)
    assert cost(Policy("last"), FLASH, 128).slots == 0
    assert cost(Policy("full"), FLASH, 128).slots == 1


def test_no_policy_without_a_window() -> None:
    with pytest.raises(InputError):
        cost(Policy("last"), presets.get("llama-3.1-8b", weights="w", tokenizer="t"), 100)


def test_the_numbers_come_from_the_layout() -> None:
    """Longer drafts: a larger ring, a lower cap, and other slots."""
    longer = Ring(StateLayout(128, 9, 20, 528), 128)
    assert (longer.size, longer.overshoot) == (137, 8)
    assert longer.layout.slot_bytes == 20 * 137 * 528
    assert longer.retry_boundary(264) == 0 and longer.retry_boundary(265) == 128
