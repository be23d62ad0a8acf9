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
from kvfs.connectors.settings import KeyedSettings
from kvfs.connectors.vllm_layout import Layout
from kvfs.errors import InputError
from kvfs.layout import EXTERNAL_HASH, Identity, Partition, Span

_TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "merges.txt",
    "tokenizer_config.json", "*.tiktoken",
)  # fmt: skip


def base_identity(
    vllm_config: Any, layout: Layout, version: str, partition: Partition, *, weights: str,
    tokenizer: str, salt: str, backend: str,
) -> Identity:  # fmt: skip
    """The identity of a worker's KV, for requests without salt and adapter of their own.

    version: of vLLM; backend: names of the attention backends. Raises InputError.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    minor = ".".join(version.split(".")[:2])
    dtypes = f"{_plain(model.dtype)},cache:{_plain(cache.cache_dtype)}"
    return Identity(
        model=os.path.basename(str(model.model).rstrip("/")) or "model",
        weights=f"{weights} config:{config_digest(vllm_config)}",
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
        "scales": bool(getattr(vllm_config.cache_config, "calculate_kv_scales", False)),
    }
    if stretches(facts["hf"]):
        # vLLM derives such a RoPE from the longest prompt it was started for.
        facts["max_model_len"] = model.max_model_len
    data = json.dumps(facts, sort_keys=True, default=str)
    return blake2b(data.encode(), digest_size=8).hexdigest()


def _plain(value: object) -> str:
    return str(value).removeprefix("torch.")


def find_weights(vllm_config: Any, cache: str | os.PathLike[str]) -> str:
    """What the loaded weights are: a commit of a model hub, or a digest over local files.

    cache: directory where digests are kept. Reads the weights, where no digest of them is kept.
    Raises InputError if neither can be told.
    """
    model = vllm_config.model_config
    if _plain(getattr(vllm_config.load_config, "load_format", "")).endswith("dummy"):
        return f"dummy:{model.seed}"
    path = Path(str(model.model))
    if path.exists():
        found = digest_files(path, WEIGHTS, cache)
        if found:
            return found
    for commit in (getattr(model.hf_config, "_commit_hash", None), model.revision):
        if commit and COMMIT.fullmatch(str(commit)):
            return f"{model.model}@{commit}"
    raise InputError(
        f"the revision of the weights of {model.model} cannot be told: give `weights` in "
        "kv_connector_extra_config"
    )


def tier_identities(
    spec: Any, row_bytes: int, settings: KeyedSettings, cache: Path, version: str
) -> dict[int, Identity]:
    """For each KV cache group the identity of its chunks, which vLLM names itself.

    spec: vLLM's OffloadingSpec. A chunk holds the share of all ranks, so the number of ranks counts
    and none is one's own. Raises InputError if the weights cannot be told.
    """
    config = spec.config
    path, parallel = Path(config.model.name), config.parallel
    weights = settings.weights or (digest_files(path, WEIGHTS, cache) if path.exists() else "")
    if not weights:
        raise InputError(
            f"the revision of the weights of {config.model.name} cannot be told: give `weights` "
            "in the tier's settings"
        )
    shape = {
        "groups": [[g.group_id, g.tokens_per_block, list(g.layer_names)] for g in config.groups],
        "chunk": [config.cache.tokens_per_hash, config.cache.blocks_per_chunk],
        "ranks": [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "layout": [config.kv_cache_layout, config.canonical_layout, config.replicated_layout],
    }
    digest = blake2b(json.dumps(shape).encode(), digest_size=8).hexdigest()
    files = digest_files(path, ("config.json",), cache) if path.exists() else ""
    minor = ".".join(version.split(".")[:2])
    form = f"vllm-{minor}-chunks,{_plain(config.model.dtype)},layout:{digest}"
    return {
        g.group_id: Identity(
            model=path.name or "model", weights=f"{weights} config:{files or 'none'}",
            tokenizer="none", spans=(Span(0, "kv", 0, row_bytes),), row_bytes=row_bytes,
            record_format=f"{form},group:{g.group_id}",
            block_tokens=g.tokens_per_block * config.cache.blocks_per_chunk,
            hash=EXTERNAL_HASH, salt=settings.salt,
        )
        for g in config.groups
    }  # fmt: skip


def find_tokenizer(vllm_config: Any, cache: str | os.PathLike[str]) -> str:
    """A digest over a local tokenizer. "none" where there is none: the requests' token ids count,
    and the weights' revision covers what comes from a hub."""
    model = vllm_config.model_config
    path = Path(str(getattr(model, "tokenizer", None) or model.model))
    return (digest_files(path, _TOKENIZER, cache) if path.exists() else "") or "none"
