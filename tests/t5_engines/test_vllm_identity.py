"""What tells one vLLM worker's KV from another's; needs neither vLLM nor torch's models."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from kvfs import Store
from kvfs.connectors import vllm_identity as vi
from kvfs.connectors.settings import Common
from kvfs.connectors.vllm_adapters import Adapters
from kvfs.connectors.vllm_layout import measure
from kvfs.connectors.vllm_settings import Settings
from kvfs.errors import InputError
from kvfs.layout import Identity, Partition


class FullAttentionSpec(SimpleNamespace):
    pass


class HfConfig(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def cache_config(layers: int = 2, tokens: int = 16) -> Any:
    spec = FullAttentionSpec(block_size=tokens)
    group = SimpleNamespace(
        layer_names=[f"model.layers.{i}.self_attn.attn" for i in range(layers)], kv_cache_spec=spec
    )
    return SimpleNamespace(
        kv_cache_groups=[group], prefix_cacheable_group_ids=(0,), num_blocks=8,
        kv_cache_layout="LBHNC",
    )  # fmt: skip


def caches(config: Any, dtype: Any = torch.float16, heads: int = 2) -> dict[str, Any]:
    names = config.kv_cache_groups[0].layer_names
    return {n: torch.zeros((8, heads, 16, 8), dtype=dtype) for n in names}


def vllm_config(path: Path, **model: Any) -> Any:
    hf = HfConfig(hidden_size=64, rope_theta=1e4, _commit_hash=None, transformers_version="5")
    return SimpleNamespace(
        model_config=SimpleNamespace(
            **{"model": str(path), "dtype": torch.float16, "hf_config": hf, "quantization": None,
               "revision": None, "seed": 0, "max_model_len": 4096, "tokenizer": None, **model}
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        load_config=SimpleNamespace(load_format="auto"),
    )  # fmt: skip


def model_dir(path: Path, byte: int = 7) -> Path:
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(bytes([byte]) * 100_000)
    (path / "tokenizer.json").write_text("{}")
    return path


def identity(config: Any, cache: Path, layout: Any = None, **more: Any) -> Identity:
    given = {
        "weights": vi.find_weights(config, cache), "tokenizer": vi.find_tokenizer(config, cache),
        "salt": "", "backend": "CPU_ATTN", **more,
    }  # fmt: skip
    kv = cache_config()
    partition = given.pop("partition", Partition())
    version = given.pop("version", "0.32.0")
    layout = layout or measure(kv, caches(kv), 128)
    return vi.base_identity(config, layout, version, partition, **given)


def test_the_same_twice(tmp_path: Path) -> None:
    config = vllm_config(model_dir(tmp_path / "m"))
    assert identity(config, tmp_path / "c") == identity(config, tmp_path / "c")


def test_every_difference_is_another_namespace(tmp_path: Path, store_dir: Path) -> None:
    """A prompt stored under one identity is a miss under each that differs in one thing."""
    cache, path = tmp_path / "c", model_dir(tmp_path / "m")
    config, kv = vllm_config(path), cache_config()
    base = identity(config, cache)
    other_hf = HfConfig(**{**vars(config.model_config.hf_config), "rope_theta": 5e5})
    fp8 = vllm_config(path)
    fp8.cache_config.cache_dtype = "fp8_e4m3"
    turned = {n: t.transpose(1, 2) for n, t in caches(kv).items()}
    three = cache_config(layers=3)
    others = {
        "config": identity(vllm_config(path, hf_config=other_hf), cache),
        "dtype": identity(vllm_config(path, dtype=torch.bfloat16), cache),
        "quantization": identity(vllm_config(path, quantization="fp8"), cache),
        "cache dtype": identity(fp8, cache),
        "rank": identity(config, cache, partition=Partition(1, 2)),
        "size": identity(config, cache, partition=Partition(0, 2)),
        "backend": identity(config, cache, backend="FLASH_ATTN"),
        "release": identity(config, cache, version="0.33.1"),
        "salt": identity(config, cache, salt="s"),
        "order in memory": identity(config, cache, measure(kv, turned, 128)),
        "tensors": identity(config, cache, measure(kv, caches(kv, torch.bfloat16), 128)),
        "layers": identity(config, cache, measure(three, caches(three), 128)),
        "block": identity(config, cache, measure(kv, caches(kv), 256)),
        "tenant": vi.variant(base, "tenant", ""),
        "adapter": vi.variant(base, "", "lora@1"),
        "other adapter": vi.variant(base, "", "lora@2"),
        "both": vi.variant(base, "tenant", "lora@1"),
    }
    model_dir(path, byte=8)
    others["weights"] = identity(config, cache)
    (path / "tokenizer.json").write_text('{"a": 1}')
    others["tokenizer"] = identity(config, cache)
    assert len({o.fingerprint for o in others.values()} | {base.fingerprint}) == len(others) + 1
    tokens = list(range(256))
    with Store.init(store_dir) as store:
        ns = store.create_namespace(base)
        store.put(ns, tokens, bytes(2 * ns.row_bytes))
        assert store.check(ns, tokens).stored_tokens == 256
        for what, other in others.items():
            assert store.check(store.create_namespace(other), tokens).stored_tokens == 0, what


def test_weights_changed_in_place_are_others(tmp_path: Path) -> None:
    """One bit, with the file's size and time as they were."""
    cache, path = tmp_path / "c", model_dir(tmp_path / "m")
    config = vllm_config(path)
    file = path / "model.safetensors"
    os.utime(file, (1, 1))
    before = vi.find_weights(config, cache)
    assert vi.find_weights(config, cache) == before and list(cache.iterdir())
    data = bytearray(file.read_bytes())
    data[50_000] ^= 1
    file.write_bytes(data)
    os.utime(file, (1, 1))
    assert vi.find_weights(config, cache) != before


