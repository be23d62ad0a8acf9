"""What shapes the KV of a vLLM worker besides its layout: weights, configuration, code and rank.

A model's name is never enough of an identity: the same directory may hold other weights tomorrow.
Of a model hub the commit counts, of a local directory a digest over every byte of its weights
(kvfs.connectors.digests).

No vLLM is imported here; its configuration objects are looked at by attribute.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvfs.connectors.digests import COMMIT, WEIGHTS, digest_files, shaping, stretches
from kvfs.connectors.vllm_layout import Layout
from kvfs.errors import InputError
from kvfs.layout import Identity, Partition

_TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "merges.txt",
    "tokenizer_config.json", "*.tiktoken",
)  # fmt: skip


def base_identity(
    vllm_config: Any, layout: Layout, version: str, partition: Partition, *, weights: str,
    tokenizer: str, salt: str, backend: str, draft: str = "",
) -> Identity:  # fmt: skip
    """The identity of a worker's KV, for requests without salt and adapter of their own.

    version: of vLLM; backend: names of the attention backends; draft: of `find_draft`. Raises
    InputError.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    minor = ".".join(version.split(".")[:2])
    dtypes = f"{_plain(model.dtype)},cache:{_plain(cache.cache_dtype)}"
    return Identity(
        model=os.path.basename(str(model.model).rstrip("/")) or "model",
        weights=f"{weights} config:{config_digest(vllm_config)}{draft and f' draft:{draft}'}",
        tokenizer=tokenizer,
        spans=layout.spans(),
        row_bytes=layout.row_bytes,
        record_format=f"vllm-{minor},{dtypes},{backend},layout:{layout.description}",
        block_tokens=layout.block_tokens,
        partition=partition,
        salt=salt,
    )


def variant(identity: Identity, salt: str, adapter: str) -> Identity:
    """The identity of requests with a `cache_salt` or an adapter (name and digest, "" for none)."""
    if not salt and not adapter:
        return identity
    own = identity.salt
    both = json.dumps([own, salt]) if own and salt else own or (salt and json.dumps([salt]))
    return replace(identity, salt=both, adapter=adapter)


def config_digest(vllm_config: Any) -> str:
    """16 hex digits over what shapes the KV in the configuration of model and engine."""
    model = vllm_config.model_config
    facts: dict[str, Any] = {
        "hf": shaping(model.hf_config.to_dict()),
        "quantization": _plain(getattr(model, "quantization", None)),
    }
    if stretches(facts["hf"]):
        # vLLM derives such a RoPE from the longest prompt it was started for.
        facts["max_model_len"] = model.max_model_len
    return _digest(facts)


def _digest(facts: Any) -> str:
    data = json.dumps(facts, sort_keys=True, default=str)
    return blake2b(data.encode(), digest_size=8).hexdigest()


def _plain(value: object) -> str:
    return str(value).removeprefix("torch.")


def find_weights(vllm_config: Any, cache: str | os.PathLike[str]) -> str:
    """What the loaded weights are: a commit of a model hub, or a digest over local files.

    cache: directory where digests are kept. Reads the weights, where no digest of them is kept.
    Raises InputError if neither can be told.
    """
    found = _weights(vllm_config.model_config, vllm_config.load_config, cache)
    if not found:
        raise InputError(
            f"the revision of the weights of {vllm_config.model_config.model} cannot be told: "
            "give `weights` in kv_connector_extra_config"
        )
    return found


def find_draft(vllm_config: Any, weights: str, cache: str | os.PathLike[str]) -> str:
    """The same of the draft model, with its configuration: its layers are in the same blocks. ""
    where there is none.

    weights: of the model itself. Raises InputError if they cannot be told.
    """
    spec = getattr(vllm_config, "speculative_config", None)
    draft = getattr(spec, "draft_model_config", None)
    if getattr(spec, "method", None) == "custom_class":
        raise InputError("what a proposer of a class of one's own keeps cannot be told")
    model = vllm_config.model_config
    # Where vLLM guesses from the prompt alone it gives the model itself.
    itself = (model, getattr(spec, "target_model_config", None))
    if spec is None or draft is None or any(draft is other for other in itself):
        return ""
    if draft.model != model.model or draft.revision not in (None, model.revision):
        load = getattr(spec, "draft_load_config", None) or vllm_config.load_config
        weights = _weights(draft, load, cache)
    if not weights:
        raise InputError(
            f"the revision of the weights of {draft.model}, the draft model, cannot be told: give "
            "its commit as `revision` of --speculative-config"
        )
    facts = [shaping(draft.hf_config.to_dict()), _plain(getattr(draft, "quantization", None))]
    return f"{spec.method},{weights},config:{_digest(facts)}"


def _weights(model: Any, load_config: Any, cache: str | os.PathLike[str]) -> str:
    """A revision or a digest of a model's weights; "" if neither can be told."""
    if _plain(getattr(load_config, "load_format", "")).endswith("dummy"):
        return f"dummy:{model.seed}"
    path = Path(str(model.model))
    if path.exists():
        found = digest_files(path, WEIGHTS, cache)
        if found:
            return found
    for commit in (getattr(model.hf_config, "_commit_hash", None), model.revision):
        if commit and COMMIT.fullmatch(str(commit)):
            return f"{model.model}@{commit}"
    return ""


def find_tokenizer(vllm_config: Any, cache: str | os.PathLike[str]) -> str:
    """A digest over a local tokenizer. "none" where there is none: the requests' token ids count,
    and the weights' revision covers what comes from a hub."""
    model = vllm_config.model_config
    path = Path(str(getattr(model, "tokenizer", None) or model.model))
    return (digest_files(path, _TOKENIZER, cache) if path.exists() else "") or "none"
