"""The ring against a ring that is written token by token, and slots unrolled to logical order."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs import presets
from kvfs.errors import InputError
from kvfs.layout import StateLayout
from kvfs.state.decode import Copy, CopyZone
from kvfs.state.policy import Policy
from kvfs.state.ring import Ring

LONGEST = 20_000
IDENTITY = presets.get("deepseek-v4.1-flash", weights="w", tokenizer="t")
FLASH = Ring.of(IDENTITY)
assert FLASH is not None
# (window, backtrack, block): the reference, no drafts, windows shorter and longer than the block,
# windows that no block divides, blocks shorter than a step.
SHAPES = [(128, 6, 128), (128, 0, 128), (100, 3, 128), (512, 8, 128), (200, 5, 64), (7, 6, 4)]


def ring_of(shape: tuple[int, int, int], layers: int = 2, token_bytes: int = 4) -> Ring:
    window, backtrack, block = shape
    return Ring(StateLayout(window, backtrack, layers, token_bytes), block)


class Tape:
    """A ring of positions, written one token after the other; the oracle of all tests here."""

    def __init__(self, size: int, start: int) -> None:
        self.places = np.full(size, -1, dtype=np.int64)
        self.next = start
        self.at = 0

    def write(self) -> None:
        self.places[self.at] = self.next
        self.next += 1
        self.at = (self.at + 1) % len(self.places)

    def oldest(self) -> int:
        held = self.places[self.places >= 0]
        return int(held.min()) if len(held) else self.next


def test_the_reference_layout() -> None:
    assert FLASH is not None
    assert (FLASH.size, FLASH.overshoot, FLASH.step, FLASH.block) == (134, 5, 6, 128)
    assert FLASH.layout.slot_bytes == 20 * 134 * 528 == 1_415_040


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("start", [0, 1, 3712])
def test_every_token_is_where_the_index_says(shape: tuple[int, int, int], start: int) -> None:
    ring = ring_of(shape)
    tape = Tape(ring.size, start)
    steps = 4 * ring.size + 3
    for _ in range(steps):
        tape.write()
        held = np.flatnonzero(tape.places >= 0)
        for place in held[:: max(1, len(held) // 8)]:
            assert ring.index(int(tape.places[place]), start) == place
        assert ring.index(tape.next, start) == tape.at  # where the next one goes
    assert ring.rotation(start + steps, start) == tape.at


@pytest.mark.parametrize("shape", SHAPES)
def test_a_window_is_whole_if_and_only_if_the_tape_has_all_of_it(
    shape: tuple[int, int, int],
) -> None:
    ring = ring_of(shape)
    for start in (0, 5, 3 * ring.block - ring.layout.window):
        tape = Tape(ring.size, max(0, start))
        for _ in range(3 * ring.size + 2 * ring.block):
            tape.write()
            held = set(tape.places.tolist())
            for anchor in range(0, tape.next + ring.block, ring.block):
                window = range(max(0, anchor - ring.layout.window), anchor)
                whole = all(x in held for x in window) and anchor <= tape.next
                assert ring.holds(anchor, max(0, start), tape.next) == whole or not anchor


@functools.cache
def oldest_held(size: int) -> list[int]:
    """The oldest token in a ring after each number of tokens."""
    tape, out = Tape(size, 0), []
    for _ in range(LONGEST + 1):
        out.append(tape.oldest())
        tape.write()
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [None, 1000, 2048])
def test_store_points_of_every_prefill(shape: tuple[int, int, int], size: int | None) -> None:
    """All lengths up to 20,000, in one chunk and in chunks that blocks do and do not divide."""
    ring = ring_of(shape)
    oldest = oldest_held(ring.size)
    last = retry = 0
    for tokens in range(LONGEST + 1):
        # The last boundary that leaves one token, and the last one that leaves a whole ring.
        while last + ring.block < tokens:
            last += ring.block
        while tokens - (retry + ring.block) >= ring.size:
            retry += ring.block
        assert ring.last_boundary(tokens) == last
        assert ring.retry_boundary(tokens) == retry
        chunk = 0 if size is None or not tokens else (tokens - 1) // size * size
        at_hand = oldest[chunk]
        wanted = {a for a in (retry, last) if a}
        found = ring.after_prefill(tokens, chunk=chunk)
        whole = {a for a in wanted if max(0, a - ring.layout.window) >= at_hand}
        assert set(found.anchors) == whole and list(found.anchors) == sorted(whole)
        assert set(found.left_out) == wanted - whole
        only = ring.after_prefill(tokens, chunk=chunk, retry=False)
        assert set(only.anchors) == whole & {last}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("retry", [False, True])
def test_the_latest_chunk_is_the_latest(shape: tuple[int, int, int], retry: bool) -> None:
    ring = ring_of(shape)
    for tokens in [*range(2, 1200), *range(1201, LONGEST, 37)]:
        latest = ring.latest_chunk(tokens, retry=retry)
        assert 0 <= latest < tokens
        assert not ring.after_prefill(tokens, chunk=latest, retry=retry).left_out
        if latest < tokens - 1:
            later = ring.after_prefill(tokens, chunk=latest + 1, retry=retry)
            assert later.left_out or not later.anchors


def test_identity_and_ring_have_one_cap() -> None:
    assert FLASH is not None
    for tokens in range(LONGEST + 1):
        assert FLASH.retry_boundary(tokens) == IDENTITY.hit_cap(tokens)


def test_a_prefill_never_stores_where_it_could_hit_itself() -> None:
    """Hence the second slot: without it an exact retry finds nothing."""
    assert FLASH is not None
    for tokens in range(1, LONGEST + 1):
        first, hit = FLASH.last_boundary(tokens), FLASH.retry_boundary(tokens)
        assert first != hit or first == 0
        assert first - hit in (128, 256) or hit == 0


def test_a_loaded_slot_or_a_replay_bounds_what_is_at_hand() -> None:
    assert FLASH is not None
    # 5,000 tokens of which 4,736 were hit: the window before the hit came from its slot.
    loaded = FLASH.after_prefill(5000, chunk=4736, start=4736 - 128)
    assert loaded.anchors == (4864, 4992) and not loaded.left_out
    # A ring begun by mistake at the hit itself has no window for a boundary right behind it.
    bare = FLASH.after_prefill(4096 + 134, chunk=4096, start=4096)
    assert bare.anchors == (4224,) and set(bare.left_out) == {4096}


def test_bad_prefills() -> None:
    assert FLASH is not None
    for tokens, chunk, start in [(-1, 0, 0), (10, 11, 0), (10, -1, 0), (10, 0, -1)]:
        with pytest.raises(InputError):
            FLASH.after_prefill(tokens, chunk=chunk, start=start)


# bytes


def token(layer: int, position: int, size: int) -> bytes:
    return (layer * 1_000_003 + position * 7919 & 0xFFFFFFFF).to_bytes(4, "little") * (size // 4)


def written(ring: Ring, start: int, end: int) -> bytes:
    """A ring's bytes after the tokens [start, end) were written into it one by one."""
    layout = ring.layout
    out = bytearray(layout.slot_bytes)
    for layer in range(layout.layers):
        for position in range(max(start, end - ring.size), end):
            at = (layer * ring.size + (position - start) % ring.size) * layout.token_bytes
            out[at : at + layout.token_bytes] = token(layer, position, layout.token_bytes)
    return bytes(out)


