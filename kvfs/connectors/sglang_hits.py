"""How much of a sequence can be restored, given which pages each pool has: SGLang's hit policies.

Pure functions over lists of bools; policies are told by their names. SGLang's own file backend is
the reference that a test compares these with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

ALL_PAGES, TRAILING_PAGES, BLOCK_GROUPS = "all_pages", "trailing_pages", "block_groups"


class Need(NamedTuple):
    """What a pool besides the KV needs for a prefix to be restored from it."""

    pool: str
    policy: str
    window: int = 1
    """Pages that must be there at a prefix's end (trailing_pages)."""
    groups: Sequence[bool] = ()
    """Whether each key of a pool of block groups is stored."""
    block_pages: int = 0
    group_pages: int = 0


class Restorable(NamedTuple):
    """pages: length of the longest prefix that can be restored; of_pool: how far each pool goes,
    those that have something; lengths: of all prefixes that can be restored."""

    pages: int
    of_pool: dict[str, int]
    lengths: list[int]


def leading(there: Sequence[bool]) -> int:
    """How many leading ones are there."""
    return next((i for i, one in enumerate(there) if not one), len(there))


def restorable(
    kv: Sequence[bool], needs: Sequence[Need], have: Callable[[str], Sequence[bool]], kv_name: str
) -> Restorable:
    """kv: which pages of the KV are stored; have: the same of another pool, asked for only while
    something can be restored. Raises ValueError for a policy that is not known."""
    pages = leading(kv)
    of_pool = {kv_name: pages} if pages else {}
    lengths = list(range(1, pages + 1))
    for need in needs:
        if not lengths:
            break
        if need.policy == BLOCK_GROUPS:  # a second form of the same pages: it never limits
            reach = _groups(need, pages)
            if reach:
                of_pool[need.pool] = reach
            continue
        good = _POLICIES[need.policy](have(need.pool)[:pages], need.window)
        if good:
            of_pool[need.pool] = max(good)
        lengths = [n for n in lengths if n in good]
    return Restorable(lengths[-1] if lengths else 0, of_pool, lengths)


def _all(there: Sequence[bool], window: int) -> set[int]:
    return set(range(1, leading(there) + 1))


def _trailing(there: Sequence[bool], window: int) -> set[int]:
    return {n for n in range(1, len(there) + 1) if all(there[max(0, n - max(1, window)) : n])}


def _groups(need: Need, pages: int) -> int:
    """Pages that the leading complete groups cover."""
    size = max(1, need.group_pages)
    return min(pages, leading(need.groups) // size * need.block_pages)


_POLICIES: Mapping[str, Callable[[Sequence[bool], int], set[int]]] = {
    ALL_PAGES: _all, TRAILING_PAGES: _trailing,
}  # fmt: skip
