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
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
}


def build(name: str, *, dtype: str = "float32", seed: int = 0, **changes: Any) -> Any:
    """A model of an architecture. The same arguments give the same weights in every process."""
    config = CONFIG_MAPPING[name](**{**_BASE, **CONFIGS[name], **changes})
    model = AutoModelForCausalLM.from_config(
        config,
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, tensor in sorted(model.state_dict().items()):
            fill(tensor, generator)
    return model


def fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Weights large enough that attention matters; integers choose among experts."""
    if not tensor.is_floating_point():
        tensor.copy_(torch.randint(0, 4, tensor.shape, generator=generator))
    elif tensor.ndim >= 2:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)


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

    model = build(request["name"])
    ids = torch.tensor([request["tokens"]])
    state = Path(request["state"]).read_bytes() if request["state"] else None
    with Store.open(request["store"], index=request["index"]) as store:
        cs = CacheStore(store, model, weights=digest_weights(model), tokenizer="none")
        cache, tokens = cs.load(ids, state)
    Path(request["out"]).write_bytes(logits(model, ids, cache).numpy().tobytes())
    return {"tokens": tokens, "namespace": cs.identity.name}


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(restore(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
