"""Redis as a cache: a server of its own behind a unix socket, nothing saved."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import redis

from kvfs.bench.peers.contract import Peer, answered, chain
from kvfs.bench.peers.work import Work

_TINY = bytes(32)
_AT_ONCE = 128
_START_SECONDS = 20.0


class RedisServer(Peer):
    api = {
        "match": "pipeline of EXISTS; keys: chain of xxh3-128",
        "put": "pipeline of SET",
        "fetch": "MGET of 128 keys, one copy into place",
        "remove": "UNLINK of 1,022 keys",
    }  # fmt: skip
    packages = ("redis",)
    note = "save '' and appendonly no; planted values: 32 bytes, among a million"
    in_memory = True
    background = True

    def __init__(self, work: Work, place: Path) -> None:
        super().__init__(work, place)
        socket = str(place / "socket")
        self._server = subprocess.Popen(
            [_program(), "--port", "0", "--unixsocket", socket, "--save", "", "--appendonly", "no",
             "--dir", str(place)],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            self._redis = redis.Redis(unix_socket_path=socket)
            answered(self._redis.ping, self._server, _START_SECONDS, redis.ConnectionError)
            self._empty = self._used()
        except BaseException:
            self.close()
            raise

    @classmethod
    def versions(cls) -> dict[str, str]:
        asked = subprocess.run([_program(), "--version"], capture_output=True, text=True)
        words = [w.removeprefix("v=") for w in asked.stdout.split() if w.startswith("v=")]
        return {**super().versions(), "redis-server": " ".join(words)}

    def _used(self) -> int:
        return int(self._redis.info("memory")["used_memory"])

    def keys(self, tokens: Any) -> Sequence[bytes]:
        return list(chain(tokens))

    def found(self, keys: Sequence[bytes]) -> int:
        pipeline = self._redis.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(key)
        n = 0
        for there in pipeline.execute():
            if not there:
                break
            n += 1
        return n

    def plant(self, keys: Sequence[bytes]) -> None:
        self._redis.mset(dict.fromkeys(keys, _TINY))

    def put(self, keys: Sequence[bytes], *, durable: bool = False) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for i, key in enumerate(keys):
            pipeline.set(key, self.work.part(self.work.payload, i))
        pipeline.execute()

    def fetch(self, keys: Sequence[bytes]) -> None:
        at = 0
        for first in range(0, len(keys), _AT_ONCE):
            for value in self._redis.mget(keys[first : first + _AT_ONCE]):
                self.work.part(self.work.into, at)[:] = value
                at += 1

    def remove(self, keys: Sequence[bytes]) -> None:
        self._redis.unlink(*keys)

    def metadata_bytes(self) -> float:
        return (self._used() - self._empty) / int(self._redis.dbsize()) - len(_TINY)

    def close(self) -> None:
        self._server.terminate()
        self._server.wait()


def _program() -> str:
    found = shutil.which("redis-server")
    if found is None:
        raise FileNotFoundError("redis-server is not installed (Debian package redis-server)")
    return found