def in_order(ring: Ring, first: int, end: int) -> bytes:
    layout = ring.layout
    return b"".join(
        token(layer, position, layout.token_bytes)
        for layer in range(layout.layers)
        for position in range(first, end)
    )


shapes = st.tuples(st.integers(1, 40), st.integers(0, 9), st.integers(1, 48))


@given(shapes, st.integers(0, 500), st.integers(1, 12), st.integers(0, 9), st.integers(1, 3))
def test_unrolling_any_rotation_and_overshoot(
    shape: tuple[int, int, int], start: int, blocks: int, overshoot: int, layers: int
) -> None:
    ring = ring_of(shape, layers=layers, token_bytes=8)
    overshoot = min(overshoot, ring.layout.backtrack)
    anchor = start + ring.size + blocks  # any position will do for bytes
    slot = written(ring, start, anchor + overshoot)
    rotation = ring.rotation(anchor, start)
    end = anchor + overshoot
    ordered = in_order(ring, end - ring.size, end)
    assert ring.unroll(slot, rotation, overshoot) == ordered
    assert ring.roll(ordered, rotation, overshoot) == slot
    assert ring.window_of(slot, rotation) == in_order(ring, anchor - ring.layout.window, anchor)
    # Loaded into a ring that was begun elsewhere, it is what that ring would have been.
    other = start % ring.size
    moved = ring.turn(slot, rotation, ring.rotation(anchor, other))
    assert moved == written(ring, other, end)


def test_every_rotation_and_overshoot_of_the_reference_ring() -> None:
    assert FLASH is not None
    ring = Ring(StateLayout(128, 6, 2, 4), 128)
    for start in range(ring.size):
        for overshoot in range(ring.layout.backtrack + 1):
            slot = written(ring, start, 1024 + overshoot)
            rotation = ring.rotation(1024, start)
            assert ring.window_of(slot, rotation) == in_order(ring, 896, 1024)


def test_bad_slots() -> None:
    ring = ring_of((128, 6, 128))
    slot = bytes(ring.layout.slot_bytes)
    for rotation, overshoot in [(-1, 0), (134, 0), (0, 7), (0, -1)]:
        with pytest.raises(InputError):
            ring.unroll(slot, rotation, overshoot)
    with pytest.raises(InputError):
        ring.window_of(slot[1:], 0)