def test_a_damaged_note_of_a_digest_is_made_anew(tmp_path: Path) -> None:
    cache, path = tmp_path / "c", model_dir(tmp_path / "m")
    os.utime(path / "model.safetensors", (1, 1))
    before = vi.find_weights(vllm_config(path), cache)
    for note in cache.iterdir():
        note.write_text("{")
    assert vi.find_weights(vllm_config(path), cache) == before


def test_a_hub_model_has_its_commit(tmp_path: Path) -> None:
    hf = HfConfig(hidden_size=64, _commit_hash="a" * 40)
    config = vllm_config(Path("org/model"), hf_config=hf)
    assert vi.find_weights(config, tmp_path) == f"org/model@{'a' * 40}"
    assert vi.find_tokenizer(config, tmp_path) == "none"


def test_a_name_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give `weights`"):
        vi.find_weights(vllm_config(Path("org/model"), revision="main"), tmp_path)


def test_salts_of_two_kinds_do_not_meet(tmp_path: Path) -> None:
    base = identity(vllm_config(model_dir(tmp_path / "m")), tmp_path / "c")
    own = dataclasses.replace(base, salt="a")
    salts = {vi.variant(i, s, "").salt for i in (base, own) for s in ("", "a", "b")}
    assert len(salts) == 6


def test_adapters_are_named_by_content(tmp_path: Path) -> None:
    path = tmp_path / "lora"
    path.mkdir()
    (path / "adapter_model.safetensors").write_bytes(b"one")
    lora = SimpleNamespace(
        lora_path=str(path), lora_name="x", lora_int_id=1, load_inplace=False
    )  # fmt: skip
    adapters = Adapters(tmp_path / "c")
    try:
        assert adapters(None) == ""
        while (name := adapters(lora)) is None:
            pass
        assert name.startswith("x@xxh3:")
        nowhere = SimpleNamespace(
            lora_path="org/lora", lora_name="y", lora_int_id=2, load_inplace=False
        )
        lora.load_inplace = True
        assert adapters(lora) is None and adapters(nowhere) is None
    finally:
        adapters.close()


