"""What a user may say about kvfs in vLLM's `kv_connector_extra_config`, checked at the start.

Plain data, no I/O; needs neither vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvfs.connectors.settings import parse
from kvfs.errors import InputError


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of the connector.

    store          directory of the store (made with `kvctl init`)
    index          directory of this host's indexes, "" for the usual place
    ttl_class      TTL class of what is stored; "": chatbot where the store has it, else the longest
    weights        revision of the weights, "" to find it: the commit of the model hub, or a digest
                   over the files of a local directory
    salt           tenant salt of all requests; a request's own `cache_salt` is added to it
    block_tokens   tokens of a block; rounded up to a multiple of vLLM's own block
    fetch          "process": the fetch process reads; "inline": this process does, for tests and
                   small machines
    fetch_seconds  a fetch that takes longer is given up, and what has come is used
    arena_bytes    shared memory of a fetch process that has to be started
    save_bytes     memory for blocks on their way to the store; what does not fit is not stored
    flush_seconds  how long a process that ends waits for its last blocks to be stored
    slot_bytes     host memory of a worker for windows that vLLM could replay, 0 for none
    slot_seconds   how long a window is looked for, after that vLLM replays it
    secret_file    the fleet's secret, to have such windows from other hosts; "" for this host's
    """

    store: str
    index: str = ""
    ttl_class: str = ""
    weights: str = ""
    salt: str = ""
    block_tokens: int = 128
    fetch: str = "process"
    fetch_seconds: float = 2.0
    arena_bytes: int = 2 << 30
    save_bytes: int = 256 << 20
    flush_seconds: float = 10.0
    slot_bytes: int = 256 << 20
    slot_seconds: float = 0.05
    secret_file: str = ""

    def __post_init__(self) -> None:
        if not self.store:
            raise InputError("kv_connector_extra_config needs `store`, the store's directory")
        if self.fetch not in ("process", "inline"):
            raise InputError(f"fetch is {self.fetch!r}; it can be process or inline")
        for name in ("block_tokens", "arena_bytes", "save_bytes", "fetch_seconds", "slot_seconds"):
            if getattr(self, name) <= 0:
                raise InputError(f"{name} must be positive, not {getattr(self, name)}")
        if self.slot_bytes < 0:
            raise InputError(f"slot_bytes must not be negative, and is {self.slot_bytes}")

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Settings:
        """The settings of a mapping. Raises InputError for what is unknown, ill-typed or absent."""
        return parse(cls, given, "kv_connector_extra_config")
