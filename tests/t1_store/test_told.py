"""What is renewed and removed by hash: every copy of it, on every host, in whatever order it comes.

Hosts on paper (kvfs.testing.paper), which store the same prompts at once and cut them differently.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
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

from kvfs.chain_entries import LISTING, NOTHING, KeepEntry, RemoveEntry
from kvfs.errors import FormatError
from kvfs.frames import (
    ClassEntry,
    CutEntry,
    DropEntry,
    Entry,
    MovedEntry,
    MoveEntry,
    NamespaceEntry,
    RenewEntry,
    RunEntry,
    SealEntry,
    SegmentEntry,
    Source,
    decode_all,
    encode,
)
from kvfs.index import told
from kvfs.index.schema import TOLD, scan
from kvfs.put import RENEW_SHARE
from kvfs.removal import removals_for
from kvfs.slot_entries import SlotEntry, SlotGoneEntry
from kvfs.testing.indexcheck import index_faults
from kvfs.testing.paper import IDENTITY, TTL, PaperHost, Prompt, runs_in, settle

HOSTS = 3
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=8).map(tuple)
numbers = st.integers(0, HOSTS - 1)
A, B = (0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 1, 1)
YEAR_MS = 365 * 86_400_000


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[PaperHost]]:
    """Hosts that live as long as the module: each example empties them."""
    root = tmp_path_factory.mktemp("paper")
    Fleet.hosts = [PaperHost(number, root) for number in range(HOSTS)]
    yield Fleet.hosts
    for host in Fleet.hosts:
        host.index.close()


@pytest.fixture
def hosts(paper: list[PaperHost]) -> list[PaperHost]:
    for host in paper:
        host.reset()
    return paper


class Fleet(RuleBasedStateMachine):
    """Puts on any host, entries reaching any other in any portions, clocks a little apart."""

    hosts: list[PaperHost] = []

    @initialize()
    def empty(self) -> None:
        for host in self.hosts:
            host.reset()
        self.prompts: set[Prompt] = set()

    @rule(host=numbers, prompt=prompts)
    def put(self, host: int, prompt: Prompt) -> None:
        self.hosts[host].put(prompt)
        self.prompts.add(prompt)
        assert self.hosts[host].check(prompt) == len(prompt)

    @rule(host=numbers, room=st.integers(1, 3))
    def begin_segment(self, host: int, room: int) -> None:
        self.hosts[host].writer.begin_segment(room)

    @rule(reader=numbers, writer=numbers, count=st.integers(1, 4))
    def follow(self, reader: int, writer: int, count: int) -> None:
        if reader != writer:
            self.hosts[reader].follow(self.hosts[writer], count)

    @rule(host=numbers, ms=st.integers(1, 5))
    def tick(self, host: int, ms: int) -> None:
        self.hosts[host].now += ms

    @invariant()
    def sound(self) -> None:
        for host in self.hosts:
            assert index_faults(host.index) == []

    def teardown(self) -> None:
        settle(self.hosts)
        self.sound()
        self.compare()

    def compare(self) -> None:
        raise NotImplementedError


class RemovingFleet(Fleet):
    """What any host removes is gone everywhere; what is put again is there again."""

    @rule(host=numbers, prompt=prompts, at=st.integers(0, 7))
    def remove(self, host: int, prompt: Prompt, at: int) -> None:
        self.hosts[host].cut(prompt, at)
        if at < len(prompt):
            assert self.hosts[host].check(prompt) <= at

    @rule(host=numbers, years=st.integers(1, 2))
    def remove_all_by_a_clock_ahead(self, host: int, years: int) -> None:
        here = self.hosts[host]
        here.remove_all(here.now + years * YEAR_MS)
        assert all(here.check(prompt) == 0 for prompt in self.prompts)

    def agree(self) -> None:
        for prompt in self.prompts:
            found = [host.check((*prompt, 7)) for host in self.hosts]
            assert len(set(found)) == 1, f"{prompt}: {found}"

    def compare(self) -> None:
        self.agree()
        for prompt in sorted(self.prompts, reverse=True):
            self.hosts[0].cut(prompt, 0)
        settle(self.hosts)
        for host, prompt in itertools.product(self.hosts, self.prompts):
            assert host.check(prompt) == 0
        for prompt in self.prompts:
            self.hosts[1].put(prompt)
        settle(self.hosts)
        self.sound()
        for host, prompt in itertools.product(self.hosts, self.prompts):
            assert host.check(prompt) == len(prompt)


@pytest.mark.usefixtures("paper")
def test_a_removal_reaches_every_copy_and_hosts_agree() -> None:
    run_state_machine_as_test(
        RemovingFleet, settings=settings(max_examples=200, stateful_step_count=30)
    )


class RenewingFleet(Fleet):
    """Nothing expires before the last that was told of it, whatever moves meanwhile."""

    @initialize()
    def empty(self) -> None:
        super().empty()
        self.promised: dict[Prompt, int] = {}

    def promise(self, prompt: Prompt, expires_ms: int) -> None:
        for n in range(1, len(prompt) + 1):
            self.promised[prompt[:n]] = max(self.promised.get(prompt[:n], 0), expires_ms)

    @rule(host=numbers, prompt=prompts)
    def put(self, host: int, prompt: Prompt) -> None:
        super().put(host, prompt)
        least = TTL.seconds * 1000 * (RENEW_SHARE - 1) // RENEW_SHARE
        self.promise(prompt, self.hosts[host].now + least)

    @rule(host=numbers, prompt=prompts, seconds=st.sampled_from([150, 200, 300]))
    def keep(self, host: int, prompt: Prompt, seconds: int) -> None:
        expires = self.hosts[host].now + seconds * 1000
        n = self.hosts[host].keep(prompt, expires)
        self.promise(prompt[:n], expires)

    @rule(host=numbers, of=numbers, number=st.integers(1, 6), gap=st.integers(0, 1))
    def move(self, host: int, of: int, number: int, gap: int) -> None:
        writer = self.hosts[of].writer
        if number < writer.number:  # nobody cleans what is being written
            segment = writer.segment_id(number)
            self.hosts[host].clean(segment, runs_in(self.hosts, segment), gap)

    def compare(self) -> None:
        for host in self.hosts:
            for prompt, expires in self.promised.items():
                now, host.now = host.now, expires - 1
                found, host.now = host.check(prompt), now
                assert found == len(prompt), f"host {host.number}: {prompt} ends at {found}"


@pytest.mark.usefixtures("paper")
def test_nothing_expires_before_the_last_renewal_says() -> None:
    run_state_machine_as_test(
        RenewingFleet, settings=settings(max_examples=200, stateful_step_count=30)
    )


# one at a time


def test_a_removal_reaches_the_copy_that_another_host_shows(hosts: list[PaperHost]) -> None:
    first, second, third = hosts
    first.put(A)
    second.put(A)  # has not heard of it
    settle(hosts)
    first.cut(A, 2)
    settle(hosts)
    assert [host.check(A) for host in hosts] == [2, 2, 2]


def test_a_renewal_reaches_a_chain_that_another_host_has_cut_otherwise(
    hosts: list[PaperHost],
) -> None:
    first, second, third = hosts
    first.put(A)
    second.writer.begin_segment(2)
    second.put(B)
    settle(hosts)
    cuts = [[(block, count) for block, count, _ in host.runs_of(B)] for host in hosts]
    assert cuts == [[(0, 4), (4, 2)], [(0, 2), (2, 4)], [(0, 4), (4, 2)]]
    second.keep(B, 500_000)
    settle(hosts)
    for host in hosts:
        host.now = 499_999
        assert host.check(B) == 6
        host.now = 500_000
        assert host.check(B) == 0


@given(st.permutations(range(3)))
def test_a_removal_between_two_copies(paper: list[PaperHost], order: list[int]) -> None:
    """Whatever comes first: the second was put because the first had been removed."""
    writer, reader, _ = paper
    writer.reset()
    reader.reset()
    writer.put(A)
    writer.cut(A, 3)
    writer.now += 10
    writer.put(A)
    changes = [e for e in writer.journal if isinstance(e, RunEntry | RemoveEntry)]
    assert [type(e) for e in changes] == [RunEntry, RemoveEntry, RunEntry]
    reader.apply([e for e in writer.journal if e not in changes])
    for i in order:
        reader.apply([changes[i]])
    assert index_faults(reader.index) == []
    assert reader.check(A) == writer.check(A) == 6


def test_a_renewal_that_comes_before_its_run(hosts: list[PaperHost]) -> None:
    first, second, third = hosts
    first.put(A)
    second.follow(first, 10)
    second.keep(A, 700_000)
    third.follow(second, 10)
    assert third.check(A) == 0
    third.follow(first, 10)
    assert [e for _, _, e in expiries(third, A)] == [700_000]


def test_a_forced_time_shortens_no_more_than_it_names(hosts: list[PaperHost]) -> None:
    first, second, _ = hosts
    first.put(A)
    second.writer.begin_segment(2)
    second.put(A[:3])
    settle(hosts)
    hasher = second.ns.hasher(list(A[:2]))
    second.publish([KeepEntry(IDENTITY.nsid, 5000, 1000, 0, "", True, b"", hasher.hashes())])
    settle(hosts)
    for host in hosts:
        assert index_faults(host.index) == []
        assert [e for _, _, e in expiries(host, A)][0] == 5000
        assert all(e > 50_000 for block, _, e in expiries(host, A) if block >= 2)


def expiries(host: PaperHost, prompt: Prompt) -> list[tuple[int, int, int]]:
    found = host.index.check(host.ns.number, host.ns.hasher(list(prompt)), 0).runs
    return [(m.block, m.shared, m.expires_ms) for m in found]


def test_all_of_a_namespace_goes_also_what_was_not_heard_of(hosts: list[PaperHost]) -> None:
    first, second, third = hosts
    first.put(A)
    third.put(B)  # nobody has heard of it
    settle([first, second])
    first.publish([RemoveEntry(IDENTITY.nsid, first.now, LISTING, b"", b"")])
    settle(hosts)
    for host in hosts:
        assert host.check(A) == host.check(B) == 0
        assert host.index.hidden_namespaces() == {host.ns.number}
        assert index_faults(host.index) == []
    second.put(A)
    settle(hosts)
    for host in hosts:
        assert host.check(A) == 6 and host.index.hidden_namespaces() == set()
    second.cut(A, 0)
    assert second.index.hidden_namespaces() == {second.ns.number}
    again = RemoveEntry(IDENTITY.nsid, first.now + 1, NOTHING, b"", b"")
    for entry in (again, RemoveEntry(IDENTITY.nsid, first.now, LISTING, b"", b"")):
        second.apply([entry])
        assert second.index.hidden_namespaces() == set()


def test_a_removal_by_a_host_whose_clock_is_behind(hosts: list[PaperHost]) -> None:
    first, second, _ = hosts
    second.now += 30_000
    second.put(A)
    settle(hosts)
    first.cut(A, 0)
    settle(hosts)
    assert [host.check(A) for host in hosts] == [0, 0, 0]
    first.put(A)  # whose time is still behind that of the removal
    settle(hosts)
    assert [host.check(A) for host in hosts] == [6, 6, 6]


def test_a_removal_by_a_host_whose_clock_is_ahead(hosts: list[PaperHost]) -> None:
    """What is stored anew stays, for its time and no longer, and can be removed again."""
    first, second, third = hosts
    first.put(A)
    settle(hosts)
    second.remove_all(second.now + YEAR_MS)
    settle(hosts)
    assert [host.check(A) for host in hosts] == [0, 0, 0]
    first.writer.begin_segment(2)  # so that it is a run and one that follows it
    first.put(A)
    third.put(A)  # at the same time
    settle(hosts)
    for host in hosts:
        assert host.check(A) == 6
        assert {e for _, _, e in expiries(host, A)} == {first.now + TTL.seconds * 1000}
    first.keep(A, 500_000)
    settle(hosts)
    assert [{e for _, _, e in expiries(host, A)} for host in hosts] == [{500_000}] * 3
    third.cut(A, 3)
    settle(hosts)
    assert [host.check(A) for host in hosts] == [3, 3, 3]
    first.put(B)
    third.remove_all(third.now)
    settle(hosts)
    assert [(host.check(A), host.check(B)) for host in hosts] == [(0, 0)] * 3


def test_what_was_told_is_forgotten_in_time(hosts: list[PaperHost]) -> None:
    first = hosts[0]
    first.put(A)
    first.cut(A, 0)
    first.put(B)
    rows: Any = first.index.query(lambda a: len(list(scan(a.txn, TOLD))))
    assert rows == 1
    first.index.write(lambda a: told.forget_before(a, first.now))
    assert first.index.query(lambda a: len(list(scan(a.txn, TOLD)))) == 1
    first.index.write(lambda a: told.forget_before(a, first.now + 1))
    assert first.index.query(lambda a: len(list(scan(a.txn, TOLD)))) == 0
    assert first.check(B) == 6


def test_what_waits_for_its_parent_is_renewed_and_removed_too(hosts: list[PaperHost]) -> None:
    """Also when what was told is forgotten before the parent comes."""
    first, second, third = hosts
    first.put(A[:2])
    second.follow(first, 10)
    second.put(A)
    third.follow(second, 100)
    assert third.index.counters()["orphans"] == 1 and third.check(A) == 0
    second.keep(A, 700_000)
    second.cut(A, 4)
    third.follow(second, 100)
    third.index.write(lambda a: told.forget_before(a, 1 << 60))
    third.follow(first, 100)
    assert expiries(third, A)[-1] == (2, 2, 700_000) and third.check(A) == 4
    assert third.index.counters()["orphans"] == 0 and index_faults(third.index) == []


# whatever a journal tells


_ends = [0, 1, 2, 1 << 31, (1 << 32) - 2, (1 << 32) - 1]
small = st.sampled_from(_ends)
large = st.sampled_from([*_ends, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
ids = st.sampled_from([IDENTITY.nsid, bytes(16)])
blocks = st.sampled_from([bytes([i]) * 16 for i in range(4)])
stretches = st.lists(blocks, min_size=1, max_size=4, unique=True).map(b"".join)
paths = st.lists(blocks, max_size=2).map(b"".join)
names = st.sampled_from(["", "short", "x" * 255, "x" * 256, "x" * 600])
runs = st.builds(RunEntry, ids, ids, small, small, large, large, blocks, paths, stretches)
sources = st.builds(Source, ids, small, small)
anything = st.one_of(
    st.builds(NamespaceEntry, ids, st.sampled_from(["", "{}", json.dumps(IDENTITY.to_json())])),
    st.builds(ClassEntry, names, large, large),
    st.builds(SegmentEntry, ids, ids, small, large, large, large, large, names, names),
    runs,
    st.builds(RenewEntry, ids, blocks, large, large, names, st.booleans()),
    st.builds(CutEntry, ids, ids, small, small, large),
    st.builds(DropEntry, ids, large),
    st.builds(SealEntry, large, st.booleans()),
    st.builds(MoveEntry, large, st.lists(sources, max_size=3).map(tuple), runs),
    st.builds(MovedEntry, ids, sources, ids, small, blocks, large),
    st.builds(SlotEntry, ids, ids, blocks, large, large, large, large, names, names),
    st.builds(SlotGoneEntry, ids, ids, blocks, large, large),
    st.builds(KeepEntry, ids, large, large, small, names, st.booleans(), paths, stretches),
    st.builds(RemoveEntry, ids, large, small, paths, stretches | st.just(b"")),
)


def read(entries: list[Entry]) -> list[Entry]:
    """What of these entries a follower reads from a journal that holds them."""
    out: list[Entry] = []
    for entry in entries:
        with contextlib.suppress(FormatError):
            out += (e for e, _ in decode_all(memoryview(encode(entry, 7, 64)), 7, 64) if e)
    return out


@given(entries=st.lists(anything, min_size=1, max_size=12))
@settings(max_examples=300)
def test_whatever_a_journal_tells_can_be_applied(
    paper: list[PaperHost], entries: list[Entry]
) -> None:
    """One that was written wrongly must not keep any host from reading the others."""
    host = paper[0]
    host.reset()
    one = SegmentEntry(bytes(16), IDENTITY.nsid, 4096, 1 << 16, 4096, 1, 1, "short", "seg/x")
    host.apply([one, *read(entries)])
    for segment in host.index.segments():
        assert segment.geometry.offset(1 << 32) > 0
    host.index.hidden_namespaces()
    for run in host.index.all_runs(host.ns.number):
        removals, _ = removals_for(host.index, host.ns, run.head, 0, host.now)
        host.publish(read(removals))
