"""Fleet figures against a case that is small enough to be done by hand."""

from __future__ import annotations

import dataclasses

import pytest

from kvfs.errors import InputError
from kvfs.sim.fleet import INDEX_BYTES, Fleet, Mix, plan
from kvfs.sim.trace import Request

# Nine records of 28 pages fit in a chunk; an id of the trace is a block.
FLEET = Fleet(
    prefill_gpus=1, prefill_rate=1280.0, servers=2, server_bytes=1e9, server_read=1e9,
    server_write=1e9, fill=1.0, ttl_seconds=10.0,
)  # fmt: skip


def request(*runs: tuple[int, int]) -> Request:
    blocks = sum(count for _, count in runs)
    return Request(0.0, "", runs, blocks * 128, 128, 1)


TWO_TURNS = [request((0, 10)), request((0, 10), (100, 10)), request((0, 10), (100, 15))]


def test_a_mix() -> None:
    mix = Mix()
    for r in TWO_TURNS:
        mix.add(r, FLEET)
    assert (mix.requests, mix.blocks, mix.hit_blocks) == (3, 55, 30)
    # Hits: one run of 10; then runs of 10 and 10. Ten records lie in two chunks.
    assert (mix.read_runs, mix.reads) == (3, 6)
    assert (mix.new_runs, mix.writes) == (3, 5)
    assert mix.used_bytes == 5 << 20


def test_a_plan() -> None:
    p = plan(TWO_TURNS, FLEET)
    # 25 new blocks in 3 requests; ten blocks a second are computed.
    assert p.requests == pytest.approx(1.2)
    assert p.removals_by_block == pytest.approx(10)
    assert p.hit_share == pytest.approx(30 / 55)
    assert p.server_writes == pytest.approx(5 * 0.4 / 2)
    assert p.server_read_rate == pytest.approx(30 * 0.4 * 114_688 / 2)
    assert p.retention_seconds == 10
    assert p.resident_bytes == pytest.approx((5 << 20) * 0.4 * 10)
    assert p.blocks == pytest.approx(100) and p.index_bytes == pytest.approx(100 * INDEX_BYTES)
    assert p.removals == pytest.approx((5 << 20) * 0.4 / (256 << 20))
    assert p.removal_calls == pytest.approx(1 / 86400), "the directory of a day at once"
    assert p.chunk_removals == pytest.approx(5 * 0.4) and p.chunk_removals_by_block == 10
    assert 1 - p.unused_share == pytest.approx(25 * 114_688 / (5 << 20))


def test_room_that_does_not_last() -> None:
    small = dataclasses.replace(FLEET, server_bytes=(5 << 20) * 0.4)
    p = plan(TWO_TURNS, small)
    assert p.retention_seconds == pytest.approx(2) and p.resident_bytes == small.capacity
    assert p.removal_calls == p.removals, "files go before their days are over"


def test_replicas_cost_writes_and_room_and_no_reads() -> None:
    one, three = plan(TWO_TURNS, FLEET), plan(TWO_TURNS, dataclasses.replace(FLEET, replicas=3))
    assert three.server_write_rate == pytest.approx(3 * one.server_write_rate)
    assert three.server_read_rate == one.server_read_rate
    assert three.capacity_bytes == pytest.approx(one.capacity_bytes / 3)


def test_what_cannot_be() -> None:
    with pytest.raises(InputError):
        plan([], FLEET)
    with pytest.raises(InputError):
        dataclasses.replace(FLEET, fill=0.0)
