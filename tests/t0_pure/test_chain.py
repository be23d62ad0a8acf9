"""Tokens to bytes to hashes: one prompt, one chain, whatever it came as, however it was hashed."""

from __future__ import annotations

import array
import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from kvfs import chain
from kvfs.chain import HASH_BYTES, PrefixHasher, as_u32, root_hash
from kvfs.errors import ConfigError, InputError
from kvfs.testing.blocks import small_identity

U32 = 0xFFFFFFFF
SMALL = small_identity()
ids_lists = st.lists(st.integers(0, U32), max_size=40)


def le_bytes(ids: Sequence[int]) -> bytes:
    return b"".join(i.to_bytes(4, "little") for i in ids)


# every kind of input


FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "list of numpy scalars": lambda ids: [np.uint32(i) for i in ids],
    "array I": lambda ids: array.array("I", ids),
    "array L": lambda ids: array.array("L", ids),
    "array q": lambda ids: array.array("q", ids),
    "array Q": lambda ids: array.array("Q", ids),
    "uint32": lambda ids: np.array(ids, np.uint32),
    "int64": lambda ids: np.array(ids, np.int64),
    "uint64": lambda ids: np.array(ids, np.uint64),
    "big-endian uint32": lambda ids: np.array(ids, ">u4"),
    "big-endian int64": lambda ids: np.array(ids, ">i8"),
    "strided": lambda ids: np.repeat(np.array(ids, np.uint32), 3)[::3],
    "backwards": lambda ids: np.array(ids[::-1], np.uint32)[::-1],
    "read-only": lambda ids: np.frombuffer(le_bytes(ids), "<u4"),
    "bytes": le_bytes,
    "bytearray": lambda ids: bytearray(le_bytes(ids)),
    "memoryview of bytes": lambda ids: memoryview(le_bytes(ids)),
    "memoryview of uint32": lambda ids: memoryview(array.array("I", ids)),
    "memoryview of int64": lambda ids: memoryview(array.array("q", ids)),
    "strided memoryview": lambda ids: memoryview(array.array("I", [*ids, *ids]))[: len(ids)],
    "ctypes": lambda ids: (ctypes.c_uint32 * len(ids))(*ids),
}
NARROW: dict[str, tuple[int, Callable[[list[int]], Any]]] = {
    "int32": (2**31 - 1, lambda ids: np.array(ids, np.int32)),
    "array i": (2**31 - 1, lambda ids: array.array("i", ids)),
    "array l": (2**31 - 1, lambda ids: array.array("l", ids)),
    "uint16": (2**16 - 1, lambda ids: np.array(ids, np.uint16)),
    "int16": (2**15 - 1, lambda ids: np.array(ids, np.int16)),
    "array H": (2**16 - 1, lambda ids: array.array("H", ids)),
    "uint8": (255, lambda ids: np.array(ids, np.uint8)),
    "int8": (127, lambda ids: np.array(ids, np.int8)),
    "array B": (255, lambda ids: array.array("B", ids)),
    "array b": (127, lambda ids: array.array("b", ids)),
}


@given(ids=ids_lists)
@example(ids=[])
@example(ids=[0, U32])
@example(ids=[1, 2, 3, 4])
def test_every_kind_of_input_gives_the_same_bytes(ids: list[int]) -> None:
    want = le_bytes(ids)
    for name, form in FORMS.items():
        got = as_u32(form(ids))
        assert bytes(got) == want, name
        assert (got.format, got.itemsize, got.ndim) == ("B", 1, 1), name


@given(ids=ids_lists)
@example(ids=[])
@example(ids=[1, 2, 3, 4])
def test_narrow_ids_are_ids_too(ids: list[int]) -> None:
    """An array of one-byte ids is not the bytes of ids: its elements are the ids."""
    for name, (largest, form) in NARROW.items():
        few = [i % (largest + 1) for i in ids]
        assert bytes(as_u32(form(few))) == le_bytes(few), name


@given(ids=st.lists(st.integers(0, 2**31 - 1), max_size=20))
@example(ids=[])
def test_torch_tensors(ids: list[int]) -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.int64, torch.int32):
        assert bytes(as_u32(torch.tensor(ids, dtype=dtype))) == le_bytes(ids)
    few = [i % 128 for i in ids]
    for dtype in (torch.uint8, torch.int8, torch.int16):
        assert bytes(as_u32(torch.tensor(few, dtype=dtype))) == le_bytes(few)
    wide = torch.tensor([[i, 0] for i in ids], dtype=torch.int64).reshape(len(ids), 2)
    assert bytes(as_u32(wide[:, 0])) == le_bytes(ids)
    with pytest.raises(InputError):
        as_u32(wide)
    with pytest.raises(InputError):
        as_u32(torch.tensor([0.5]))


