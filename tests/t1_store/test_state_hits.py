"""Hit arithmetic on a real store: parts of a block, the cap, retries, remainders.

Each of these has hurt somebody elsewhere: a main part restored without its index part, a full hit
that left nothing to compute, a retry that found nothing, a partial block that came back with other
tokens behind it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs import presets
from kvfs.layout import Identity
from kvfs.namespace import Namespace
from kvfs.state import Anchor, Ring, SlotPool, decide
from kvfs.state.directory import Directory
from kvfs.store import Store
from kvfs.testing.blocks import first_wrong, payloads

LENGTHS = {
    1: 0, 127: 0, 128: 0, 133: 0, 134: 0, 261: 0, 262: 128, 263: 128, 389: 128, 390: 256,
    1280: 1024, 131_072: 130_816,
}  # fmt: skip


@pytest.fixture
def store(store_dir: Path) -> Iterator[Store]:
    with Store.init(store_dir, durability="none", extent=4 << 20) as made:
        yield made


@pytest.fixture
def swa(store: Store) -> Namespace:
    return store.create_namespace(presets.get("tiny-swa", weights="w", tokenizer="t"))


def put(store: Store, ns: Namespace, tokens: list[int]) -> int:
    hasher = ns.hasher(tokens)
    result = store.put(ns, hasher, payloads(hasher, ns.row_bytes))
    assert result.error is None and result.remainder_tokens == len(tokens) % ns.block_tokens
    return result.stored


# parts


def index_spans(identity: Identity) -> list[tuple[int, int]]:
    return [(s.offset, s.length) for s in identity.spans if s.part == "index"]


@pytest.mark.parametrize("how", ["flip", "zeros", "missing"])
def test_a_block_without_its_index_part_ends_the_prefix(
    store: Store, how: str, store_dir: Path
) -> None:
    """Twenty blocks of the large model's layout; of the eighth only the index part is spoilt."""
    flash = presets.get("deepseek-v4.1-flash", weights="w", tokenizer="t")
    ns = store.create_namespace(flash)
    tokens = list(range(20 * 128 + 134))
    put(store, ns, tokens)
    plan = store.check(ns, tokens)
    assert plan.hit_blocks == 20
    (extent,) = plan.extents
    record = extent.geometry.offset(extent.slot + 7)
    path = store_dir / extent.segment
    if how == "missing":
        os.truncate(path, record + index_spans(flash)[0][0])
    else:
        with open(path, "r+b") as f:
            for offset, length in index_spans(flash):
                f.seek(record + offset)
                old = f.read(length)
                f.seek(record + offset)
                f.write(bytes(length) if how == "zeros" else bytes([old[0] ^ 1]) + old[1:])
    into = bytearray(20 * ns.row_bytes)
    got = store.fetch(ns, plan, tokens, memoryview(into))
    assert got.blocks == 7 and got.reason is not None
    assert "index" in got.reason or how == "missing"
    assert first_wrong(got.data, ns.hasher(tokens), ns.row_bytes) is None
    assert len(got.data) == 7 * ns.row_bytes  # nothing of block 7 and behind is handed out
    assert store.check(ns, tokens).stored_blocks == 7


# the cap


def test_a_full_hit_leaves_a_ring_to_compute(store: Store, swa: Namespace) -> None:
    dense = store.create_namespace(presets.get("tiny", weights="w", tokenizer="t"))
    tokens = [i % 50_000 for i in range(131_072)]
    for ns in (swa, dense):
        put(store, ns, tokens)
    for length, hit in LENGTHS.items():
        plan = store.check(swa, tokens[:length])
        assert plan.stored_tokens == length // 128 * 128
        assert plan.hit_tokens == hit, length
        whole = decide(plan, swa.identity, {hit})
        assert whole.hit_tokens == hit and (whole.compute_tokens >= 134 or not hit)
        plain = decide(store.check(dense, tokens[:length]), dense.identity)
        assert plain.hit_tokens == (length - 1) // 128 * 128 and plain.compute_tokens >= 1


# retries


def test_an_exact_retry_hits_what_it_stored(store: Store, swa: Namespace, tmp_path: Path) -> None:
    """Store 4,096 tokens and their slots, then the same 4,096 again: a hit at a stated cost."""
    ring = Ring.of(swa.identity)
    assert ring is not None
    tokens = list(range(4096))
    put(store, swa, tokens)
    hasher = swa.hasher(tokens)
    with SlotPool.open(swa.identity, 1 << 20, directory=str(tmp_path)) as pool:
        directory = Directory(store, pool)
        last, retry = ring.last_boundary(4096), ring.retry_boundary(4096)
        directory.stored(pool.write(Anchor.of(hasher, last), bytes(pool.slot_bytes)))
        alone = decide(store.check(swa, tokens), swa.identity)
        assert (alone.l1, alone.hit_tokens, alone.replay_tokens) == (3840, 3712, 128)
        assert str(last) in alone.reason and "beyond" in alone.reason
        six_more = decide(store.check(swa, [*tokens, *range(6)]), swa.identity)
        assert (six_more.hit_tokens, six_more.slot) == (3968, 3968)
        directory.stored(pool.write(Anchor.of(hasher, retry), bytes(pool.slot_bytes)))
        both = decide(store.check(swa, tokens), swa.identity)
        assert (both.hit_tokens, both.compute_tokens, both.replay_tokens) == (3840, 256, 0)
        assert both.slot is not None and pool.read(Anchor.of(hasher, both.slot)) is not None


# remainders


def test_only_whole_blocks_are_stored(store: Store, swa: Namespace) -> None:
    for i, (length, blocks) in enumerate({100: 0, 127: 0, 128: 1, 129: 1, 255: 1, 256: 2}.items()):
        prompt = [1000 * i + n for n in range(length)]
        assert put(store, swa, prompt) == blocks
        assert store.check(swa, prompt).stored_tokens == blocks * 128
        first = list(range(length, length + 28))
        longer = store.check(swa, [*prompt[:100], *first, *range(300)])
        assert longer.stored_tokens == 0  # other tokens behind it: another block
        assert longer.hit_tokens % 128 == 0


def test_a_remainder_that_goes_on_is_a_new_block(store: Store, swa: Namespace) -> None:
    put(store, swa, list(range(100)))
    prompt = [*range(100), *range(900, 928)]
    assert store.check(swa, prompt).stored_tokens == 0
    assert put(store, swa, prompt) == 1
    assert store.check(swa, prompt).stored_tokens == 128
    assert store.check(swa, list(range(128))).stored_tokens == 0
