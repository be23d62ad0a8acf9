"""How a model goes on from the store, beside how it goes on from what it computed: the difference.

    python -m kvfs.connectors.hf_compare DIRECTORY [--random] [--tokens N] [--text FILE] [--json]

For each way to have the windows at a block's end, the state itself, an exact replay and a replay of
one window (kvfs.connectors.hf_replay): in which layers they are equal bit by bit to the computed
ones, by how much the others differ, and what that does to the logits. It answers whether the cheap
replay will do for a model of one's own. DIRECTORY holds the model, or its configuration alone for
--random weights. Works in a store of its own, in the temporary directory.

One thread. Prints, and otherwise raises what kvfs.connectors.transformers does.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from kvfs.connectors import hf_copy, hf_replay
from kvfs.connectors.hf_layout import CacheLayout, forward
from kvfs.connectors.transformers import CacheStore, digest_weights
from kvfs.errors import InputError, KvfsError
from kvfs.state.slot import META_BYTES
from kvfs.store import Store


@dataclass(frozen=True, slots=True)
class Difference:
    """Of some numbers from computed ones: equal bit by bit; largest: absolute difference; spread:
    standard deviation of the computed ones."""

    equal: bool
    largest: float
    spread: float


@dataclass(frozen=True, slots=True)
class LayerDifference:
    """Of a layer's window and what else belongs to its state.

    exact: the replay computes everything that it depends on, so that it differs by the order of
    the kernel's sums at most.
    """

    layer: int
    window: int
    exact: bool
    found: Difference


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of one way to go on. tokens: what was loaded; replayed: of these, computed once more; layers:
    those with a state; logits: of all tokens behind; same: share of these whose likeliest next
    token is the same."""

    way: str
    tokens: int
    replayed: int
    layers: tuple[LayerDifference, ...]
    logits: Difference
    same: float


def compare(cs: CacheStore, input_ids: Any) -> Iterator[Comparison]:
    """Computes and saves the whole blocks of a prompt, and yields each way to go on from them.

    input_ids: [1, n]; at least one token is left to compute. A way that is a miss is left out, as
    an exact replay that would have to compute everything. Raises InputError for less than a block.
    """
    size = cs.ns.block_tokens
    end = max(0, input_ids.shape[1] - 1) // size * size
    if not end:
        raise InputError(
            f"{input_ids.shape[1]} tokens: one block of {size} and one more are needed"
        )
    computed = DynamicCache(config=cs.model.config)
    forward(cs.model, input_ids[:, :end].to(cs.model.device), computed)
    cs.save(input_ids[:, :end], computed)
    state = cs.state(input_ids[:, :end], computed)
    logits = _logits(cs.model, input_ids[:, end:], copy.deepcopy(computed))
    for way in ("state", "exact", "window") if cs.hybrid else ("blocks",):
        cache, tokens = _load(cs, input_ids, way, state)
        if tokens != end:
            continue
        start = end
        if way in ("exact", "window"):
            start = hf_replay.replay_start(cs.identity, end, exact=way == "exact")
        ours = cs.state(input_ids[:, :end], cache)
        layers: tuple[LayerDifference, ...] = ()
        if state is not None and ours is not None:
            layers = layer_differences(cs.layout, ours, state, end, start)
        found = _logits(cs.model, input_ids[:, end:], cache)
        same = float((found.argmax(-1) == logits.argmax(-1)).float().mean())
        yield Comparison(way, end, end - start, layers, difference(found, logits), same)


def layer_differences(
    layout: CacheLayout, ours: bytes, computed: bytes, tokens: int, start: int
) -> tuple[LayerDifference, ...]:
    """Of one state from another (CacheStore.state), both after `tokens` tokens.

    start: where the replay began that made ours; `tokens` where none did.
    """
    exact = exact_layers(layout, start, tokens)
    found, expected = (_fields(layout, state, tokens) for state in (ours, computed))
    return tuple(
        LayerDifference(
            layer, window, layer in exact, difference(_flat(found[layer]), _flat(expected[layer]))
        )
        for layer, window in _windows(layout).items()
    )


def exact_layers(layout: CacheLayout, start: int, end: int) -> set[int]:
    """The layers with a window in which a replay of tokens start..end-1 is exact.

    A layer's rows depend on the layer before at a window's tokens up to each, so what is missing
    before `start` reaches window - 1 tokens further with each layer that has one. Layers whose KV
    is stored take nothing away. A start of 0, or of `end` (nothing is replayed), leaves all exact.
    """
    windows = _windows(layout)
    if start in (0, end):
        return set(windows)
    reached = accumulate((window - 1 for window in windows.values()), initial=start)
    pairs = zip(windows.items(), reached, strict=False)
    return {layer for (layer, window), first in pairs if first <= end - (window - 1)}


