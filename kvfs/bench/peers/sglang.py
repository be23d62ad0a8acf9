"""SGLang's file backend of its hierarchical cache: a file per page, a page of 128 tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
from sglang.srt.mem_cache.utils import get_hash_str

from kvfs.bench.peers.contract import Peer, as_ids
from kvfs.bench.peers.work import BLOCK_TOKENS, Work


class Pages(Peer):
    """What SGLang's backends have in common: keys, and pages as tensors."""

    packages = ("sglang", "torch")

    def __init__(self, work: Work, place: Path) -> None:
        super().__init__(work, place)
        logging.getLogger("sglang").setLevel(logging.ERROR)
        torch.set_num_threads(1)
        self.pages = _pages(work, work.payload)
        self.into = _pages(work, work.into)

    def keys(self, tokens: Any) -> Sequence[str]:
        """Its own chain: SHA-256 in hexadecimal, by its compiled function."""
        found: list[str] = get_hash_str(tokens, None, BLOCK_TOKENS)
        return found[: len(tokens) // BLOCK_TOKENS]  # it also gives one for a part of a page

    def as_array(self, tokens: Any) -> Any:
        return as_ids(tokens)


class File(Pages):
    api = {
        "match": "get_hash_str over all pages, HiCacheFile.batch_exists",
        "put": "HiCacheFile.batch_set",
        "fetch": "HiCacheFile.batch_get into given tensors",
    }  # fmt: skip
    removes = False
    cached = False

    def __init__(self, work: Work, place: Path) -> None:
        super().__init__(work, place)
        config = HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
            is_mla_model=True, enable_storage_metrics=False, is_page_first_layout=True,
            model_name="m",
            extra_config={"enable_metadata_cache": self.cached, "metadata_ttl": 3600.0},
        )  # fmt: skip
        self._storage = HiCacheFile(config, str(place))
        self._tiny = torch.zeros(1, dtype=torch.uint8)

    def found(self, keys: Sequence[str]) -> int:
        return int(self._storage.batch_exists(list(keys)))

    def plant(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._storage.set(key, self._tiny)

    def put(self, keys: Sequence[str], *, durable: bool = False) -> None:
        if not self._storage.batch_set(list(keys), self.pages):
            raise RuntimeError("batch_set says that it failed")

    def fetch(self, keys: Sequence[str]) -> None:
        if any(page is None for page in self._storage.batch_get(list(keys), self.into)):
            raise RuntimeError("batch_get did not bring all pages")


class FileCached(File):
    note = "with enable_metadata_cache"
    cached = True


def _pages(work: Work, buffer: memoryview) -> list[Any]:
    whole = torch.frombuffer(buffer, dtype=torch.uint8).view(work.blocks, work.block_bytes)
    return list(whole)