def test_an_adapter_that_is_loaded_anew_may_be_another(tmp_path: Path) -> None:
    """Under its old name and path; what is left of the first one is not told by the new files."""
    path = tmp_path / "lora"
    path.mkdir()

    def loaded(number: int, content: bytes) -> Any:
        (path / "adapter_model.safetensors").write_bytes(content)
        return SimpleNamespace(
            lora_path=str(path), lora_name="x", lora_int_id=number, load_inplace=False
        )

    def told(lora: Any) -> str:
        while (name := adapters(lora)) is None:
            pass
        return str(name)

    adapters = Adapters(tmp_path / "c")
    try:
        first = loaded(1, b"one")
        before = told(first)
        second = loaded(2, b"another")
        assert told(second) != before and adapters(first) is None
        assert told(loaded(3, b"one")) == before
        assert len(adapters._known) == 1
    finally:
        adapters.close()


def test_the_draft_model_is_part_of_what_is_kept(tmp_path: Path) -> None:
    cache, path = tmp_path / "c", model_dir(tmp_path / "m")
    config, draft_path = vllm_config(path), model_dir(tmp_path / "draft", byte=9)
    hf = HfConfig(num_hidden_layers=1)

    def draft(model: Any = draft_path, method: str = "eagle3", **more: Any) -> str:
        of_draft = vllm_config(model, **{"hf_config": hf, **more}).model_config
        config.speculative_config = SimpleNamespace(method=method, draft_model_config=of_draft)
        return vi.find_draft(config, "rev1", cache)

    config.speculative_config = None
    assert vi.find_draft(config, "rev1", cache) == ""
    first = draft()
    plain, with_draft = identity(config, cache), identity(config, cache, draft=first)
    assert plain.fingerprint != with_draft.fingerprint
    others = [draft(method="mtp"), draft(hf_config=HfConfig(num_hidden_layers=2))]
    model_dir(draft_path, byte=10)
    assert len({first, *others, draft()}) == 4
    own = config.model_config.model
    assert draft(own).startswith("eagle3,rev1,")  # layers of the model's own weights
    assert not draft(own, revision="main").startswith("eagle3,rev1,")
    assert f"org/draft@{'a' * 40}" in draft("org/draft", revision="a" * 40)
    with pytest.raises(InputError, match="`revision` of --speculative-config"):
        draft("org/draft", revision="main")
    with pytest.raises(InputError, match="class of one's own"):
        draft(method="custom_class")
    for target in (config.model_config, SimpleNamespace()):
        config.speculative_config = SimpleNamespace(
            method="ngram", draft_model_config=target, target_model_config=target
        )
        assert vi.find_draft(config, "rev1", cache) == ""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs `store`"),
        ({"store": ""}, "needs `store`"),
        ({"store": "/s", "stor": 1}, "unknown setting stor"),
        ({"store": "/s", "fetch": "magic"}, "process or inline"),
        ({"store": "/s", "fetch_seconds": "2"}, "of type float"),
        ({"store": "/s", "block_tokens": True}, "of type int"),
        ({"store": "/s", "save_bytes": 0}, "must be positive"),
        ({"store": "/s", "slot_bytes": -1}, "slot_bytes must not be negative"),
        ({"store": "/s", "flush_seconds": -1}, "flush_seconds must not be negative"),
        ({"store": "/s", "fetch_seconds": float("nan")}, "must be positive"),
        ({"store": "/s", "fetch_seconds": float("inf")}, "and finite"),
    ],
)
def test_settings_that_cannot_be_right(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Settings.parse(given)


def test_settings() -> None:
    assert Settings.parse({"store": "/s", "fetch_seconds": 3}).fetch_seconds == 3.0
    assert Settings.parse({"store": "/s", "slot_bytes": 0}).slot_bytes == 0


def test_a_connector_that_needs_more_says_so() -> None:
    """And what is true or false is no number."""

    @dataclasses.dataclass(frozen=True, slots=True)
    class Own(Common):
        NEEDED = ("store", "weights")
        replay: bool = True

    assert not Own("/s", weights="w", replay=False).replay
    with pytest.raises(InputError, match="needs `weights`"):
        Own("/s")
