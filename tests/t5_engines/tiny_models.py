"""Tiny transformers models with random weights, and a process that restores their caches.

Run as a script it answers requests, one JSON object a line on standard input: it builds the model
anew, opens the store with an index of its own, loads what it can of the tokens, computes the rest,
writes the logits to a file and answers with what it loaded. All architectures share one child,
since importing torch takes longer than everything that is tested.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, logging
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

logging.set_verbosity_error()  # remarks about tokens that have no meaning for random weights
# One thread: the same sums in the same order in every process.
torch.set_num_threads(1)

VOCABULARY = 512
_BASE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 4096,
}  # fmt: skip
# Latent attention: one compressed vector a token, and experts behind the first layer.
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
}  # fmt: skip
# Lightning indexer; as many entries as there are, so that attention is a function of the prefix.
_INDEXER = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 4096}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_HEAVY, _SPARSE = "heavily_compressed_attention", "compressed_sparse_attention"
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 200},
    "gemma3_text": {
        "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16,
        "sliding_window": 200, "layer_types": [_SLIDING, _SLIDING, _SLIDING, _FULL],
    },
    "gpt_oss": {
        "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 128, "layer_types": [_SLIDING, _FULL] * 2,
    },
    "deepseek_v3": _LATENT,
    "deepseek_v32": {**_LATENT, **_INDEXER},
    "deepseek_v4": {
        **_INDEXER, "num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 32,
        "qk_rope_head_dim": 8, "o_groups": 2, "o_lora_rank": 16, "hc_mult": 2,
        "moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_routed_experts": 4,
        "n_shared_experts": 1, "num_hidden_layers": 6, "sliding_window": 128,
        "layer_types": [_SLIDING, _HEAVY, _SPARSE, _HEAVY, _SPARSE, _SLIDING],
        "mlp_layer_types": ["hash_moe"] + ["moe"] * 5,
    },
    # A recurrent state in some layers: kvfs refuses it.
    "lfm2": {"num_key_value_heads": 2, "layer_types": ["conv", _FULL] * 2},
}  # fmt: skip
STORED = [name for name in ARCHITECTURES if name != "lfm2"]


def build(
    name: str, *, dtype: str = "float32", seed: int = 0, attention: str = "eager", **changes: Any
) -> Any:
    """A model of an architecture. The same arguments give the same weights in every process."""
    fields = {**_BASE, **ARCHITECTURES[name], **changes}
    if name == "deepseek_v4":
        del fields["intermediate_size"]  # it has experts in every layer
    config = CONFIG_MAPPING[name](**fields)
    model = AutoModelForCausalLM.from_config(
        config,
        dtype=getattr(torch, dtype),
        attn_implementation=attention,
        experts_implementation="eager",
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in sorted(model.state_dict().items()):
            if "norm" not in key:
                fill(tensor, generator)
    return model


def fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Weights large enough that attention matters; integers choose among experts."""
    if tensor.is_floating_point():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    else:
        tensor.copy_(torch.randint(0, 4, tensor.shape, generator=generator))


def prompt(length: int, seed: int = 1) -> torch.Tensor:
    """Tokens [1, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (1, length), generator=generator)


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Logits [tokens, vocabulary] of the tokens a cache does not hold; the cache takes them in."""
    done = int(cache.get_seq_length())
    out = model(input_ids=ids[:, done:], past_key_values=cache, use_cache=True)
    result: torch.Tensor = out.logits[0]
    return result


def restore(request: dict[str, Any]) -> dict[str, Any]:
    """One request of the child; see `restored` in test_transformers.py."""
    from kvfs import Store
    from kvfs.connectors.transformers import CacheStore, digest_weights
    from kvfs.state.slots import SlotPool

    model = build(request["name"], **request["options"])
    ids = torch.tensor([request["tokens"]])
    state = Path(request["state"]).read_bytes() if request["state"] else None
    with Store.open(request["store"], index=request["index"]) as store:
        cs = CacheStore(store, model, weights=digest_weights(model), tokenizer="none")
        if request["slots"]:
            cs.slots = SlotPool.open(cs.identity, directory=request["slots"])
        cache, tokens = cs.load(ids, state, replay=request["replay"])
        if cs.slots is not None:
            cs.slots.close()
        loaded = cs.state(ids[:, :tokens], cache)
        if loaded is not None:
            Path(request["loaded"]).write_bytes(loaded)
    Path(request["out"]).write_bytes(logits(model, ids, cache).numpy().tobytes())
    return {"tokens": tokens, "namespace": cs.identity.name}


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(restore(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
