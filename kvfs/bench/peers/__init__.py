"""`make bench-peers`: match, put and fetch of kvfs beside what people use in its place.

    python -m kvfs.bench.peers [--peer NAME]... [--quick] [--json] [--install]

Each peer is measured in a process of its own, by the interpreter of an environment of its own,
since they pin other versions of the same packages. In that process the peer, kvfs and the limit of
the hardware take turns with the same work, so that each row has its own kvfs and its own limit, and
its ratios hold on a machine whose speed moves. A peer that cannot be installed or fails is in the
report with the reason.

contract  what a peer can be asked            work      the inputs, the same for everybody
ours      kvfs and the limits as cases        figures   the cases of one peer, as rows
measure   the process of one peer             runner    starts these processes
install   their environments                  report    tables and JSON

files, lmdb_values, rocksdb, redis_server, mooncake, lmcache, sglang, sglang_hf3fs: the peers. A new
one is a class in a module of its own, a line in PEERS and, if it needs an environment of its own, a
file in .ci/peers.
"""

from __future__ import annotations

from typing import NamedTuple


class Spec(NamedTuple):
    """A peer. module and name: its class, None: kvfs itself; environment: name of the one it needs,
    None: that of kvfs."""

    title: str
    module: str | None = None
    name: str = ""
    environment: str | None = None


PEERS: dict[str, Spec] = {
    "kvfs": Spec("kvfs itself"),
    "files": Spec("one file per block", "files", "Files"),
    "lmdb": Spec("LMDB, values inside", "lmdb_values", "LmdbValues"),
    "rocksdb": Spec("RocksDB, values inside", "rocksdb", "RocksDb", "rocksdb"),
    "rocksdb-blob": Spec("RocksDB, blob files", "rocksdb", "RocksDbBlob", "rocksdb"),
    "redis": Spec("Redis, unix socket", "redis_server", "RedisServer", "redis"),
    "mooncake": Spec("Mooncake, own process", "mooncake", "MooncakeOwn", "mooncake"),
    "mooncake-tcp": Spec("Mooncake, by TCP", "mooncake", "MooncakeTcp", "mooncake"),
    "lmcache-fs": Spec("LMCache fs", "lmcache", "Fs", "lmcache"),
    "lmcache-fs-native": Spec("LMCache fs_native", "lmcache", "FsNative", "lmcache"),
    "lmcache-raw-block": Spec("LMCache raw_block", "lmcache", "RawBlock", "lmcache"),
    "lmcache-raw-block-direct": Spec(
        "LMCache raw_block, O_DIRECT", "lmcache", "RawBlockDirect", "lmcache"
    ),
    "sglang-file": Spec("SGLang file", "sglang", "File", "sglang"),
    "sglang-file-cached": Spec("SGLang file, names cached", "sglang", "FileCached", "sglang"),
    "sglang-hf3fs": Spec("SGLang HF3FS", "sglang_hf3fs", "Hf3fs", "sglang"),
    "sglang-hf3fs-http": Spec("SGLang HF3FS, by HTTP", "sglang_hf3fs", "Hf3fsHttp", "sglang"),
}
