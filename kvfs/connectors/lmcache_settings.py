"""What a user may say about kvfs in `adapter_params` of LMCache's `--l2-adapter`.

Plain data, no I/O; needs neither LMCache nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvfs.connectors.settings import KeyedSettings, parse
from kvfs.errors import InputError

WHERE = "adapter_params"


@dataclass(frozen=True, slots=True)
class Settings(KeyedSettings):
    """Options of the L2 adapter: those of KeyedSettings, and one more.

    chunk_size     tokens in a chunk, the server's own --chunk-size
    """

    chunk_size: int = 256

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> tuple[Settings, dict[str, str]]:
        """The settings of LMCache's mapping, and `models` of it: revisions of weights by model.

        Raises InputError for what is unknown or ill-typed.
        """
        models = given.get("models", {})
        if not isinstance(models, Mapping) or not all(
            isinstance(name, str) and isinstance(rev, str) and rev for name, rev in models.items()
        ):
            raise InputError("setting models must map names of models to revisions of weights")
        rest = {k: v for k, v in given.items() if k != "models"}
        return parse(cls, rest, WHERE), dict(models)
