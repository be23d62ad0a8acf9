"""The hit decision against a model that tries every prefix, and the cases that are written down."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs import presets
from kvfs.errors import InputError
from kvfs.layout import Identity, StateLayout
from kvfs.plan import Plan
from kvfs.state import decide
from kvfs.state.decision import decide_length, exact_tokens, replay_before
from kvfs.state.ring import Ring

FLASH = presets.get("deepseek-v4.1-flash", weights="w", tokenizer="t")
DENSE = presets.get("llama-3.1-8b", weights="w", tokenizer="t")


def identity(window: int, backtrack: int, block: int) -> Identity:
    tiny = presets.get("tiny", weights="w", tokenizer="t")
    return Identity(
        "m", "w", "t", tiny.spans, tiny.row_bytes, "opaque", block_tokens=block,
        state=StateLayout(window, backtrack, 2, 4),
    )  # fmt: skip


def plan(tokens: int, stored: int, who: Identity = FLASH) -> Plan:
    hit = min(stored, who.hit_cap(tokens))
    return Plan(who.name, who.nsid, tokens, who.block_tokens, stored, hit, "hit", ())


def test_the_reference_case() -> None:
    length = 131_072
    found = decide(plan(length, length), FLASH, {130_816})
    assert (found.cap, found.l1, found.compute_tokens) == (130_938, 130_816, 256)
    assert (found.slot, found.replay) == (130_816, None)
    without = decide(plan(length, length), FLASH)
    assert (without.hit_tokens, without.compute_tokens, without.replay_tokens) == (
        130_688, 384, 128,
    )  # fmt: skip
    assert without.replay is not None
    assert (without.replay.start, without.replay.end) == (130_560, 130_688)
    assert without.replay.layers == 20
    assert without.to_json()["replay"]["writes_blocks"] is False


def test_an_exact_retry() -> None:
    """Stored 4,096 tokens and their last boundary's slot alone: the retry replays one window."""
    stored = plan(4096, 4096)
    only = decide(stored, FLASH, {3968})
    assert (only.l1, only.hit_tokens, only.slot, only.replay_tokens) == (3840, 3712, None, 128)
    assert only.reason == "no slot at 3840: the one at 3968 is beyond what may be hit"
    # Six tokens more, and the same slot is in reach.
    longer = decide(plan(4102, 4096), FLASH, {3968})
    assert (longer.l1, longer.hit_tokens, longer.slot) == (3968, 3968, 3968)


def test_an_exact_retry_hits_with_the_second_slot() -> None:
    ring = Ring.of(FLASH)
    assert ring is not None
    assert ring.after_prefill(4096).anchors == (3840, 3968)
    for tokens in range(1, 20_001):
        stored = tokens // 128 * 128
        found = decide_length(FLASH, tokens, stored, ring.after_prefill(tokens).anchors)
        assert found.hit_tokens == found.l1 == FLASH.hit_cap(tokens)
        assert found.replay is None


