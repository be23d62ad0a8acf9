"""The fetch process as a connector uses it: one way to have it, and to say that it is not there.

Misses by reason and blocks that are bad get to the store through it, and so to `kvctl stats`.
"""

from __future__ import annotations

import logging

from kvfs.fetcher.engine import Fetcher
from kvfs.fetcher.launch import Options
from kvfs.store import Store

log = logging.getLogger(__name__)


def fetcher_of(store: Store, arena_bytes: int, *, hit: bool = True) -> Fetcher:
    """A client of the store's fetch process, which is started if there is none. Close it.

    Waits until it is there, so that the first requests hit: a second or more where it has to be
    started. arena_bytes: of one that is started. hit: what is used of a prefix counts as a hit and
    is renewed when its ticket is released; False where the connector tells the store itself. Raises
    RuntimeError without threads, else nothing: without a fetch process every fetch is a miss, until
    there is one.
    """
    options = Options(arena_bytes=arena_bytes)
    fetcher = Fetcher.of(store, options, hit=hit)
    if not fetcher.ready(options.start_seconds):
        log.warning("no fetch process yet: %s", fetcher.problem or "it does not answer")
    return fetcher
