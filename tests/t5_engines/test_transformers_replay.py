"""A prompt from prefill to its continuation in another process, by a state and by replays: which
layers are equal, bit by bit or but for the order of sums, and how far the others are off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny_models
from hf_support import BLOCK, Child, cache_store, filled

from kvfs import Store
from kvfs.connectors import hf_compare, hf_replay
from kvfs.errors import InputError

IDS = tiny_models.prompt(461)
END = 3 * BLOCK
KERNEL = 1e-5
"""What sums in another order may come to, of numbers around 1 in float32."""


@pytest.mark.parametrize(
    ("name", "window", "attention", "replay", "start", "exact"),
    [
        # Windows of 127 rows in layers 0 and 2, of which the second needs another one before.
        ("gpt_oss", 128, "eager", "never", END, {0, 2}),
        ("gpt_oss", 128, "eager", "exact", 128, {0, 2}),
        ("gpt_oss", 128, "eager", "window", 256, {0}),
        # A block is two windows here, so that a replay of one window is exact in two layers.
        ("gemma3_text", 64, "sdpa", "exact", 128, {0, 1, 2}),
        ("gemma3_text", 64, "eager", "window", 256, {0, 1}),
        ("mistral", 16, "eager", "exact", 256, {0, 1, 2, 3}),
        ("mistral", 100, "eager", "window", 256, {0}),
        ("deepseek_v4", 128, "eager", "never", END, {0, 1, 2, 3, 4, 5}),
        ("deepseek_v4", 16, "eager", "exact", 256, {0, 1, 2, 3, 4, 5}),
        ("deepseek_v4", 64, "eager", "window", 256, {0, 1}),
    ],
)  # fmt: skip
def test_a_new_process_goes_on(
    name: str, window: int, attention: str, replay: str, start: int, exact: set[int],
    child: Child, store: Store, store_dir: Path,
) -> None:  # fmt: skip
    options = {"sliding_window": window, "attention": attention}
    model = tiny_models.build(name, **options)
    cs = cache_store(store, model)
    cache = filled(model, IDS[:, :END])
    assert cs.save(IDS, cache) == END
    state = cs.state(IDS[:, :END], cache)
    assert state is not None
    in_memory = tiny_models.logits(model, IDS, cache)

    given = state if replay == "never" else None
    tokens, logits = child.restored(name, store_dir, IDS, given, replay=replay, **options)
    assert tokens == END and child.loaded is not None
    if replay != "never":
        assert hf_replay.replay_start(cs.identity, END, exact=replay == "exact") == start
    layers = hf_compare.layer_differences(cs.layout, child.loaded, state, END, start)

    assert {one.layer for one in layers if one.exact} == exact
    assert layers[0].found.equal, "the first layer's rows depend on nothing before them"
    for one in layers:
        assert (one.found.largest < KERNEL) == one.exact, one
    found = hf_compare.difference(logits, in_memory)
    if all(one.found.equal for one in layers):
        assert found.equal
    assert (found.largest < KERNEL) == all(one.exact for one in layers), found


def test_which_layers_are_exact_follows_from_the_windows(store: Store) -> None:
    """Four windows of 33: rows of 32 tokens, and each layer needs those of the one before."""
    layout = cache_store(store, tiny_models.build("mistral", sliding_window=33)).layout
    for layers in range(1, 5):
        start = END - layers * 32
        assert hf_compare.exact_layers(layout, start, END) == set(range(layers))
        assert hf_compare.exact_layers(layout, start + 1, END) == set(range(layers - 1))
    for start, end in ((0, 64), (END, END)):  # from the first token on, and no replay
        assert hf_compare.exact_layers(layout, start, end) == {0, 1, 2, 3}


def test_every_way_is_compared(store: Store) -> None:
    cs = cache_store(store, tiny_models.build("gpt_oss"))
    ways = {found.way: found for found in hf_compare.compare(cs, IDS)}
    assert {way: found.replayed for way, found in ways.items()} == {
        "state": 0, "exact": 256, "window": 128,
    }  # fmt: skip
    assert ways["state"].logits.equal and ways["state"].same == 1
    assert ways["exact"].logits.largest < KERNEL < ways["window"].logits.largest
    llama = cache_store(store, tiny_models.build("llama"))
    (blocks,) = hf_compare.compare(llama, IDS)
    assert (blocks.way, blocks.layers, blocks.logits.equal) == ("blocks", (), True)
    with pytest.raises(InputError, match="one block of 128 and one more"):
        next(hf_compare.compare(cs, IDS[:, :BLOCK]))


def test_an_exact_replay_that_would_compute_everything_is_left_out(store: Store) -> None:
    cs = cache_store(store, tiny_models.build("gpt_oss"))
    assert [found.way for found in hf_compare.compare(cs, IDS[:, : 2 * BLOCK + 1])] == [
        "state", "window",
    ]  # fmt: skip


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_models.build("gpt_oss").config.save_pretrained(tmp_path)
    words = [str(tmp_path), "--random", "--tokens", str(IDS.shape[1])]
    hf_compare.main(words)
    said = capsys.readouterr().out.splitlines()
    assert said[:4] == [
        "384 tokens with its state",
        "  logits    equal bit by bit; the same next token 100.0%",
        "  layer 0   equal bit by bit",
        "  layer 2   equal bit by bit",
    ]
    assert "384 tokens by an exact replay, 256 of them computed again" in said
    assert said[-1].startswith("  layer 2   differ by ")
    assert said[-1].endswith("; not all it depends on is computed")
    hf_compare.main([*words, "--json"])
    found: list[dict[str, Any]] = [
        json.loads(line) for line in capsys.readouterr().out.splitlines()
    ]
    assert [one["way"] for one in found] == ["state", "exact", "window"]
    assert [layer["exact"] for layer in found[2]["layers"]] == [True, False]
    with pytest.raises(SystemExit, match="2"):
        hf_compare.main([str(tmp_path), "--random", "--tokens", "5"])
    assert "5 tokens: one block of 128 and one more" in capsys.readouterr().err
