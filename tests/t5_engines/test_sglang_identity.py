"""What shapes SGLang's KV is in the identity: weights, configuration, adapters, draft models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from sglang_fake import FakePool, HiCacheStorageConfig

from kvfs.connectors.sglang_identity import Model, identity_of, model_of
from kvfs.connectors.sglang_pages import Flat, pages_of
from kvfs.errors import InputError
from kvfs.layout import Partition

COMMIT = "a" * 40
CONFIG = HiCacheStorageConfig(
    tp_rank=1, tp_size=4, pp_rank=0, pp_size=2, attn_cp_rank=0, attn_cp_size=1,
    is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=True, model_name="x",
)  # fmt: skip


class HfConfig:
    """Of a transformers configuration, what is looked at."""

    def __init__(self, commit: str | None = None, **fields: Any) -> None:
        self._commit_hash = commit
        self.fields = {"hidden_size": 64, "_name_or_path": "anywhere", **fields}

    def to_dict(self) -> dict[str, Any]:
        return dict(self.fields)


def args_of(path: Path | str, **fields: Any) -> Any:
    given = {
        "model_path": str(path), "load_format": "auto", "random_seed": 0, "revision": None,
        "dtype": "bfloat16", "quantization": None, "kv_cache_dtype": "auto",
        "json_model_override_args": "{}", "context_length": None, "lora_paths": None, **fields,
    }  # fmt: skip
    return SimpleNamespace(**given)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"weights")
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture
def told(tmp_path: Path) -> Callable[..., Model]:
    """What is found out of arguments and a configuration."""
    return lambda args, hf=None, given="": model_of(
        args, hf or HfConfig(), given, tmp_path / "digests"
    )


def test_local_weights_count_and_their_name_does_not(
    weights: Path, told: Callable[..., Model]
) -> None:
    first = told(args_of(weights))
    renamed = weights.with_name("other")
    weights.rename(renamed)
    assert told(args_of(renamed)).weights == first.weights
    assert first.name == "checkpoint"
    (renamed / "model.safetensors").write_bytes(b"trained on")
    assert told(args_of(renamed)).weights != first.weights


def test_of_a_hub_the_commit_counts(told: Callable[..., Model]) -> None:
    found = told(args_of("org/model"), HfConfig(commit=COMMIT))
    assert found.weights.startswith(f"org/model@{COMMIT} ") and found.name == "model"
    assert told(args_of("org/model", revision=COMMIT)).weights == found.weights
    with pytest.raises(InputError, match="give `weights`"):
        told(args_of("org/model", revision="main"))
    assert told(args_of("org/model"), given="v1").weights.startswith("v1 ")


def test_random_weights_are_those_of_their_seed(weights: Path, told: Callable[..., Model]) -> None:
    dummy = told(args_of(weights, load_format="dummy"))
    assert dummy.weights.startswith("dummy:0 ")
    assert told(args_of(weights, load_format="dummy", random_seed=1)).weights != dummy.weights


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "float16"}, {"quantization": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"},
        {"json_model_override_args": '{"rope_theta": 1}'}, {"speculative_algorithm": "EAGLE"},
    ],
)  # fmt: skip
def test_arguments_that_change_the_kv(
    weights: Path, told: Callable[..., Model], changed: dict[str, Any]
) -> None:
    assert told(args_of(weights, **changed)).weights != told(args_of(weights)).weights


def test_the_configuration_as_the_engine_runs_it(weights: Path, told: Callable[..., Model]) -> None:
    plain = told(args_of(weights))
    assert told(args_of(weights), HfConfig(_name_or_path="elsewhere")) == plain
    assert told(args_of(weights), HfConfig(rope_theta=1e6)).weights != plain.weights
    assert told(args_of(weights, context_length=1 << 20)) == plain
    stretched = HfConfig(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    a, b = (told(args_of(weights, context_length=n), stretched) for n in (4096, 8192))
    assert a.weights != b.weights


def test_scales_of_an_fp8_cache(weights: Path, told: Callable[..., Model], tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    scales.write_text(json.dumps({"k": 1.0}))
    first = told(args_of(weights, quantization_param_path=str(scales)))
    scales.write_text(json.dumps({"k": 2.0, "v": 1.0}))
    assert told(args_of(weights, quantization_param_path=str(scales))).weights != first.weights


@pytest.mark.parametrize(
    "form",
    [
        lambda p: [f"mine={p}"], lambda p: [str(p)], lambda p: [{"lora_path": str(p)}],
        lambda p: {"mine": SimpleNamespace(lora_path=str(p))},
        lambda p: [SimpleNamespace(lora_path=str(p))],
    ],
)  # fmt: skip
def test_an_adapter_under_the_same_name_and_path(
    weights: Path, told: Callable[..., Model], tmp_path: Path, form: Any
) -> None:
    """SGLang's keys hold an id made of name and path: the files have to be in the identity."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"one")
    first = told(args_of(weights, lora_paths=form(adapter)))
    assert first.weights != told(args_of(weights)).weights
    (adapter / "adapter_model.safetensors").write_bytes(b"another")
    assert told(args_of(weights, lora_paths=form(adapter))).weights != first.weights
    with pytest.raises(InputError, match="adapter"):
        told(args_of(weights, lora_paths=form(tmp_path / "org" / "adapter")))


