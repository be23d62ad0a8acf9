"""What a user may say about kvfs in SGLang's `--hicache-storage-backend-extra-config`.

Plain data, no I/O; needs neither SGLang nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvfs.connectors.settings import parse
from kvfs.errors import InputError

WHERE = "--hicache-storage-backend-extra-config"
# SGLang's own, which stay in the mapping that a backend is given.
_SGLANG = frozenset(
    {"backend_name", "module_path", "class_name", "interface_v1", "file_storage_path"}
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of the storage backend.

    store          directory of the store (made with `kvctl init`)
    index          directory of this host's indexes, "" for the usual place
    ttl_class      TTL class of what is stored
    weights        revision of the weights, "" to find it: the commit of the model hub, or a digest
                   over the files of a local directory
    salt           tenant salt of all requests
    fetch          "process": the fetch process reads; "inline": this process does, for tests and
                   small machines
    fetch_seconds  a fetch that takes longer is given up, and what has come is used
    arena_bytes    shared memory of a fetch process that has to be started
    save_bytes     memory for pages on their way to the store; what does not fit is not stored
    save_seconds   SGLang is told that pages are not stored if it takes longer
    """

    store: str
    index: str = ""
    ttl_class: str = "chatbot"
    weights: str = ""
    salt: str = ""
    fetch: str = "process"
    fetch_seconds: float = 2.0
    arena_bytes: int = 2 << 30
    save_bytes: int = 256 << 20
    save_seconds: float = 10.0

    def __post_init__(self) -> None:
        if not self.store:
            raise InputError(f"{WHERE} needs `store`, the store's directory")
        if self.fetch not in ("process", "inline"):
            raise InputError(f"fetch is {self.fetch!r}; it can be process or inline")
        for name in ("arena_bytes", "save_bytes", "fetch_seconds", "save_seconds"):
            if getattr(self, name) <= 0:
                raise InputError(f"{name} must be positive, not {getattr(self, name)}")

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Settings:
        """The settings of SGLang's mapping. Raises InputError for what is unknown or ill-typed."""
        return parse(cls, {k: v for k, v in given.items() if k not in _SGLANG}, WHERE)
