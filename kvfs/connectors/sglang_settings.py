"""What a user may say about kvfs in SGLang's `--hicache-storage-backend-extra-config`.

Plain data, no I/O; needs neither SGLang nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvfs.connectors.settings import KeyedSettings, parse

WHERE = "--hicache-storage-backend-extra-config"
# SGLang's own, which stay in the mapping that a backend is given.
_SGLANG = frozenset(
    {"backend_name", "module_path", "class_name", "interface_v1", "file_storage_path"}
)


def settings_of(given: Mapping[str, Any]) -> KeyedSettings:
    """The settings of SGLang's mapping. Raises InputError for what is unknown or ill-typed."""
    return parse(KeyedSettings, {k: v for k, v in given.items() if k not in _SGLANG}, WHERE)
