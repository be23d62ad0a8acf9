"""Which models share blocks, and which are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny_models
import torch
from hf_support import IDS, cache_store, filled
from transformers import DynamicCache

from kvfs import Store
from kvfs.connectors.hf_identity import check_model, config_digest
from kvfs.connectors.transformers import digest_tokenizer, digest_weights
from kvfs.errors import InputError

# identity


def test_what_shapes_the_bytes_is_the_identity(store: Store, llama: Any) -> None:
    """The same tokens, one thing different: nothing is shared."""
    cs = cache_store(store, llama)
    cs.prefill(IDS)
    others = {
        "dtype": cache_store(store, tiny_models.build("llama", dtype="bfloat16"), weights="w"),
        "weights": cache_store(store, tiny_models.build("llama", seed=1)),
        "revision": cache_store(store, llama, weights="b"),
        "tokenizer": cache_store(store, llama, tokenizer="b"),
        "adapter": cache_store(store, llama, adapter="b"),
        "salt": cache_store(store, llama, salt="b"),
        "heads": cache_store(
            store, tiny_models.build("llama", num_key_value_heads=1, head_dim=32), weights="w"
        ),
        "rope": cache_store(
            store, tiny_models.build("llama", rope_parameters={
                "rope_type": "default", "rope_theta": 5e5}),
        ),
        "block": cache_store(store, llama, block_tokens=64),
    }  # fmt: skip
    same = cache_store(store, llama, weights="w")
    assert others["dtype"].identity.weights == same.identity.weights
    assert others["rope"].identity.spans == cs.identity.spans
    for what, other in others.items():
        assert other.load(IDS)[1] == 0, what
    assert len({o.ns.nsid for o in (cs, same, *others.values())}) == len(others) + 2


def test_the_name_and_the_way_to_run_are_no_identity(store: Store, llama: Any) -> None:
    again = tiny_models.build("llama")
    again.config._name_or_path = "/somewhere/else"
    again.config.use_cache = False
    assert cache_store(store, again).identity == cache_store(store, llama).identity


def test_stores_that_are_there_are_found() -> None:
    """The digest of a configuration is part of the identity of all that is stored: pinned."""
    config = {
        "model_type": "llama", "_name_or_path": "/a", "dtype": "float32", "use_cache": True,
        "_attn_implementation": "sdpa", "layers": [{"use_cache": 1, "n": 2}, (1, 2)],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "dtype": "x"},
        "eos": [1, 2], 3: "x",
    }  # fmt: skip
    assert config_digest(SimpleNamespace(to_dict=lambda: config)) == "ef922cdb1a9a6a52"
    for key in ("_attn_implementation", "_experts_implementation", "torch_dtype"):
        other = {**config, key: "another"}
        assert config_digest(SimpleNamespace(to_dict=lambda o=other: o)) == "ef922cdb1a9a6a52"
    other = {**config, "rope_parameters": {"rope_type": "linear"}}
    assert config_digest(SimpleNamespace(to_dict=lambda: other)) != "ef922cdb1a9a6a52"


def test_the_digest_of_weights_sees_one_bit(llama: Any) -> None:
    other = tiny_models.build("llama")
    assert digest_weights(other) == digest_weights(llama)
    with torch.no_grad():
        other.model.norm.weight[3] *= 1.0001
    assert digest_weights(other) != digest_weights(llama)


def test_the_digest_of_a_tokenizer() -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    def tokenizer(words: list[str]) -> Any:
        model = WordLevel({w: i for i, w in enumerate(words)}, unk_token="?")
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), pad_token="?")

    one = tokenizer(["?", "a", "b"])
    digest = digest_tokenizer(one)
    one(["a", "b"], padding="max_length", max_length=4)
    assert digest_tokenizer(one) == digest == digest_tokenizer(tokenizer(["?", "a", "b"]))
    assert digest_tokenizer(tokenizer(["?", "b", "a"])) != digest


# what is refused


def test_models_whose_cache_is_no_function_of_the_prefix_are_refused(store: Store) -> None:
    model = tiny_models.build("llama")
    with pytest.raises(InputError, match="training mode"):
        cache_store(store, model.train())
    model.eval()
    model._hf_peft_config_loaded = True
    with pytest.raises(InputError, match="adapter"):
        cache_store(store, model)
    assert cache_store(store, model, adapter="lora@1").identity.adapter == "lora@1"
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(InputError, match="RoPE of type dynamic"):
        cache_store(store, tiny_models.build("llama", rope_parameters=rope))
    model = tiny_models.build("llama")
    model.config.rope_parameters = {"a layer": {"type": ["no name"], "rope_type": "su"}}
    with pytest.raises(InputError, match="RoPE of type su"):  # longrope, as it was called once
        check_model(model, "")


def test_layers_with_unknown_content_are_refused(
    store: Store, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.cache_utils import DynamicLayer

    update = DynamicLayer.update

    def more(self: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        self.mean = values.mean(dim=-2)
        return update(self, keys, values, *args, **kwargs)

    monkeypatch.setattr(DynamicLayer, "update", more)
    with pytest.raises(InputError, match=r"layer 0 \(DynamicLayer\) holds `mean`"):
        cache_store(store, llama)


def test_layers_of_another_kind_are_refused(store: Store) -> None:
    model = tiny_models.build("lfm2")
    with pytest.raises(InputError, match="LinearAttentionLayer"):
        cache_store(store, model)


def test_caches_that_do_not_fit_are_refused(store: Store, llama: Any, mistral: Any) -> None:
    cs = cache_store(store, mistral)
    with pytest.raises(InputError, match="DynamicCache\\(config=model.config\\)"):
        cs.save(IDS, filled(llama, IDS))
    cs = cache_store(store, llama)
    narrow = tiny_models.build("llama", dtype="bfloat16")
    with pytest.raises(InputError, match="torch.bfloat16"):
        cs.save(IDS, filled(narrow, IDS))
    with pytest.raises(InputError, match="one sequence at a time"):
        cs.load(IDS.repeat(2, 1))
    with pytest.raises(InputError, match="one sequence at a time"):
        cs.save(IDS, filled(llama, IDS.repeat(2, 1)))
    assert cs.save(IDS, DynamicCache(config=llama.config)) == 0
