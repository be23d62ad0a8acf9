"""The exchange of slots on one host: what is believed, what is answered, what an attacker gets.

No pickle, an explicit address, a shared secret, bounded memory and waits.
"""

from __future__ import annotations

import gc
import http.client
import os
import re
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from kvfs.errors import ConfigError, InputError
from kvfs.peers import auth, wire
from kvfs.peers import client as peer_client
from kvfs.peers import http as peer_http
from kvfs.peers import server as peer_server
from kvfs.peers.auth import ReplayWindow, Secret
from kvfs.peers.client import PeerClient
from kvfs.peers.http import PeerError, parse_head
from kvfs.peers.server import SlotServer, bound
from kvfs.peers.wire import Holder
from kvfs.state.slot import Anchor
from kvfs.state.slots import Slot
from kvfs.testing.peers import FLASH, KEY, SECRET, SWA, anchor, data_of, pool_of, serving

PACKAGE = Path(auth.__file__).parent
assert FLASH.state is not None
STATE = FLASH.state
SECONDS = 20.0
"""For what has to work on a busy machine; what has to fail has its own."""


def soon(seconds: float = SECONDS) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[Path]:
    with pool_of(tmp_path / "shm", [1, 2]):
        yield tmp_path / "shm"


@pytest.fixture
def server(slots: Path) -> Iterator[SlotServer]:
    with serving(slots) as started:
        yield started


@pytest.fixture
def client() -> Iterator[PeerClient]:
    with PeerClient(SECRET) as made:
        yield made


def pull(client: PeerClient, address: str, number: int = 1, seconds: float = SECONDS) -> Slot | str:
    """The slot of an anchor, whose data are right, or the reason why there is none."""
    key = anchor(number)
    pulled = client.pull(Holder(address), FLASH.nsid, key, STATE, soon(seconds))
    if pulled.slot is None:
        return pulled.reason
    assert pulled.slot.data == data_of(key)
    return pulled.slot


def test_pull(server: SlotServer, client: PeerClient) -> None:
    slot = pull(client, server.address)
    assert isinstance(slot, Slot) and len(slot.data) == 1_415_040
    into = bytearray(STATE.slot_bytes)
    holder = Holder(server.address, slot.meta.pool, slot.meta.generation)
    again = client.pull(holder, FLASH.nsid, anchor(1), STATE, soon(), into)
    assert again.slot is not None and again.slot.data is into and into == data_of(anchor(1))
    assert pull(client, server.address, 7) == "not there: no such slot here any more"


def test_a_connection_is_kept(server: SlotServer, client: PeerClient) -> None:
    made = []
    first = peer_http.Connection.__init__

    def count(self: peer_http.Connection, *args: object) -> None:
        made.append(1)
        first(self, *args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_http.Connection, "__init__", count)
        for number in (1, 2, 7, 1):
            pull(client, server.address, number)
    assert len(made) == 1


