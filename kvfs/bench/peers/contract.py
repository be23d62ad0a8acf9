"""What a peer can be asked, so that the same cases measure all of them.

A peer lies in a directory of its own and is used by one thread. Whatever it raises ends its
measurement; the report then says so. Nothing is measured here.
"""

from __future__ import annotations

import os
import struct
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from socket import socket
from subprocess import Popen
from typing import Any, ClassVar, TypeVar

import xxhash

from kvfs.bench.peers import disk
from kvfs.bench.peers.work import BLOCK_TOKENS, Work

_PACK = struct.Struct(f"<{BLOCK_TOKENS}i").pack
_KEY_BYTES = 16
T = TypeVar("T")


class Peer(ABC):
    """One peer, open. The class says what it is, the methods are what is measured.

    Keys are whatever the peer names a block by. `put` and `fetch` move blocks of `work.block_bytes`
    bytes from `work.payload` and to `work.into`, in the order of the keys.
    """

    api: ClassVar[Mapping[str, str]] = {}
    """What is called: "match", "put", "put.durable", "fetch", "remove"."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Distributions whose versions the report names."""
    verifies: ClassVar[str] = "nothing"
    """What of a fetched block is compared with what was stored."""
    note: ClassVar[str] = ""
    in_memory: ClassVar[bool] = False
    """Blocks are in memory only: no file is written, and copying memory is the limit."""
    durable: ClassVar[bool] = False
    """put(durable=True) is there."""
    background: ClassVar[bool] = False
    """`plant` is fast enough to make a store of a million blocks around the prompts."""
    removes: ClassVar[bool] = True
    """There is a call that removes some blocks."""
    align: ClassVar[int] = 1
    """Its blocks are a multiple of so many bytes."""

    def __init__(self, work: Work, place: Path) -> None:
        """place: an empty directory, on the file system that is measured."""
        self.work = work
        self.place = place

    @classmethod
    def versions(cls) -> dict[str, str]:
        """What is measured, by name of distribution or program."""
        return {name: version(name) for name in cls.packages}

    @abstractmethod
    def keys(self, tokens: Any) -> Sequence[Any]:
        """The keys of the whole blocks of a prompt. tokens: a list, or what `as_array` returns."""

    def as_array(self, tokens: Any) -> Any:
        """A numpy array of 32-bit ids in the form of array the peer takes; None: it takes lists."""
        return tokens

    @abstractmethod
    def found(self, keys: Sequence[Any]) -> int:
        """How many of these are stored without a gap, from the first one on."""

    def match(self, tokens: Any) -> int:
        """The blocks of a prompt that are stored."""
        return self.found(self.keys(tokens))

    @abstractmethod
    def plant(self, keys: Sequence[Any]) -> None:
        """Makes keys stored, with values as small as the peer takes: for `match`."""

    def plant_background(self, count: int, batch: int) -> None:
        """Makes so many more blocks stored, by random keys of 16 bytes."""
        for at in range(0, count, batch):
            self.plant([os.urandom(_KEY_BYTES) for _ in range(min(batch, count - at))])

    @abstractmethod
    def put(self, keys: Sequence[Any], *, durable: bool = False) -> None:
        """Stores the blocks of `work.payload`. durable: returns when they are on their device."""

    def settle(self) -> None:
        """After a put, unmeasured: waits until all is on its device, that nothing later pays."""
        if not self.in_memory:
            disk.sync(self.place)

    @abstractmethod
    def fetch(self, keys: Sequence[Any]) -> None:
        """Brings the blocks into `work.into`."""

    def drop(self) -> None:
        """Takes what is stored out of the page cache. Not called for what is in memory."""
        disk.drop(self.place)

    def remove(self, keys: Sequence[Any]) -> None:
        """Removes blocks by key. Not called where `removes` is False."""
        raise NotImplementedError

    def metadata_bytes(self) -> float | None:
        """Bytes kept for each planted key beside its value; None: not measured."""
        return None

    def close(self) -> None:  # noqa: B027 (many have nothing to close)
        """Ends servers and closes files."""


def chain(tokens: Any) -> Iterator[bytes]:
    """Keys for stores that have none of their own: xxh3-128 of the parent's key and the tokens.

    The cheapest that pure Python does, block by block, so that who stops at a miss hashes no more.
    tokens: a list or a numpy array of 32-bit ids; what is behind the last whole block is left out.
    """
    digest, parent = xxhash.xxh3_128_digest, bytes(_KEY_BYTES)
    for packed in _blocks(tokens):
        parent = digest(parent + packed)
        yield parent


def _blocks(tokens: Any) -> Iterator[bytes]:
    whole = len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
    if isinstance(tokens, list):
        for at in range(0, whole, BLOCK_TOKENS):
            yield _PACK(*tokens[at : at + BLOCK_TOKENS])
    else:
        data = memoryview(tokens).cast("B")
        size = BLOCK_TOKENS * 4
        for at in range(0, whole * 4, size):
            yield bytes(data[at : at + size])


def as_ids(tokens: Any) -> array[int]:
    """A numpy array of 32-bit ids as an array of unsigned ones."""
    return array("I", memoryview(tokens).cast("B").tobytes())


def free_ports(count: int) -> list[int]:
    """Ports of the loopback device that nobody uses now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def as_hex(key: str | bytes) -> str:
    """A key for a peer that takes text alone."""
    return key.hex() if isinstance(key, bytes) else key


def answered(
    ask: Callable[[], T], server: Popen[Any], seconds: float,
    errors: type[Exception] = OSError,
) -> T:  # fmt: skip
    """Asks a server that has just been started until it answers without one of these errors.
    Raises RuntimeError if it ends, or does not answer in time."""
    end = time.monotonic() + seconds
    while True:
        try:
            return ask()
        except errors as e:
            if server.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the server does not answer") from e
            time.sleep(0.05)
