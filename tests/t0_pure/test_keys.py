"""Keys of an engine: how they are folded, and that they stand where tokens do elsewhere."""

from __future__ import annotations

from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.errors import InputError
from kvfs.keys import KeyChain, root_of
from kvfs.namespace import Namespace
from kvfs.record import Landing, RunBlocks, Shape, encode_metas, matches, verify
from kvfs.testing.blocks import small_identity

IDENTITY = small_identity(hash="external")
KEYS = [f"{i:064x}" for i in range(5)]


def folded(key: bytes, root: bytes = IDENTITY.fingerprint) -> bytes:
    """The published fold, written down a second time."""
    return blake2b(key, digest_size=32, key=root, person=b"kvfs-key").digest()


@given(st.lists(st.binary(min_size=1, max_size=80), max_size=5))
def test_a_key_is_folded_with_the_fingerprint(keys: list[bytes]) -> None:
    chain = KeyChain(IDENTITY, keys)
    assert chain.hashes() == b"".join(folded(k)[:16] for k in keys)
    assert chain.lineages(len(keys)) == b"".join(folded(k)[16:] for k in keys)
    assert chain.digest(0) == root_of(IDENTITY) == folded(b"")[:16]


def test_text_is_its_utf8_and_a_parent_is_folded_like_a_key() -> None:
    chain = KeyChain(IDENTITY, ["é"], parent="ab")
    assert chain.digest(1) == folded("é".encode())[:16]
    assert chain.digest(0) == folded(b"ab")[:16]


def test_equal_keys_of_two_namespaces_have_nothing_in_common() -> None:
    other = small_identity(hash="external", salt="somebody else's")
    a, b = KeyChain(IDENTITY, KEYS), KeyChain(other, KEYS)
    pairs = [(c.digest(i), c.lineages(i + 1, first=i)) for c in (a, b) for i in range(5)]
    assert len(set(pairs)) == 10


@pytest.mark.parametrize("empty", ["", b""])
def test_an_empty_key_is_refused(empty: bytes | str) -> None:
    with pytest.raises(InputError, match="empty"):
        KeyChain(IDENTITY, ["a", empty])


def test_more_keys_than_there_are_is_refused() -> None:
    with pytest.raises(InputError, match="5 keys, not 6"):
        KeyChain(IDENTITY, KEYS).digest(6)


def test_tokens_and_keys_are_not_mixed_up() -> None:
    by_key, by_token = Namespace(IDENTITY, 1, "c"), Namespace(small_identity(), 2, "c")
    with pytest.raises(InputError, match="keyed by its engine"):
        by_key.as_hasher([1, 2, 3, 4])
    with pytest.raises(InputError, match="keyed by tokens"):
        by_token.keys(KEYS)
    with pytest.raises(InputError, match="needs tokens"):
        by_key.as_prefix(by_key.keys(KEYS))
    with pytest.raises(InputError, match="another namespace"):
        by_token.as_hasher(by_key.keys(KEYS))
    assert by_key.as_hasher(chain := by_key.keys(KEYS)) is chain


def test_a_record_is_believed_only_for_its_own_key() -> None:
    shape = Shape.of(IDENTITY)
    chain = KeyChain(IDENTITY, KEYS[1:4], parent=KEYS[0], first_block=7)
    rows = [bytes([i]) * IDENTITY.row_bytes for i in range(3)]
    run = RunBlocks.of(chain, 0, 3)
    metas = encode_metas(shape, run, 1, [memoryview(r) for r in rows])
    records = memoryview(b"".join(row + meta for row, meta in zip(rows, metas, strict=True)))
    at = Landing.whole(shape, records)

    # Who asks for the middle of a chain knows neither what is before it nor its number.
    assert verify(at, RunBlocks.of(KeyChain(IDENTITY, KEYS[1:4]), 0, 3)) == (3, None)
    assert run.block == 7 and run.part(1, 3).keyed
    good, reason = verify(at, RunBlocks.of(KeyChain(IDENTITY, [*KEYS[1:3], "x"]), 0, 3))
    assert (good, reason) == (2, "identity mismatch: another block")


def test_the_half_of_the_fold_that_is_no_address_is_compared_too() -> None:
    shape = Shape.of(IDENTITY)
    chain = KeyChain(IDENTITY, KEYS[:1])
    run = RunBlocks.of(chain, 0, 1)
    row = bytes(IDENTITY.row_bytes)
    (meta,) = encode_metas(shape, run, 1, [memoryview(row)])
    at = Landing.whole(shape, memoryview(row + meta))
    assert matches(at, run) == (1, None)
    collided = RunBlocks(run.parent, 0, run.hashes, bytes(16), run.tokens, keyed=True)
    assert matches(at, collided) == (0, "identity mismatch: another block")
