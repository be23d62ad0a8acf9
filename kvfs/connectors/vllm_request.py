"""What the scheduler's half of the vLLM connector knows of a request: fetch, load and saves.

Plain records and questions about vLLM's own objects, no I/O. For vLLM's scheduler thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvfs.chain import PrefixHasher
from kvfs.connectors.vllm_slots import Search
from kvfs.fetcher.ticket import Ticket
from kvfs.namespace import Namespace
from kvfs.plan import Plan

Span = tuple[int, int]
"""Blocks, from the first up to the end."""


@dataclass(slots=True)
class Fetch:
    """A fetch under way: one ticket for each worker's namespace."""

    first: int
    end: int
    until: float
    tickets: Future[list[Ticket]]

    def good(self) -> int | None:
        """Blocks of the prefix that every worker has verified; None while that may still grow."""
        if not self.tickets.done():
            return None if time.monotonic() < self.until else 0
        if self.tickets.exception() is not None:
            return 0
        tickets = self.tickets.result()
        if not all(t.done for t in tickets) and time.monotonic() < self.until:
            return None
        return self.first + min((t.good for t in tickets), default=0)

    def landed(self) -> list[Ticket]:
        """The tickets, if the fetch process has answered."""
        if not self.tickets.done() or self.tickets.exception() is not None:
            return []
        return self.tickets.result()

    def release(self) -> None:
        def let_go(future: Future[list[Ticket]]) -> None:
            if not future.cancelled() and future.exception() is None:
                for ticket in future.result():
                    ticket.release()

        self.tickets.add_done_callback(let_go)


@dataclass(slots=True)
class Known:
    """What is known of one of vLLM's requests."""

    request: Any
    salt: str
    adapter: str
    hashers: list[tuple[Namespace, PrefixHasher]] = field(default_factory=list)
    hashed: int = 0
    plans: dict[bytes, Plan] = field(default_factory=dict)
    fetch: Fetch | None = None
    search: Search | None = None
    end: int = 0
    """Tokens up to which a load was offered last."""
    slot: int | None = None
    """The same, if the window before it is to be loaded too."""
    slotless: bool = False
    """A load failed: its window may have been why."""
    start: int = 0
    """Tokens vLLM had itself at the last look-up."""
    loads: int = 0
    saved: int = 0
    """Leading blocks that need not be stored any more."""
    told: int = 0
    """Tokens the worker has been told."""
    saving: bool = True
    counted: bool = False
    stored: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    """By worker, the blocks that it has stored."""
    announced: int = 0
    """Up to which block all of them had, when that was told last."""

    def release(self) -> None:
        if self.fetch is not None:
            self.fetch.release()
            self.fetch = None
        self.search = None

    def all_have(self, news: Mapping[bytes, Span], workers: int) -> Span | None:
        """The blocks that all workers have stored and that were not told of before; None if there
        are none. news: what some of them have stored since: each stores at its own pace."""
        for worker, (first, end) in news.items():
            before = self.stored.get(worker, (first, end))
            if first <= before[1] and end >= before[0]:
                first, end = min(first, before[0]), max(end, before[1])
            self.stored[worker] = first, end
        if len(self.stored) < workers:
            return None
        first = max(self.announced, *(first for first, _ in self.stored.values()))
        end = min(end for _, end in self.stored.values())
        if first >= end:
            return None
        self.announced = end
        return first, end


def cacheable(request: Any) -> bool:
    """Whether a request's KV is a function of its tokens, salt and adapter.

    Not so with images, sound or embeddings in the prompt: their tokens do not say which.
    """
    return (
        request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and not request.mm_features
        and request.pooling_params is None
    )


def progress(output: Any) -> Iterable[tuple[str, int]]:
    """(request, tokens computed before this step) of what runs in a step."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)
