"""Caches of transformers models through a real store, and back in another process.

What is compared is the logits of the continuation, bit by bit: a cache that went through the store
must continue exactly as the one that never left memory.
"""

from __future__ import annotations

import errno
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny_models
import torch
from transformers import DynamicCache

from kvfs import Store
from kvfs.backend import PosixBackend
from kvfs.connectors import hf_copy
from kvfs.connectors import transformers as connector
from kvfs.connectors.transformers import CacheStore, digest_tokenizer, digest_weights
from kvfs.errors import InputError
from kvfs.testing.faults import Fail, FaultyBackend

BLOCK = 128
LENGTH = 333  # two whole blocks, and 77 tokens to compute
HELD = LENGTH // BLOCK * BLOCK
HYBRID = {"mistral", "gemma3_text", "gpt_oss", "deepseek_v4"}
INFO = "kvfs.connectors.transformers"


class Child:
    """The process that restores: see tiny_models.py."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, tiny_models.__file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.ready = False

    def restored(
        self, name: str, store: Path, ids: Any, state: bytes | None = None
    ) -> tuple[int, Any]:
        """(tokens the child loaded, its logits of all others)."""
        assert self.process.stdin is not None and self.process.stdout is not None
        if not self.ready:
            assert self.process.stdout.readline() == "ready\n"
            self.ready = True
        work = store.parent
        if state is not None:
            (work / "state").write_bytes(state)
        request = {
            "name": name, "store": str(store), "index": str(work / "index-of-child"),
            "tokens": ids[0].tolist(), "state": str(work / "state") if state else None,
            "out": str(work / "logits"),
        }  # fmt: skip
        print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        data = torch.frombuffer(bytearray((work / "logits").read_bytes()), dtype=torch.float32)
        return answer["tokens"], data.view(-1, tiny_models.VOCABULARY)

    def close(self) -> None:
        self.process.communicate()
        assert self.process.returncode == 0


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.close()


@pytest.fixture
def store(store_dir: Path) -> Iterator[Store]:
    with Store.init(store_dir) as store:
        yield store


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_models.build("llama")


@pytest.fixture(scope="module")
def mistral() -> Any:
    return tiny_models.build("mistral")


IDS = tiny_models.prompt(LENGTH)


def cache_store(store: Store, model: Any, **fields: Any) -> CacheStore:
    given = {"weights": digest_weights(model), "tokenizer": "none", **fields}
    return CacheStore(store, model, **given)


def filled(model: Any, ids: Any) -> Any:
    """A cache that holds these tokens and has never seen a store."""
    cache = DynamicCache(config=model.config)
    tiny_models.logits(model, ids, cache)
    return cache


def noise(row: Any) -> Any:
    """A row of other bytes, that are plausible numbers."""
    numbers = torch.randn(row.numel() // 4, generator=torch.Generator().manual_seed(7))
    return numbers.view(torch.uint8)


def overwrite(store_dir: Path, old: Any, new: Any) -> None:
    """Replaces bytes of a stored block, on disk."""
    data = old.numpy().tobytes()
    (path,) = [p for p in store_dir.rglob("*.seg") if data in p.read_bytes()]
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(data))
        file.write(new.numpy().tobytes())


# through the store and back


@pytest.mark.parametrize("name", tiny_models.STORED)
def test_comes_back_in_a_new_process(
    name: str, child: Child, store: Store, store_dir: Path
) -> None:
    model = tiny_models.build(name)
    cs = cache_store(store, model)
    assert cs.hybrid == (name in HYBRID)
    cache = filled(model, IDS[:, :HELD])
    assert cs.save(IDS, cache) == HELD
    state = cs.state(IDS, cache)
    assert (state is not None) == cs.hybrid
    in_memory = tiny_models.logits(model, IDS, cache)

    tokens, logits = child.restored(name, store_dir, IDS, state)
    assert tokens == HELD
    assert torch.equal(logits, in_memory)
    whole = tiny_models.logits(model, IDS, DynamicCache(config=model.config))
    assert torch.allclose(logits, whole[HELD:], atol=1e-5)


@pytest.mark.parametrize("name", [name for name in tiny_models.STORED if name != "mistral"])
def test_noise_in_a_block_is_not_served(
    name: str, child: Child, store: Store, store_dir: Path
) -> None:
    model = tiny_models.build(name)
    cs = cache_store(store, model)
    cache, _, state = cs.prefill(IDS)
    rows = hf_copy.gather(cs.layout, cache, 0, 2)
    in_memory = tiny_models.logits(model, IDS, cache)
    overwrite(store_dir, rows[1], noise(rows[1]))

    tokens, logits = child.restored(name, store_dir, IDS, state)
    # The good block alone; a model with windows has none at its end.
    assert tokens == (0 if cs.hybrid else BLOCK)
    assert torch.allclose(logits[HELD - tokens :], in_memory, atol=1e-5), "recomputed"

    # Had the noise been served, it would have been noticed here.
    noisy = filled(model, IDS[:, :HELD])
    rows[1] = noise(rows[1])
    for layer, fields in hf_copy.scatter(cs.layout, rows).items():
        hf_copy.install(noisy.layers[layer], fields, HELD)
    assert (tiny_models.logits(model, IDS, noisy) - in_memory).abs().max() > 0.01


def test_llama_recomputes_the_same_behind_a_bad_block(
    child: Child, store: Store, store_dir: Path, llama: Any
) -> None:
    cs = cache_store(store, llama)
    rows = hf_copy.gather(cs.layout, cs.prefill(IDS).cache, 0, 2)
    overwrite(store_dir, rows[1], noise(rows[1]))
    one_block = hf_copy.build(llama.config, hf_copy.scatter(cs.layout, rows[:1]), BLOCK)

    tokens, logits = child.restored("llama", store_dir, IDS)
    assert tokens == BLOCK
    assert torch.equal(logits, tiny_models.logits(llama, IDS, one_block))


def test_a_bad_block_is_stored_again(store: Store, store_dir: Path, llama: Any) -> None:
    cs = cache_store(store, llama)
    row = hf_copy.gather(cs.layout, cs.prefill(IDS).cache, 0, 2)[1]
    overwrite(store_dir, row, noise(row))
    assert [cs.prefill(IDS).hit_tokens for _ in range(2)] == [BLOCK, HELD]


def test_a_damaged_index_key_is_named(
    store: Store, store_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """B1: indexer keys are in the same record; damage to them alone ends the prefix."""
    model = tiny_models.build("deepseek_v32")
    cs = cache_store(store, model)
    row = hf_copy.gather(cs.layout, cs.prefill(IDS).cache, 0, 2)[1]
    span = next(s for s in cs.identity.spans if s.part == "index")
    damaged = row.clone()
    damaged[span.offset + 5] ^= 1
    overwrite(store_dir, row, damaged)
    with caplog.at_level(logging.INFO, INFO):
        assert cs.load(IDS)[1] == BLOCK
    assert "checksum of part index at block 1" in caplog.text


def test_bfloat16_is_kept_bit_by_bit(store: Store) -> None:
    model = tiny_models.build("llama", dtype="bfloat16")
    cs = cache_store(store, model)
    cache = cs.prefill(IDS).cache
    loaded, tokens = cs.load(IDS)
    assert tokens == HELD
    for ours, theirs in zip(loaded.layers, cache.layers, strict=True):
        assert ours.keys.dtype == torch.bfloat16
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v4"])
def test_generate_goes_on_from_a_loaded_cache(name: str, store: Store) -> None:
    model = tiny_models.build(name)
    cs = cache_store(store, model)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(IDS, **options)
    _, hit, state = cs.prefill(IDS)
    assert hit == 0
    cache, hit, _ = cs.prefill(IDS, state)
    assert hit == HELD
    assert torch.equal(model.generate(IDS, past_key_values=cache, **options), plain)
    assert cs.save(plain, cache) == HELD


# how much


@pytest.mark.parametrize("length", [1, 127, 128, 129, 255, 256, 257, 333])
def test_a_token_is_left_to_compute(length: int, store: Store, llama: Any) -> None:
    """B2: also where every token of the prompt is stored."""
    cs = cache_store(store, llama)
    ids = IDS[:, :length]
    assert cs.save(ids, filled(llama, ids)) == length // BLOCK * BLOCK
    cache, tokens = cs.load(ids)
    assert tokens == cache.get_seq_length() == (length - 1) // BLOCK * BLOCK


def test_a_state_at_the_end_of_the_prompt_is_of_no_use(store: Store, mistral: Any) -> None:
    cs = cache_store(store, mistral)
    ids = IDS[:, :HELD]
    cache = filled(mistral, ids)
    cs.save(ids, cache)
    state = cs.state(ids, cache)
    assert cs.load(ids, state)[1] == 0
    assert cs.load(IDS, state)[1] == HELD


def test_only_new_blocks_are_written(
    store: Store, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cs = cache_store(store, llama)
    monkeypatch.setattr(connector, "_BATCH_BYTES", 2 * cs.ns.row_bytes)
    ids = tiny_models.prompt(5 * BLOCK + 9)
    cache = filled(llama, ids)
    written = []
    for length in (BLOCK, 5 * BLOCK, 5 * BLOCK):
        assert cs.save(ids[:, :length], cache) == length
        written.append(store.stats()["put_blocks"])
    assert written == [1, 5, 5]
    loaded, tokens = cs.load(ids)
    assert tokens == 5 * BLOCK
    assert torch.equal(loaded.layers[3].values, cache.layers[3].values[:, :, : 5 * BLOCK])


def test_tokens_come_in_any_form(store: Store, llama: Any) -> None:
    cs = cache_store(store, llama)
    cs.save(IDS[0].tolist(), filled(llama, IDS))
    for ids in (IDS, IDS[0], IDS.int(), IDS[0].numpy(), IDS[0].tolist()):
        assert cs.load(ids)[1] == HELD


# the state


def test_a_state_can_be_taken_as_long_as_the_window_is_whole(store: Store, mistral: Any) -> None:
    cs = cache_store(store, mistral)
    short = IDS[:, :199]  # window 200: nothing dropped yet
    cache = filled(mistral, short)
    cs.save(short, cache)
    state = cs.state(short, cache)
    ids = IDS[:, :230]
    loaded, tokens = cs.load(ids, state)
    assert tokens == BLOCK
    at_block = filled(mistral, ids[:, :BLOCK])
    expected = tiny_models.logits(mistral, ids, at_block)
    assert torch.allclose(tiny_models.logits(mistral, ids, loaded), expected, atol=1e-5)
    assert cs.state(IDS, filled(mistral, IDS)) is None, "it has gone on, and dropped what is needed"


def test_blocks_without_a_state_are_a_miss(store: Store, mistral: Any) -> None:
    cs = cache_store(store, mistral)
    cs.prefill(IDS)
    cache, tokens = cs.load(IDS)
    assert tokens == 0
    whole = tiny_models.logits(mistral, IDS, DynamicCache(config=mistral.config))
    assert torch.equal(tiny_models.logits(mistral, IDS, cache), whole)


def test_a_state_without_its_blocks_is_a_miss(store: Store) -> None:
    model = tiny_models.build("gpt_oss")
    cs = cache_store(store, model)
    state = cs.prefill(IDS).state
    store.remove(cs.ns, IDS[0], from_block=1)
    assert cs.load(IDS, state)[1] == 0


def test_a_state_that_does_not_fit_is_a_miss(
    store: Store, mistral: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cs = cache_store(store, mistral)
    other = cache_store(store, mistral, weights="another revision")
    state = cs.prefill(IDS).state
    assert state is not None and cs.load(IDS, state)[1] == HELD
    flipped = bytearray(state)
    flipped[-1] ^= 1
    elsewhere = IDS.clone()
    elsewhere[0, 0] += 1
    for why, bad in {
        "state damaged": bytes(flipped), "state too short": state[:63],
        "state of an unknown format": b"X" + state[1:], "state of another model":
        other.state(IDS[:, :HELD], filled(mistral, IDS[:, :HELD])),
        "state of other tokens": cs.prefill(elsewhere).state,
    }.items():  # fmt: skip
        caplog.clear()
        with caplog.at_level(logging.INFO, INFO):
            assert cs.load(IDS, bad)[1] == 0
        assert why in caplog.text


# identity


def test_what_shapes_the_bytes_is_the_identity(store: Store, llama: Any) -> None:
    """A4: the same tokens, one thing different: nothing is shared."""
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


# storage that fails


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES])
def test_storage_that_fails_is_a_miss(code: int, store_dir: Path, llama: Any) -> None:
    """F2: the model computes what the storage does not give."""
    faults = FaultyBackend(PosixBackend(str(store_dir)))
    with Store.init(store_dir, backend=faults) as store:
        cs = cache_store(store, llama)
        cs.prefill(IDS)
        faults.on("readv", "seg/*", times=None, do=Fail(code))
        cache, tokens = cs.load(IDS)
        assert tokens == 0
        whole = tiny_models.logits(llama, IDS, DynamicCache(config=llama.config))
        assert torch.equal(tiny_models.logits(llama, IDS, cache), whole)


@pytest.mark.expect_logs("not all stored")
def test_a_store_that_is_full_stores_less(store_dir: Path, llama: Any) -> None:
    faults = FaultyBackend(PosixBackend(str(store_dir)))
    with Store.init(store_dir, backend=faults) as store:
        cs = cache_store(store, llama)
        faults.on("writev", "seg/*", times=None, do=Fail(errno.ENOSPC))
        assert cs.prefill(IDS).hit_tokens == 0
        faults.clear()
        assert cs.load(IDS)[1] == 0