def test_with_all_stored_the_cap_is_what_is_hit() -> None:
    for tokens, hit in {
        1: 0, 127: 0, 128: 0, 133: 0, 134: 0, 261: 0, 262: 128, 263: 128, 389: 128, 390: 256,
        1280: 1024, 131_072: 130_816,
    }.items():  # fmt: skip
        assert decide_length(FLASH, tokens, tokens // 128 * 128, {hit}).hit_tokens == hit


def try_all(who: Identity, tokens: int, stored: int, slots: set[int]) -> tuple[int, int | None]:
    """(hit, slot) found by looking at every boundary, from the rules as they are written down."""
    state, block = who.state, who.block_tokens
    assert state is not None
    usable = [b for b in range(0, stored + 1, block) if tokens - b >= state.ring or b == 0]
    best = usable[-1]
    if best and best in slots:
        return best, best
    if len(usable) < 2:
        return 0, None
    before = usable[-2]
    return before, before if before and before in slots else None


@given(
    st.integers(1, 300), st.integers(0, 9), st.sampled_from([4, 32, 128, 100]),
    st.integers(0, 20_000), st.data(),
)  # fmt: skip
def test_decisions_equal_the_model(
    window: int, backtrack: int, block: int, tokens: int, data: st.DataObject
) -> None:
    who = identity(window, backtrack, block)
    stored = data.draw(st.integers(0, tokens // block)) * block
    near = range(max(0, stored - 6 * block), stored + 1, block)
    slots = data.draw(st.sets(st.sampled_from(near)))
    found = decide_length(who, tokens, stored, slots)
    assert (found.hit_tokens, found.slot) == try_all(who, tokens, stored, slots)
    assert found.hit_tokens % block == 0 and found.hit_tokens <= min(stored, max(0, tokens - 1))
    assert found.compute_tokens >= 1 or not tokens
    if found.slot is None and found.hit_tokens:
        assert found.replay is not None
        assert found.replay.end == found.hit_tokens
        assert found.replay.tokens == min(window, found.hit_tokens)
    else:
        assert found.replay is None


def test_every_length_in_the_reference_layout() -> None:
    for tokens in range(20_001):
        stored = tokens // 128 * 128
        l1 = max((b for b in (stored, stored - 128, stored - 256) if tokens - b >= 134), default=0)
        l1 = max(0, l1)
        found = decide_length(FLASH, tokens, stored)
        assert found.l1 == l1 and found.cap == max(0, tokens - 134)
        assert found.hit_tokens == max(0, l1 - 128)
        assert found.replay_tokens == (128 if l1 > 128 else 0)
        assert decide_length(FLASH, tokens, stored, {l1} if l1 else ()).hit_tokens == l1


def test_a_slot_one_block_back_saves_the_replay() -> None:
    found = decide(plan(4096, 4096), FLASH, {3712})
    assert (found.hit_tokens, found.slot, found.replay) == (3712, 3712, None)
    both = decide(plan(4096, 4096), FLASH, {3712, 3840})
    assert (both.hit_tokens, both.slot) == (3840, 3840)


def test_a_model_without_a_window_leaves_one_token() -> None:
    for tokens in range(0, 2000):
        found = decide_length(DENSE, tokens, tokens // 128 * 128)
        assert found.cap == max(0, tokens - 1)
        assert found.hit_tokens == max(0, tokens - 1) // 128 * 128
        assert tokens == 0 or found.compute_tokens >= 1
        assert (found.slot, found.replay, found.reason) == (None, None, "no sliding window")


def test_reasons_of_no_hit() -> None:
    assert decide_length(FLASH, 5000, 0).reason == "nothing stored"
    assert decide_length(FLASH, 200, 128).reason == "the prompt is too short for a hit"
    assert decide_length(FLASH, 5000, 128).reason == "no slot at 128"
    assert decide_length(FLASH, 5000, 128).hit_tokens == 0


# what a replay can rebuild


def reaches(window: int, layer: int, position: int) -> int:
    """The earliest token that the state of a layer at a position depends on, layer by layer."""
    for _ in range(layer):
        position = max(0, position - window + 1)
    return position


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 400), st.booleans())
def test_where_a_replay_is_exact(window: int, layers: int, end: int, exact: bool) -> None:
    replay = replay_before(StateLayout(window, 0, layers, 4), end, exact=exact)
    if replay is None:
        assert end == 0
        return
    whole = 0
    for layer in range(layers):
        first = replay.exact_from(layer)
        for position in range(max(0, replay.start), end):
            needs = reaches(window, layer, position)
            assert (needs >= replay.start) == (position >= first)
        whole += all(
            reaches(window, layer, p) >= replay.start for p in range(max(0, end - window), end)
        )
    assert replay.exact_layers == whole
    if exact:
        assert whole == layers


def test_an_exact_replay_is_no_longer_than_it_must_be() -> None:
    assert FLASH.state is not None
    assert exact_tokens(FLASH.state) == 128 + 19 * 127 == 2541
    found = decide(plan(131_072, 131_072), FLASH, exact=True)
    assert found.replay is not None
    assert (found.replay.tokens, found.replay.exact_layers) == (2541, 20)
    bounded = decide(plan(131_072, 131_072), FLASH).replay
    assert bounded is not None and bounded.exact_layers == 1
    # From the beginning of a sequence everything is exact: nothing is missing.
    early = decide(plan(400, 256), FLASH).replay
    assert early is not None and (early.start, early.exact_layers) == (0, 20)


def test_layers_that_are_not_replayed() -> None:
    replay = decide(plan(4096, 4096), FLASH).replay
    assert replay is not None
    with pytest.raises(InputError):
        replay.exact_from(20)
