"""Clients and a fetcher together: a process where its life or death matters, else a thread."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvfs.backend.select import open_backend
from kvfs.errors import BackendError, BusyError, ConfigError, InputError, NoStoreError
from kvfs.fetcher import client as client_module
from kvfs.fetcher import core as core_module
from kvfs.fetcher import launch, wire, workers
from kvfs.fetcher import ticket as ticket_module
from kvfs.fetcher.client import FetchClient, pieces_of
from kvfs.fetcher.launch import Options
from kvfs.fetcher.ticket import Ticket
from kvfs.plan import Plan
from kvfs.testing.blocks import first_wrong, payload
from kvfs.testing.faults import FaultyBackend, Hold
from kvfs.testing.fetchers import FetcherThread
from kvfs.testing.stock import Stock, tokens
from tests.t2_fetch.conftest import Connect, Start, end

BLOCK = 16
MIB = 1 << 20


def stored(stock: Stock, seed: int, blocks: int, after: list[int] | None = None) -> list[int]:
    """A prompt all of whose blocks are stored; the last one may not be hit."""
    prompt = tokens(seed, BLOCK * blocks, after)
    assert stock.put(prompt).error is None
    return prompt


def ask(client: FetchClient, stock: Stock, prompt: list[int], **options: Any) -> Ticket:
    plan = stock.store.check(stock.ns, prompt)
    return client.fetch(stock.ns, plan, prompt, **{"deadline": 20, **options})


def wrong(ticket: Ticket, stock: Stock, prompt: list[int]) -> int | None:
    """The first of the good blocks that is not the prompt's."""
    hasher, row, good = stock.ns.hasher(prompt), stock.ns.row_bytes, ticket.good
    lineages = hasher.lineages(ticket.first + good, first=ticket.first)
    for i in range(good):
        if ticket.payload(ticket.first + i) != payload(lineages[16 * i : 16 * i + 16], row):
            return ticket.first + i
    return None


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """For what another thread or process does a moment later and tells nobody."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


def unused(fetcher: FetcherThread | FetchClient) -> bool:
    stats = fetcher.core.stats() if isinstance(fetcher, FetcherThread) else fetcher.stats()
    return not stats["requests"] and not stats["tickets"]


# a process


def test_blocks_come_bit_by_bit_through_a_process(stock: Stock, connect: Connect) -> None:
    prompt = stored(stock, 1, 300)
    client = connect()
    assert os.path.exists(f"/proc/{client.fetcher_pid}") and client.fetcher_pid != os.getpid()
    with ask(client, stock, prompt) as ticket:
        assert ticket.wait() == ticket.wanted == 299
        assert (ticket.reason, ticket.lasting, ticket.done) == ("", False, True)
        assert wrong(ticket, stock, prompt) is None
        data = bytearray(299 * stock.ns.row_bytes)
        assert ticket.copy_into(data) == 299
        assert first_wrong(data, stock.ns.hasher(prompt), stock.ns.row_bytes) is None
        with pytest.raises(TypeError):
            ticket.payload(0)[0] = 1
        with pytest.raises(InputError, match="not here"):
            ticket.payload(299)
    assert unused(client) and client.stats()["bytes_read"] == 299 * stock.ns.stride
    with ask(client, stock, prompt) as again:
        assert again.wait(timeout=5) == 299
    assert client.stats()["bytes_read"] == 299 * stock.ns.stride, "what is here is read again"
    assert client.evict()["blocks_here"] == 0


def test_the_second_client_finds_the_first_ones_fetcher(stock: Stock, connect: Connect) -> None:
    prompt = stored(stock, 1, 100)
    one, other = connect(), connect()
    assert one.fetcher_pid == other.fetcher_pid
    with ask(one, stock, prompt) as ticket, ask(other, stock, prompt) as same:
        assert ticket.wait() == same.wait() == 99
        assert bytes(ticket.payload(98)) == bytes(same.payload(98))
    with pytest.raises(BusyError, match="running for this store already"):
        launch.start(stock.store.path, Options(MIB))


def test_a_fetcher_ends_with_its_parent_or_when_nobody_uses_it(stock: Stock) -> None:
    path, store = stock.store.path, stock.store.uuid
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    for options in (Options(MIB, parent=child.pid), Options(MIB, idle_seconds=0.2)):
        client = launch.connect(path, store, options)
        handle = os.pidfd_open(client.fetcher_pid)
        client.close() if options.parent is None else child.communicate(b"\n")
        assert _ended(handle)
        client.close()
    assert launch.find(store) is None


def _ended(handle: int, seconds: float = 10.0) -> bool:
    import select

    ready = bool(select.select([handle], [], [], seconds)[0])
    os.close(handle)
    return ready


def test_a_fetcher_that_nobody_can_find_any_more_ends(
    stock: Stock, connect: Connect, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A logout removes the directory of its sockets."""
    client = connect(idle_seconds=0.5)
    handle = os.pidfd_open(client.fetcher_pid)
    (runtime_dir / "kvfs").rename(runtime_dir / "gone")
    client.close()
    assert _ended(handle)


