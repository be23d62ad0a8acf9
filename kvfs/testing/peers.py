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
from kvfs.peers.pools import Pools
from kvfs.peers.server import SlotServer, address_of, bound
from kvfs.state.poolfile import Geometry
from kvfs.state.slot import Anchor
from kvfs.state.slots import SlotPool
from kvfs.testing import command

FLASH = presets.get("deepseek-v4.1-flash", weights="w", tokenizer="t")
SWA = presets.get("tiny-swa", weights="w", tokenizer="t")
KEY = "a secret of the tests that is long enough"
SECRET = Secret(KEY.encode())


def anchor(number: int) -> Anchor:
    """An anchor that is of no prompt."""
    return Anchor(
        number.to_bytes(16, "big"), 128 * (number % 1000 + 1), (number + 1).to_bytes(16, "little")
    )


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
    secret: Secret = SECRET, idle: float = 30.0, **options: Any,
) -> Iterator[SlotServer]:  # fmt: skip
    """A server of the pool in a directory, in this process. options: of SlotApp."""
    listener = bound(listen)
    with Pools(lambda: [identity], str(directory)) as pools:
        app = SlotApp(pools, secret, address_of(listener), **options)
        with SlotServer(app, pools, listener, idle=idle) as server:
            yield server


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