def _windows(layout: CacheLayout) -> dict[int, int]:
    """Window of each layer that has a state, which are those that slide."""
    return dict(zip(sorted({p.layer for p in layout.state}), layout.windows, strict=True))


def difference(ours: Any, computed: Any) -> Difference:
    """Of two tensors of one shape."""
    a, b = ours.float(), computed.float()
    return Difference(
        torch.equal(ours, computed), float((a - b).abs().max()), float(b.std(correction=0))
    )


def _load(cs: CacheStore, input_ids: Any, way: str, state: bytes | None) -> tuple[Any, int]:
    if way == "exact":
        return cs.load(input_ids, replay="exact")
    if way == "window":
        return cs.load(input_ids, replay="window")
    return cs.load(input_ids, state, replay="never")


def _fields(layout: CacheLayout, state: bytes, tokens: int) -> dict[int, dict[str, Any]]:
    payload = torch.frombuffer(bytearray(state[META_BYTES:]), dtype=torch.uint8)
    return hf_copy.scatter_state(layout, payload, tokens)


def _flat(fields: dict[str, Any]) -> Any:
    return torch.cat([fields[name].flatten() for name in sorted(fields)])


def _logits(model: Any, ids: Any, cache: Any) -> Any:
    """Logits [tokens, vocabulary] of tokens [1, n] behind a cache, which takes them in."""
    with torch.no_grad():
        out = model(input_ids=ids.to(model.device), past_key_values=cache, use_cache=True)
    return out.logits[0]


# the command


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m kvfs.connectors.hf_compare",
        description="Compare how a model goes on from a state or a replay with how it goes on "
        "from what it computed.",
    )
    parser.add_argument("directory", help="of the model, or of its configuration for --random")
    parser.add_argument("--random", action="store_true", help="random weights")
    parser.add_argument("--tokens", type=int, default=1025, help="of a random prompt (%(default)s)")
    parser.add_argument("--text", type=Path, help="file with the prompt, for the model's tokenizer")
    parser.add_argument("--json", action="store_true", help="print JSON, an object for each way")
    chosen = parser.parse_args(arguments)
    model = _model(chosen.directory, chosen.random)
    try:
        for found in _compare_in_a_new_store(model, _prompt(chosen, model)):
            print(json.dumps(asdict(found)) if chosen.json else "\n".join(_lines(found)))
    except KvfsError as e:
        parser.error(str(e))


def _compare_in_a_new_store(model: Any, input_ids: Any) -> Iterator[Comparison]:
    with (
        tempfile.TemporaryDirectory(prefix="kvfs-compare-") as work,
        Store.init(f"{work}/store", index=f"{work}/index", durability="none") as store,
    ):
        cs = CacheStore(store, model, weights=digest_weights(model), tokenizer="-")
        yield from compare(cs, input_ids)


def _model(directory: str, random: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    if not random:
        return AutoModelForCausalLM.from_pretrained(directory).eval()
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).eval()


def _prompt(chosen: argparse.Namespace, model: Any) -> Any:
    if chosen.text is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(model.config.vocab_size, (1, chosen.tokens), generator=generator)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(chosen.directory)
    return tokenizer(chosen.text.read_text(), return_tensors="pt").input_ids


_WORDS = {
    "blocks": "from its blocks", "state": "with its state", "exact": "by an exact replay",
    "window": "by a replay of one window",
}  # fmt: skip


def _lines(found: Comparison) -> Iterator[str]:
    replayed = f", {found.replayed:,} of them computed again" if found.replayed else ""
    yield f"{found.tokens:,} tokens {_WORDS[found.way]}{replayed}"
    yield f"  logits    {_said(found.logits)}; the same next token {found.same:.1%}"
    for one in found.layers:
        note = "" if one.exact else "; not all it depends on is computed"
        yield f"  layer {one.layer:<3} {_said(one.found)}{note}"


def _said(found: Difference) -> str:
    if found.equal:
        return "equal bit by bit"
    return f"differ by {found.largest:.2g} at most, of a spread of {found.spread:.2g}"


if __name__ == "__main__":
    main()