def test_a_private_fetcher_ends_with_its_client(stock: Stock, runtime_dir: Path) -> None:
    prompt = stored(stock, 1, 50)
    with launch.private(stock.store.path, Options(8 * MIB)) as client:
        handle = os.pidfd_open(client.fetcher_pid)
        with ask(client, stock, prompt) as ticket:
            assert ticket.wait() == 49
    assert _ended(handle, 0)
    assert not list(runtime_dir.rglob("*.sock"))


@pytest.mark.parametrize("start", [launch.start, launch.private])
def test_why_a_fetcher_does_not_start_is_said(start: Any, tmp_path: Path, stock: Stock) -> None:
    with pytest.raises(NoStoreError, match="no store here"):
        start(str(tmp_path / "absent"), Options(MIB))
    with pytest.raises(ConfigError, match="cannot reserve|arena needs"):
        start(stock.store.path, Options(1 << 50))


def test_a_directory_for_sockets_that_others_may_enter_is_refused(
    stock: Stock, runtime_dir: Path
) -> None:
    (runtime_dir / "kvfs").mkdir(0o755)
    with pytest.raises(ConfigError, match="nobody else may enter"):
        launch.connect(stock.store.path, stock.store.uuid)


def test_a_name_that_is_too_long_for_a_socket_is_a_setting(
    stock: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("KVFS_RUNTIME", str(long))
    with pytest.raises(ConfigError, match="KVFS_RUNTIME"):
        launch.connect(stock.store.path, stock.store.uuid, Options(MIB))


def test_a_killed_fetcher_is_noticed_at_once_and_another_starts_beside(
    stock: Stock, connect: Connect
) -> None:
    prompt, other = stored(stock, 1, 200), stored(stock, 2, 100)
    client = connect()
    kept = ask(client, stock, prompt)
    assert kept.wait() == 199
    os.kill(client.fetcher_pid, signal.SIGSTOP)
    assert ask(client, stock, other, deadline=0.2).reason == "deadline"
    os.kill(client.fetcher_pid, signal.SIGCONT)
    assert client.stats()["tickets"] <= 2
    running = ask(client, stock, other, deadline=20)
    os.kill(client.fetcher_pid, signal.SIGSTOP)
    killer = threading.Timer(0.1, end, [client.fetcher_pid])
    killer.start()
    began = time.monotonic()
    running.wait()
    assert running.done and running.reason in ("fetcher gone", "")
    assert time.monotonic() - began < 2
    killer.join()
    with pytest.raises(BackendError, match="fetcher gone"):
        ask(client, stock, other)
    again = connect()
    assert again.fetcher_pid != client.fetcher_pid
    with ask(again, stock, other) as ticket:
        assert ticket.wait() == 99
    assert kept.held and wrong(kept, stock, prompt) is None, "the good prefix is lost"


def test_a_fetcher_that_is_told_to_end_leaves_clients_what_they_have(
    stock: Stock, connect: Connect
) -> None:
    prompt = stored(stock, 1, 200)
    client = connect()
    with ask(client, stock, prompt) as ticket:
        assert ticket.wait() == 199
        began = time.monotonic()
        end(client.fetcher_pid, signal.SIGTERM)
        assert time.monotonic() - began < 5
        assert not os.path.exists(launch.socket_path(stock.store.uuid))
        eventually(client.gone)
        assert ticket.held and wrong(ticket, stock, prompt) is None


_CLIENT = """if True:
    import os, sys, time
    from kvfs.fetcher.client import FetchClient, pieces_of
    from kvfs.namespace import Namespace
    from kvfs.layout import Identity
    from kvfs.plan import Plan
    import json
    told = json.load(sys.stdin)
    client = FetchClient(told["socket"])
    ns = Namespace(Identity.from_json(told["identity"]), 0, "")
    ticket = client.fetch(ns, Plan.from_json(told["plan"]), told["tokens"], deadline=60)
    if {wait}:
        ticket.wait()
    if os.fork() == 0:
        time.sleep(600)
    print(ticket.good, flush=True)
    time.sleep(600)
"""


def other_process(
    socket_path: str, stock: Stock, prompt: list[int], *, wait: bool = True
) -> subprocess.Popen[str]:
    """A client in a process that asked for a prompt, and has a child that keeps its socket open.

    It has said how many blocks are good.
    """
    import json

    told = {
        "socket": socket_path, "identity": stock.ns.identity.to_json(), "tokens": prompt,
        "plan": stock.store.check(stock.ns, prompt).to_json(),
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", _CLIENT.format(wait=wait)], text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin and process.stdout
    json.dump(told, process.stdin)
    process.stdin.close()
    assert process.stdout.readline().strip()
    return process


def test_a_killed_clients_tickets_are_taken_back_even_if_its_child_lives(
    stock: Stock, connect: Connect
) -> None:
    prompt = stored(stock, 1, 300)
    client = connect()
    process = other_process(launch.socket_path(stock.store.uuid), stock, prompt)
    try:
        assert client.stats()["tickets"] == 1
        process.kill()
        process.wait()
        eventually(lambda: unused(client))
        assert client.evict()["blocks_here"] == 0
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()


# a thread: order, pieces, windows


def test_pieces_come_in_chain_order_and_the_first_long_before_the_end(
    stock: Stock, faults: FaultyBackend, start: Start
) -> None:
    prompt = stored(stock, 1, 300)
    hold = Hold(0)
    faults.on("readv", "seg/*", nth=9, do=hold, times=None)
    client = start(faults, threads=1).client()
    with ask(client, stock, prompt) as ticket:
        first = ticket.wait(64)
        assert 64 <= first < 299 and not ticket.done
        assert wrong(ticket, stock, prompt) is None
        assert ticket.wait(timeout=0.05) == ticket.good < 299, "a timeout is not the end"
        hold.release()
        seen = ticket.good
        while not ticket.done:
            assert seen <= (seen := ticket.good)
        assert ticket.good == 299 and wrong(ticket, stock, prompt) is None


def test_a_prefix_that_is_larger_than_the_arena_comes_in_windows(
    stock: Stock, start: Start
) -> None:
    prompt = stored(stock, 1, 300)
    client = start(arena_bytes=5 * MIB).client()
    first, windows = 0, 0
    while first < 299:
        with ask(client, stock, prompt, first=first) as ticket:
            good = ticket.wait()
            assert good == ticket.wanted > 0 and wrong(ticket, stock, prompt) is None
            assert ticket.reason == ("" if first + good == 299 else "arena full")
            first, windows = first + good, windows + 1
    assert first == 299 and windows <= 5


def test_blocks_of_the_middle_come_alone(stock: Stock, start: Start) -> None:
    prompt = stored(stock, 2, 60, stored(stock, 1, 60)[: BLOCK * 40])
    fetcher = start()
    with ask(fetcher.client(), stock, prompt, first=35, blocks=20) as ticket:
        assert (ticket.wait(), ticket.first) == (20, 35)
        assert wrong(ticket, stock, prompt) is None
        with pytest.raises(InputError):
            ticket.payload(34)
    assert fetcher.core.stats()["bytes_read"] == 20 * stock.ns.stride


@pytest.mark.parametrize(
    "options",
    [{"first": -1}, {"blocks": 51}, {"first": 40, "blocks": 11}, {"first": 51, "blocks": 0}],
)
def test_what_the_plan_does_not_have_cannot_be_asked_for(
    options: dict[str, int], stock: Stock, start: Start
) -> None:
    prompt = stored(stock, 1, 50)
    client = start().client()
    with pytest.raises(InputError, match="the plan has 50 blocks"):
        ask(client, stock, prompt, **options)
    with ask(client, stock, prompt, blocks=0) as ticket:
        assert ticket.wait() == 0 and ticket.done and not ticket.reason
    plan = stock.store.check(stock.ns, prompt)
    with pytest.raises(InputError, match="longer prompt"):
        client.fetch(stock.ns, plan, prompt[:32], deadline=1)
    gap = Plan.from_json({**plan.to_json(), "extents": plan.to_json()["extents"][1:]})
    with pytest.raises(InputError, match="does not say where block 0 is"):
        client.fetch(stock.ns, gap, prompt, deadline=1)


# a thread: time


def test_a_deadline_delivers_the_good_prefix_in_time(
    stock: Stock, faults: FaultyBackend, start: Start
) -> None:
    """Storage that hangs."""
    prompt = stored(stock, 1, 300)
    hold = Hold(0)
    faults.on("readv", "seg/*", nth=6, do=hold, times=None)
    fetcher = start(faults, threads=1)
    client = fetcher.client()
    began = time.monotonic()
    ticket = ask(client, stock, prompt, deadline=0.3)
    good = ticket.wait()
    assert 0.3 <= time.monotonic() - began < 0.6
    assert ticket.reason == "deadline" and not ticket.lasting
    assert 0 < good < 299 and wrong(ticket, stock, prompt) is None
    eventually(lambda: fetcher.core.stats()["requests"] == 0)
    assert ticket.good == good and ticket.held
    hold.release()
    with ask(client, stock, prompt) as again:
        assert again.wait() == 299 and wrong(again, stock, prompt) is None
    assert wrong(ticket, stock, prompt) is None, "late reads went into blocks that were delivered"
    ticket.release()
    assert fetcher.core.stats()["expired"] == 1


def test_a_deadline_holds_even_if_the_fetcher_is_stopped(stock: Stock, connect: Connect) -> None:
    prompt, other = stored(stock, 1, 300), stored(stock, 2, 50)
    client = connect()
    ticket = ask(client, stock, prompt, deadline=0.5)
    os.kill(client.fetcher_pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        ticket.wait()
        assert time.monotonic() - began < 1.0
        began = time.monotonic()
        assert ask(client, stock, other, deadline=0.3).reason == "deadline"
        assert 0.2 < time.monotonic() - began < 0.8
        began, silent = time.monotonic(), 0
        for _ in range(200):
            try:
                assert ask(client, stock, other, deadline=0.3).reason == "deadline"
            except BackendError as e:
                silent += "silent" in str(e)
        assert silent > 180, "request after request waits for a fetcher that is silent"
        assert time.monotonic() - began < client_module.ANSWER_SECONDS + 1
    finally:
        os.kill(client.fetcher_pid, signal.SIGCONT)
    eventually(lambda: client.stats()["requests"] == 0)
    with ask(client, stock, other) as ticket:
        assert ticket.wait() == 49
    ticket.release()


def test_an_answer_that_comes_too_late_is_given_back(
    stock: Stock, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = stored(stock, 1, 50)
    client = connect()
    os.kill(client.fetcher_pid, signal.SIGSTOP)
    assert ask(client, stock, prompt, deadline=0.1).reason == "deadline"
    os.kill(client.fetcher_pid, signal.SIGCONT)
    client.stats()
    assert unused(client), "the ticket nobody waits for is still there"


def test_a_deadline_that_is_over_is_a_ticket_that_ended(stock: Stock, start: Start) -> None:
    prompt = stored(stock, 1, 50)
    client = start().client()
    with ask(client, stock, prompt, deadline=0) as ticket:
        assert ticket.wait() == 0 and ticket.reason == "deadline" and not ticket.lasting
    client.stats()
    with ask(client, stock, prompt) as ticket:
        assert ticket.wait() == 49


def test_no_request_is_worked_on_for_longer_than_the_limit(
    stock: Stock, faults: FaultyBackend, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvfs.fetcher import server

    monkeypatch.setattr(server, "MAX_SECONDS", 0.1)
    prompt, hold = stored(stock, 1, 50), Hold(0)
    faults.on("readv", "seg/*", do=hold, times=None)
    client = start(faults).client()
    with ask(client, stock, prompt, deadline=float("inf")) as ticket:
        assert ticket.wait() == 0 and ticket.reason == "deadline"
    hold.release()


# a thread: many requests


def all_given_back(stats: dict[str, int]) -> bool:
    return stats["arena_free_bytes"] + stats["arena_idle_bytes"] == stats["arena_bytes"]


def test_cancelled_requests_are_not_read(stock: Stock, faults: FaultyBackend, start: Start) -> None:
    prompt, hold = stored(stock, 1, 300), Hold(0)
    faults.on("readv", "seg/*", do=hold)
    fetcher = start(faults, threads=1)
    ticket = ask(fetcher.client(), stock, prompt)
    assert hold.reached.wait(5)
    ticket.cancel()
    eventually(lambda: unused(fetcher))
    hold.release()
    assert (ticket.good, ticket.reason, ticket.held) == (0, "cancelled", False)
    eventually(lambda: all_given_back(fetcher.core.stats()))
    assert fetcher.core.stats()["bytes_read"] <= 16 * stock.ns.stride


def test_a_waiting_request_overtakes_a_prefetch(
    stock: Stock, faults: FaultyBackend, start: Start
) -> None:
    later, now = stored(stock, 1, 300), stored(stock, 2, 30)
    hold, places = Hold(0), []

    def note(call: Any) -> Any:
        places.append((call.path, call.offset))
        return call.proceed()

    faults.on("readv", "seg/*", do=hold)
    faults.on("readv", "seg/*", do=note, times=None)
    client = start(faults, threads=1).client()
    with ask(client, stock, later, priority=5) as prefetch:
        assert hold.reached.wait(5)
        with ask(client, stock, now) as ticket:
            hold.release()
            assert ticket.wait() == 29 and prefetch.wait() == 299
    pieces = pieces_of(stock.ns, stock.store.check(stock.ns, now), 0, 29)
    assert places[: len(pieces)] == [(p.path, p.offset) for p in pieces]


def test_a_full_queue_says_busy(
    stock: Stock, faults: FaultyBackend, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_module, "MAX_UNFINISHED", 3)
    prompt, hold = stored(stock, 1, 50), Hold(0)
    faults.on("readv", "seg/*", do=hold, times=None)
    client = start(faults).client()
    tickets = [ask(client, stock, prompt) for _ in range(3)]
    with pytest.raises(BusyError, match="3 requests are under way"):
        ask(client, stock, prompt)
    hold.release()
    assert [t.wait() for t in tickets] == [49] * 3
    tickets.append(ask(client, stock, prompt))
    for ticket in tickets:
        ticket.release()


def test_an_arena_full_of_blocks_in_use_says_busy(stock: Stock, start: Start) -> None:
    prompt, other = stored(stock, 1, 100), stored(stock, 2, 10)
    client = start(arena_bytes=4 * MIB).client()
    with ask(client, stock, prompt) as ticket:
        assert ticket.wait() == 64
        with pytest.raises(BusyError, match="arena is full"):
            ask(client, stock, other)
    with ask(client, stock, other) as ticket:
        assert ticket.wait() == 9


def test_one_hot_prefix_is_read_once_for_all(stock: Stock, start: Start) -> None:
    """64 clients at once."""
    prompt = stored(stock, 1, 300)
    fetcher = start(arena_bytes=32 * MIB)
    clients = [fetcher.client() for _ in range(64)]
    tickets: list[Ticket] = []
    threads = [
        threading.Thread(target=lambda c=client: tickets.append(ask(c, stock, prompt)))
        for client in clients
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [ticket.wait() for ticket in tickets] == [299] * 64
    assert wrong(tickets[5], stock, prompt) is None
    assert fetcher.core.stats()["bytes_read"] == 299 * stock.ns.stride
    for ticket in tickets:
        ticket.release()
    eventually(lambda: unused(fetcher))


def test_the_shared_half_of_two_prefixes_is_read_once(stock: Stock, start: Start) -> None:
    one = stored(stock, 1, 200)
    two = stored(stock, 2, 100, one[: BLOCK * 100])
    fetcher = start(arena_bytes=32 * MIB)
    client = fetcher.client()
    with ask(client, stock, two) as second, ask(client, stock, one) as first:
        assert first.wait() == second.wait() == 199
        assert wrong(first, stock, one) is None and wrong(second, stock, two) is None
    assert fetcher.core.stats()["bytes_read"] == 298 * stock.ns.stride


def test_the_others_go_on_when_the_first_to_ask_dies(
    stock: Stock, faults: FaultyBackend, start: Start
) -> None:
    """The leader is killed half way; nothing is read a second time."""
    prompt, hold = stored(stock, 1, 300), Hold(0)
    faults.on("readv", "seg/*", nth=5, do=hold, times=None)
    fetcher = start(faults, threads=1, arena_bytes=32 * MIB)
    leader = other_process(fetcher.path, stock, prompt, wait=False)
    try:
        assert hold.reached.wait(10)
        clients = [fetcher.client() for _ in range(20)]
        tickets = [ask(client, stock, prompt) for client in clients]
        leader.kill()
        leader.wait()
        eventually(lambda: fetcher.core.stats()["requests"] == 20)
        hold.release()
        assert [ticket.wait() for ticket in tickets] == [299] * 20
        assert wrong(tickets[0], stock, prompt) is None
        assert fetcher.core.stats()["bytes_read"] == 299 * stock.ns.stride
        for ticket in tickets:
            ticket.release()
    finally:
        os.killpg(leader.pid, signal.SIGKILL)
        assert leader.stdout
        leader.stdout.close()


def test_a_client_that_hangs_up_gives_everything_back(stock: Stock, start: Start) -> None:
    prompt = stored(stock, 1, 100)
    fetcher = start()
    client = fetcher.client()
    tickets = [ask(client, stock, prompt) for _ in range(5)]
    assert tickets[-1].wait() == 99
    client.close()
    client.close()
    assert not tickets[0].held and tickets[0].good in (0, 99)
    eventually(lambda: unused(fetcher))


def test_a_forgotten_ticket_is_released_with_the_next_request(stock: Stock, start: Start) -> None:
    prompt = stored(stock, 1, 50)
    fetcher = start()
    client = fetcher.client()
    assert ask(client, stock, prompt).wait() == 49
    with ask(client, stock, prompt) as ticket:
        ticket.wait()
        eventually(lambda: fetcher.core.stats()["tickets"] == 1)


def test_a_lost_ticket_is_not_held_and_copies_nothing(stock: Stock, start: Start) -> None:
    """The fetcher drops a client that breaks the protocol; its blocks may become others'."""
    prompt = stored(stock, 1, 50)
    fetcher = start()
    client = fetcher.client()
    ticket = ask(client, stock, prompt)
    assert ticket.wait() == 49
    client._sock.send(b"\xff" * 8)
    eventually(lambda: not ticket.held)
    assert ticket.copy_into(bytearray(49 * stock.ns.row_bytes)) == 0
    running = Ticket(client, stock.ns, None, (0, 77), 0, 5, [], time.monotonic() + 9)
    assert running.wait() == 0 and running.reason == "fetcher gone"


def test_tickets_may_be_used_by_several_threads(stock: Stock, start: Start) -> None:
    prompts = [stored(stock, seed, 60) for seed in range(4)]
    client = start(arena_bytes=32 * MIB).client()
    failures: list[object] = []

    def use(seed: int) -> None:
        for i in range(30):
            prompt = prompts[(seed + i) % 4]
            with ask(client, stock, prompt) as ticket:
                if ticket.wait() != 59 or wrong(ticket, stock, prompt) is not None:
                    failures.append((ticket.good, ticket.reason))

    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_forked_child_does_not_use_its_parents_connection(stock: Stock, start: Start) -> None:
    prompt = stored(stock, 1, 50)
    client = start().client()
    plan = stock.store.check(stock.ns, prompt)
    ticket = client.fetch(stock.ns, plan, prompt, deadline=5)
    assert ticket.wait() == 49
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            ticket.release()
            client.fetch(stock.ns, plan, prompt, deadline=5)
        except BackendError as e:
            code = 0 if "another process" in str(e) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert ticket.held and client.stats()["tickets"] == 1
    ticket.release()


def test_a_silent_listener_costs_a_short_time(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        began = time.monotonic()
        with pytest.raises(BackendError, match="no fetcher answers"):
            FetchClient(str(tmp_path / "s"), 0.2)
        assert time.monotonic() - began < 1
    with pytest.raises(BackendError) as failure:
        FetchClient(str(tmp_path / "absent"))
    assert os.strerror(errno.ENOENT) in str(failure.value)


def test_running_out_of_descriptors_is_over_when_there_are_some_again(
    start: Start, expect_logs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    expect_logs("cannot accept a client")
    fetcher = start()
    with socket.socket(socket.AF_UNIX) as sock:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        os.close(lowest := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            sock.connect(fetcher.path)
            eventually(lambda: "cannot accept" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        sock.settimeout(10)
        sock.sendall(wire.hello())
        assert wire.parse_welcome(sock.recv(100)) == os.getpid()


def test_a_file_that_is_not_read_for_a_while_is_closed(
    stock: Stock, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removed segment takes its room for as long as somebody has it open."""
    monkeypatch.setattr(workers, "IDLE_SECONDS", 0.1)
    prompt = stored(stock, 1, 50)
    (path,) = stock.paths()
    with ask(start().client(), stock, prompt) as ticket:
        assert ticket.wait() == 49
    stock.close()
    os.unlink(path)
    eventually(lambda: not any(path in file for file in _open_files()))


def _open_files() -> list[str]:
    files = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since
            files.append(os.readlink(f"/proc/self/fd/{number}"))
    return files


def test_checks_may_be_left_out(stock: Stock, start: Start) -> None:
    prompt, other = stored(stock, 1, 40), stored(stock, 2, 40)
    client = start().client()
    plan = stock.store.check(stock.ns, prompt)
    with client.fetch(stock.ns, plan, other, deadline=5) as ticket:
        assert ticket.wait() == 0 and ticket.reason == "identity mismatch: tokens"
        assert ticket.lasting
    with client.fetch(stock.ns, plan, other, deadline=5, identity=False, checksums=False) as ticket:
        assert ticket.wait() == 39 and wrong(ticket, stock, prompt) is None


def test_a_ticket_is_looked_at_often_only_when_something_is_about_to_come() -> None:
    pause = partial(ticket_module._pause, wanted=1000)
    assert pause(0, 0, 0) == ticket_module._SHORTEST_POLL
    assert pause(0.1, 0, 0) == pytest.approx(0.002), "nothing yet"
    assert pause(0, 0.004, 500) == pytest.approx(0.002), "half of what has passed at most"
    assert pause(0, 0.008, 800) == pytest.approx(0.0015), "most of what is left"
    assert pause(0.002, 0.008, 800) == ticket_module._SHORTEST_POLL, "it is due"
    assert pause(0.5, 0.008, 800) == ticket_module._LONGEST_POLL, "it is late"


def test_the_answer_limit_is_short() -> None:
    assert client_module.ANSWER_SECONDS <= 2.5, "a fetch returns within its deadline + 0.5 s"


def test_reads_of_a_local_disk_go_one_by_one_where_the_cache_has_nothing(
    stock: Stock, faults: FaultyBackend, start: Start
) -> None:
    prompt, lock, most = stored(stock, 1, 200), threading.Lock(), [0]

    def alone(call: Any) -> Any:
        assert lock.acquire(blocking=False), "two reads at once"
        try:
            most[0] += 1
            return call.proceed()
        finally:
            lock.release()

    faults.on("readv", "seg/*", do=alone, times=None)
    client = start(faults, threads=4, one_by_one=True).client()
    with ask(client, stock, prompt) as ticket:
        assert ticket.wait() == 199 and most[0] > 4
    warm = start(open_backend(stock.store.path), threads=4, one_by_one=True).client()
    with ask(warm, stock, prompt) as ticket:
        assert ticket.wait() == 199
