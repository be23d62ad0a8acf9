"""What a DeepInfer engine that was started with kvfs holds: settings, store, pools and threads.

Made once, after the engine has allocated its cache. Belongs to the engine's thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kvfs.connectors.deepinfer_layout import Memory, measure
from kvfs.connectors.deepinfer_load import Limits, Loader
from kvfs.connectors.deepinfer_save import Saver
from kvfs.connectors.deepinfer_state import Account, Slots
from kvfs.connectors.fetching import fetcher_of
from kvfs.connectors.settings import Common
from kvfs.errors import InputError, KvfsError
from kvfs.gpu.swap_in import Swapper
from kvfs.peers.client import PeerClient
from kvfs.state.directory import Directory
from kvfs.state.policy import Policy
from kvfs.state.slots import SlotPool
from kvfs.store import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings(Common):
    """Options of the connector, besides those of every connector; weights must be given.

    tokenizer      revision or digest of the tokenizer
    slot_bytes     host memory for sliding windows; 0: none are kept, every hit replays
    slot_directory  where it is
    address        where `kvctl serve` of this host answers for its slots, "" if it does not
    policy         last, last:1 or zero, see docs/state.md
    replay         without a slot, let the engine compute one window anew; else that is a miss
    state_seconds  a slot that takes longer to come is given up
    flush_seconds  how long an engine that ends waits for its last blocks to be stored
    """

    NEEDED: ClassVar[tuple[str, ...]] = ("store", "weights", "tokenizer")
    MAY_BE_ZERO: ClassVar[tuple[str, ...]] = ("slot_bytes", "flush_seconds")

    tokenizer: str = ""
    slot_bytes: int = 1 << 30
    slot_directory: str = "/dev/shm"
    address: str = ""
    policy: str = "last"
    replay: bool = True
    state_seconds: float = 0.05
    save_bytes: int = 1 << 30
    flush_seconds: float = 10.0

    def __post_init__(self) -> None:
        Common.__post_init__(self)
        if Policy.parse(self.policy).every_boundary:
            raise InputError(f"policy {self.policy}: the engine hands over last or zero")


class Cache:
    """What a started engine has of kvfs."""

    def __init__(
        self, engine: Any, settings: Settings, client: PeerClient | None, in_flight: int,
        format: str,
    ) -> None:  # fmt: skip
        """in_flight, format: see kvfs.connectors.deepinfer.Release. Raises as Store.open and
        Swapper do."""
        self.settings = settings
        self.counts: Counter[str] = Counter()
        self.steps = 0
        self.accounts: dict[int, Account] = {}
        self.memory: Memory = measure(
            engine.driver_worker.cache_engine,
            model=str(engine.model_config.model).rstrip("/").rpartition("/")[2],
            weights=settings.weights, tokenizer=settings.tokenizer, salt=settings.salt,
            format=format,
        )  # fmt: skip
        self.store = Store.open(settings.store, index=settings.index or None)
        self.ns = self.store.create_namespace(
            self.memory.identity, default_class=settings.ttl_class
        )
        self.swapper = Swapper(self.memory.tensors(), self.memory.identity)
        self.slots = self._rules(in_flight)
        self.pool = self._slot_pool()
        self.copy_states: Any = torch.empty_like(self.memory.states) if self.slots else None
        directory = None
        if self.pool is not None:
            directory = Directory(self.store, self.pool, address=settings.address)
        self.saver = Saver(
            self.store, self.ns, self.memory, self.swapper, engine.block_manager, pool=self.pool,
            directory=directory, ttl_class=settings.ttl_class, most_bytes=settings.save_bytes,
            counts=self.counts,
        )  # fmt: skip
        limits = Limits(
            settings.fetch_seconds, settings.state_seconds,
            int(engine.cache_config.lookahead_tokens),
            settings.replay and bool(engine.scheduler_config.chunked_prefill),
        )  # fmt: skip
        self.loader = Loader(
            self.store, self.ns, self.memory, self.swapper,
            fetcher_of(self.store, settings.arena_bytes), engine.scheduler, limits,
            pool=self.pool, client=client, counts=self.counts,
        )  # fmt: skip

    def _rules(self, in_flight: int) -> Slots | None:
        ring, big = self.memory.ring, self.memory.big
        if ring is None or big is None:
            return None
        return Slots(ring, big, Policy.parse(self.settings.policy), in_flight)

    def _slot_pool(self) -> SlotPool | None:
        if self.slots is None or not self.settings.slot_bytes or self.slots.policy.kind == "zero":
            return None
        return SlotPool.open(
            self.memory.identity, self.settings.slot_bytes, directory=self.settings.slot_directory
        )

    def account(self, seq: Any) -> Account:
        """A sequence's; of one that was never seen, nothing is known of what it has."""
        if seq.seq_id not in self.accounts:
            known = Account(cacheable=seq.multi_modal_data is None, start=seq.num_cached_tokens)
            self.accounts[seq.seq_id] = known
        return self.accounts[seq.seq_id]

    def prune(self, live: set[int]) -> None:
        """Forgets sequences that ended without the engine saying so."""
        live |= {held.seq.seq_id for held in self.loader.held}
        gone = self.accounts.keys() - live
        for seq_id in gone:
            del self.accounts[seq_id]
        self.loader.forget(set(gone))

    def close(self) -> None:
        """Stores what is waiting, for `flush_seconds` at most, and leaves the store."""
        self.loader.close()
        ended = self.saver.close(self.settings.flush_seconds)
        self.swapper.close()
        if not ended:
            log.warning("%s: not all was stored", self.store.path)
            return
        if self.pool is not None:
            self.pool.close()
        try:
            self.store.close()
        except KvfsError as e:
            log.warning("%s: %s", self.store.path, e)
