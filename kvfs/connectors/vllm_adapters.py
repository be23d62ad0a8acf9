"""Which adapter a request uses, by content: an adapter's name may come to mean other weights.

A digest over an adapter's files is computed on a thread of its own when the adapter is first seen;
until it is known, requests with it are not cached. No vLLM is imported here.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from kvfs.connectors.background import Background
from kvfs.connectors.digests import digest_files

_CLOSE_SECONDS = 1.0
_FILES = ("*.safetensors", "*.bin", "*.pt", "adapter_config.json")


class Adapters:
    """Names of adapters for identities. For one thread."""

    def __init__(self, cache: str | os.PathLike[str]) -> None:
        """cache: directory where digests are kept. Raises RuntimeError without threads."""
        self._cache = cache
        self._known: dict[str, tuple[int, Future[str]]] = {}
        """By path: vLLM's number of the adapter that was loaded from there last, and its digest."""
        self._background = Background("kvfs-adapters")

    def __call__(self, lora_request: Any) -> str | None:
        """Name and digest; "" for no adapter, None for one that cannot be told (yet).

        lora_request: vLLM's LoRARequest or None.
        """
        if lora_request is None:
            return ""
        if getattr(lora_request, "load_inplace", False):
            return None  # the files may have changed since vLLM read them
        path, number = str(lora_request.lora_path), int(lora_request.lora_int_id)
        if path not in self._known or self._known[path][0] < number:
            # Loaded anew: the files may be others. A file that has not changed is not read again.
            future = self._background.submit(digest_files, Path(path), _FILES, self._cache)
            self._known[path] = number, future
        newest, digest = self._known[path]
        if number != newest:
            return None  # what it was loaded from may be gone
        if not digest.done() or digest.exception() is not None or not digest.result():
            return None
        return f"{lora_request.lora_name}@{digest.result()}"

    def close(self) -> None:
        self._background.close(_CLOSE_SECONDS, drop=True)
