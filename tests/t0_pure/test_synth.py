"""Synthetic tokens and payloads: the same everywhere, and different wherever they must be."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import pytest

from kvfs.errors import InputError
from kvfs.sim.synth import VOCABULARY, PayloadSynth, TokenSynth
from kvfs.sim.trace import Request

ROWS = [1, 15, 16, 512, 4096, 5000, 17_000, 114_048]


def request(*runs: tuple[int, int], tokens: int, block_tokens: int = 128, line: int = 2) -> Request:
    return Request(0.0, "", runs, tokens, block_tokens, line)


def keys(n: int) -> bytes:
    return b"".join(hashlib.blake2b(bytes([i]), digest_size=16).digest() for i in range(n))


def test_tokens_are_a_published_function_of_the_ids() -> None:
    """A change here makes every store filled by an older replay a store of misses."""
    tokens = TokenSynth(128).tokens(request((0, 2), (70_000, 1), tokens=384))
    digest = hashlib.sha256(tokens.astype("<u4").tobytes()).hexdigest()
    assert digest == "d9e512b9dc9fc0ceb7b7cabb3699b8e9ac4f49d033adc4b2d0be05abf8358bce"
    assert tokens.dtype == np.uint32 and tokens.shape == (384,)
    assert int(tokens.max()) < VOCABULARY


@pytest.mark.parametrize("block_tokens", [5, 16, 100, 128, 512])
def test_equal_ids_give_equal_tokens_wherever_they_stand(block_tokens: int) -> None:
    synth = TokenSynth(block_tokens)
    a = synth.tokens(request((5, 3), tokens=3 * block_tokens, block_tokens=block_tokens))
    b = synth.tokens(
        request((90, 1), (6, 2), tokens=3 * block_tokens, block_tokens=block_tokens, line=9)
    )
    assert np.array_equal(a[block_tokens:], b[block_tokens:])
    assert not np.array_equal(a[:block_tokens], b[:block_tokens])


@pytest.mark.parametrize("block_tokens", [128, 512])
def test_no_two_blocks_of_128_tokens_are_equal(block_tokens: int) -> None:
    """Also ids far apart, of which all but one digit of the stamp agree."""
    n = 300
    runs = [(base, n) for base in (0, VOCABULARY, VOCABULARY**2, (1 << 48) - n)]
    total = n * len(runs) * block_tokens
    tokens = TokenSynth(block_tokens).tokens(
        request(*runs, tokens=total, block_tokens=block_tokens)
    )
    blocks = tokens.reshape(-1, 128)
    assert len({row.tobytes() for row in blocks}) == len(blocks) == total // 128
    assert len({row[:4].tobytes() for row in blocks}) == len(blocks)


def test_tokens_are_cut_to_the_input_length() -> None:
    synth = TokenSynth(512)
    whole = synth.tokens(request((3, 4), tokens=2048, block_tokens=512))
    for n in (0, 1, 127, 128, 129, 512, 513, 2047):
        cut = synth.tokens(request((3, 4), tokens=n, block_tokens=512))
        assert np.array_equal(cut, whole[:n])


def test_tokens_beyond_the_ids_are_shared_with_nobody() -> None:
    """A trace whose ids cover whole blocks only says nothing about the rest."""
    synth = TokenSynth(128)
    a = synth.tokens(request((0, 1), tokens=128 + 300, line=2))
    b = synth.tokens(request((0, 1), tokens=128 + 300, line=3))
    assert len(a) == len(b) == 428
    assert np.array_equal(a[:128], b[:128])
    rows = [*a[128:384].reshape(2, 128), *b[128:384].reshape(2, 128)]
    assert all(not np.array_equal(x, y) for x, y in pairwise(rows))
    assert np.array_equal(a, synth.tokens(request((0, 1), tokens=428, line=2)))


def test_traces_share_nothing() -> None:
    one, other = (TokenSynth(128, name).tokens(request((0, 9), tokens=9 * 128)) for name in "ab")
    assert not (one.reshape(-1, 128) == other.reshape(-1, 128)).all(axis=1).any()


def test_ids_of_too_few_tokens_are_refused() -> None:
    with pytest.raises(InputError, match="too short"):
        TokenSynth(4)


def test_payloads_are_a_published_function_of_the_hash() -> None:
    found = hashlib.sha256(PayloadSynth(5000).make(keys(3))).hexdigest()
    assert found == "2a8073ead8720823cf5c9c300f91373dedbc315deecdf934ad4531d1026d8975"


@pytest.mark.parametrize("row_bytes", ROWS)
def test_payloads_do_not_depend_on_the_company(row_bytes: int) -> None:
    synth = PayloadSynth(row_bytes)
    together = bytes(synth.make(keys(5)))
    alone = b"".join(bytes(synth.make(keys(5)[i * 16 : i * 16 + 16])) for i in range(5))
    assert together == alone
    assert len(together) == 5 * row_bytes


@pytest.mark.parametrize("row_bytes", ROWS)
def test_a_changed_byte_is_found_in_its_block(row_bytes: int) -> None:
    synth = PayloadSynth(row_bytes)
    data = synth.make(keys(6))
    assert synth.first_difference(keys(6), data) is None
    for block, at in ((5, row_bytes - 1), (3, 0), (2, row_bytes // 2)):
        data[block * row_bytes + at] ^= 1
        assert synth.first_difference(keys(6), data) == block


def test_differences_are_found_across_chunks() -> None:
    synth = PayloadSynth(114_048)
    hashes = keys(90)
    data = synth.make(hashes)
    data[80 * 114_048 + 5] ^= 0x40
    assert synth.first_difference(hashes, data) == 80


def test_missing_data_is_a_difference() -> None:
    synth = PayloadSynth(512)
    data = synth.make(keys(6))
    assert synth.first_difference(keys(6), data[: 4 * 512 + 100]) == 4
    assert synth.first_difference(keys(6), b"") == 0
    assert synth.first_difference(b"", b"") is None


def test_every_page_carries_the_hash() -> None:
    data = bytes(PayloadSynth(114_048).make(keys(1)))
    assert all(data[at : at + 16] == keys(1) for at in range(0, 114_048, 4096))


def test_a_buffer_of_another_size_is_refused() -> None:
    with pytest.raises(InputError, match="2 blocks are 1024 bytes"):
        PayloadSynth(512).fill(keys(2), bytearray(1023))
