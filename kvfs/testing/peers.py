"""Hosts that have slots, for tests: pools whose data tell whose they are, and their servers."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvfs import presets
from kvfs.layout import Identity
from kvfs.peers.app import SlotApp
from kvfs.peers.auth import Secret
from kvfs.peers.client import PeerClient
from kvfs.peers.load import Loaded, load_state
from kvfs.peers.pools import Pools
from kvfs.peers.server import SlotServer, address_of, bound
from kvfs.peers.service import PeerService
from kvfs.state.poolfile import Geometry
from kvfs.state.slot import Anchor
from kvfs.state.slots import SlotPool
from kvfs.store import Store
from kvfs.testing import command

FLASH = presets.get("deepseek-v4.1-flash", weights="w", tokenizer="t")
SWA = presets.get("tiny-swa", weights="w", tokenizer="t")
KEY = "a secret of the tests that is long enough"
SECRET = Secret(KEY.encode())
L1 = 768
"""Of a `prompt` that is stored: what may be hit of it."""


def anchor(number: int) -> Anchor:
    """An anchor that is of no prompt."""
    return Anchor(
        number.to_bytes(16, "big"), 128 * (number % 1000 + 1), (number + 1).to_bytes(16, "little")
    )


def prompt(seed: int) -> list[int]:
    """1,000 tokens: 7 whole blocks, of which 6 may be hit."""
    return [(seed * 7_919 + i) % 60_000 for i in range(1000)]


def data_of(key: Anchor, identity: Identity = FLASH) -> bytes:
    """Data that tell which anchor they are of, in every stretch of 16 bytes."""
    assert identity.state is not None
    size = identity.state.slot_bytes
    return (key.hash * (size // 16 + 1))[:size]


def budget(slots: int, identity: Identity = FLASH) -> int:
    assert identity.state is not None
    return Geometry(slots, identity.state.slot_bytes).file_bytes


@contextlib.contextmanager
def pool_of(
    directory: Path, numbers: range | list[int], *, slots: int = 4, identity: Identity = FLASH
) -> Iterator[SlotPool]:
    """A pool with the slots of some anchors."""
    directory.mkdir(exist_ok=True)
    with SlotPool.open(identity, budget(slots, identity), directory=str(directory)) as pool:
        for number in numbers:
            pool.write(anchor(number), data_of(anchor(number), identity))
        yield pool


@contextlib.contextmanager
def serving(
    directory: Path, *, listen: str = "127.0.0.1:0", identity: Identity = FLASH,
    secret: Secret = SECRET, idle: float = 30.0, stuck: float = 10.0, most: int = 1 << 20,
    **options: Any,
) -> Iterator[SlotServer]:  # fmt: skip
    """A server of the pool in a directory, in this process. options: of SlotApp."""
    listener = bound(listen, stuck=stuck)
    with Pools(lambda: [identity], str(directory)) as pools:
        app = SlotApp(pools, secret, address_of(listener), **options)
        with SlotServer(app, pools, listener, idle=idle, most=most) as server:
            yield server


class Host:
    """A host of a fleet in this process: a store with an index of its own, a pool, and a server."""

    def __init__(self, store: Path, base: Path, *, slots: int = 16, serves: bool = True) -> None:
        """store: made before; base: a new directory for what is this host's own; serves: whether
        it has a pool and answers."""
        base.mkdir()
        self.shm = base / "shm"
        self.shm.mkdir()
        self._stack = contextlib.ExitStack()
        opened = Store.open(store, index=str(base / "index"))
        self.store = self._stack.enter_context(opened)
        self.ns = self.store.create_namespace(SWA)
        self.client = self._stack.enter_context(PeerClient(SECRET))
        self.pool: SlotPool | None = None
        if serves:
            pool = SlotPool.open(SWA, budget(slots, SWA), directory=str(self.shm))
            self.pool = self._stack.enter_context(pool)
            self.start()

    def start(self, listen: str = "127.0.0.1:0") -> None:
        """Answers; tells what it has when `tell` is called, besides once at the start."""
        service = PeerService(
            self.store, listen, SECRET, directory=str(self.shm), interval=3600.0
        )  # fmt: skip
        self.service = service.__enter__()

    def stop(self) -> None:
        """Answers no more."""
        self.service.__exit__(None, None, None)

    @property
    def slots(self) -> SlotPool:
        assert self.pool is not None
        return self.pool

    def put(self, tokens: list[int], *positions: int) -> None:
        """Stores the blocks of a prompt, and slots at some positions."""
        blocks = len(tokens) // self.ns.block_tokens
        self.store.put(self.ns, tokens, bytes(blocks * self.ns.row_bytes))
        for position in positions:
            key = Anchor.of(self.ns.hasher(tokens), position)
            self.slots.write(key, data_of(key, SWA), rotation=position % 134)

    def tell(self) -> None:
        self.service.announcer.turn()

    def load(self, tokens: list[int], seconds: float = 20.0) -> Loaded:
        """What an engine here gets for a prompt; a slot has the right data, always."""
        self.store.catch_up()
        plan = self.store.check(self.ns, tokens)
        loaded = load_state(
            self.store, self.ns, plan, tokens, seconds, pool=self.pool, client=self.client
        )
        if loaded.slot is not None:
            assert loaded.decision.slot == loaded.slot.meta.position
            key = Anchor.of(self.ns.hasher(tokens), loaded.slot.meta.position)
            assert loaded.slot.data == data_of(key, SWA), "bytes of another slot"
        return loaded

    def close(self) -> None:
        if self.pool is not None:
            self.stop()
        self._stack.close()


@contextlib.contextmanager
def kvctl_serve(
    store: Path, slots: Path, index: Path, listen: str,
    start: Callable[..., Any] = lambda work, *a, **k: work(*a, **k),
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:  # fmt: skip
    """`kvctl serve --listen` in a process of its own, and its address. It is killed at the end.

    start: calls the function that it is given, in another network namespace perhaps.
    """
    words = command.command(
        "serve", "--store", store, "--index", index, "--listen", listen, "--slots", slots, "--json"
    )
    environment = {**command.environment(), "KVFS_PEER_SECRET": KEY}
    process = start(subprocess.Popen, words, stdout=subprocess.PIPE, env=environment)
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())["address"]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