def test_what_needs_no_copy_is_not_copied() -> None:
    for make in ("uint32", "array I", "bytearray", "memoryview of uint32", "ctypes"):
        ids = FORMS[make]([1, 2, 3, 4])
        got = as_u32(ids)
        memoryview(ids).cast("B")[0] = 9
        assert got[0] == 9, make


REFUSED: dict[str, Any] = {
    "pairs": [(1, 2), (2, 3)],
    "nested": [[1], [2]],
    "ragged": [[1], [2, 3]],
    "two dimensions": np.zeros((2, 2), np.uint32),
    "no dimension": np.uint32(5),
    "a number": 5,
    "nothing": None,
    "text": "1 2 3",
    "list of text": ["1", "2"],
    "list with None": [1, None],
    "floats": [1.0, 2.0],
    "float array": np.ones(3, np.float32),
    "array of double": array.array("d", [1.0]),
    "bool array": np.ones(3, bool),
    "complex": np.ones(3, complex),
    "negative": [1, -1],
    "negative int32": np.array([1, -1], np.int32),
    "negative int8": np.array([1, -1], np.int8),
    "negative int64": np.array([1, -1], np.int64),
    "negative array": array.array("i", [-1]),
    "many negative": np.full(100_000, -1, np.int32),
    "too large": [1, 2**32],
    "too large int64": np.array([2**32], np.int64),
    "too large uint64": np.array([2**63], np.uint64),
    "huge": [10**30],
    "part of a token": b"123",
    "part of a token behind some": bytearray(9),
    "dict": {1: 2},
    "set": {1, 2},
    "object array": np.array([1, 2], object),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_a_flat_list_of_ids_is_refused(what: str) -> None:
    with pytest.raises(InputError):
        as_u32(REFUSED[what])
    with pytest.raises(InputError):
        PrefixHasher(SMALL, REFUSED[what])
    hasher = PrefixHasher(SMALL, [1, 2])
    with pytest.raises(InputError):
        hasher.extend(REFUSED[what])
    assert bytes(hasher.buffer) == le_bytes([1, 2])


# the chain


@given(ids=st.lists(st.integers(0, U32), max_size=60), data=st.data())
def test_a_chain_hash_is_the_digest_of_root_and_all_tokens(ids: list[int], data: Any) -> None:
    """The definition, computed a second time without the streaming."""
    identity = small_identity(block_tokens=data.draw(st.integers(1, 9)))
    size = 4 * identity.block_tokens
    seed = int.from_bytes(identity.fingerprint[:8], "little")
    raw, root = le_bytes(ids), identity.canonical()
    ends = range(size, len(raw) + 1, size)
    want = b"".join(xxhash.xxh3_128_digest(root + raw[:end], seed=seed) for end in ends)
    hasher = PrefixHasher(identity, ids)
    assert hasher.hashes() == want
    lineages = (hashlib.blake2b(root + raw[:end], digest_size=16).digest() for end in ends)
    assert hasher.lineages(hasher.n_blocks) == b"".join(lineages)
    assert root_hash(identity) == hasher.digest(0) == xxhash.xxh3_128_digest(root, seed=seed)


@pytest.mark.parametrize("name", ["xxh3-128", "blake3"])
@given(parts=st.lists(ids_lists, max_size=6), lazy=st.booleans())
def test_extending_is_the_same_as_having_it_all(
    name: str, parts: list[list[int]], lazy: bool
) -> None:
    identity = small_identity(hash=name)
    whole = [i for part in parts for i in part]
    hasher = PrefixHasher(identity, parts[0] if parts else [], lazy=lazy)
    for i, part in enumerate(parts[1:]):
        if i % 2:
            hasher.hashes()  # hashing on the way changes nothing
            hasher.lineages(hasher.n_blocks)
        hasher.extend(part)
    want = PrefixHasher(identity, whole)
    assert (hasher.n_tokens, hasher.n_blocks) == (len(whole), len(whole) // 4)
    assert bytes(hasher.buffer) == bytes(want.buffer)
    assert hasher.hashes() == want.hashes()
    assert hasher.lineages(hasher.n_blocks) == want.lineages(want.n_blocks)


@given(ids=st.lists(st.integers(0, U32), max_size=60), data=st.data())
def test_hashes_in_any_order_of_asking(ids: list[int], data: Any) -> None:
    want = PrefixHasher(SMALL, ids).hashes()
    hasher = PrefixHasher(SMALL, ids)
    for _ in range(5):
        n = data.draw(st.integers(0, hasher.n_blocks))
        first = data.draw(st.integers(0, n))
        assert hasher.hashes(n, first=first) == want[first * HASH_BYTES : n * HASH_BYTES]
        if n:
            assert hasher.digest(n) == want[(n - 1) * HASH_BYTES : n * HASH_BYTES]
        size = hasher.block_bytes
        assert bytes(hasher.blocks(first, n)) == le_bytes(ids)[first * size : n * size]
    with pytest.raises(InputError):
        hasher.hashes(hasher.n_blocks + 1)


@given(ids=st.lists(st.integers(0, U32), min_size=1, max_size=40), data=st.data())
def test_one_changed_token_changes_its_block_and_all_after_it(ids: list[int], data: Any) -> None:
    at = data.draw(st.integers(0, len(ids) - 1))
    other = list(ids)
    other[at] ^= 1 << data.draw(st.integers(0, 31))
    a, b = (PrefixHasher(SMALL, tokens) for tokens in (ids, other))
    for i in range(a.n_blocks):
        same = i < at // SMALL.block_tokens
        assert (a.digest(i + 1) == b.digest(i + 1)) == same


def test_a_view_of_the_tokens_outlives_an_extension() -> None:
    hasher = PrefixHasher(SMALL, [1, 2, 3, 4])
    hasher.extend([5])
    held = hasher.buffer[:8]
    hasher.extend([6, 7, 8])
    assert bytes(held) == le_bytes([1, 2])
    assert hasher.hashes() == PrefixHasher(SMALL, range(1, 9)).hashes()


def test_an_extension_does_not_change_the_callers_buffer() -> None:
    ids = np.arange(4, dtype=np.uint32)
    hasher = PrefixHasher(SMALL, ids)
    hasher.extend(ids)
    assert ids.tolist() == [0, 1, 2, 3]
    assert hasher.n_tokens == 8


# the same in every process


PRINT_CHAIN = """
import json, sys
from kvfs.chain import PrefixHasher
from kvfs.testing.blocks import small_identity
out = []
for name in ("xxh3-128", "blake3"):
    hasher = PrefixHasher(small_identity(block_tokens=128, hash=name), list(range(1000)))
    out.append(hasher.hashes().hex())
print(json.dumps(out))
"""


def interpreters() -> list[tuple[str, list[str], dict[str, str]]]:
    """Ways to start a process whose built-in hash() differs, and other Pythons that have xxhash."""
    ways: list[tuple[str, list[str], dict[str, str]]] = [
        ("unset", [sys.executable], {}),
        ("0", [sys.executable], {"PYTHONHASHSEED": "0"}),
        ("1", [sys.executable], {"PYTHONHASHSEED": "1"}),
        ("random", [sys.executable], {"PYTHONHASHSEED": "random"}),
        ("-O", [sys.executable, "-O"], {}),
        ("-OO", [sys.executable, "-OO"], {"PYTHONHASHSEED": "random"}),
    ]
    for name in ("python3.12", "python3.13", "python3.14"):
        found = shutil.which(name)
        if (
            found
            and not subprocess.run(
                [found, "-c", "import xxhash, blake3"], capture_output=True, check=False
            ).returncode
        ):
            ways.append((name, [found], {}))
    return ways


def test_the_chain_is_the_same_in_every_process() -> None:
    """No process state goes into a digest."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(chain.__file__)))
    base = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    base["PYTHONPATH"] = root
    running = {
        name: subprocess.Popen(
            [*command, "-c", PRINT_CHAIN], env={**base, **env}, stdout=subprocess.PIPE, text=True
        )
        for name, command, env in interpreters()
    }
    found = {name: json.loads(process.communicate()[0]) for name, process in running.items()}
    want = [
        PrefixHasher(small_identity(block_tokens=128, hash=name), range(1000)).hashes().hex()
        for name in ("xxh3-128", "blake3")
    ]
    assert found == dict.fromkeys(found, want)


def test_a_library_that_hashes_differently_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = xxhash.xxh3_128
    monkeypatch.setattr(xxhash, "xxh3_128", lambda data, seed=0: right(data, seed=seed + 1))
    with pytest.raises(ConfigError, match="install a sound xxhash"):
        chain.self_test()


def test_an_unknown_hash_is_refused_by_name() -> None:
    external = small_identity(hash="external")
    with pytest.raises(InputError, match="external"):
        chain.start(external)
