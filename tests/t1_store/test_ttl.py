"""Times to live: what a class promises, what renews a block, and that expired means invisible."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.errors import InputError
from kvfs.testing.blocks import small_identity
from kvfs.testing.stock import START, Stock, tokens

DAY = 86400.0
PROMPT = tokens(1, 40)


@pytest.fixture
def stock(store_dir: Path) -> Iterator[Stock]:
    stock = Stock.make(store_dir)
    yield stock
    stock.close()


def expires(stock: Stock, prompt: list[int]) -> list[float]:
    """Days from the start until each run of the stored prefix expires."""
    plan = stock.store.check(stock.ns, prompt)
    return [(e.expires_ms / 1000 - START) / DAY for e in plan.extents]


def test_expired_is_invisible_at_once(stock: Stock) -> None:
    """No collector has run and the bytes are all there: check answers miss to the second."""
    stock.put(PROMPT, ttl_class="agent")
    stock.put(tokens(2, 40), ttl_class="chatbot")
    stock.clock.now = START + 3 * DAY - 1
    assert stock.sound(PROMPT) == 10
    stock.clock.now = START + 3 * DAY + 1
    plan = stock.store.check(stock.ns, PROMPT)
    assert (plan.stored_blocks, plan.reason) == (0, "expired at block 0")
    assert stock.sound(tokens(2, 40)) == 10
    stock.clock.now = START + 7 * DAY + 1
    assert stock.sound(tokens(2, 40)) == 0


def test_a_shared_block_takes_the_longer_class(stock: Stock) -> None:
    stock.put(PROMPT, ttl_class="agent")
    stock.clock.now = START + 3 * DAY - 3600
    result = stock.put(PROMPT, ttl_class="chatbot")
    assert (result.stored, result.existing) == (0, 10)
    assert expires(stock, PROMPT) == [pytest.approx(10 - 1 / 24)]
    stock.clock.now = START + 3 * DAY + 1
    assert stock.sound(PROMPT) == 10
    assert stock.put(PROMPT, ttl_class="agent").existing == 10  # not shortened by the other class
    stock.clock.now = START + 10 * DAY - 3601
    assert stock.sound(PROMPT) == 10
    stock.clock.now = START + 10 * DAY
    assert stock.sound(PROMPT) == 0


def test_a_longer_prompt_renews_the_prefix_it_stands_on(stock: Stock) -> None:
    """A prefix must not expire under a suffix that was stored later."""
    stock.put(PROMPT, ttl_class="agent")
    stock.clock.now = START + 2 * DAY
    longer = tokens(2, 40, PROMPT)
    stock.put(longer, ttl_class="agent")
    stock.clock.now = START + 4 * DAY
    assert stock.sound(longer) == 20
    assert expires(stock, longer) == [pytest.approx(5), pytest.approx(5)]


def test_checking_renews_nothing(stock: Stock) -> None:
    stock.put(PROMPT, ttl_class="agent")
    for hour in range(72):
        stock.clock.now = START + hour * 3600
        for _ in range(10):
            stock.stored(PROMPT)
        assert stock.sound(PROMPT) == 10
    assert expires(stock, PROMPT) == [3.0]
    stock.clock.now = START + 3 * DAY
    assert stock.sound(PROMPT) == 0


def test_touch_renews_but_does_not_revive(stock: Stock) -> None:
    stock.put(PROMPT, ttl_class="agent")
    stock.clock.now = START + 2 * DAY
    assert stock.store.touch(stock.ns, PROMPT) == 1
    assert expires(stock, PROMPT) == [5.0]
    stock.clock.now = START + 5 * DAY
    assert stock.store.touch(stock.ns, PROMPT) == 0
    assert stock.sound(PROMPT) == 0


def test_touch_with_a_class_moves_either_way_and_all_at_once(stock: Stock) -> None:
    """Forty runs change together: nobody sees a prefix that is half of the old class."""
    prompt: list[int] = []
    for i in range(40):
        prompt = tokens(i, 4, prompt)
        stock.put(prompt, ttl_class="chatbot")
    before = stock.store.index.env().info()["last_txnid"]
    assert stock.store.touch(stock.ns, prompt, ttl_class="agent") == 40
    assert stock.store.index.env().info()["last_txnid"] == before + 1
    assert expires(stock, prompt) == [3.0] * 40
    assert stock.store.touch(stock.ns, prompt, ttl_class="chatbot") == 40
    assert expires(stock, prompt) == [7.0] * 40


def test_what_expired_is_stored_anew(stock: Stock) -> None:
    stock.put(PROMPT, ttl_class="agent")
    longer = tokens(2, 20, PROMPT)
    stock.put(longer, ttl_class="chatbot")
    stock.clock.now = START + 8 * DAY
    result = stock.put(longer, ttl_class="agent")
    assert (result.stored, result.existing) == (15, 0)
    assert stock.sound(longer) == 15 and expires(stock, longer) == [11.0]


def test_a_class_that_changes_counts_from_then_on(stock: Stock) -> None:
    stock.store.define_class("brief", 3600)
    stock.put(PROMPT, ttl_class="brief")
    stock.store.define_class("brief", 7200)
    stock.put(tokens(2, 40), ttl_class="brief")
    stock.clock.now = START + 3601
    assert (stock.sound(PROMPT), stock.sound(tokens(2, 40))) == (0, 10)
    assert stock.store.index.segments()[0].ttl_seconds == 3600
    assert stock.store.index.segments()[1].ttl_seconds == 7200
    with pytest.raises(InputError, match="no TTL class"):
        stock.put(PROMPT, ttl_class="forever")


def test_other_processes_agree(stock: Stock) -> None:
    stock.put(PROMPT, ttl_class="agent")
    other = stock.another()
    stock.clock.now = START + 2 * DAY
    other.put(PROMPT, ttl_class="chatbot")
    stock.clock.now = START + 8 * DAY
    assert (stock.sound(PROMPT), other.sound(PROMPT)) == (10, 10)
    stock = stock.again()
    assert stock.sound(PROMPT) == 10
    stock.clock.now = START + 9 * DAY
    assert (stock.sound(PROMPT), other.sound(PROMPT)) == (0, 0)


@pytest.mark.parametrize(
    ("classes", "chosen"),
    [
        ({"a": 60, "chatbot": 30}, "chatbot"),
        ({"a": 60, "b": 600, "c": 6}, "b"),
    ],
)
def test_a_namespace_has_a_class_of_its_store_by_default(
    store_dir: Path, classes: dict[str, int], chosen: str
) -> None:
    stock = Stock.make(store_dir, classes=classes)
    try:
        ns = stock.store.create_namespace(small_identity(salt="other"))
        assert ns.default_class == chosen
        done = stock.store.put(ns, PROMPT, bytes(10 * ns.row_bytes))
        assert done.complete and done.error is None
        with pytest.raises(InputError, match=r"no TTL class 'late'; known are a, .*ttl define"):
            stock.store.create_namespace(small_identity(salt="x"), default_class="late")
        assert len(stock.store.namespaces()) == 2, "a refused one was made"
    finally:
        stock.close()