# decoding


class Decoder:
    """Decodes with drafts that may be taken back, and keeps the ring's positions by hand."""

    def __init__(self, ring: Ring, start: int, tokens: int, rng: random.Random) -> None:
        self.ring, self.start, self.rng = ring, start, rng
        self.places = [-1] * ring.size
        self.tokens = tokens
        for position in range(start, tokens):
            self.places[(position - start) % ring.size] = position

    def step(self) -> tuple[int, int]:
        """Writes drafts, accepts some; drafts that are refused stay in the ring as what they are:
        tokens of a position that is still to come, marked by a negative number."""
        before = self.tokens
        drafted = self.rng.randint(1, self.ring.step)
        accepted = self.rng.randint(1, drafted)
        for i in range(drafted):
            position = before + i
            kept = position if i < accepted else -2
            self.places[(position - self.start) % self.ring.size] = kept
        self.tokens = before + accepted
        return before, self.tokens


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_every_copy_has_the_whole_window(shape: tuple[int, int, int], seed: int) -> None:
    ring, rng = ring_of(shape), random.Random(seed)
    prompt = rng.randrange(ring.layout.window, 3000)
    start = rng.choice([0, prompt - ring.layout.window])
    decoder = Decoder(ring, start, prompt, rng)
    zone = CopyZone(ring, start)
    halves: list[tuple[Copy, list[int]] | None] = [None, None]
    completed: Copy | None = None
    under_way: Copy | None = None
    while decoder.tokens < prompt + 20 * ring.block + 7:
        before, after = decoder.step()
        copy = zone.step(before, after)
        crossed = after // ring.block > before // ring.block
        first = after // ring.block * ring.block - ring.layout.window
        assert (copy is not None) == (crossed and max(0, first) >= start)
        if copy is not None:
            assert copy.anchor == after // ring.block * ring.block
            assert copy.overshoot == after - copy.anchor <= ring.overshoot
            window = range(copy.anchor - ring.layout.window, copy.anchor)
            places = [(copy.rotation + x - copy.anchor) % ring.size for x in window]
            assert [decoder.places[i] for i in places] == list(window)
            halves[copy.half], under_way = (copy, list(decoder.places)), copy
        elif under_way is not None and rng.random() < 0.3:
            assert not zone.complete(under_way)  # stored at the end, not at once
            completed, under_way = under_way, None
        if completed is not None:
            # The half of the last completed copy is never the one being written.
            kept = halves[completed.half]
            assert kept is not None and kept[0] == completed
    assert zone.finish() == completed


def test_what_is_stored_at_the_end() -> None:
    assert FLASH is not None
    zone = CopyZone(FLASH, 0)
    assert zone.step(250, 255) is None
    first = zone.step(255, 261)
    assert first == Copy(256, 5, 256 % 134, 0)
    assert zone.finish() is None  # ordered, never completed
    zone = CopyZone(FLASH, 0)
    first = zone.step(255, 261)
    assert first is not None and not zone.complete(first)
    second = zone.step(383, 384)
    assert second == Copy(384, 0, 384 % 134, 1)
    assert zone.finish() == first
    third = CopyZone(FLASH, 0)
    assert third.step(128, 129) is None  # crossed before: the prefill's slot


def test_a_copy_that_was_overtaken_is_not_stored() -> None:
    ring = ring_of((7, 6, 4))
    zone = CopyZone(ring, 0)
    first, second = zone.step(10, 12), zone.step(12, 16)
    assert first is not None and second is not None and first.half == second.half
    zone.complete(first)
    assert zone.finish() is None
    first, second = zone.step(10, 12), zone.step(12, 16)
    assert first is not None and second is not None
    zone.complete(second)
    assert zone.finish() == second


def test_policies_decide_which_crossings_count() -> None:
    assert FLASH is not None
    for policy, anchors in [("full", [256, 384, 512, 640]), ("periodic:256", [256, 512]),
                            ("last", [256, 384, 512, 640]), ("zero", [])]:  # fmt: skip
        zone = CopyZone(FLASH, 0, Policy.parse(policy))
        copies = [zone.step(n, n + 6) for n in range(200, 650, 6)]
        assert [c.anchor for c in copies if c is not None] == anchors
        zone = CopyZone(FLASH, 0, Policy.parse(policy))
        for n in range(200, 650, 6):
            copy = zone.step(n, n + 6)
            if copy is not None:
                assert zone.complete(copy) == (policy in ("full", "periodic:256"))
        last = zone.finish()
        assert (last is not None) == (policy == "last")


def test_a_step_longer_than_the_ring_has_room_for() -> None:
    assert FLASH is not None
    zone = CopyZone(FLASH, 0)
    with pytest.raises(InputError):
        zone.step(200, 207)
    with pytest.raises(InputError):
        zone.step(200, 199)
