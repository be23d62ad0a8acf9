"""What shapes the chunks of vLLM's offloading, as far as vLLM tells a tier.

vLLM names a chunk by its own chain hash; the identity has what stands around it. No vLLM is
imported here; its objects are looked at by attribute. Reads the weights where no digest of them is
kept.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvfs.connectors.digests import WEIGHTS, digest_files
from kvfs.connectors.settings import KeyedSettings
from kvfs.errors import InputError
from kvfs.layout import EXTERNAL_HASH, Identity, Span


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
    form = f"vllm-{minor}-chunks,{str(config.model.dtype).removeprefix('torch.')},layout:{digest}"
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
