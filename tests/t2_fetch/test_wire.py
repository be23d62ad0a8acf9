"""Frames: what is packed is what is parsed; and what no client should send harms nobody."""

from __future__ import annotations

import array
import json
import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.errors import BackendError, InputError
from kvfs.fetcher import server, wire
from kvfs.fetcher.client import FetchClient
from kvfs.fetcher.wire import FetchRequest, Piece, Range
from kvfs.testing.fetchers import FetcherThread
from kvfs.testing.stock import Stock, tokens
from tests.t2_fetch.conftest import Start

PAGE = 4096

# frames

PATHS = st.text("abc/é-.", min_size=1, max_size=20).filter(
    lambda p: not {"", ".", ".."} & set(p.split("/"))
)
PIECE_LISTS = st.lists(
    st.builds(
        Piece, PATHS, st.integers(0, 1 << 40).map(lambda n: n * PAGE), st.integers(1, 1 << 16)
    ),
    max_size=30,
)


@given(
    nsid=st.binary(min_size=16, max_size=16), pieces=PIECE_LISTS,
    deadline=st.floats(allow_nan=False), priority=st.integers(0, 255), checksums=st.booleans(),
    number=st.integers(0, wire.NUMBERS - 1),
)  # fmt: skip
def test_a_fetch_comes_as_it_was_sent(
    nsid: bytes, pieces: list[Piece], deadline: float, priority: int, checksums: bool, number: int
) -> None:
    request = FetchRequest(nsid, pieces, deadline, priority, checksums)
    data = wire.fetch(request, number)
    assert wire.parse_head(data) == (len(data) - wire.HEAD.size, wire.FETCH, number)
    assert wire.parse_fetch(data[wire.HEAD.size :]) == request


RANGES = st.lists(st.builds(Range, *[st.integers(0, (1 << n) - 1) for n in (32, 32, 64)]))


@given(words=st.tuples(*[st.integers(0, (1 << 32) - 1)] * 3), ranges=RANGES)
def test_a_ticket_comes_as_it_was_sent(words: tuple[int, int, int], ranges: list[Range]) -> None:
    data = wire.ticket(7, *words, ranges)
    assert wire.parse_head(data)[1:] == (wire.TICKET, 7)
    assert wire.parse_ticket(data[wire.HEAD.size :]) == (*words, ranges)


@given(code=st.integers(0, 255), text=st.text(max_size=2000))
def test_a_refusal_comes_as_it_was_sent(code: int, text: str) -> None:
    data = wire.refused(1, code, text)
    got, said = wire.parse_refused(data[wire.HEAD.size :])
    assert got == code and text.startswith(said.rstrip("\ufffd"))


def test_small_frames_come_as_they_were_sent() -> None:
    body = wire.HEAD.size
    wire.parse_hello(wire.hello()[body:])
    assert wire.parse_release(wire.release(3, 9)[body:]) == (3, 9)
    assert wire.parse_welcome(wire.welcome()) == os.getpid()


@given(data=st.binary(max_size=200))
def test_garbage_is_an_input_error_and_nothing_else(data: bytes) -> None:
    for parse in (
        wire.parse_fetch, wire.parse_release, wire.parse_hello, wire.parse_ticket,
        wire.parse_refused,
    ):  # fmt: skip
        try:
            parse(data)
        except InputError:
            continue


@given(data=st.data())
def test_a_fetch_with_bytes_changed_is_parsed_or_refused(data: st.DataObject) -> None:
    pieces = [Piece("a/b", PAGE, 3), Piece("c", 8 * PAGE, 1)]
    body = bytearray(wire.fetch(FetchRequest(bytes(16), pieces, 1.0), 0)[wire.HEAD.size :])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        request = wire.parse_fetch(bytes(body[: data.draw(st.integers(0, len(body)))]))
    except InputError:
        return
    assert sum(p.count for p in request.pieces) <= wire.MAX_BLOCKS
    assert all(p.offset % PAGE == 0 and p.count > 0 for p in request.pieces)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "a//b", "", "a/", "a\0b"])
def test_paths_outside_the_store_are_refused(path: str) -> None:
    body = wire.fetch(FetchRequest(bytes(16), [Piece(path, 0, 1)], 1.0), 0)[wire.HEAD.size :]
    with pytest.raises(InputError, match="not a path in a store"):
        wire.parse_fetch(body)


def test_a_request_that_no_frame_holds_is_refused_at_home() -> None:
    pieces = [Piece("a", i * PAGE, 1) for i in range(100_000)]
    with pytest.raises(InputError, match="limit"):
        wire.fetch(FetchRequest(bytes(16), pieces, 1.0), 0)


# a server among clients that do not keep to the rules


@pytest.fixture
def fetcher(start: Start, monkeypatch: pytest.MonkeyPatch) -> FetcherThread:
    monkeypatch.setattr(server, "FRAME_SECONDS", 0.2)
    return start()


