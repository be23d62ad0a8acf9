"""The examples of docs/transformers.md are run, on a tiny model."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny_models
from hf_support import HELD, IDS
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from kvfs.state.slots import SlotPool

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_the_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SlotPool, "open", partial(SlotPool.open, directory=str(tmp_path)))
    words = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    names: dict[str, Any] = {
        "model": tiny_models.build(name, pad_token_id=0),
        "tokenizer": PreTrainedTokenizerFast(tokenizer_object=words),
        "input_ids": IDS,
        "secret": b"a secret of the tests that is long enough",
    }
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) == 5
    try:
        for example in examples:
            exec(compile(example, str(PAGE), "exec"), names)
    finally:
        names["store"].close()
        if names["cs"].slots is not None:
            names["cs"].slots.close()
    assert names["output"].shape[1] > IDS.shape[1]
    assert names["n"] == (0 if names["cs"].hybrid else HELD) and names["saved"] == HELD
    assert names["hit_tokens"] == HELD
    assert names["again"].hit_tokens == HELD