def test_a_draft_model_has_weights_of_its_own(
    weights: Path, told: Callable[..., Model], tmp_path: Path
) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(b"draft")
    plain = told(args_of(weights))
    model = told(args_of(weights, speculative_draft_model_path=str(draft)))
    assert model.weights.startswith(f"{plain.weights} draft:xxh3:")
    (draft / "model.safetensors").write_bytes(b"trained on")
    again = told(args_of(weights, speculative_draft_model_path=str(draft)))
    assert again.weights != model.weights
    pool = FakePool()
    for name in ("kv", "draft"):  # some draft models' layers are packed into the KV's pages
        own = identity_of(model, CONFIG, name, pool, pages_of(pool), "", "0.5.23")
        assert own.weights == model.weights


def test_the_draft_model_of_a_hub(weights: Path, told: Callable[..., Model]) -> None:
    of_hub = {"speculative_draft_model_path": "org/draft"}
    with pytest.raises(InputError, match="give --speculative-draft-model-revision its commit"):
        told(args_of(weights, **of_hub))
    known = told(args_of(weights, **of_hub, speculative_draft_model_revision=COMMIT))
    assert known.weights.endswith(f" draft:org/draft@{COMMIT}")
    same = args_of("org/model", speculative_draft_model_path="org/model")
    assert told(same, given="rev1").weights.endswith(" draft:rev1")


def test_ranks_that_share_out_the_tokens_of_a_page_are_refused() -> None:
    pool, config = FakePool(), SimpleNamespace(**vars(CONFIG), dcp_size=2, dcp_rank=1)
    with pytest.raises(InputError, match="decode context parallelism"):
        identity_of(Model("m", "w"), config, "kv", pool, pages_of(pool), "", "0.5.23")


def test_ranks() -> None:
    class MHATokenToKVPoolHost(FakePool):
        """Of a draft model without latent attention."""

    model, pool = Model("m", "w"), FakePool()

    def partition(name: str, own: Any = pool, **config: Any) -> Partition:
        return identity_of(
            model, replace(CONFIG, **config), name, own, pages_of(own), "", "0.5.23"
        ).partition

    assert partition("kv") == Partition(tp_rank=1, tp_size=4, pp_size=2)
    assert partition("kv", is_mla_model=True) == Partition(pp_size=2)
    assert partition("mamba", is_mla_model=True).tp_rank == 1
    assert partition("draft", MHATokenToKVPoolHost(), is_mla_model=True).tp_rank == 1
    assert partition("kv", attn_cp_rank=2, attn_cp_size=3).cp_rank == 2


def test_what_is_no_identity_by_itself() -> None:
    model, pool = Model("m", "w"), FakePool()

    def fingerprint(name: str = "kv", own: Any = None, version: str = "0.5.23") -> bytes:
        pages = pages_of(pool) if own is None else own
        return identity_of(model, CONFIG, name, pool, pages, "", version).fingerprint

    others = [
        fingerprint("swa"), fingerprint(own=Flat(pool)), fingerprint(version="0.5.24"),
        fingerprint(own=pages_of(FakePool("layer_first"))),
    ]  # fmt: skip
    assert len({fingerprint(), *others}) == 5
    identity = identity_of(model, CONFIG, "kv", pool, pages_of(pool), "", "0.5.23")
    assert (identity.hash, identity.block_tokens, identity.row_bytes) == ("external", 4, 1536)
