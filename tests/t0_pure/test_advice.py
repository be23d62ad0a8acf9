"""From which length on loading beats computing: the arithmetic, on round figures."""

from __future__ import annotations

import pytest

from kvfs.bench.advice import Cost, advise
from kvfs.bench.report import advice
from kvfs.bench.timing import Options, Row


def row(name: str, tokens: int, seconds: float, check: float = 0.0) -> Row:
    return Row(
        f"fetch.fetcher.{name}", seconds, 5, "", figures={"tokens": tokens, "check_seconds": check}
    )


def test_two_fetches_give_a_fixed_cost_and_a_rate() -> None:
    cost = Cost.through((1000, 0.003), (11_000, 0.013))
    assert cost.fixed_seconds == pytest.approx(0.002)
    assert cost.token_seconds == pytest.approx(1e-6)
    assert cost.seconds(5000) == pytest.approx(0.007)


@pytest.mark.parametrize(
    ("small", "large", "fixed", "rate"),
    [
        ((1000, 0.001), (10_000, 0.1), 0.0, 1e-5),  # the small one was too fast to be true
        ((1000, 0.002), (10_000, 0.001), 0.002, 0.0),  # the large one was
        ((1000, 0.002), (1000, 0.004), 0.002, 0.0),  # the same length twice
    ],
)
def test_noise_makes_no_cost_negative(
    small: tuple[float, float], large: tuple[float, float], fixed: float, rate: float
) -> None:
    cost = Cost.through(small, large)
    assert cost.fixed_seconds == pytest.approx(fixed)
    assert cost.token_seconds == pytest.approx(rate)


@pytest.mark.parametrize(
    ("fixed", "rate", "prefill", "tokens"),
    [
        (0.002, 1e-6, 10_000, 128),  # 99 us gained a token: 20 tokens, and a block is the least
        (0.1, 0.0, 10_000, 1024),  # 1,000 tokens take as long: one block more than seven
        (0.128, 0.0, 10_000, 1408),  # ten blocks take exactly as long, which is no gain
        (0.0, 1e-6, 10_000, 128),
        (0.002, 1e-4, 10_000, None),  # a token takes as long to load as to compute
        (0.002, 1e-3, 10_000, None),
    ],
)
def test_where_loading_begins_to_be_worth_it(
    fixed: float, rate: float, prefill: float, tokens: int | None
) -> None:
    cost = Cost(fixed, rate)
    assert cost.worth_from(prefill, 128) == tokens
    if tokens is not None:
        assert cost.seconds(tokens) < tokens / prefill
        before = tokens - 128
        assert not before or cost.seconds(before) >= before / prefill


def test_the_rows_of_fetch_are_what_it_is_made_from() -> None:
    rows = [
        row("4k.warm", 4096, 0.0010, check=0.0001),
        row("128k.warm", 131_072, 0.0129, check=0.0001),
        row("4k.cold", 4096, 0.004),
        row("128k.first", 4096, 0.001),
    ]
    found = advise(rows, prefill=1000)
    assert found.keys() == {"warm"}, "cold was not measured at two lengths"
    warm = found["warm"]
    assert warm["fixed_seconds"] == pytest.approx(0.0011 - 4096 * 0.0119 / 126_976)
    assert warm["tokens_per_second"] == pytest.approx(126_976 / 0.0119)
    assert (warm["from_tokens"], warm["tokens"]) == (128, 131_072)
    assert warm["load_seconds"] == pytest.approx(0.013)
    assert warm["compute_seconds"] == pytest.approx(131.072)
    assert advise([], 1000) == {}


def test_it_is_said_in_words_only_if_asked() -> None:
    rows = [row("4k.warm", 4096, 0.004), row("128k.warm", 131_072, 0.004 + 0.1)]
    assert list(advice(rows, Options())) == []
    (fast,) = advice(rows, Options(prefill=20_000))
    assert fast.startswith("loading beats recomputing at 20,000 tokens/s from 128 tokens on")
    assert "a token each 788 ns" in fast and "104 ms instead of 6.55 s" in fast
    (slow,) = advice(rows, Options(prefill=2e6))
    assert " never, from the page cache" in slow
