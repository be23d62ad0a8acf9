"""What a forked child does before it uses what its parent has made.

A lock that another thread held at the moment of the fork is never released in the child, and what
that thread was changing may be half changed. So objects with locks register here and make them
anew in the child, in the order in which they registered. Connections and files are their owners'
business: see kvfs.index.env.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """Something that can start anew in a child."""

    def after_fork(self) -> None:
        """Called in the child, which has one thread. Takes no lock."""
        ...


_known: weakref.WeakKeyDictionary[Forked, None] = weakref.WeakKeyDictionary()


def register(item: Forked) -> None:
    """Calls `item.after_fork` in every child that is forked while the item lives."""
    _known[item] = None


def _in_child() -> None:
    for item in list(_known):
        item.after_fork()


os.register_at_fork(after_in_child=_in_child)
