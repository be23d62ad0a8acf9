"""`longest_prefix` against a dictionary of blocks, and what it leaves in the hasher."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs import presets
from kvfs.chain import PrefixHasher
from kvfs.errors import InputError
from kvfs.index import lookup
from kvfs.index.schema import RUN

IDENTITY = presets.get("tiny", weights="w", tokenizer="t")
BT = IDENTITY.block_tokens
NOW = 1000

FORMS = {
    "bytes": lambda ids: array.array("I", ids).tobytes(),
    "list": list,
    "array": lambda ids: array.array("I", ids),
    "int32": lambda ids: np.array(ids, np.int32),
    "int64": lambda ids: np.array(ids, np.int64),
    "big-endian": lambda ids: np.array(ids, ">i8"),
    "strided": lambda ids: np.repeat(np.array(ids, np.uint32), 2)[::2],
}


def tokens_of(blocks: list[int]) -> list[int]:
    """A prompt in which block i holds the number blocks[i] in its last token alone."""
    return [token for block in blocks for token in [7] * (BT - 1) + [block]]


def true_hashes(blocks: list[int]) -> list[bytes]:
    data = PrefixHasher(IDENTITY, tokens_of(blocks)).hashes()
    return [data[i : i + 16] for i in range(0, len(data), 16)]


class Rows:
    """A `runs` table in a dictionary, and the plain set of all blocks in it."""

    def __init__(self) -> None:
        self.rows: dict[bytes, memoryview] = {}
        self.blocks: set[bytes] = set()

    def add(self, hashes: list[bytes], expires: int = NOW + 1) -> None:
        """Stores what is new of a chain as one run, as the index does."""
        new = next((i for i, h in enumerate(hashes) if h not in self.blocks), len(hashes))
        if run := hashes[new:]:
            value = RUN.pack(1, new, len(run), new, 0, expires, 1, bytes(16)) + b"".join(run)
            self.rows[run[0]] = memoryview(value)
            self.blocks |= set(run)

    def longest(self, hasher: PrefixHasher) -> lookup.Found:
        return lookup.longest_prefix(self.rows.get, b"", hasher, NOW)


prompts = st.lists(st.integers(0, 1), max_size=40)


@given(
    stored=st.lists(prompts, max_size=5), asked=st.lists(prompts, min_size=1, max_size=3),
    first_step=st.integers(1, 9), form=st.sampled_from(sorted(FORMS)), lazy=st.booleans(),
)  # fmt: skip
def test_against_a_set_of_blocks(
    stored: list[list[int]], asked: list[list[int]], first_step: int, form: str, lazy: bool
) -> None:
    rows = Rows()
    for blocks in stored:
        rows.add(true_hashes(blocks))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "FIRST_STEP", first_step)
        whole: list[int] = []
        hasher = PrefixHasher(IDENTITY, FORMS[form](tokens_of(asked[0])), lazy=lazy)
        for i, part in enumerate(asked):
            whole += part
            if i:
                hasher.extend(FORMS[form](tokens_of(part)))
            hashes = true_hashes(whole)
            want = next((k for k, h in enumerate(hashes) if h not in rows.blocks), len(hashes))
            found = rows.longest(hasher)
            assert found.blocks == want
            assert sum(m.shared for m in found.runs) == want
            at = 0
            for match in found.runs:
                assert match.block == at == match.slot
                at += match.shared
            known = bytes(hasher.known)
            assert known == b"".join(hashes)[: len(known)]
            assert hasher.state.digest() == hasher.digest(len(known) // 16)
            if not lazy:
                assert len(known) >= want * 16
    assert hasher.hashes() == b"".join(true_hashes(whole))


def test_a_long_run_is_searched_not_walked() -> None:
    """A thousand blocks, shared to any place, take a few digests."""
    rows, n = Rows(), 1000
    blocks = [0] * n
    rows.add(true_hashes(blocks))
    counts = []
    for shared in (1, 2, 255, 256, 257, 500, 999, 1000):
        prompt = blocks[:shared] + [1] * (n - shared)
        hasher = PrefixHasher(IDENTITY, tokens_of(prompt))
        hasher.state = counter = _Counting(hasher.state)
        assert rows.longest(hasher).blocks == shared
        counts.append(counter.digests[0])
    assert max(counts) <= 16


class _Counting:
    """A hash state that counts the digests taken of it and of its copies."""

    def __init__(self, state: Any, digests: list[int] | None = None) -> None:
        self._state = state
        self.digests = [0] if digests is None else digests

    def update(self, data: Any) -> None:
        self._state.update(data)

    def copy(self) -> _Counting:
        return _Counting(self._state.copy(), self.digests)

    def digest(self) -> bytes:
        self.digests[0] += 1
        digest: bytes = self._state.digest()
        return digest


@pytest.mark.parametrize("form", ["list", "int32", "int64"])
def test_a_miss_looks_at_the_first_block_only(form: str) -> None:
    rows = Rows()
    ids = tokens_of([0, 1, 2])
    make: Any = {"list": list, "int32": lambda i: np.array(i, np.int32), "int64": np.array}[form]
    ids[-1] = -1
    lazy = PrefixHasher(IDENTITY, make(ids), lazy=True)
    assert rows.longest(lazy).reason == "root unknown"
    rows.add(true_hashes([0, 1, 2]))
    with pytest.raises(InputError):
        rows.longest(lazy)
    with pytest.raises(InputError):
        PrefixHasher(IDENTITY, make(ids))
    with pytest.raises(InputError):
        PrefixHasher(IDENTITY, make([-1, *ids]), lazy=True)


def test_expired_and_foreign_runs_end_the_prefix() -> None:
    rows = Rows()
    hashes = true_hashes([0, 0, 0])
    rows.add(hashes[:2])
    rows.add(hashes, expires=NOW)
    found = rows.longest(PrefixHasher(IDENTITY, tokens_of([0, 0, 0])))
    assert (found.blocks, found.reason) == (2, "expired")
    rows.rows[hashes[2]] = memoryview(RUN.pack(1, 0, 1, 9, 0, NOW + 1, 1, bytes(16)) + hashes[2])
    found = rows.longest(PrefixHasher(IDENTITY, tokens_of([0, 0, 0])))
    assert (found.blocks, found.reason) == (2, "diverged")
