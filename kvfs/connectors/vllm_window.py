"""The window that vLLM can replay (DeepSeek-V4.1): its groups, their blocks and bytes.

vLLM keeps such windows out of its prefix cache. After a hit it computes the last window once more,
unless the load brings the window's groups too: then it takes them as they are. A window is stored
in a slot, at one boundary of a prompt; only a slot at exactly the end of the load is of use.

Arithmetic over vLLM's KVCacheConfig and block tables, no I/O. Needs no vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvfs.connectors.vllm_layout import (
    NULL_BLOCK,
    Group,
    Layout,
    block_tokens_for,
    group_at,
    measure_groups,
)
from kvfs.layout import Identity, StateLayout


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
    return tuple(i for i, group in enumerate(groups) if group.kv_cache_spec.prefix_replay_tokens)


def window_groups(kv_cache_config: Any, block_tokens: int) -> tuple[Group, ...]:
    """The groups whose window goes into a slot: all that vLLM replays, or none.

    None where vLLM does not hand over all of them, or where a block of `block_tokens` does not end
    where their blocks do. Raises InputError for a kind of cache that is not known here.
    """
    ids = replayed_group_ids(kv_cache_config)
    if not set(ids) <= set(kv_cache_config.transfer_group_ids):
        return ()
    groups = tuple(group_at(kv_cache_config, i) for i in ids)
    if any(g.window is None or block_tokens % g.block_tokens for g in groups):
        return ()
    return groups


def longest(groups: Sequence[Group]) -> int:
    """Tokens of the longest window."""
    return max(group.window or 0 for group in groups)


def slot_tokens(groups: Sequence[Group]) -> int:
    """Tokens of whole vLLM blocks that hold all of a window but the token at its boundary."""
    return block_tokens_for(groups, max(1, longest(groups) - 1))


def window_tables(
    tables: Sequence[Sequence[int]], groups: Sequence[Group], end: int
) -> tuple[list[int], ...]:
    """For each group the vLLM blocks of the window before `end`; () if one of them is not there.

    tables: a request's block tables, by vLLM's group. Null where no token of the window is.
    """
    tokens, out = slot_tokens(groups), []
    for group in groups:
        table, needed = tables[group.index], group.needed(end)
        stop = end // group.block_tokens
        wanted = range(stop - tokens // group.block_tokens, stop)
        if any(i >= len(table) or table[i] == NULL_BLOCK for i in needed):
            return ()
        out.append([table[i] if i in needed else NULL_BLOCK for i in wanted])
    return tuple(out)


def measure_window(
    kv_cache_config: Any, kv_caches: Mapping[str, Any], block_tokens: int
) -> Layout | None:
    """A slot as one row of the window's groups; None for a model without such windows.

    Raises InputError for memory whose blocks are not dense.
    """
    groups = window_groups(kv_cache_config, block_tokens)
    if not groups:
        return None
    return measure_groups(kv_cache_config, kv_caches, groups, slot_tokens(groups))


def with_window(identity: Identity, layout: Layout) -> Identity:
    """The identity of a model that has such windows as well. layout: of `measure_window`."""
    window, layers = longest(layout.groups), len(layout.pieces)
    # What is kept are whole blocks: as many bytes a token as hold them.
    token_bytes = -(-layout.row_bytes // (window * layers))
    return replace(
        identity,
        state=StateLayout(window, 0, layers, token_bytes),
        record_format=f"{identity.record_format},window:{layout.description}",
    )
