"""The answers of a host that has slots: an ASGI application without a framework, six status codes.

A request is believed only after its MAC, and costs next to nothing before: no pool is looked at, no
body is read, no turn is taken. Then it needs one of a few turns, kept until the answer was sent, or
is told to come again. A body has a deadline, and must have the length of a slot. What is sent is a
verified copy.

Awaits: runs on one event loop; reading a pool takes less than a millisecond and is done on it,
writing may wait for a lock and is done in a thread. trio alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any, NamedTuple

import trio

from kvfs.errors import BusyError, FormatError, InputError
from kvfs.peers import wire
from kvfs.peers.auth import MAC_BYTES, NONCE_BYTES, ReplayWindow, Secret, same
from kvfs.peers.pools import Pools
from kvfs.peers.wire import Target
from kvfs.state.slot import META_BYTES, SlotMeta
from kvfs.state.slots import SlotPool

log = logging.getLogger(__name__)
TURNS = 8
BODY_SECONDS = 5.0

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class Refusal(Exception):
    """Ends a request with a status and words."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Reply(NamedTuple):
    """slot: the description that goes with it, b"" for none."""

    status: int
    body: bytes
    slot: bytes = b""


class SlotApp:
    """Answers requests for the slots of some pools."""

    def __init__(
        self, pools: Pools, secret: Secret, host: str, *, turns: int = TURNS,
        body_seconds: float = BODY_SECONDS, window: ReplayWindow | None = None,
    ) -> None:  # fmt: skip
        """host: `IP:port` by which the others know this host; turns: requests for slots at once;
        body_seconds: for a slot to come in."""
        self.instance = secrets.token_bytes(wire.INSTANCE_BYTES)
        self.counters: dict[str, int] = {}
        self._pools = pools
        self._secret = secret
        self._host = host
        self._turns = turns
        self._body_seconds = body_seconds
        self._window = window or ReplayWindow()
        self.busy = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await send({"type": "websocket.close"})

    async def _http(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = _fields(scope["headers"])
        nonce: bytes | None = None
        with contextlib.ExitStack() as turn:
            try:
                nonce = self._authenticate(scope, headers)
                turn.enter_context(self._turn())
                reply = await self._reply(scope, headers, receive)
            except Refusal as e:
                reply = Reply(e.status, str(e).encode())
            except Exception:
                log.exception("a request of another host failed; this is a bug of kvfs")
                reply = Reply(500, b"internal error")
            self.count(f"{scope['method'].lower()}.{reply.status}")
            if not _may_have_body(scope):
                await self._send(reply, nonce, send)
                return
            # hypercorn cannot end a request, nor close its connection, while what has come of the
            # body fills its queue: nobody else would ever take it out.
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_discard, receive)
                await self._send(reply, nonce, send)
                nursery.cancel_scope.cancel()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One of a few requests at once, until its answer was sent. Raises Refusal."""
        if self.busy >= self._turns:
            raise Refusal(503, f"{self._turns} requests are under way")
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1

    def count(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0) + 1

    # who asks

    def _authenticate(self, scope: Message, headers: dict[str, str]) -> bytes:
        """The nonce of a request that is believed. Raises Refusal."""
        nonce = wire.hex_field(headers.get(wire.NONCE), NONCE_BYTES)
        given = wire.hex_field(headers.get(wire.MAC), MAC_BYTES)
        time_ms = headers.get(wire.TIME, "")
        content = headers.get(wire.SLOT, "")
        slot = b"" if not content else wire.hex_field(content, META_BYTES)
        if nonce is None or given is None or slot is None or not _short_number(time_ms):
            raise Refusal(401, "the request has no MAC")
        target = scope["raw_path"].decode("latin-1")
        if scope["query_string"]:
            target += "?" + scope["query_string"].decode("latin-1")
        host = headers.get("host", "")
        right = self._secret.of_request(
            scope["method"], target, host, int(time_ms), nonce, slot
        )  # fmt: skip
        if not same(given, right):
            raise Refusal(401, "the MAC is not right: another secret?")
        if host != self._host:
            raise Refusal(401, f"this host is {self._host}, not {host}")
        refusal = self._window.refusal(int(time_ms), nonce)
        if refusal is not None:
            raise Refusal(401, refusal)
        return nonce

    # what it asks

    async def _reply(self, scope: Message, headers: dict[str, str], receive: Receive) -> Reply:
        method, path = scope["method"], scope["path"]
        if method == "GET" and path == wire.STATUS_PATH:
            found = await trio.to_thread.run_sync(self._pools.status)
            return Reply(200, json.dumps({"pools": found}).encode())
        target = wire.parse_target(path, scope["query_string"].decode("latin-1"))
        if target is None or not (method == "GET" or (method == "PUT" and target.anchor)):
            raise Refusal(400, "no such request")
        pool = self._pool(target)
        if target.anchor is None:
            metas = await trio.to_thread.run_sync(pool.metas)
            return Reply(200, b"".join(meta.encode() for meta in metas))
        if method == "GET":
            return self._get(pool, target)
        return await self._put(pool, target, headers, receive)

    def _pool(self, target: Target) -> SlotPool:
        pool = self._pools.get(target.nsid)
        if pool is None:
            raise Refusal(404, "no slots of this namespace here")
        if target.pool and target.pool != pool.pool_id:
            raise Refusal(412, "the slots were lost with their pool")
        return pool

    def _get(self, pool: SlotPool, target: Target) -> Reply:
        assert target.anchor is not None
        slot = pool.read(target.anchor)
        if slot is None:
            raise Refusal(404, "no such slot here any more")
        if target.pool and slot.meta.generation != target.generation:
            raise Refusal(412, "the slot was stored anew since")
        return Reply(200, slot.data, slot.meta.encode())

    async def _put(
        self, pool: SlotPool, target: Target, headers: dict[str, str], receive: Receive
    ) -> Reply:
        assert target.anchor is not None
        anchor, meta = target.anchor, _description(headers)
        if meta.nsid != target.nsid or not meta.is_for(anchor) or not anchor.lineage:
            raise Refusal(400, "the description is of another slot")
        if meta.layout != pool.identity.state:
            raise Refusal(400, "the slot has another layout than the pool")
        data = await self._body(headers, receive, pool.slot_bytes)
        if not meta.accepts(data):
            raise Refusal(400, "the data are not those of the description (checksum)")

        def store() -> tuple[SlotMeta, bool]:
            stored = pool.write(anchor, data, rotation=meta.rotation, overshoot=meta.overshoot)
            return stored.meta, stored.new

        try:
            kept, new = await trio.to_thread.run_sync(store)
        except BusyError as e:
            raise Refusal(503, str(e)) from None
        except InputError as e:
            raise Refusal(400, str(e)) from None
        return Reply(201 if new else 200, b"", kept.encode())

    async def _body(self, headers: dict[str, str], receive: Receive, size: int) -> bytearray:
        """The body, which has to be `size` bytes and to come in time. Raises Refusal."""
        if headers.get("content-length") != str(size):
            raise Refusal(413, f"a slot of this namespace has {size} bytes")
        data = bytearray()
        with trio.move_on_after(self._body_seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refusal(400, "the body ended early")
                data += message.get("body", b"")
                if len(data) > size:
                    raise Refusal(413, f"a slot of this namespace has {size} bytes")
                if not message.get("more_body"):
                    break
            if len(data) == size:
                return data
            raise Refusal(400, "the body ended early")
        raise Refusal(408, "the body did not come in time")

    async def _send(self, reply: Reply, nonce: bytes | None, send: Send) -> None:
        instance = self.instance
        head: Headers = [
            (b"content-length", str(len(reply.body)).encode()),
            (wire.INSTANCE.encode(), instance.hex().encode()),
        ]
        if nonce is not None:
            content = reply.slot or bytes(reply.body)
            mac = self._secret.of_answer(nonce, reply.status, instance, content)
            head.append((wire.MAC.encode(), mac.hex().encode()))
        if reply.slot:
            head.append((wire.SLOT.encode(), reply.slot.hex().encode()))
        if reply.status == 503:
            head.append((b"retry-after", b"1"))
        await send({"type": "http.response.start", "status": reply.status, "headers": head})
        await send({"type": "http.response.body", "body": reply.body})


def _may_have_body(scope: Message) -> bool:
    names = {name.lower() for name, _ in scope["headers"]}
    return not scope["http_version"].startswith("1.") or not names.isdisjoint(
        {b"content-length", b"transfer-encoding"}
    )


async def _discard(receive: Receive) -> None:
    """Takes what is left of a request, and of one that was closed: for as long as it is let."""
    while True:
        await receive()


def _fields(raw: Any) -> dict[str, str]:
    """The headers; of those that came twice none, so that nothing is believed twice over."""
    fields: dict[str, str] = {}
    twice = set()
    for name, value in raw:
        key = name.decode("latin-1").lower()
        if key in fields:
            twice.add(key)
        fields[key] = value.decode("latin-1")
    return {key: value for key, value in fields.items() if key not in twice}


def _short_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 15


def _description(headers: dict[str, str]) -> SlotMeta:
    try:
        return SlotMeta.decode(wire.hex_field(headers.get(wire.SLOT), META_BYTES) or b"")
    except FormatError as e:
        raise Refusal(400, str(e)) from None