@pytest.fixture
def rough(fetcher: FetcherThread) -> Iterator[list[socket.socket]]:
    """Sockets that are closed when the test ends."""
    opened: list[socket.socket] = []
    yield opened
    for sock in opened:
        sock.close()


def connected(fetcher: FetcherThread, rough: list[socket.socket], *, greet: bool = True):
    sock = socket.socket(socket.AF_UNIX)
    rough.append(sock)
    sock.connect(fetcher.path)
    sock.settimeout(10)
    if greet:
        sock.sendall(wire.hello())
        _, ancillary, _, _ = sock.recvmsg(wire.WELCOME_BYTES, socket.CMSG_SPACE(4))
        wire.close_all(wire.take_fds(ancillary))
    return sock


def hung_up(sock: socket.socket) -> bool:
    """The server ends the connection, within the socket's timeout."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def serves(fetcher: FetcherThread, stock: Stock, seed: int = 1) -> bool:
    prompt = tokens(seed, 16 * 40)
    stock.put(prompt)
    plan = stock.store.check(stock.ns, prompt)
    client = fetcher.client()
    with client.fetch(stock.ns, plan, prompt, deadline=5) as ticket:
        assert ticket.wait() == plan.hit_blocks > 0, ticket.reason
    client.close()
    return True


def told(stock: Stock) -> bytes:
    return wire.frame(wire.NAMESPACE, json.dumps(stock.ns.identity.to_json()).encode())


BOMB = b"cos\nsystem\n(S'touch /tmp/kvfs-bomb'\ntR."
BROKEN = {
    "unknown type": wire.frame(77, b"x"),
    "huge length": struct.pack("<IHH", 0xFFFFFFFF, wire.FETCH, 0),
    "pickle": wire.frame(wire.FETCH, BOMB),
    "pickle as a namespace": wire.frame(wire.NAMESPACE, BOMB),
    "deep JSON": wire.frame(wire.NAMESPACE, b"[" * 200_000),
    "no UTF-8": wire.frame(wire.NAMESPACE, b"\xff\xfe{}"),
    "short release": wire.frame(wire.RELEASE, b"123"),
    "short fetch": wire.frame(wire.FETCH, bytes(20)),
    "another version": wire.frame(wire.HELLO, struct.pack("<I", 99)),
    "an answer": wire.welcome(),
    "impossible counts": wire.frame(
        wire.FETCH, struct.pack("<16sdIHBB", bytes(16), 1.0, 0xFFFFFFFF, 0xFFFF, 0, 0)
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_who_breaks_the_protocol_is_disconnected(
    name: str, fetcher: FetcherThread, stock: Stock, rough: list[socket.socket]
) -> None:
    sock = connected(fetcher, rough)
    sock.sendall(BROKEN[name])
    assert hung_up(sock)
    assert serves(fetcher, stock)
    assert not os.path.exists("/tmp/kvfs-bomb")


def test_random_bytes_harm_nobody(
    fetcher: FetcherThread, stock: Stock, rough: list[socket.socket]
) -> None:
    rng = random.Random(3)
    for _ in range(60):
        sock = connected(fetcher, rough, greet=rng.random() < 0.5)
        data = rng.randbytes(rng.randrange(1, 3000))
        if rng.random() < 0.7:  # so that it gets beyond the head
            kind = rng.choice([2, 3, 4, 5, 6])
            data = wire.frame(kind, data, rng.randrange(1 << 16))
        try:
            sock.sendall(data)
        except ConnectionError:
            continue
    assert serves(fetcher, stock)
    for sock in rough:
        sock.close()
    assert serves(fetcher, stock, 2)


def test_a_client_that_says_nothing_or_half_a_frame_is_let_go(
    fetcher: FetcherThread, rough: list[socket.socket]
) -> None:
    silent = connected(fetcher, rough, greet=False)
    half = connected(fetcher, rough)
    half.sendall(wire.release(0, 0)[:-1])
    began = time.monotonic()
    assert hung_up(silent) and hung_up(half)
    assert time.monotonic() - began < 5


def test_a_client_that_is_only_idle_stays(
    fetcher: FetcherThread, rough: list[socket.socket]
) -> None:
    idle = connected(fetcher, rough)
    assert hung_up(connected(fetcher, rough, greet=False))  # so the time is over
    idle.sendall(wire.frame(wire.STATS, number=5))
    assert wire.parse_head(idle.recv(1 << 16))[1:] == (wire.FIGURES, 5)


def test_idle_strangers_do_not_keep_others_out(
    start: Start, stock: Stock, rough: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand connections that say nothing."""
    monkeypatch.setattr(server, "MAX_CLIENTS", 50)
    fetcher = start()
    before = _memory()
    for _ in range(300):
        connected(fetcher, rough, greet=False)
    assert serves(fetcher, stock)
    assert fetcher.server.clients <= 50
    assert _memory() - before < 50 << 20


