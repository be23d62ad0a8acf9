"""CHECK: the longest stored prefix of a prompt, in an index of millions of blocks.

Measured through Store.check, each time with an array that it has not seen, so that conversion is in
and the tokens are not in cache: 32-bit integers with a sign, as engines have them. Beside it, in
turns: one plain hash of as many equally cold bytes, and the approach of one key per block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvfs.bench.place import new_store
from kvfs.bench.synthetic import fill, plant
from kvfs.bench.timing import Case, Options, Row, compared, in_turns, timed
from kvfs.chain import HASH_BYTES, TOKEN_BYTES, as_u32
from kvfs.index.schema import run_key
from kvfs.namespace import Namespace
from kvfs.store import Store

RUNS = 60
VOCABULARY = 129_280
RATIO_LIMIT = 5.0
INDEX_LIMITS = {"index_bytes_per_block": 45.0}
PLAIN = "one plain xxh3 of the same bytes"
_PROMPTS = 4
_COPIES = 16
_FEW = 7
_MISSES = 500

Tokens = npt.NDArray[Any]

# name, tokens, runs they are stored in, most seconds
SIZES = (("1m", 1_000_000, 40, 1e-3), ("128k", 131_072, 5, 0.15e-3))
# How tokens may come: name, maker of a fresh object, what it is.
FORMS: dict[str, tuple[Callable[[Tokens], Any], str]] = {
    "int64": (lambda t: t.astype(np.int64), "from an array of 64-bit integers"),
    "list": (lambda t: t.tolist(), "from a Python list"),
}


def run(options: Options) -> Iterator[Row]:
    """Yields the rows `check.*`. Raises ConfigError, IndexFault."""
    with new_store(options.directory, options.index) as (store, ns):
        fill(store, ns, options.blocks, options.progress)
        blocks = store.index.counters()["blocks"]
        index = {"index_bytes_per_block": store.index.env().info()["used_bytes"] / blocks}
        runs = options.runs or RUNS
        for name, tokens, stored_runs, limit in SIZES:
            options.progress(f"check.{name}")
            prompts = _prompts(store, ns, tokens, stored_runs)
            yield from _size(store, ns, name, prompts, stored_runs, limit, runs, index)
        options.progress("check.miss")
        yield _miss(store, ns, options.runs or _MISSES)


def _prompts(store: Store, ns: Namespace, tokens: int, runs: int) -> list[Tokens]:
    rng = np.random.default_rng(tokens)
    prompts = [rng.integers(0, VOCABULARY, tokens, np.int32) for _ in range(_PROMPTS)]
    for prompt in prompts:
        plant(store, ns, prompt, runs)
    return prompts


def _size(
    store: Store, ns: Namespace, name: str, prompts: list[Tokens], stored_runs: int,
    limit: float, runs: int, index: Mapping[str, float],
) -> Iterator[Row]:  # fmt: skip
    found = in_turns(
        {
            "check": _each(prompts, lambda t: _hit(store, ns, t)),
            "xxh3": _each(prompts, xxhash.xxh3_128_digest),
        },
        runs,
    )
    seconds, plain, ratio = compared(found["check"], found["xxh3"])
    what = f"{len(prompts[0]):,} tokens, fully stored in {stored_runs} runs"
    yield Row(
        f"check.{name}", seconds, runs, what, limit, ratio, RATIO_LIMIT, PLAIN, plain,
        index, INDEX_LIMITS,
    )  # fmt: skip
    few = min(runs, _FEW)
    others = {
        form: _each(prompts, lambda t: _hit(store, ns, t), make, few)
        for form, (make, _) in FORMS.items()
    }
    others["per_block"] = _each(prompts, lambda t: per_block_prefix(store, ns, t), copies=few)
    texts = {form: text for form, (_, text) in FORMS.items()}
    texts["per_block"] = "sha256 chain and one lookup per block"
    found = in_turns({**others, "xxh3": _each(prompts, xxhash.xxh3_128_digest, copies=few)}, few)
    for key, text in texts.items():
        seconds, plain, ratio = compared(found[key], found["xxh3"])
        yield Row(
            f"check.{name}.{key}", seconds, few, f"{what}: {text}",
            ratio=ratio, reference=PLAIN, reference_seconds=plain,
        )  # fmt: skip


def _hit(store: Store, ns: Namespace, tokens: Any) -> None:
    if store.check(ns, tokens).reason != "hit":
        raise AssertionError("a stored prompt is no hit")


def _each(
    prompts: list[Tokens], work: Callable[[Any], Any],
    make: Callable[[Tokens], Any] = lambda t: t.copy(), copies: int = _COPIES,
) -> Case:  # fmt: skip
    """Does the work on fresh copies in turn: enough of them that each has left the caches."""
    source = cycle(prompts)
    made = [make(next(source)) for _ in range(copies)]
    turn = cycle(made)

    def case() -> float:
        tokens = next(turn)
        return timed(lambda: work(tokens))

    return case


def per_block_prefix(store: Store, ns: Namespace, tokens: Tokens) -> int:
    """The longest prefix as others find it: a key for every block, and a lookup for every key.

    The keys are looked up in the index at hand. That has a row per run, so nearly all lookups find
    nothing, and it is smaller than one with a row per block would be: the real thing is slower.
    """
    data, size = as_u32(tokens), ns.block_tokens * TOKEN_BYTES
    parent, keys, sha256 = b"", [], hashlib.sha256
    for at in range(0, len(data) // size * size, size):
        parent = sha256(parent + data[at : at + size]).digest()
        keys.append(parent)
    prefix = run_key(ns.number, b"")
    with store.index.env().read() as txn:
        return sum(txn.get(prefix + key[:HASH_BYTES]) is not None for key in keys)


def _miss(store: Store, ns: Namespace, runs: int) -> Row:
    """A prompt of 128 K tokens whose first block is not stored; a new one each time."""
    length = SIZES[1][1]
    rng = np.random.default_rng(3)
    pool = rng.integers(0, VOCABULARY, length + runs, np.int32)
    at = cycle(range(runs))

    def case() -> float:
        first = next(at)
        tokens = pool[first : first + length]
        return timed(lambda: store.check(ns, tokens))

    found = in_turns({"check": case, "xxh3": _each([pool[:length]], xxhash.xxh3_128_digest)}, runs)
    if store.check(ns, pool[:length]).stored_tokens:
        raise AssertionError("a prompt of random tokens is stored")
    seconds, plain, ratio = compared(found["check"], found["xxh3"])
    return Row(
        "check.miss", seconds, runs, f"{length:,} tokens, the first block not stored",
        10e-6, ratio, RATIO_LIMIT, PLAIN, plain,
    )  # fmt: skip
