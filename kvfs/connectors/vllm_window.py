"""Which groups a load restores, where vLLM can replay a sliding window (DeepSeek-V4.1).

vLLM keeps such windows out of its prefix cache. After a hit it computes the last window once more,
unless the load brings the window's groups too: then it takes them as they are. A window is stored
in a slot, at one boundary of a prompt; only a slot at exactly the end of the load is of use.

Arithmetic over vLLM's KVCacheConfig, no I/O.
"""

from __future__ import annotations

from typing import Any


def loaded_group_ids(kv_cache_config: Any, end: int, slot: int | None) -> tuple[int, ...]:
    """The groups that are there after a load of the tokens up to `end`.

    slot: anchor of the slot that will be loaded, None without one. Without one at `end` these are
    the groups of vLLM's prefix cache, and vLLM replays the window.
    """
    stored = tuple(kv_cache_config.prefix_cacheable_group_ids)
    if slot is None or slot != end:
        return stored
    return tuple(sorted({*stored, *replayed_group_ids(kv_cache_config)}))


def replayed_group_ids(kv_cache_config: Any) -> tuple[int, ...]:
    """The groups whose window vLLM computes once more after a hit."""
    groups = kv_cache_config.kv_cache_groups
    return tuple(
        i
        for i in kv_cache_config.transfer_group_ids
        if groups[i].kv_cache_spec.prefix_replay_tokens > 0
    )
