"""What shapes the pages of an SGLang host pool: weights, configuration, code, layout and rank.

SGLang's page keys cover the tokens before a page, the adapter's id and a request's `cache_salt`,
and nothing else; all else is here. The id of an adapter named on the command line is a function of
its name and path alone, so the digests of the adapters' files are in the configuration's.

No SGLang is imported here; its objects are looked at by attribute.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvfs.connectors.digests import COMMIT, WEIGHTS, digest_files, shaping, stretches
from kvfs.connectors.sglang_pages import Pages
from kvfs.connectors.sglang_settings import WHERE
from kvfs.errors import InputError
from kvfs.layout import EXTERNAL_HASH, Identity, Partition, Span

# Arguments of the server that change what is computed, or how it is packed.
_ARGUMENTS = (
    "dtype", "quantization", "kv_cache_dtype", "mamba_ssm_dtype", "json_model_override_args",
    "enable_fp32_lm_head", "speculative_algorithm",
)  # fmt: skip
_ADAPTER = ("adapter_config.json", "new_embeddings.safetensors", *WEIGHTS)
_SHARDED = frozenset({"mamba"})
"""Pools that each tensor rank has its own share of, also where the KV is the same on all."""


@dataclass(frozen=True, slots=True)
class Model:
    """The model that an engine runs, as far as its KV depends on it."""

    name: str
    weights: str
    """Revision or digest of weights and configuration, and of the draft model's weights: its layers
    may be packed into the same pages."""


def model_of(args: Any, hf_config: Any, weights: str, cache: str | os.PathLike[str]) -> Model:
    """What SGLang's server arguments and the model's configuration say.

    weights: the revision, if the user gave one; cache: directory where digests are kept. Reads the
    weights, where no digest of them is kept. Raises InputError if they cannot be told.
    """
    path = str(args.model_path)
    found = weights or _weights(path, args, getattr(hf_config, "_commit_hash", None), cache)
    name = os.path.basename(path.rstrip("/")) or "model"
    whole = f"{found} config:{_configuration(args, hf_config, cache)}"
    draft = str(getattr(args, "speculative_draft_model_path", None) or "")
    if not draft:
        return Model(name, whole)
    of_draft = found if draft == path else _weights(draft, args, None, cache)
    return Model(name, f"{whole} draft:{of_draft}")


def _weights(path: str, args: Any, commit: Any, cache: str | os.PathLike[str]) -> str:
    if str(getattr(args, "load_format", "")).endswith("dummy"):
        return f"dummy:{getattr(args, 'random_seed', None)}"
    if Path(path).exists():
        found = digest_files(Path(path), WEIGHTS, cache)
        if found:
            return found
    of_main = path == str(args.model_path)
    field = "revision" if of_main else "speculative_draft_model_revision"
    for revision in (commit, getattr(args, field, None)):
        if revision and COMMIT.fullmatch(str(revision)):
            return f"{path}@{revision}"
    option = f"--{field.replace('_', '-')}"
    wanted = f"give `weights` in {WHERE}" if of_main else f"give {option} its commit"
    raise InputError(f"the revision of the weights of {path} cannot be told: {wanted}")


def _configuration(args: Any, hf_config: Any, cache: str | os.PathLike[str]) -> str:
    """16 hex digits over all that shapes the KV besides the weights."""
    facts: dict[str, Any] = {name: getattr(args, name, None) for name in _ARGUMENTS}
    facts["hf"] = shaping(hf_config.to_dict())
    if stretches(facts["hf"]):
        facts["context_length"] = getattr(args, "context_length", None)
    scales = getattr(args, "quantization_param_path", None)
    if scales:
        facts["scales"] = digest_files(Path(scales), (), cache) or str(scales)
    facts["adapters"] = sorted(_adapters(getattr(args, "lora_paths", None) or (), cache))
    data = json.dumps(facts, sort_keys=True, default=str)
    return blake2b(data.encode(), digest_size=8).hexdigest()


def _adapters(given: Iterable[Any], cache: str | os.PathLike[str]) -> list[str]:
    """Digests of the adapters that the server was started with."""
    if isinstance(given, Mapping):
        given = given.values()
    out = []
    for adapter in given:
        path = Path(_adapter_path(adapter))
        digest = digest_files(path, _ADAPTER, cache) if path.exists() else ""
        if not digest:
            raise InputError(
                f"the files of adapter {path} cannot be told: only adapters in local directories "
                "can be cached"
            )
        out.append(digest)
    return out


def _adapter_path(adapter: Any) -> str:
    """Where an adapter lies, in any of the forms that --lora-paths takes."""
    if isinstance(adapter, Mapping):
        return str(adapter.get("lora_path"))
    own = getattr(adapter, "lora_path", None)
    if own is not None:
        return str(own)
    name, named, path = str(adapter).partition("=")
    return path if named else name


def identity_of(
    model: Model, config: Any, name: str, pool: Any, pages: Pages, salt: str, version: str
) -> Identity:
    """The identity of the pages of a pool.

    config: SGLang's HiCacheStorageConfig; name: of the pool; version: of SGLang. Raises InputError
    for context parallelism of decoding, whose ranks each have other tokens of a page.
    """
    if getattr(config, "dcp_size", 1) > 1:
        raise InputError("decode context parallelism is not supported")
    digest = blake2b(pages.description.encode(), digest_size=8).hexdigest()
    return Identity(
        model=model.name,
        weights=model.weights,
        tokenizer="none",
        spans=(Span(0, name, 0, pages.row_bytes),),
        row_bytes=pages.row_bytes,
        record_format=f"sglang-{version},pool:{name},layout:{digest}",
        block_tokens=pages.page_tokens,
        partition=_partition(config, name, pool),
        hash=EXTERNAL_HASH,
        salt=salt,
    )


def _partition(config: Any, name: str, pool: Any) -> Partition:
    """Whose share a page is. Of latent attention all tensor ranks have the same, stored once."""
    own_share = not config.is_mla_model or name in _SHARDED or "MHA" in type(pool).__name__
    tp = (config.tp_rank, config.tp_size) if own_share else (0, 1)
    return Partition(
        tp_rank=tp[0], tp_size=tp[1], pp_rank=config.pp_rank, pp_size=config.pp_size,
        cp_rank=config.attn_cp_rank, cp_size=config.attn_cp_size,
    )  # fmt: skip
