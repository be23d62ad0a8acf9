"""The index against plain models: what hosts find must not depend on what they heard first.

Paper hosts: real indexes, the real putter, but journals that are Python lists, so that thousands of
interleavings fit into seconds and each entry can reach each host at any time. Then one store, with
a clock, restarts and rebuilds, and several hosts on one store directory.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvfs.chain import HASH_BYTES
from kvfs.frames import CutEntry, DropEntry, Entry, RunEntry, SegmentEntry
from kvfs.index import finder as finder_module
from kvfs.testing.indexcheck import index_faults
from kvfs.testing.paper import IDENTITY, PaperHost, Prompt, runs_in, settle

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=8).map(tuple)


def stored(prefixes: set[Prompt], prompt: Prompt) -> int:
    """The length of the longest prefix in a set that holds every prefix of what it holds."""
    return max((n for n in range(len(prompt) + 1) if prompt[:n] in prefixes), default=0)


def prefixes_of(prompt: Prompt) -> set[Prompt]:
    return {prompt[:n] for n in range(len(prompt) + 1)}


HOSTS = 3


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Hosts that live as long as the module: each example empties them."""
    root = tmp_path_factory.mktemp("paper")
    PaperFleet.hosts = [PaperHost(number, root) for number in range(HOSTS)]
    yield PaperFleet.hosts
    for host in PaperFleet.hosts:
        host.index.close()


numbers = st.integers(0, HOSTS - 1)


class PaperFleet(RuleBasedStateMachine):
    """Puts on any host, entries reaching any other in any portions."""

    hosts: list[PaperHost] = []

    @initialize()
    def empty(self) -> None:
        for host in self.hosts:
            host.reset()
        self.stored: set[Prompt] = {()}

    @rule(host=numbers, prompt=prompts)
    def put(self, host: int, prompt: Prompt) -> None:
        self.hosts[host].put(prompt)
        self.stored |= prefixes_of(prompt)
        assert self.hosts[host].check(prompt) == len(prompt)

    @rule(host=numbers, room=st.integers(1, 3))
    def begin_segment(self, host: int, room: int) -> None:
        self.hosts[host].writer.begin_segment(room)

    @rule(reader=numbers, writer=numbers, count=st.integers(1, 4))
    def follow(self, reader: int, writer: int, count: int) -> None:
        if reader != writer:
            self.hosts[reader].follow(self.hosts[writer], count)

    @invariant()
    def sound(self) -> None:
        for host in self.hosts:
            assert index_faults(host.index) == []
            for prompt in self.stored:
                assert host.check((*prompt, 7)) <= len(prompt)

    def teardown(self) -> None:
        settle(self.hosts)
        self.compare()

    def compare(self) -> None:
        for host in self.hosts:
            found = {prompt: host.check((*prompt, 7)) for prompt in self.stored}
            wrong = {prompt: n for prompt, n in found.items() if n != len(prompt)}
            assert not wrong, f"host {host.number} finds {wrong}"
            assert index_faults(host.index) == []
            assert host.index.counters().get("orphans", 0) == 0


