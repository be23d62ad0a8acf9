"""A store in its steady state, against the rule; and the rule against figures that are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvfs.repair.fsck import fsck
from kvfs.sim.reference import sliding
from kvfs.sim.steady import SteadyRun, make_store
from kvfs.sim.trace import Request, find


def request(t: float, first: int, count: int, tokens: int | None = None) -> Request:
    return Request(t, "", ((first, count),), tokens or count * 4, 4, 0)


def test_the_rule_of_a_sliding_time_to_live() -> None:
    asked = [request(0, 0, 4), request(10, 0, 2), request(20, 0, 4), request(31, 0, 4)]
    # At 20 the first two are 10 old and the others 20: with a time of 10 only those are found.
    assert sliding(asked, 10).hit_tokens == 8 + 8 + 0
    assert sliding(asked, 11).hit_tokens == 8 + 8 + 16
    assert sliding(asked, 1000).hit_tokens == 8 + 16 + 16


def test_the_rule_of_a_capacity() -> None:
    asked = [request(0, 0, 3), request(1, 10, 3), request(2, 0, 3), request(3, 10, 3)]
    assert sliding(asked, 100, 6).hit_tokens == 24
    # One block too few: the last of the longest unused request goes, never one before it.
    assert sliding(asked, 100, 5).hit_tokens == 8 + 8
    assert sliding(asked, 100, 3).hit_tokens == 0


@pytest.mark.parametrize(
    ("trace", "ttl", "hit_tokens"),
    [
        ("mooncake_conversation_2000", 60, 2879875),
        ("mooncake_conversation_2000", 300, 7527700),
        ("mooncake_conversation_2000", 600, 8070959),
    ],
)
def test_the_rule_hits_what_others_have_found(trace: str, ttl: int, hit_tokens: int) -> None:
    assert sliding(find(trace).requests(), ttl).hit_tokens == hit_tokens


@pytest.mark.posix("it takes minutes on a stand-in")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ttl", [3600, 4 * 3600])
def test_half_a_day_of_coding_agents(
    store_dir: Path, tmp_path: Path, ttl: int, expect_logs: Callable[..., None]
) -> None:
    """Hit rate, copies and removals of the store itself, on a clock that is driven."""
    expect_logs("housekeeping in", optional=True)
    trace = find("weka_claude_code_small")
    ideal = sliding(trace.requests(), ttl)
    store, clock = make_store(str(store_dir), ttl, 2 << 20, index=str(tmp_path / "i"))
    with store:
        done = SteadyRun(store, clock, int(ideal.most_live * 4096 * 1.5), 300).run(trace.requests())
        report = fsck(store)
    assert (ideal.hit_rate - done.hit_rate) * 100 <= 0.5
    assert done.copied_per_written <= 0.3
    calls, single = done.removals_per_tb(114_688)
    assert calls * 300 <= single  # segments of 512 records here, of 2,340 by default
    assert done.refused_puts <= 5 and done.freed_bytes > 0
    assert not report.damaged
