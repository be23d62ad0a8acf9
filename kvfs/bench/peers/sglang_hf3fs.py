"""SGLang's HF3FS backend, with its own stand-in for the client of 3FS: one file, read and written.

There is no 3FS here; the stand-in copies each page twice, so that its put and fetch say nothing of
USRBIO. Its metadata is what is compared: a dictionary in this process, or behind a server of JSON
over HTTP, which models with one copy of the cache for all ranks need.

Two modules of SGLang load GPU code that is not used here; they are replaced by empty ones.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from kvfs.bench.peers.contract import answered, as_hex, free_ports
from kvfs.bench.peers.disk import resident
from kvfs.bench.peers.sglang import Pages
from kvfs.bench.peers.work import Work

_PAGES = 120_000
_START_SECONDS = 120.0
_REPLACED = (
    "sglang.srt.mem_cache.pool_host", "sglang.srt.observability.metrics_collector",
)  # fmt: skip


class _Empty(ModuleType):
    """Has a class of every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def replace_modules() -> None:
    for name in _REPLACED:
        sys.modules.setdefault(name, _Empty(name))


class Hf3fs(Pages):
    api = {
        "match": "get_hash_str over all pages, HiCacheHF3FS.batch_exists",
        "put": "HiCacheHF3FS._batch_set, what batch_set does without a pool of GPU memory",
        "fetch": "HiCacheHF3FS._batch_get",
        "remove": "delete_keys of the metadata client",
    }  # fmt: skip
    note = "stand-in for the 3FS client (two copies), metadata in this process: memory it takes"
    background = True

    def __init__(self, work: Work, place: Path) -> None:
        super().__init__(work, place)
        self._server: subprocess.Popen[Any] | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        self._empty, self._planted = self._resident(), 0

    def _start(self) -> None:
        replace_modules()
        import torch
        from sglang.srt.mem_cache.storage.hf3fs.storage_hf3fs import HiCacheHF3FS

        self._metadata = self._client()
        size = self.work.block_bytes
        self._storage = HiCacheHF3FS(
            rank=0, file_path=str(self.place / "pages"), file_size=_PAGES * size, numjobs=16,
            bytes_per_page=size, entries=8, client_timeout=5, dtype=torch.uint8,
            metadata_client=self._metadata, is_mla_model=False, is_page_first_layout=True,
            use_mock_client=True,
        )  # fmt: skip
        self._storage.mha_zero_copy = False

    def _client(self) -> Any:
        from sglang.srt.mem_cache.storage.hf3fs import mini_3fs_metadata_server as metadata

        return metadata.Hf3fsLocalMetadataClient()

    def _resident(self) -> int:
        return resident()

    def found(self, keys: Sequence[str]) -> int:
        return int(self._storage.batch_exists(list(keys)))

    def plant(self, keys: Sequence[Any]) -> None:
        """Pages are given to the keys and never written: their file is sparse."""
        names = [(as_hex(key), "") for key in keys]
        given = self._metadata.reserve_and_allocate_page_indices(0, names)
        written = [(name, index) for (name, _), (_, index) in zip(names, given, strict=True)]
        self._metadata.confirm_write(0, written, [])
        self._planted += len(keys)

    def plant_background(self, count: int, batch: int) -> None:
        """As many as its pages hold, beside the prompts."""
        super().plant_background(min(count, _PAGES - 20_000), batch)

    def put(self, keys: Sequence[str], *, durable: bool = False) -> None:
        if not all(self._storage._batch_set(list(keys), self.pages)):
            raise RuntimeError("_batch_set did not store all pages")

    def fetch(self, keys: Sequence[str]) -> None:
        if not all(self._storage._batch_get(list(keys), self.into)):
            raise RuntimeError("_batch_get did not bring all pages")

    def remove(self, keys: Sequence[str]) -> None:
        self._metadata.delete_keys(0, list(keys))

    def metadata_bytes(self) -> float:
        return (self._resident() - self._empty) / self._planted

    def close(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()


class Hf3fsHttp(Hf3fs):
    note = "stand-in for the 3FS client (two copies), metadata by HTTP: memory of its server"

    def _client(self) -> Any:
        from sglang.srt.mem_cache.storage.hf3fs import mini_3fs_metadata_server as metadata

        (port,) = free_ports(1)
        with (self.place / "metadata.log").open("w") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-m", __name__, str(port)], stdout=log, stderr=log
            )
        url = f"http://127.0.0.1:{port}"
        answered(partial(_ask, url), self._server, _START_SECONDS)
        return metadata.Hf3fsGlobalMetadataClient(url)

    def _resident(self) -> int:
        assert self._server is not None
        return resident(self._server.pid)


def _ask(url: str) -> None:
    with suppress(HTTPError):  # whatever it answers
        urlopen(url, timeout=1).close()


if __name__ == "__main__":
    replace_modules()
    from sglang.srt.mem_cache.storage.hf3fs.mini_3fs_metadata_server import run_metadata_server

    run_metadata_server("127.0.0.1", int(sys.argv[1]))
