"""What a fleet would ask of its storage: a trace's mix, scaled to so many GPUs, by arithmetic.

The trace says how long prompts are, how much of each was seen before and in how many runs it lies;
the layout says how many bytes and I/Os that is; the fleet says how often. What kvfs itself adds
(index, journals, room that runs leave unused) is counted with its own formats. Nothing is stored
and no time passes: queues, retries and hot spots are not in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvfs.chain import HASH_BYTES
from kvfs.errors import InputError
from kvfs.frames import RunEntry, encode
from kvfs.geometry import Geometry
from kvfs.sim.trace import Request

INDEX_BYTES = 42
"""Of a block in an index of 10 million, measured."""
REMOVALS_SHOWN = 1.4e6
"""Removals a second that 3FS has shown at its peak, by its own publication."""
_DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """Who asks, and what answers. Rates are a second, sizes bytes.

    What GPUs that decode store comes with the next prompt, as if it were computed there.
    """

    prefill_gpus: int = 64
    prefill_rate: float = 10_000.0
    """Tokens that one prefill GPU computes."""
    servers: int = 3
    server_bytes: float = 20 * 30.73e12
    server_read: float = 40e9
    server_write: float = 5e9
    replicas: int = 1
    fill: float = 0.85
    """Share of the room that is used."""
    ttl_seconds: float = 3 * _DAY
    stride: int = 114_688
    block_tokens: int = 128
    extent: int = 1 << 20
    segment_bytes: int = 256 << 20
    own_extents: bool = True

    def __post_init__(self) -> None:
        """Raises InputError for a fleet that cannot be."""
        numbers = (
            self.prefill_gpus, self.prefill_rate, self.servers, self.server_bytes,
            self.server_read, self.server_write, self.replicas, self.ttl_seconds, self.stride,
            self.block_tokens, self.extent, self.segment_bytes,
        )  # fmt: skip
        if min(numbers) <= 0 or not 0 < self.fill <= 1:
            raise InputError("a fleet has at least one of everything, and room is filled up to 1")

    @property
    def geometry(self) -> Geometry:
        return Geometry.fit(self.stride, self.extent, self.extent)

    @property
    def capacity(self) -> float:
        """Bytes of stored data that there is room for."""
        return self.servers * self.server_bytes * self.fill / self.replicas


@dataclass(slots=True)
class Mix:
    """What a trace asks of a cache that forgets nothing, summed over its requests."""

    requests: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    """Those of blocks that were stored before, from the beginning on."""
    read_runs: int = 0
    """Stretches that hits lie in."""
    reads: int = 0
    """I/Os of hits."""
    new_runs: int = 0
    writes: int = 0
    used_bytes: int = 0
    """Room that the new blocks take, what runs leave unused included."""
    tail_tokens: int = 0
    """Behind the last whole block: computed each time."""
    _owner: dict[int, int] = field(default_factory=dict)
    _scale: float = 1.0

    def add(self, request: Request, fleet: Fleet) -> None:
        """Adds a request; its ids stand for so many tokens each, and are counted as they are."""
        ids = [i for first, count in request.runs for i in range(first, first + count)]
        self.requests += 1
        hit = 0
        while hit < len(ids) and ids[hit] in self._owner:
            hit += 1
        lengths = self._stretches(ids[:hit])
        # An id may stand for more or fewer tokens than a block of the fleet has.
        ratio = request.block_tokens / fleet.block_tokens
        self.blocks += round(len(ids) * ratio)
        self.hit_blocks += round(hit * ratio)
        self.tail_tokens += max(0, request.tokens - len(ids) * request.block_tokens)
        self.read_runs += len(lengths)
        self.reads += sum(_extents(round(n * ratio), fleet) for n in lengths)
        self._store(ids[hit:], ratio, fleet)

    def _stretches(self, ids: list[int]) -> list[int]:
        """Lengths of the stretches of a prefix that were stored by one put each."""
        lengths: list[int] = []
        last = -1
        for i in ids:
            owner = self._owner[i]
            if owner == last:
                lengths[-1] += 1
            else:
                lengths.append(1)
                last = owner
        return lengths

    def _store(self, ids: list[int], ratio: float, fleet: Fleet) -> None:
        if not ids:
            return
        for i in ids:
            self._owner.setdefault(i, self.requests)
        blocks = round(len(ids) * ratio)
        extents = _extents(blocks, fleet)
        self.new_runs += 1
        self.writes += extents
        own = extents * fleet.geometry.extent
        self.used_bytes += own if fleet.own_extents else blocks * fleet.stride


def _extents(blocks: int, fleet: Fleet) -> int:
    return -(-blocks // fleet.geometry.in_extent)


@dataclass(frozen=True, slots=True)
class Plan:
    """What it comes to. Rates are a second, sizes bytes; `server` figures are of one server."""

    requests: float
    prompt_tokens: float
    hit_share: float
    capacity_bytes: float
    resident_bytes: float
    retention_seconds: float
    """How long a block that nobody asks for stays: its time to live, or less if room is short."""
    blocks: float
    index_bytes: float
    journal_rate: float
    """Bytes that each router reads."""
    server_reads: float
    server_read_rate: float
    server_read_share: float
    server_writes: float
    server_write_rate: float
    server_write_share: float
    unused_share: float
    """Of the room: what runs leave at the ends of their extents."""
    removals: float
    """Files removed."""
    removals_by_block: float
    """The same with a file for each block."""
    removal_calls: float
    """Calls that remove them: one for the directory of a day where its files last their time to
    live, one for each where room is short."""
    chunk_removals: float
    """Chunks that the servers then remove, replicas included."""
    chunk_removals_by_block: float
    """The same with a file for each block."""


def plan(requests: Iterable[Request], fleet: Fleet) -> Plan:
    """Raises InputError for a trace that computes nothing."""
    mix = Mix()
    for request in requests:
        mix.add(request, fleet)
    new = mix.blocks - mix.hit_blocks
    computed = new * fleet.block_tokens + mix.tail_tokens
    if not mix.requests or not computed or not new:
        raise InputError("the trace has no request with anything new in it")
    rate = fleet.prefill_gpus * fleet.prefill_rate / (computed / mix.requests)
    each = rate / mix.requests
    stored = mix.used_bytes * each
    retention = min(fleet.ttl_seconds, fleet.capacity / stored)
    read, write = mix.hit_blocks * fleet.stride * each, new * fleet.stride * each
    write_rate = write * fleet.replicas / fleet.servers
    # What comes in goes out: as segments, or as blocks.
    by_block = new * each
    removals = stored / fleet.segment_bytes
    return Plan(
        requests=rate,
        prompt_tokens=mix.blocks * fleet.block_tokens / mix.requests,
        hit_share=mix.hit_blocks / mix.blocks,
        capacity_bytes=fleet.capacity,
        resident_bytes=stored * retention,
        retention_seconds=retention,
        blocks=by_block * retention,
        index_bytes=by_block * retention * INDEX_BYTES,
        journal_rate=mix.new_runs * each * _entry_bytes(new / mix.new_runs),
        server_reads=mix.reads * each / fleet.servers,
        server_read_rate=read / fleet.servers,
        server_read_share=read / fleet.servers / fleet.server_read,
        server_writes=mix.writes * each * fleet.replicas / fleet.servers,
        server_write_rate=write_rate,
        server_write_share=write_rate / fleet.server_write,
        unused_share=1 - new * fleet.stride / mix.used_bytes,
        removals=removals,
        removals_by_block=by_block,
        removal_calls=removals if retention < fleet.ttl_seconds else min(removals, 1 / _DAY),
        chunk_removals=stored / fleet.geometry.extent * fleet.replicas,
        chunk_removals_by_block=by_block * -(-fleet.stride // fleet.extent) * fleet.replicas,
    )


def _entry_bytes(blocks: float) -> float:
    """Bytes of a journal entry of a run of so many blocks, as they are written."""

    def size(n: int) -> int:
        hashes, heads = bytes(HASH_BYTES * n), bytes(HASH_BYTES)
        entry = RunEntry(bytes(16), bytes(16), 0, 0, 0, 0, bytes(HASH_BYTES), heads, hashes)
        return len(encode(entry, 0, 0))

    low = size(1)
    return low + (size(101) - low) / 100 * (blocks - 1)
