"""A store against a dictionary of prefixes: one host with a clock, then several on a directory."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvfs.repair.rebuild import rebuild
from kvfs.testing.indexcheck import index_faults
from kvfs.testing.stock import START, Clock, Stock

Blocks = tuple[int, ...]
SECONDS = {"agent": 800, "chatbot": 8000}

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)
classes = st.sampled_from(sorted(SECONDS))


def tokens(blocks: Blocks, rest: int = 0) -> list[int]:
    """Four tokens a block, and some that make no block."""
    return [token for block in blocks for token in [block] * 4] + [9] * rest


def stored(prefixes: set[Blocks], prompt: Blocks) -> int:
    """Length of the longest prefix in a set that holds every prefix of what it holds."""
    return next((n for n in range(len(prompt)) if prompt[: n + 1] not in prefixes), len(prompt))


class Place:
    """Where the machines put their stores and their indexes."""

    ram: Path
    stores: Path

    @classmethod
    def examples(cls, most: int) -> int:
        """How many to try: fewer where each takes longer."""
        return most if cls.ram in cls.stores.parents else most // 5


@pytest.fixture(autouse=True)
def _place(ram_dir: Path, quick_store: Path) -> None:
    Place.ram, Place.stores = ram_dir, quick_store
    quick_store.mkdir()


class OneHost(RuleBasedStateMachine):
    """Two handles on one index, with a clock.

    For each block the model knows until when it must be visible at least. A lease is of a run, so
    that a block may live on with others of its tree: at most until the latest lease given to any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(dir=Place.ram))
        self.place = Path(tempfile.mkdtemp(dir=Place.stores))
        self.clock = Clock()
        place = {"index": str(self.path / "index"), "classes": SECONDS}
        self.first = Stock.make(self.place / "store", clock=self.clock, **place)
        self.second = self.first.another(index=str(self.path / "index"))
        self.least: dict[Blocks, float] = {}
        self.most: dict[int, float] = {}

    def teardown(self) -> None:
        self.first.close()
        shutil.rmtree(self.path)
        shutil.rmtree(self.place)

    def stock(self, second: bool) -> Stock:
        # What two writers do in one millisecond has no order in their journals.
        self.clock.now += 0.001
        return self.second if second else self.first

    def bounds(self, prompt: Blocks) -> tuple[int, int]:
        now = self.clock.now
        sure = {p for p, until in self.least.items() if until > now}
        maybe = {p for p in self.least if self.most[p[0]] > now}
        return stored(sure, prompt), stored(maybe, prompt)

    def leased(self, prompt: Blocks, until: float) -> None:
        self.most[prompt[0]] = max(self.most.get(prompt[0], 0), until)

    @rule(prompt=prompts, ttl=classes, second=st.booleans(), rest=st.integers(0, 3))
    def put(self, prompt: Blocks, ttl: str, second: bool, rest: int) -> None:
        stock, seconds, now = self.stock(second), SECONDS[ttl], self.clock.now
        result = stock.put(tokens(prompt, rest), ttl_class=ttl)
        assert (result.error, result.blocks, result.remainder_tokens) == (None, len(prompt), rest)
        assert result.stored + result.existing == len(prompt)
        # A lease is renewed once an eighth of it is over.
        for n in range(1, len(prompt) + 1):
            until = now + seconds * (1 if n > result.existing else 7 / 8)
            self.least[prompt[:n]] = max(self.least.get(prompt[:n], 0), until)
        self.leased(prompt, now + seconds)
        assert stock.good(tokens(prompt)) == len(prompt)

    @rule(prompt=prompts, at=st.integers(0, 6), second=st.booleans())
    def remove(self, prompt: Blocks, at: int, second: bool) -> None:
        stock = self.stock(second)
        low, high = self.bounds(prompt)
        removed = stock.store.remove(stock.ns, tokens(prompt), from_block=at)
        assert (removed > 0) >= (at < low) and (removed > 0) <= (at < high)
        if removed:
            gone = [p for p in self.least if p[: at + 1] == prompt[: at + 1]]
            assert removed <= len(gone)
            for p in gone:
                del self.least[p]

    @rule(prompt=prompts, ttl=classes, second=st.booleans())
    def touch(self, prompt: Blocks, ttl: str, second: bool) -> None:
        """Moved to a class, a whole run expires by it, which may be earlier."""
        stock = self.stock(second)
        now, found = self.clock.now, stock.stored(tokens(prompt))
        runs = stock.store.touch(stock.ns, tokens(prompt), ttl_class=ttl)
        assert bool(runs) == bool(found)
        if found:
            until = now + SECONDS[ttl]
            for p in self.least:
                if p[0] == prompt[0]:
                    self.least[p] = min(self.least[p], until)
            for n in range(1, found + 1):
                self.least[prompt[:n]] = until
            self.leased(prompt, until)

    @rule(prompt=prompts, second=st.booleans())
    def renew(self, prompt: Blocks, second: bool) -> None:
        """Each run for the time of its own class."""
        stock = self.stock(second)
        now, found = self.clock.now, stock.stored(tokens(prompt))
        stock.store.touch(stock.ns, tokens(prompt))
        for n in range(1, found + 1):
            self.least[prompt[:n]] = max(self.least[prompt[:n]], now + SECONDS["agent"])
        if found:
            self.leased(prompt, now + SECONDS["chatbot"])

    @rule(seconds=st.sampled_from([1, 60, 400, 799, 800, 7000]))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule()
    def reopen(self) -> None:
        before = self.first.lookups()
        self.second.store.close()
        self.first = self.first.again(index=str(self.path / "index"))
        self.second = self.first.another(index=str(self.path / "index"))
        assert self.first.lookups() == before

    @rule()
    def make_the_index_anew(self) -> None:
        before = self.first.lookups()
        rebuild(self.first.store, source="journals")
        assert self.first.lookups() == before

    @invariant()
    def between_the_bounds(self) -> None:
        for stock in (self.first, self.second):
            assert index_faults(stock.store.index) == []
            for prompt in [*self.least, (0, 1, 0, 1), (1, 1, 1, 1, 1, 1)]:
                low, high = self.bounds(prompt)
                assert low <= stock.stored(tokens(prompt)) <= high, prompt