def test_connections_are_not_kept_for_longer_than_the_peer_keeps_them(
    slots: Path, client: PeerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anything of hosts that left."""
    monkeypatch.setattr(peer_client, "_TIDY_SECONDS", 0.0)
    monkeypatch.setattr(peer_client, "KEPT_SECONDS", 0.0)
    monkeypatch.setattr(peer_client, "AWAY_SECONDS", 0.0)
    monkeypatch.setattr(peer_client, "MOST_PEERS", 2)
    before, kept = sockets(), []
    for _ in range(3):
        with serving(slots) as server:
            assert isinstance(pull(client, server.address), Slot)
            kept.append(len(client._idle))
    assert kept == [1, 1, 1] and len(client._instances) == 2
    with socket.create_server(("127.0.0.1", 0)) as silent:
        pull(client, "{}:{}".format(*silent.getsockname()), seconds=0.1)
    assert sockets() == before and not client._idle
    assert len(client._away) == 1
    client._tidy()
    assert not client._away


def test_who_gives_no_time_blames_nobody(client: PeerClient) -> None:
    """One who asks in the last moment does not keep the others from asking."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "{}:{}".format(*silent.getsockname())
        for _ in range(2):
            said = str(pull(client, address, seconds=peer_client.LEAST_SECONDS / 2))
            assert "away" not in said and "time" in said
        pull(client, address, seconds=0.1)
        assert "away a moment ago" in str(pull(client, address))


def test_a_hint_is_right_or_plainly_stale(
    slots: Path, server: SlotServer, client: PeerClient
) -> None:
    slot = pull(client, server.address)
    assert isinstance(slot, Slot)
    for pool, generation, why in (
        (slot.meta.pool, slot.meta.generation + 2, "stale hint: the slot was stored anew since"),
        (b"other pool of it", slot.meta.generation, "stale hint: the slots were lost with their"),
    ):
        holder = Holder(server.address, pool, generation)
        pulled = client.pull(holder, FLASH.nsid, anchor(1), STATE, soon())
        assert pulled.slot is None and pulled.reason.startswith(why)
    other = Anchor(anchor(1).hash, anchor(1).position, b"another prefix !")
    pulled = client.pull(Holder(server.address), FLASH.nsid, other, STATE, soon())
    assert pulled.slot is None and pulled.reason.startswith("not there")
    pulled = client.pull(Holder(server.address), SWA.nsid, anchor(1), STATE, soon())
    assert pulled.reason == "not there: no slots of this namespace here"
    bare = Anchor(anchor(1).hash, anchor(1).position)
    assert "no lineage" in client.pull(Holder("127.0.0.1:1"), b"", bare, STATE, soon()).reason


def test_push(server: SlotServer, client: PeerClient, tmp_path: Path) -> None:
    with pool_of(tmp_path / "other", [5]) as mine:
        slot = mine.read(anchor(5))
        assert slot is not None
        pushed = client.push(server.address, slot, soon())
        assert pushed.new and pushed.meta is not None and pushed.meta.pool != slot.meta.pool
        assert not client.push(server.address, slot, soon()).new
    got = pull(client, server.address, 5)
    assert isinstance(got, Slot) and got.meta == pushed.meta
    damaged = Slot(slot.meta, bytes(len(slot.data)))
    assert "checksum" in client.push(server.address, damaged, soon()).reason
    small = Slot(slot.meta, slot.data[:-1])
    assert "1415040 bytes" in client.push(server.address, small, soon()).reason


def test_what_is_there(server: SlotServer, client: PeerClient) -> None:
    (found,) = client.status(server.address, soon()).value["pools"]
    assert (found["nsid"], found["slots"], found["used"]) == (FLASH.nsid.hex(), 4, 2)
    metas = client.slots(server.address, FLASH.nsid, soon()).value
    assert {meta.anchor for meta in metas} == {anchor(1).hash, anchor(2).hash}


# who is believed


def test_another_secret(server: SlotServer) -> None:
    with PeerClient(Secret(b"another secret, as long as it has to be")) as stranger:
        assert "the MAC is not right" in str(pull(stranger, server.address))


def test_another_clock(server: SlotServer) -> None:
    with PeerClient(SECRET, clock=lambda: time.time() - 100) as late:
        assert "the clocks of the two hosts differ by 100 s" in str(pull(late, server.address))


def request(server: SlotServer, *, nonce: bytes = b"n" * 16, **changed: str) -> tuple[int, str]:
    """A request as the client makes it, but for what is changed. Returns status and text."""
    path = wire.slot_path(FLASH.nsid, anchor(1))
    now = int(time.time() * 1000)
    mac = SECRET.of_request("GET", path, server.address, now, nonce, b"")
    headers = {"Host": server.address, wire.TIME: str(now), wire.NONCE: nonce.hex(),
               wire.MAC: mac.hex()}  # fmt: skip
    method = changed.pop("method", "GET")
    path = changed.pop("path", path)
    headers |= {name.replace("_", "-"): value for name, value in changed.items()}
    host, port = wire.split_address(server.address)
    with closing(http.client.HTTPConnection(host, port, timeout=SECONDS)) as connection:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        assert wire.hex_field(answer.getheader(wire.INSTANCE), 16) == server.app.instance
        return answer.status, answer.read(300).decode("latin-1")


def test_a_request_is_good_once(server: SlotServer) -> None:
    assert request(server)[0] == 200
    assert request(server) == (401, "the request was sent twice")
    assert request(server, nonce=b"m" * 16)[0] == 200


@pytest.mark.parametrize("changed", [
    {"kvfs-mac": "00" * 32}, {"kvfs-mac": "zz"}, {"kvfs-nonce": "11" * 16}, {"kvfs-time": "1"},
    {"kvfs-time": "9" * 400}, {"Host": "127.0.0.2:80"}, {"path": "/1/status"}, {"method": "PUT"},
    {"path": wire.slot_path(FLASH.nsid, anchor(2))}, {"kvfs-slot": "00" * 136},
])  # fmt: skip
def test_a_changed_request_is_refused(server: SlotServer, changed: dict[str, str]) -> None:
    assert request(server, **changed)[0] == 401
    assert server.app.counters.keys() <= {"get.401", "put.401"}


def test_another_host_is_refused_what_was_meant_for_one(slots: Path) -> None:
    with serving(slots) as one, serving(slots) as two:
        now = int(time.time() * 1000)
        path = wire.slot_path(FLASH.nsid, anchor(1))
        mac = SECRET.of_request("GET", path, one.address, now, b"n" * 16, b"").hex()
        fields = {"Host": one.address, wire.TIME: str(now), wire.MAC: mac}
        status, said = request(two, **fields)
        assert status == 401 and said == f"this host is {two.address}, not {one.address}"


def test_replay_window() -> None:
    now = [1000.0]
    window = ReplayWindow(30, most=3, clock=lambda: now[0])
    assert window.refusal(1_000_000, b"a") is None
    assert window.refusal(1_000_000, b"a") == "the request was sent twice"
    assert window.refusal(1_030_000, b"b") is None
    assert "differ" in str(window.refusal(1_030_001, b"c"))
    assert window.refusal(970_000, b"c") is None
    assert window.refusal(1_000_000, b"d") == "too many requests"
    now[0] = 1060.1
    # What could still be sent again is refused by its time or by its nonce, never forgotten.
    for time_ms, nonce in ((1_000_000, b"a"), (1_030_000, b"b"), (970_000, b"c")):
        assert window.refusal(time_ms, nonce) is not None
    assert window.refusal(1_060_000, b"d") is None


def test_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(auth.SECRET_VARIABLE, raising=False)
    path = tmp_path / "secret"
    path.write_text(KEY + "\n")
    path.chmod(0o600)
    same = Secret.load(str(path))
    assert same.of_answer(b"", 1, b"", b"") == SECRET.of_answer(b"", 1, b"", b"")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        Secret.load(str(path))
    with pytest.raises(ConfigError, match="no secret"):
        Secret.load()
    monkeypatch.setenv(auth.SECRET_VARIABLE, "short")
    with pytest.raises(ConfigError, match="5 bytes"):
        Secret.load()
    monkeypatch.setenv(auth.SECRET_VARIABLE, os.fsdecode(b"\xff" * auth.MIN_SECRET))
    binary = Secret(b"\xff" * auth.MIN_SECRET).of_answer(b"", 1, b"", b"")
    assert Secret.load().of_answer(b"", 1, b"", b"") == binary
    assert KEY not in repr(same)


# an impostor where a peer was


def impostor(answer: Callable[[bytes], list[bytes]]) -> tuple[str, threading.Thread]:
    """Answers one connection with the pieces that `answer` makes of the head of the request."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            connection.settimeout(SECONDS)
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(4096)
            with suppress(OSError):  # nobody listens any more
                for piece in answer(head):
                    connection.sendall(piece)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)

    thread = threading.Thread(target=serve)
    thread.start()
    return "{}:{}".format(*listener.getsockname()), thread


def answer_of(slot: Slot, **changed: bytes) -> Callable[[bytes], list[bytes]]:
    """A right answer to any request, but for what is changed."""

    def answer(head: bytes) -> list[bytes]:
        found = re.search(rb"kvfs-nonce: (\w+)", head)
        assert found is not None
        nonce = bytes.fromhex(found[1].decode())
        meta = changed.get("meta", slot.meta.encode())
        data = changed.get("data", bytes(slot.data))
        mac = SECRET.of_answer(nonce, 200, b"i" * 16, meta)
        lines = [
            b"HTTP/1.1 200 ", b"kvfs-instance: " + (b"i" * 16).hex().encode(),
            b"kvfs-mac: " + changed.get("mac", mac.hex().encode()),
            b"kvfs-slot: " + meta.hex().encode(),
            b"content-length: " + changed.get("length", str(len(data)).encode()),
        ]  # fmt: skip
        return [b"\r\n".join(lines) + b"\r\n\r\n" + data]

    return answer


@pytest.mark.parametrize(("changed", "why"), [
    ({}, ""),
    ({"mac": b"00" * 32}, "not from a host with the same secret"),
    ({"mac": b"x"}, "not from a host with the same secret"),
    ({"length": b"17"}, "17 bytes"),
    ({"length": b"4294967296"}, "4294967296 bytes"),
    ({"length": b"-1"}, "how long"),
    ({"meta": b"\0" * 136}, "not the description of a slot"),
    ({"data": bytes(1_415_040)}, "damaged"),
    ({"data": b"short", "length": b"1415040"}, "closed the connection"),
])  # fmt: skip
def test_an_answer_that_is_not_right(
    tmp_path: Path, client: PeerClient, changed: dict[str, bytes], why: str
) -> None:
    with pool_of(tmp_path / "shm", [1]) as pool:
        slot = pool.read(anchor(1))
    assert slot is not None
    address, thread = impostor(answer_of(slot, **changed))
    result = pull(client, address, seconds=SECONDS)
    client.close()
    thread.join()
    assert isinstance(result, Slot) if not why else why in str(result)


def test_a_slot_of_another_prefix_is_not_taken(tmp_path: Path, client: PeerClient) -> None:
    with pool_of(tmp_path / "shm", [2]) as pool:
        slot = pool.read(anchor(2))
    assert slot is not None
    address, thread = impostor(answer_of(slot))
    assert "another prefix" in str(pull(client, address, 1))
    thread.join()


@pytest.mark.parametrize("answer", [
    lambda head: [b"\xff" * 100_000],
    lambda head: [b"HTTP/1.1 200 OK\r\nA: b\r\nA: c\r\n\r\n"],
    lambda head: [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"],
    lambda head: [],
])  # fmt: skip
def test_an_answer_that_is_none(client: PeerClient, answer: Callable[[bytes], list[bytes]]) -> None:
    address, thread = impostor(answer)
    result = pull(client, address)
    assert isinstance(result, str) and result
    thread.join()


def test_one_deadline_over_all_the_pieces(client: PeerClient) -> None:
    """A peer that sends a byte now and then does not hold the request."""
    stop = threading.Event()

    def pieces(head: bytes) -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\n"
        while not stop.wait(0.02):
            yield b"a"

    address, thread = impostor(pieces)  # type: ignore[arg-type]
    began = time.monotonic()
    result = pull(client, address, seconds=0.3)
    took = time.monotonic() - began
    stop.set()
    thread.join()
    assert "not in time" in str(result)
    assert 0.29 < took < 5
    assert "away a moment ago" in str(pull(client, address))


def test_heads() -> None:
    assert parse_head(b"HTTP/1.1 404 \r\nContent-Length: 3").length == 3
    for bad in (b"", b"HTTP/1.1 20", b"HTTP/2 200 \r\nContent-Length: 3", b"HTTP/1.1 200 OK",
                b"HTTP/1.1 200 \r\nno colon\r\nContent-Length: 3",
                b"HTTP/1.1 200 \r\nContent-Length: " + b"9" * 30):  # fmt: skip
        with pytest.raises(PeerError):
            parse_head(bad)


@pytest.mark.parametrize("text", ["host:1", "127.0.0.1", "127.0.0.1:x", "::1:80", "1.1.1.1:70000"])
def test_an_address_is_a_number(text: str) -> None:
    with pytest.raises(InputError):
        wire.split_address(text)


def test_targets() -> None:
    key, pool = anchor(3), b"p" * 16
    path = wire.slot_path(FLASH.nsid, key, pool, 12)
    assert wire.parse_target(*path.split("?")) == (FLASH.nsid, key, pool, 12)
    assert wire.parse_target("/1/slots/" + "00" * 16, "") == (bytes(16), None, b"", 0)
    for bad in ("/", "/1/slots/", "/1/slots/00", path.split("?")[0] + "/x", "/1/slots/" + "g" * 32):
        assert wire.parse_target(bad, "") is None
    assert wire.parse_target(path.split("?")[0], "of=zz") is None


# the server and those who mean it ill


def test_every_interface_has_to_be_meant() -> None:
    for address in ("0.0.0.0:0", "[::]:0"):
        with pytest.raises(ConfigError, match="--any-interface"):
            bound(address)
    with closing(bound("0.0.0.0:0", any_interface=True)):
        pass


def test_nothing_is_unpickled() -> None:
    root = PACKAGE.parent
    for path in [*root.rglob("*.py")]:
        if "testing" not in path.parts:
            text = path.read_text()
            assert not re.search(r"^\s*(import|from) (pickle|marshal|shelve|dill)\b", text, re.M), (
                path
            )
            assert "torch.load" not in text, path


def sockets() -> int:
    """Sockets that are open in this process."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed since it was listed
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


def rss() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")


BOMB = b"cposix\nsystem\n(S'touch /tmp/owned'\ntR."


def put(body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return b"PUT /1/slots/x HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (size, body)


ATTACKS = {
    "random bytes": os.urandom(65536),
    "a body that nobody wants": put(bytes(4 << 20), 100 << 20),
    "a pickle": BOMB,
    "a pickle in a body": put(BOMB),
    "4 GiB announced": put(b"ab", 1 << 32),
    "half a head": b"GET /1/status HTTP/1.1\r\nHo",
    "half a body": put(b"ab", 99),
    "an endless head": b"GET / HTTP/1.1\r\n" + b"A: " + b"b" * (1 << 20),
    "chunks": b"PUT / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFF\r\n"
              + b"c" * 65536,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" + os.urandom(4096),
    "a web socket": b"GET /1/status HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\n"
                    b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
                    b"Sec-WebSocket-Key: " + b"A" * 22 + b"==\r\n\r\n",
    "no MAC": b"GET /1/status HTTP/1.1\r\nHost: a\r\n\r\n",
}  # fmt: skip


def attack(server: SlotServer, data: bytes) -> socket.socket:
    connection = socket.create_connection(wire.split_address(server.address), SECONDS)
    with suppress(OSError):  # it hung up before it had heard all of it
        connection.sendall(data)
    return connection


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks(slots: Path, client: PeerClient, name: str) -> None:
    """The process lives, nothing is served, and a host of the fleet gets its slot meanwhile."""
    with serving(slots, idle=1.0) as server:
        before = sockets()
        with ExitStack() as stack:
            for _ in range(20):
                connection = stack.enter_context(attack(server, ATTACKS[name]))
                connection.setblocking(False)
                with suppress(BlockingIOError, ConnectionResetError):
                    assert b" 200 " not in connection.recv(65536)[:200]
            assert isinstance(pull(client, server.address), Slot)
        served = {c: n for c, n in server.app.counters.items() if not c.endswith((".401", ".400"))}
        assert served == {"get.200": 1}
        client.close()
        deadline = soon()
        while sockets() > before:
            assert time.monotonic() < deadline, "connections of those who left are kept"
            time.sleep(0.01)


def test_a_thousand_idle_connections(slots: Path, client: PeerClient) -> None:
    """Less than 50 MiB, a legitimate pull works, and they are closed after a while."""
    with serving(slots, idle=1.0) as server, ExitStack() as stack:
        pull(client, server.address)
        gc.collect()
        before = rss()
        idle = [
            stack.enter_context(attack(server, b"GET /1/s" if n % 2 else b"")) for n in range(1000)
        ]
        assert isinstance(pull(client, server.address), Slot)
        assert rss() - before < 50 << 20
        for connection in idle:
            connection.settimeout(SECONDS)
            with suppress(ConnectionResetError):
                while connection.recv(4096):  # until it is closed, or raises a timeout
                    pass


def test_more_connections_than_there_may_be(slots: Path, client: PeerClient) -> None:
    """The one that is idle for longest makes room, and nobody who waits for an answer does."""
    with serving(slots, most=3, turns=1) as server, ExitStack() as stack:
        idle = []
        for _ in range(3):
            connection = stack.enter_context(attack(server, ATTACKS["no MAC"]))
            connection.settimeout(SECONDS)
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert answer.status == 401 and answer.read()
            idle.append(connection)
        assert isinstance(pull(client, server.address), Slot)
        assert idle[0].recv(1) == b""
        assert select.select(idle[1:], [], [], 0)[0] == []
    with serving(slots, most=1, body_seconds=SECONDS) as server, pool_of(slots, []) as pool:
        slot = pool.read(anchor(1))
        assert slot is not None
        head = signed(server, "PUT", 1, slot) + f"Content-Length: {len(slot.data)}\r\n\r\n"
        with attack(server, head.encode()) as asking:
            while not server.app.busy:
                time.sleep(0.001)
            with attack(server, b"") as refused:
                refused.settimeout(SECONDS)
                assert refused.recv(1) == b""
            asking.sendall(slot.data)
            asking.settimeout(SECONDS)
            assert asking.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_a_body_that_does_not_come(slots: Path, client: PeerClient, tmp_path: Path) -> None:
    """Somebody with the secret who announces a slot and falls silent gives up his turn."""
    with (
        serving(slots, turns=1, body_seconds=0.5) as server,
        pool_of(tmp_path / "other", [9]) as mine,
    ):
        slot = mine.read(anchor(9))
        assert slot is not None
        path, meta, now = wire.slot_path(FLASH.nsid, anchor(9)), slot.meta.encode(), time.time()
        mac = SECRET.of_request("PUT", path, server.address, int(now * 1000), b"n" * 16, meta)
        head = (
            f"PUT {path} HTTP/1.1\r\nHost: {server.address}\r\nContent-Length: 1415040\r\n"
            f"kvfs-time: {int(now * 1000)}\r\nkvfs-nonce: {(b'n' * 16).hex()}\r\n"
            f"kvfs-mac: {mac.hex()}\r\nkvfs-slot: {meta.hex()}\r\n\r\nonly the beginning"
        )
        with attack(server, head.encode()) as connection:
            while not server.app.busy:
                time.sleep(0.001)
            busy = pull(client, server.address)
            assert busy == "busy: 1 requests are under way"
            connection.settimeout(SECONDS)
            assert b" 408 " in connection.recv(4096)
        while server.app.busy:
            time.sleep(0.001)
        assert isinstance(pull(client, server.address), Slot)


def test_a_host_that_leaves_in_the_middle_of_its_slot(slots: Path, client: PeerClient) -> None:
    with serving(slots, turns=1) as server:
        key, now, before = anchor(1), int(time.time() * 1000), sockets()
        with pool_of(slots, []) as pool:
            slot = pool.read(key)
        assert slot is not None
        path, meta = wire.slot_path(FLASH.nsid, key), slot.meta.encode()
        mac = SECRET.of_request("PUT", path, server.address, now, b"n" * 16, meta)
        head = (
            f"PUT {path} HTTP/1.1\r\nHost: {server.address}\r\nContent-Length: 1415040\r\n"
            f"kvfs-time: {now}\r\nkvfs-nonce: {(b'n' * 16).hex()}\r\n"
            f"kvfs-mac: {mac.hex()}\r\nkvfs-slot: {meta.hex()}\r\n\r\n"
        )
        with attack(server, head.encode() + bytes(slot.data[: 1 << 20])):
            while not server.app.busy:
                time.sleep(0.001)
        deadline = soon()
        while server.app.busy or sockets() > before:
            assert time.monotonic() < deadline, "its turn is held, or its connection"
            time.sleep(0.01)
        assert isinstance(pull(client, server.address), Slot)


def test_a_peer_that_takes_nothing(slots: Path, client: PeerClient) -> None:
    """Somebody with the secret who asks for a slot and never reads it gives up his turn, too."""
    with serving(slots, turns=1, stuck=1.0) as server:
        path, now = wire.slot_path(FLASH.nsid, anchor(1)), int(time.time() * 1000)
        mac = SECRET.of_request("GET", path, server.address, now, b"n" * 16, b"")
        head = (
            f"GET {path} HTTP/1.1\r\nHost: {server.address}\r\nkvfs-time: {now}\r\n"
            f"kvfs-nonce: {(b'n' * 16).hex()}\r\nkvfs-mac: {mac.hex()}\r\n\r\n"
        )
        with socket.socket() as frozen:
            frozen.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            frozen.connect(wire.split_address(server.address))
            frozen.sendall(head.encode())
            while not server.app.busy:
                time.sleep(0.001)
            assert pull(client, server.address) == "busy: 1 requests are under way"
            deadline = soon()
            while server.app.busy:
                assert time.monotonic() < deadline, "it is held for ever"
                time.sleep(0.01)
            assert isinstance(pull(client, server.address), Slot)


def signed(server: SlotServer, method: str, number: int, slot: Slot | None = None) -> str:
    """The head of a request for a slot, or with one, up to its last header."""
    path, now = wire.slot_path(FLASH.nsid, anchor(number)), int(time.time() * 1000)
    nonce, meta = secrets.token_bytes(16), b"" if slot is None else slot.meta.encode()
    mac = SECRET.of_request(method, path, server.address, now, nonce, meta)
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {server.address}\r\nkvfs-time: {now}\r\n"
        f"kvfs-nonce: {nonce.hex()}\r\nkvfs-mac: {mac.hex()}\r\n"
    )
    return head if slot is None else f"{head}kvfs-slot: {meta.hex()}\r\n"


def test_who_waits_to_be_told_to_go_on_is_told(slots: Path, tmp_path: Path) -> None:
    """A general client asks before it sends a body, and hears before the answer."""
    with serving(slots) as server, pool_of(tmp_path / "other", [9]) as mine:
        slot = mine.read(anchor(9))
        assert slot is not None
        head = signed(server, "PUT", 9, slot)
        head += f"Content-Length: {len(slot.data)}\r\nExpect: 100-continue\r\n\r\n"
        with attack(server, head.encode()) as connection:
            connection.settimeout(SECONDS)
            assert connection.recv(4096).startswith(b"HTTP/1.1 100 ")
            connection.sendall(slot.data)
            assert connection.recv(4096).startswith(b"HTTP/1.1 201 ")


def test_requests_one_behind_the_other_are_answered_in_turn(slots: Path) -> None:
    with serving(slots) as server:
        asked = "".join(signed(server, "GET", number) + "\r\n" for number in (1, 2, 1))
        with attack(server, asked.encode()) as connection:
            connection.settimeout(SECONDS)
            answers = connection.makefile("rb")
            for number in (1, 2, 1):
                assert answers.readline().startswith(b"HTTP/1.1 200 ")
                while answers.readline() != b"\r\n":
                    pass
                assert answers.read(1_415_040) == data_of(anchor(number))
            answers.close()


def test_a_server_that_ends_closes_who_asks_nothing_and_lets_an_answer_end(
    slots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_server, "STOP_SECONDS", SECONDS)
    received: list[bytes] = []
    with ExitStack() as stack:
        with serving(slots) as server:
            idle = stack.enter_context(attack(server, b""))
            asking = stack.enter_context(attack(server, b""))
            asking.settimeout(SECONDS)
            asking.sendall((signed(server, "GET", 1) + "\r\n").encode())
            received.append(asking.recv(1))

            def read() -> None:
                while part := asking.recv(1 << 20):
                    received.append(part)

            reader = threading.Thread(target=read)
            reader.start()
        reader.join()
        idle.settimeout(SECONDS)
        assert idle.recv(1) == b""
    head, _, body = b"".join(received).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and body == data_of(anchor(1))


def test_a_server_that_was_started_anew_is_noticed(slots: Path) -> None:
    noticed: list[str] = []
    with PeerClient(SECRET, on_restart=noticed.append) as client:
        with serving(slots) as server:
            address = server.address
            assert isinstance(pull(client, address), Slot)
        assert isinstance(pull(client, address, seconds=0.5), str)
        with serving(slots, listen=address):
            deadline = soon()
            while not isinstance(pull(client, address), Slot):  # left alone for a second
                assert time.monotonic() < deadline
                time.sleep(0.05)
        assert noticed == [address]