@pytest.mark.usefixtures("paper")
@pytest.mark.parametrize("search", [0, 1, finder_module.SEARCH_LIMIT])
def test_hosts_agree_on_what_was_put_anywhere(search: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However far the search for a parent's run gets before all runs are looked at."""
    monkeypatch.setattr(finder_module, "SEARCH_LIMIT", search)
    run_state_machine_as_test(
        PaperFleet, settings=settings(max_examples=150, stateful_step_count=25)
    )


class ChangingFleet(PaperFleet):
    """Things go, too: by time, by removal, with their segment. A put counts all the same."""

    @rule(host=numbers, seconds=st.sampled_from([1, 30, 90, 200]))
    def wait(self, host: int, seconds: int) -> None:
        for each in self.hosts:  # clocks are a little apart
            each.now += seconds * 1000 + each.number

    @rule(host=numbers, prompt=prompts, at=st.integers(0, 7))
    def cut(self, host: int, prompt: Prompt, at: int) -> None:
        self.hosts[host].cut(prompt, at)
        if at < len(prompt):
            assert self.hosts[host].check(prompt) <= at

    @rule(host=numbers, of=numbers, number=st.integers(1, 3))
    def drop(self, host: int, of: int, number: int) -> None:
        writer = self.hosts[of].writer
        if number < writer.number:  # nobody drops what is being written
            self.hosts[host].publish([DropEntry(writer.segment_id(number), self.hosts[host].now)])

    def compare(self) -> None:
        self.sound()
        for host in self.hosts:
            for prompt in self.stored:
                host.put(prompt) if prompt else None
                assert host.check(prompt) == len(prompt)
        self.sound()


@pytest.mark.usefixtures("paper")
def test_what_goes_leaves_a_sound_index() -> None:
    run_state_machine_as_test(
        ChangingFleet, settings=settings(max_examples=150, stateful_step_count=25)
    )


class MovingFleet(PaperFleet):
    """A cleaner on any host moves what it sees of a segment and drops it: nothing is ever lost."""

    @rule(host=numbers, of=numbers, number=st.integers(1, 6), gap=st.integers(0, 2))
    def move(self, host: int, of: int, number: int, gap: int) -> None:
        writer = self.hosts[of].writer
        if number < writer.number:  # nobody cleans what is being written
            segment = writer.segment_id(number)
            self.hosts[host].clean(segment, runs_in(self.hosts, segment), gap)


@pytest.mark.usefixtures("paper")
def test_what_is_moved_is_found_by_every_host() -> None:
    run_state_machine_as_test(
        MovingFleet, settings=settings(max_examples=150, stateful_step_count=25)
    )


class MovingAndChangingFleet(MovingFleet, ChangingFleet):
    """Moves among removals: they come in any order, and the index stays sound."""


@pytest.mark.usefixtures("paper")
def test_moves_among_removals_leave_a_sound_index() -> None:
    run_state_machine_as_test(
        MovingAndChangingFleet, settings=settings(max_examples=80, stateful_step_count=20)
    )


# entries on their own


def run_of(host: PaperHost, prompt: Prompt, slot: int, **changes: Any) -> RunEntry:
    hasher = host.ns.hasher(list(prompt))
    fields = {
        "nsid": IDENTITY.nsid, "segment": host.writer.segment_id(), "slot": slot, "block": 0,
        "written_ms": 1000, "expires_ms": 50_000, "parent": hasher.digest(0), "heads": b"",
        "hashes": hasher.hashes(),
    }  # fmt: skip
    return RunEntry(**{**fields, **changes})


@pytest.fixture
def host(paper: list[PaperHost]) -> PaperHost:
    paper[0].reset()
    return paper[0]


@given(st.permutations(range(4)))
def test_what_is_gone_stays_gone_whatever_comes_first(
    paper: list[PaperHost], order: list[int]
) -> None:
    """A removal may overtake the run it removes, and the drop of a segment its beginning."""
    host = paper[0]
    host.reset()
    segment = b"\7" * 16
    entries: list[Entry] = [
        SegmentEntry(segment, IDENTITY.nsid, 4096, 1 << 20, 4096, 0, 100, "short", "seg/7"),
        DropEntry(segment, 2000),
        run_of(host, (1, 1, 1), 0),
        CutEntry(IDENTITY.nsid, host.writer.segment_id(), 1, 2, 2000),
    ]
    for i in order:
        host.apply([entries[i]])
    host.apply([run_of(host, (0, 0), 0, segment=segment)])
    assert host.check((0, 0)) == 0
    assert host.check((1, 1, 1)) == 1
    assert index_faults(host.index) == []


def test_a_trimmed_run_prolongs_what_shows_its_blocks(host: PaperHost) -> None:
    host.apply([run_of(host, (0, 0, 0), 0, expires_ms=10_000)])
    host.apply([run_of(host, (0, 0), 10, expires_ms=20_000)])
    host.now = 19_999
    assert host.check((0, 0)) == 2
    host.now = 20_000
    assert host.check((0, 0)) == 0


def test_a_newer_run_takes_the_place_of_an_expired_one(host: PaperHost) -> None:
    """The bytes of an expired run may go at any time: nothing makes it visible again."""
    host.apply([run_of(host, (0, 0, 0), 0, expires_ms=2000)])
    host.apply([run_of(host, (0, 0), 10, written_ms=2000, expires_ms=102_000)])
    run = host.index.run(host.ns.number, host.ns.hasher([0]).hashes())
    assert run is not None and (run.slot, run.count, run.expires_ms) == (10, 2, 102_000)


def test_a_run_waits_where_its_parent_has_expired(host: PaperHost) -> None:
    hasher = host.ns.hasher([0, 0, 1, 1])
    host.apply([run_of(host, (0, 0, 1), 0, expires_ms=2000)])
    late = {"block": 2, "parent": hasher.digest(2), "hashes": hasher.hashes()[2 * HASH_BYTES :]}
    late |= {"written_ms": 3000, "expires_ms": 103_000, "heads": hasher.hashes(1)}
    host.apply([run_of(host, (0, 0, 1, 1), 10, **late)])
    host.now = 3000
    assert host.check((0, 0, 1, 1)) == 0
    host.apply([run_of(host, (0, 0), 20, written_ms=3000, expires_ms=103_000)])
    assert host.check((0, 0, 1, 1)) == 4
    assert index_faults(host.index) == []


def test_a_parent_is_found_behind_any_number_of_forks(host: PaperHost) -> None:
    """One system prompt, a thousand conversations, one of which another host cut differently."""
    host.put((9, 9))
    for fork in range(1000):
        host.put((9, 9, fork, 1))
    hasher = host.ns.hasher([9, 9, 500, 1, 2, 2])
    host.put((9, 9, 500, 1, 2))
    late = {"block": 4, "parent": hasher.digest(4), "hashes": hasher.hashes()[4 * HASH_BYTES :]}
    host.apply([run_of(host, (0,), 9000, heads=hasher.hashes(1), **late)])
    assert host.check((9, 9, 500, 1, 2, 2)) == 6
    assert index_faults(host.index) == []


def test_a_dropped_segment_takes_those_who_wait_along(host: PaperHost) -> None:
    hasher = host.ns.hasher([0, 0, 0])
    late = {"block": 2, "parent": hasher.digest(2), "hashes": hasher.hashes()[2 * HASH_BYTES :]}
    host.apply([run_of(host, (0, 0, 0), 5, **late)])
    assert host.index.counters()["orphans"] == 1
    host.apply([DropEntry(host.writer.segment_id(), 2000)])
    assert host.index.counters()["orphans"] == 0
    host.writer.begin_segment(1000)
    host.apply([run_of(host, (0, 0), 0)])
    assert host.check((0, 0, 0)) == 2


def test_many_runs_may_wait_for_one(host: PaperHost) -> None:
    """The first run of a long conversation comes last: no recursion, and all are found."""
    prompt = tuple([0] * 3000)
    hasher = host.ns.hasher(list(prompt))
    hashes = hasher.hashes()
    for block in range(len(prompt) - 1, -1, -1):
        part = hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES]
        entry = run_of(host, (0,), block, block=block, parent=hasher.digest(block), hashes=part)
        host.apply([entry])
    assert host.check(prompt) == len(prompt)
    assert index_faults(host.index) == []