def _memory() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * PAGE


@pytest.mark.expect_logs("refused a client")
def test_more_clients_than_there_may_be_are_sent_away(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CLIENTS", 3)
    fetcher = start()
    clients = [fetcher.client() for _ in range(3)]
    with pytest.raises(BackendError, match="no fetcher answers"):
        fetcher.client()
    clients[0].close()
    clients[1].stats()
    _eventually(lambda: fetcher.server.clients < 3)
    fetcher.client().stats()


def _eventually(condition, seconds: float = 5.0) -> None:
    """For what another thread does a moment later and tells nobody."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_descriptors_that_nobody_asked_for_are_closed(
    fetcher: FetcherThread, stock: Stock, rough: list[socket.socket]
) -> None:
    assert serves(fetcher, stock)
    before = len(os.listdir("/proc/self/fd"))
    for n in (1, 5, 200):
        sock = connected(fetcher, rough)
        reader, writer = os.pipe()
        rights = array.array("i", [writer] * n)
        sock.sendmsg([wire.hello()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        os.close(writer)
        assert os.read(reader, 1) == b"", "the server keeps one open"
        os.close(reader)
        assert hung_up(sock)
        sock.close()
    assert serves(fetcher, stock)
    _eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_a_namespace_that_was_not_told_is_a_refusal(
    fetcher: FetcherThread, stock: Stock, rough: list[socket.socket]
) -> None:
    sock = connected(fetcher, rough)
    request = wire.fetch(FetchRequest(stock.ns.nsid, [Piece("a", PAGE, 1)], 1e9), 1)
    sock.sendall(request)
    assert wire.parse_head(sock.recv(1 << 16))[1] == wire.REFUSED
    broken = {**stock.ns.identity.to_json(), "row_bytes": -1}
    sock.sendall(wire.frame(wire.NAMESPACE, json.dumps(broken).encode()) + request)
    data = sock.recv(1 << 16)
    assert wire.parse_head(data)[1] == wire.REFUSED
    assert "row_bytes" in wire.parse_refused(data[wire.HEAD.size :])[1]
    sock.sendall(told(stock) + request)
    assert wire.parse_head(sock.recv(1 << 16))[1] == wire.TICKET


def test_one_clients_tickets_and_namespaces_are_limited(
    fetcher: FetcherThread, stock: Stock, rough: list[socket.socket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(server, "MAX_TICKETS", 3)
    sock = connected(fetcher, rough)
    sock.sendall(told(stock))
    kinds = []
    for number in range(5):
        piece = Piece("absent", PAGE * (1 + 16 * number), 1)
        sock.sendall(wire.fetch(FetchRequest(stock.ns.nsid, [piece], 1e9), number))
        kinds.append(wire.parse_head(sock.recv(1 << 16))[1])
    assert kinds == [wire.TICKET] * 3 + [wire.REFUSED] * 2
    monkeypatch.setattr(server, "MAX_NAMESPACES", 1)
    sock.sendall(told(stock))
    assert hung_up(sock)
    _eventually(lambda: fetcher.core.stats()["tickets"] == 0)


# a client and a server that does not keep to the rules


class _Liar:
    """A listening socket that answers each connection with given bytes and hangs up."""

    def __init__(self, path: str, answer: bytes, fds: int) -> None:
        self.answer, self.fds = answer, fds
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.bind(path)
        self.sock.listen()

    def serve(self) -> None:
        peer, _ = self.sock.accept()
        with peer, open(os.devnull) as null:
            peer.recv(100)
            if self.answer:
                rights = array.array("i", [null.fileno()] * self.fds)
                peer.sendmsg([self.answer], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


@pytest.mark.parametrize(
    ("answer", "fds"),
    [
        (b"", 0),
        (b"x", 1),
        (wire.welcome(), 0),
        (wire.welcome(), 1),  # a descriptor that is no memory
        (wire.frame(wire.WELCOME, struct.pack("<II", 9, 1)), 1),
        (struct.pack("<IHH", 0xFFFFFFFF, wire.WELCOME, 0), 1),
        (wire.refused(0, 5, "busy"), 1),
    ],
)
def test_who_is_no_fetcher_is_not_taken_for_one(tmp_path, answer: bytes, fds: int) -> None:
    import threading

    before = len(os.listdir("/proc/self/fd"))
    with ExitStack() as stack:
        liar = _Liar(str(tmp_path / "s"), answer, fds)
        stack.enter_context(liar.sock)
        thread = threading.Thread(target=liar.serve)
        thread.start()
        stack.callback(thread.join)
        with pytest.raises(BackendError, match="no fetcher answers"):
            FetchClient(str(tmp_path / "s"), 5)
    assert len(os.listdir("/proc/self/fd")) == before
