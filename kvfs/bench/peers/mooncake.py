"""Mooncake Store: blocks in the memory of its clients, named by a master. Nothing is on disk.

Own: the memory is this process's, as on the host that computed a prefix. By TCP: it is another
process's, as on any other host; loopback stands for the network.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from socket import create_connection
from typing import Any, ClassVar

from kvfs.bench.peers.contract import Peer, answered, as_hex, chain, free_ports
from kvfs.bench.peers.disk import resident
from kvfs.bench.peers.work import Work

_HOST = "127.0.0.1"
_SEGMENT_BYTES = 4 << 30
_BUFFER_BYTES = 256 << 20
_TINY = 64
_AT_ONCE = 500
_START_SECONDS = 30.0
_OWNER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
name, metadata, segment, buffer, master = sys.argv[1:]
print(store.setup(name, metadata, int(segment), int(buffer), "tcp", "", master), flush=True)
sys.stdin.read()
"""


class MooncakeOwn(Peer):
    api = {
        "match": "batch_is_exist; keys: chain of xxh3-128, in hexadecimal",
        "put": "batch_put_from, registered memory",
        "fetch": "batch_get_into, registered memory",
        "remove": "batch_remove",
    }  # fmt: skip
    packages = ("mooncake-transfer-engine-non-cuda",)
    note = "metadata: memory of the master"
    in_memory = True
    background = True
    own: ClassVar[bool] = True

    def __init__(self, work: Work, place: Path) -> None:
        super().__init__(work, place)
        self._processes: list[subprocess.Popen[Any]] = []
        self._store: Any = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "2")
        os.environ.setdefault("GLOG_minloglevel", "2")
        os.environ["MC_TCP_BIND_ADDRESS"] = _HOST
        from mooncake.store import MooncakeDistributedStore

        rpc, metrics, http, ours, theirs = free_ports(5)
        self._master = self._run(
            [os.path.join(sys.prefix, "bin", "mooncake_master"), f"-rpc_port={rpc}",
             f"-rpc_address={_HOST}", f"-metrics_host={_HOST}", f"-metrics_port={metrics}",
             "-enable_http_metadata_server=true", f"-http_metadata_server_host={_HOST}",
             f"-http_metadata_server_port={http}", "-eviction_high_watermark_ratio=1.0"]
        )  # fmt: skip
        for port in (rpc, http):
            answered(partial(_connect, port), self._master, _START_SECONDS)
        metadata, master = f"http://{_HOST}:{http}/metadata", f"{_HOST}:{rpc}"
        if not self.own:
            self._own_elsewhere(f"{_HOST}:{theirs}", metadata, master)
        self._store = MooncakeDistributedStore()
        given = _SEGMENT_BYTES if self.own else 0
        code = self._store.setup(
            f"{_HOST}:{ours}", metadata, given, _BUFFER_BYTES, "tcp", "", master
        )
        if code:
            raise RuntimeError(f"setup returned {code}")
        self._payload, self._into = _address(self.work.payload), _address(self.work.into)
        for address in (self._payload, self._into):
            if code := self._store.register_buffer(address, self.work.total):
                raise RuntimeError(f"register_buffer returned {code}")
        self._empty, self._planted = resident(self._master.pid), 0

    def _run(self, command: Sequence[str], **pipes: Any) -> subprocess.Popen[Any]:
        log = (self.place / f"{len(self._processes)}.log").open("w")
        with log:
            process = subprocess.Popen(command, stderr=log, **{"stdout": log, **pipes})
        self._processes.append(process)
        return process

    def _own_elsewhere(self, name: str, metadata: str, master: str) -> None:
        owner = self._run(
            [sys.executable, "-c", _OWNER, name, metadata, str(_SEGMENT_BYTES), str(64 << 20),
             master],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        answer = owner.stdout.readline() if owner.stdout else b""
        if answer.strip() != b"0":
            raise RuntimeError(f"setup of the memory's owner returned {answer!r}")

    def keys(self, tokens: Any) -> Sequence[str]:
        return [key.hex() for key in chain(tokens)]

    def found(self, keys: Sequence[str]) -> int:
        n = 0
        for there in self._store.batch_is_exist(keys):
            if there != 1:
                break
            n += 1
        return n

    def plant(self, keys: Sequence[Any]) -> None:
        for first in range(0, len(keys), _AT_ONCE):
            some = [as_hex(key) for key in keys[first : first + _AT_ONCE]]
            self._stored(some, [self._payload] * len(some), [_TINY] * len(some))
        self._planted += len(keys)

    def plant_background(self, count: int, batch: int) -> None:
        """A tenth: each costs the master a kilobyte, and an exchange with it."""
        super().plant_background(count // 10, batch)

    def put(self, keys: Sequence[str], *, durable: bool = False) -> None:
        size = self.work.block_bytes
        places = [self._payload + i * size for i in range(len(keys))]
        self._stored(keys, places, [size] * len(keys))

    def _stored(self, keys: Sequence[str], places: list[int], sizes: list[int]) -> None:
        if any(codes := self._store.batch_put_from(list(keys), places, sizes)):
            raise RuntimeError(f"batch_put_from returned {next(filter(None, codes))}")

    def fetch(self, keys: Sequence[str]) -> None:
        size = self.work.block_bytes
        places = [self._into + i * size for i in range(len(keys))]
        got = self._store.batch_get_into(list(keys), places, [size] * len(keys))
        if any(n != size for n in got):
            raise RuntimeError("batch_get_into did not bring all blocks")

    def remove(self, keys: Sequence[str]) -> None:
        if any(codes := self._store.batch_remove(list(keys), True)):
            raise RuntimeError(f"batch_remove returned {next(filter(None, codes))}")

    def metadata_bytes(self) -> float:
        return (resident(self._master.pid) - self._empty) / self._planted

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
        for process in reversed(self._processes):
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


class MooncakeTcp(MooncakeOwn):
    note = "metadata: memory of the master; the owner of the memory shares the two cores"
    own = False


def _address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _connect(port: int) -> None:
    create_connection((_HOST, port), 1).close()
