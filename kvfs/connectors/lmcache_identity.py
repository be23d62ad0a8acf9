"""What shapes the objects of an LMCache server: weights, layout, rank, object group and salt.

LMCache's key of a chunk covers its tokens and all before them; beside it stand the model's name,
the rank and a salt. A name is not an identity, so the revision of the weights comes from the user,
or from the files where the name is that of a local directory; the shape and dtype of the objects
come from LMCache's own description. Objects of one identity all have the same size.

No LMCache is imported here; its objects are looked at by attribute. Thread-safe.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvfs.connectors.digests import WEIGHTS, digest_files
from kvfs.connectors.lmcache_settings import WHERE, Settings
from kvfs.errors import InputError
from kvfs.layout import EXTERNAL_HASH, Identity, Span

_KEPT = 1024
"""Identities that are kept at once: salts may be as many as tenants, or as requests."""
LEAST_KEY_BYTES = 16
"""A chunk's key that is shorter than this does not tell prefixes apart for certain."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How an object lies in memory: its tensors, one after the other."""

    description: str
    size: int

    @classmethod
    def of(cls, shapes: Iterable[Any], dtypes: Iterable[Any]) -> Layout:
        """shapes: torch.Size, dtypes: torch.dtype, one each for every tensor of the object."""
        parts, size = [], 0
        for shape, dtype in zip(shapes, dtypes, strict=True):
            elements = 1
            for n in shape:
                elements *= int(n)
            size += elements * int(dtype.itemsize)
            parts.append(f"{dtype}{tuple(int(n) for n in shape)}")
        return cls(";".join(parts), size)


class Identities:
    """The identities of the objects that one server keeps; those used last are not made anew."""

    def __init__(
        self, settings: Settings, models: Mapping[str, str], version: str, cache: Path
    ) -> None:
        """models: revision of the weights by model name; version: of LMCache; cache: directory
        where digests of files are kept."""
        self._settings = settings
        self._models = dict(models)
        self._version = version
        self._cache = cache
        self._weights: dict[str, str] = {}
        self._made = lru_cache(_KEPT)(self._make)

    def of(self, key: Any, layout: Layout) -> Identity:
        """The identity of an object. Raises InputError if its model or its key says too little."""
        if len(key.chunk_hash) < LEAST_KEY_BYTES:
            raise InputError(
                f"keys of {len(key.chunk_hash)} bytes are too short to tell prefixes apart: start "
                "the server with --hash-algorithm blake3"
            )
        return self._made(key.model_name, key.kv_rank, key.object_group_id, key.cache_salt, layout)

    def _make(self, model: str, rank: int, group: int, salt: str, layout: Layout) -> Identity:
        digest = blake2b(layout.description.encode(), digest_size=8).hexdigest()
        return Identity(
            model=os.path.basename(model.rstrip("/")) or "model",
            weights=self._weights_of(model),
            tokenizer="none",
            spans=(Span(0, f"group{group}", 0, layout.size),),
            row_bytes=layout.size,
            record_format=f"lmcache-{self._version},rank:{rank:x},layout:{digest}",
            block_tokens=self._settings.chunk_size,
            hash=EXTERNAL_HASH,
            salt=_joined(self._settings.salt, salt),
        )

    def _weights_of(self, model: str) -> str:
        if model not in self._weights:
            self._weights[model] = f"{model}@{self._revision(model)}"
        return self._weights[model]

    def _revision(self, model: str) -> str:
        given = self._models.get(model) or self._settings.weights
        if given:
            return given
        path = Path(model)
        found = path.is_dir() and digest_files(path, (*WEIGHTS, "config.json"), self._cache)
        if not found:
            raise InputError(
                f"the revision of the weights of {model} cannot be told: give `weights`, or "
                f"`models`, in {WHERE}"
            )
        return str(found)


def _joined(ours: str, theirs: str) -> str:
    """One salt of two, so that no two pairs give the same."""
    return f"{len(ours)}:{ours}{theirs}" if ours or theirs else ""


def grouped(keys: Sequence[Any]) -> list[list[int]]:
    """Numbers of keys that belong together (model, rank, group, salt), each in its order."""
    rows: dict[tuple[Any, ...], list[int]] = {}
    for i, key in enumerate(keys):
        about = (key.model_name, key.kv_rank, key.object_group_id, key.cache_salt)
        rows.setdefault(about, []).append(i)
    return list(rows.values())
