"""What a user may say about kvfs in vLLM's `kv_connector_extra_config`, checked at the start.

Plain data, no I/O; needs neither vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvfs.connectors.settings import Fetching, parse


@dataclass(frozen=True, slots=True)
class Settings(Fetching):
    """Options of the connector, besides those of every connector.

    block_tokens   tokens of a block; rounded up to a multiple of vLLM's own block
    flush_seconds  how long a process that ends waits for its last blocks to be stored
    slot_bytes     host memory of a worker for windows that vLLM could replay, 0 for none
    slot_seconds   how long a window is looked for, after that vLLM replays it
    secret_file    the fleet's secret, to have such windows from other hosts; "" for this host's
    """

    MAY_BE_ZERO: ClassVar[tuple[str, ...]] = ("flush_seconds", "slot_bytes")

    block_tokens: int = 128
    flush_seconds: float = 10.0
    slot_bytes: int = 256 << 20
    slot_seconds: float = 0.05
    secret_file: str = ""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Settings:
        """The settings of a mapping. Raises InputError for what is unknown, ill-typed or absent."""
        return parse(cls, given, "kv_connector_extra_config")
