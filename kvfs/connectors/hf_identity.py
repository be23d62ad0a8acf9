"""What shapes a transformers model's KV, besides its layout: configuration, weights, tokenizer.

The weights alone do not decide the bytes: another RoPE base or window on the same weights gives
other KV, so the configuration is part of the identity; and because the code is too, so is the minor
version of transformers. Models whose KV is not a function of the tokens before it are refused.

No I/O. The digests read all of what they digest.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

import torch
import transformers

from kvfs.connectors.digests import shaping, stretches
from kvfs.connectors.hf_layout import CacheLayout
from kvfs.errors import InputError
from kvfs.layout import Identity, Partition

# Of the configuration, how its model is run, where kvfs.connectors.digests does not know it; the
# dtype is taken from the model itself. To change it changes the identity of what is stored.
_HOW_IT_IS_RUN = frozenset(
    {"_attn_implementation", "_attn_implementation_internal", "_experts_implementation",
     "_experts_implementation_internal"}
)  # fmt: skip


def identity(
    model: Any, layout: CacheLayout, *, weights: str, tokenizer: str, name: str, adapter: str,
    salt: str, hash: str, partition: Partition | None,
) -> Identity:  # fmt: skip
    """The identity of a model's KV in this layout. Raises InputError for a model that has none."""
    check_model(model, adapter)
    minor = ".".join(transformers.__version__.split(".")[:2])
    digest = blake2b(layout.describe().encode(), digest_size=8).hexdigest()
    computed = str(model.dtype).removeprefix("torch.")
    return Identity(
        model=name or model.config.model_type,
        weights=f"{weights} config:{config_digest(model.config)}",
        tokenizer=tokenizer,
        spans=layout.spans(),
        row_bytes=layout.row_bytes,
        record_format=f"transformers-{minor},{computed},cache:{layout.dtypes},layout:{digest}",
        block_tokens=layout.block_tokens,
        partition=Partition() if partition is None else partition,
        adapter=adapter,
        hash=hash,
        salt=salt,
        state=layout.state_layout(),
    )


def check_model(model: Any, adapter: str) -> None:
    """Raises InputError for a model whose KV is not a function of the token ids before it."""
    if model.training:
        raise InputError("a model in training mode drops out parts of its KV: model.eval()")
    if model.config.is_encoder_decoder:
        raise InputError("encoder-decoder models have KV that depends on more than a prefix")
    rope = stretches(model.config.to_dict())
    if rope:
        raise InputError(
            f"RoPE of type {', '.join(sorted(rope))} depends on the length of the whole prompt: "
            "a stored prefix would not fit every prompt that begins with it"
        )
    has_adapter = getattr(model, "peft_config", None) or getattr(
        model, "_hf_peft_config_loaded", False
    )
    if has_adapter and not adapter:
        raise InputError("the model has an adapter loaded: name it, with its revision (adapter=)")


def config_digest(config: Any) -> str:
    """16 hex digits over everything in a configuration that may shape the KV."""
    data = json.dumps(shaping(config.to_dict(), _HOW_IT_IS_RUN), sort_keys=True, default=str)
    return blake2b(data.encode(), digest_size=8).hexdigest()


def digest_weights(model: Any) -> str:
    """A digest over all weights of a model, for `weights=` where no revision is known.

    Reads every byte, at about 1 GB/s, and more slowly from a GPU: for small models and tests.
    """
    digest = blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}:{tensor.dtype}:{list(tensor.shape)}\n".encode())
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(memoryview(data.numpy()))
    return f"blake2b:{digest.hexdigest()}"


def digest_tokenizer(tokenizer: Any) -> str:
    """A digest over a tokenizer: vocabulary, special tokens and, where it has one, its pipeline."""
    parts: dict[str, Any] = {
        "vocabulary": tokenizer.get_vocab(),
        "special": {k: str(v) for k, v in tokenizer.special_tokens_map.items()},
    }
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        pipeline = json.loads(backend.to_str())
        # What calls like tokenizer(..., padding=True) leave behind.
        parts["pipeline"] = {
            k: v for k, v in pipeline.items() if k not in ("padding", "truncation")
        }
    data = json.dumps(parts, sort_keys=True)
    return f"blake2b:{blake2b(data.encode(), digest_size=16).hexdigest()}"