@pytest.mark.timeout(300)
def test_one_host_against_a_model() -> None:
    run_state_machine_as_test(
        OneHost, settings=settings(max_examples=Place.examples(80), stateful_step_count=20)
    )


HOSTS = 3
numbers = st.integers(0, HOSTS - 1)


class SeveralHosts(RuleBasedStateMachine):
    """Hosts with an index and a clock each, which follow each other's journals when told to."""

    SKEW = (0.0, 40.0, -3.0)

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(dir=Place.ram))
        self.place = Path(tempfile.mkdtemp(dir=Place.stores))
        first = Stock.make(
            self.place / "store", index=str(self.path / "host0"), segment_bytes=1 << 16
        )
        self.hosts = [first, *(self.host(n, first) for n in range(1, HOSTS))]
        self.put_anywhere: set[Blocks] = set()

    def host(self, number: int, like: Stock) -> Stock:
        stock = like.another(index=str(self.path / f"host{number}"))
        stock.clock = Clock(START + self.SKEW[number])
        stock.store.clock = stock.clock
        return stock

    def teardown(self) -> None:
        try:
            for _ in range(2):  # what one could not place the first time it can by then
                for stock in self.hosts:
                    stock.store.catch_up()
            self.all_agree()
        finally:
            for stock in self.hosts:
                stock.close()
            shutil.rmtree(self.path)
            shutil.rmtree(self.place)

    @rule(host=numbers, prompt=prompts)
    def put(self, host: int, prompt: Blocks) -> None:
        stock = self.hosts[host]
        stock.clock.now += 1
        assert stock.put(tokens(prompt)).complete
        self.put_anywhere |= {prompt[:n] for n in range(1, len(prompt) + 1)}
        assert stock.good(tokens(prompt)) == len(prompt)

    @rule(host=numbers)
    def catch_up(self, host: int) -> None:
        assert self.hosts[host].store.catch_up().problems == []

    @rule(host=numbers)
    def restart(self, host: int) -> None:
        old = self.hosts[host]
        old.store.close()
        self.hosts[host] = self.host(host, old)

    @rule(host=numbers)
    def lose_the_index(self, host: int) -> None:
        old = self.hosts[host]
        old.store.close()
        shutil.rmtree(self.path / f"host{host}")
        self.hosts[host] = self.host(host, old)

    @invariant()
    def sound(self) -> None:
        for stock in self.hosts:
            assert index_faults(stock.store.index) == []

    def all_agree(self) -> None:
        self.sound()
        for number, stock in enumerate(self.hosts):
            found = {p: stock.good(tokens(p)) for p in self.put_anywhere}
            wrong = {p: n for p, n in found.items() if n != len(p)}
            assert not wrong, f"host {number} finds {wrong}"


@pytest.mark.timeout(300)
def test_several_hosts_on_one_directory() -> None:
    run_state_machine_as_test(
        SeveralHosts, settings=settings(max_examples=Place.examples(60), stateful_step_count=15)
    )
