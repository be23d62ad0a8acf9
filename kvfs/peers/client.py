"""Asks other hosts for slots, and gives them some. Whatever goes wrong is a reason, in time.

Connections are kept for the next request, for less than the peer keeps them. A peer that did not
answer is left alone for a second, so that a host that is down does not take its deadline from every
request; one that was given next to no time is not blamed for it. An answer whose MAC, kind or
length is not right is none; a slot is handed out only after its description is the one that was
asked for (anchor, lineage, layout; pool and generation if a hint named them) and its data match the
checksum in it. A peer that was started anew is noticed by its instance, which every answer names.

Threads: all methods, from any. Fork: a child begins with no connections. Nothing is raised.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import xxhash

from kvfs.errors import FormatError, InputError
from kvfs.layout import StateLayout
from kvfs.peers import wire
from kvfs.peers.auth import MAC_BYTES, NONCE_BYTES, Secret, same
from kvfs.peers.http import Connection, Head, Late, PeerError
from kvfs.peers.wire import Holder
from kvfs.state.slot import META_BYTES, Anchor, SlotMeta
from kvfs.state.slots import Slot

log = logging.getLogger(__name__)
AWAY_SECONDS = 1.0
LEAST_SECONDS = 0.02
"""Who did not answer within less may be there all the same."""
KEPT = 8
"""Connections to one peer that are kept."""
KEPT_SECONDS = wire.IDLE_SECONDS - 5
"""How long: the peer must not close one that is taken just now."""
MOST_PEERS = 4096
"""Whose instances are known."""
_TIDY_SECONDS = 1.0
BUSY = "busy"
"""What the reason begins with where another try may do."""
_WORDS = {401: "refused", 404: "not there", 412: "stale hint", 503: BUSY}


class Pulled(NamedTuple):
    """slot: verified, or None; reason: why not; "" with a slot."""

    slot: Slot | None
    reason: str


class Pushed(NamedTuple):
    """meta: the slot that the peer has now, None if it has none; new: it was stored by this."""

    meta: SlotMeta | None
    new: bool
    reason: str


class Asked(NamedTuple):
    """value: what was asked for, or None; reason: why not."""

    value: Any
    reason: str


class PeerClient:
    """A host's side that asks. A context manager."""

    def __init__(
        self, secret: Secret, *, clock: Callable[[], float] = time.time,
        on_restart: Callable[[str], object] = lambda address: None,
    ) -> None:  # fmt: skip
        """on_restart: called with the address of a peer that was started anew, on the thread that
        noticed; what was known of its slots is worth nothing any more."""
        self._secret = secret
        self._clock = clock
        self._on_restart = on_restart
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._idle: dict[str, list[tuple[Connection, float]]] = {}  # and since when
        self._tidied = time.monotonic()
        self._instances: dict[str, bytes] = {}
        self._away: dict[str, tuple[float, str]] = {}

    def close(self) -> None:
        """Closes the connections that are kept. The client may be used on."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for connection, _ in (c for kept in idle.values() for c in kept):
            connection.close()

    def __enter__(self) -> PeerClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def pull(
        self, holder: Holder, nsid: bytes, anchor: Anchor, layout: StateLayout, deadline: float,
        into: Any = None,
    ) -> Pulled:  # fmt: skip
        """The slot of an anchor from a peer.

        anchor: with its lineage; layout: of the namespace; deadline: of time.monotonic; into: a
        writable buffer of slot_bytes, whose content is not to be used unless there is a slot.
        """
        if not anchor.lineage:
            return Pulled(None, "the anchor has no lineage to verify the slot by")
        data = bytearray(layout.slot_bytes) if into is None else into
        view = memoryview(data).cast("B")
        path = wire.slot_path(nsid, anchor, holder.pool, holder.generation)

        def take(connection: Connection, head: Head, answer: _Answer) -> Slot:
            meta = _described(head)
            answer.require(_bytes(head))
            _check(meta, holder, nsid, anchor, layout)
            if head.length != len(view):
                raise PeerError(f"the slot has {head.length} bytes, not {len(view)}")
            summed = xxhash.xxh3_64()
            connection.read(view, deadline, summed.update)
            if summed.intdigest() != meta.data_sum:
                raise PeerError("the data of the slot are damaged (checksum)")
            return Slot(meta, data if into is not None else memoryview(data).toreadonly())

        return Pulled(*self._ask("GET", holder.address, path, b"", b"", deadline, take))

    def push(self, address: str, slot: Slot, deadline: float) -> Pushed:
        """Gives a peer a slot; it keeps the one it has for the anchor."""
        meta = slot.meta
        anchor = Anchor(meta.anchor, meta.position, meta.lineage)

        def take(connection: Connection, head: Head, answer: _Answer) -> tuple[SlotMeta, bool]:
            kept = _described(head)
            answer.require(_bytes(head))
            connection.read_all(head.length, deadline)
            if not kept.is_for(anchor):
                raise PeerError("the peer says that it stored another slot")
            return kept, head.status == 201

        path, content = wire.slot_path(meta.nsid, anchor), meta.encode()
        body = memoryview(slot.data).cast("B")
        done, reason = self._ask("PUT", address, path, content, body, deadline, take)
        return Pushed(None, False, reason) if done is None else Pushed(done[0], done[1], "")

    def slots(self, address: str, nsid: bytes, deadline: float) -> Asked:
        """The descriptions of all slots of a namespace that a peer has: list[SlotMeta]."""

        def take(connection: Connection, head: Head, answer: _Answer) -> list[SlotMeta]:
            body = connection.read_all(head.length, deadline)
            answer.require(body)
            return [SlotMeta.decode(part) for part in wire.descriptions(body)]

        path = f"{wire.SLOTS_PATH}{nsid.hex()}"
        return Asked(*self._ask("GET", address, path, b"", b"", deadline, take))

    def status(self, address: str, deadline: float) -> Asked:
        """What a peer says of its pools: see kvfs.peers.wire."""

        def take(connection: Connection, head: Head, answer: _Answer) -> Any:
            body = connection.read_all(head.length, deadline)
            answer.require(body)
            return json.loads(body)

        return Asked(*self._ask("GET", address, wire.STATUS_PATH, b"", b"", deadline, take))

    # one request

    def _ask(
        self, method: str, address: str, path: str, content: bytes, body: Any, deadline: float,
        take: Callable[[Connection, Head, _Answer], Any],
    ) -> tuple[Any, str]:  # fmt: skip
        """(what `take` makes of a good answer, "") or (None, the reason why there is none)."""
        self._mine()
        given = deadline - time.monotonic()
        try:
            if given <= 0:
                return None, "no time left to ask"
            self._require_there(address)
            while True:
                connection = self._connection(address, deadline)
                again = connection.used  # the peer may have closed it meanwhile
                try:
                    return self._once(connection, method, path, content, body, deadline, take), ""
                except _Gone:
                    if not again:
                        raise
        except _Refused as e:
            return None, str(e)
        except PeerError as e:
            if not isinstance(e, Late) or given >= LEAST_SECONDS:
                self._note_away(address, str(e))
            return None, str(e)
        except (InputError, FormatError, ValueError) as e:
            return None, f"the answer is none: {e}"

    def _once(
        self, connection: Connection, method: str, path: str, content: bytes, body: Any,
        deadline: float, take: Callable[[Connection, Head, _Answer], Any],
    ) -> Any:  # fmt: skip
        nonce, now = secrets.token_bytes(NONCE_BYTES), int(self._clock() * 1000)
        mac = self._secret.of_request(method, path, connection.address, now, nonce, content)
        headers = {wire.TIME: str(now), wire.NONCE: nonce.hex(), wire.MAC: mac.hex()}
        if content:
            headers[wire.SLOT] = content.hex()
        sound = False
        try:
            try:
                head = connection.request(method, path, headers, body, deadline)
            except Late:
                raise
            except PeerError as e:
                raise _Gone(str(e)) from None
            answer = _Answer(self._secret, nonce, head)
            if head.status >= 300:
                text = connection.read_all(min(head.length, 1 << 16), deadline)
                refusal = answer.refusal(text)
                self._note_instance(connection.address, answer)
                # A body that was not taken may still be on its way there.
                sound = connection.used = isinstance(refusal, _Refused) and method == "GET"
                raise refusal
            value = take(connection, head, answer)
            self._note_instance(connection.address, answer)
            connection.used = sound = True
            return value
        finally:
            self._put_back(connection, sound)

    # connections and what is known of peers

    def _mine(self) -> None:
        if self._pid != os.getpid():
            self._lock = threading.Lock()
            self._begin()

    def _connection(self, address: str, deadline: float) -> Connection:
        self._tidy()
        with self._lock:
            kept = self._idle.get(address)
            if kept:
                return kept.pop()[0]
        host, port = wire.split_address(address)
        return Connection(host, port, deadline)

    def _put_back(self, connection: Connection, sound: bool) -> None:
        if sound:
            with self._lock:
                kept = self._idle.setdefault(connection.address, [])
                if len(kept) < KEPT:
                    kept.append((connection, time.monotonic()))
                    return
        connection.close()

    def _tidy(self) -> None:
        """Leaves connections that were kept for long enough, and forgets who was away."""
        now = time.monotonic()
        with self._lock:
            if now - self._tidied < _TIDY_SECONDS:
                return
            self._tidied, idle = now, self._idle
            self._idle = {}
            over = []
            for address, kept in idle.items():
                fresh = [(c, since) for c, since in kept if now - since < KEPT_SECONDS]
                over += [c for c, since in kept if now - since >= KEPT_SECONDS]
                if fresh:
                    self._idle[address] = fresh
            self._away = {a: said for a, said in self._away.items() if now < said[0]}
        for connection in over:
            connection.close()

    def _require_there(self, address: str) -> None:
        until, why = self._away.get(address, (0.0, ""))
        if time.monotonic() < until:
            raise _Refused(f"the peer was away a moment ago: {why}")

    def _note_away(self, address: str, why: str) -> None:
        log.info("peer %s: %s", address, why)
        with self._lock:
            self._away[address] = (time.monotonic() + AWAY_SECONDS, why)
            idle = self._idle.pop(address, [])
        for connection, _ in idle:
            connection.close()

    def _note_instance(self, address: str, answer: _Answer) -> None:
        """Only what comes with a right MAC is believed."""
        if not answer.genuine:
            return
        with self._lock:
            before = self._instances.pop(address, None)
            self._instances[address] = answer.instance
            while len(self._instances) > MOST_PEERS:  # the one asked least lately
                del self._instances[next(iter(self._instances))]
        if before not in (None, answer.instance):
            log.info("peer %s was started anew", address)
            self._on_restart(address)


class _Gone(PeerError):
    """Nothing was answered at all: on a connection that was kept, worth another try."""


class _Refused(PeerError):
    """The peer is there and answers; it just does not give what was asked for."""


class _Answer:
    """Whether an answer is from somebody who has the secret."""

    def __init__(self, secret: Secret, nonce: bytes, head: Head) -> None:
        self._secret, self._nonce, self._head = secret, nonce, head
        self.instance = wire.hex_field(head.headers.get(wire.INSTANCE), wire.INSTANCE_BYTES) or b""
        self.genuine = False

    def require(self, content: bytes) -> None:
        """Raises PeerError unless the MAC of the answer with this content is right."""
        given = wire.hex_field(self._head.headers.get(wire.MAC), MAC_BYTES) or b""
        right = self._secret.of_answer(self._nonce, self._head.status, self.instance, content)
        if not same(given, right):
            raise PeerError("the answer is not from a host with the same secret")
        self.genuine = True

    def refusal(self, text: bytes) -> PeerError:
        """What a status that is no success stands for. The peer is there only if it is genuine."""
        status = self._head.status
        word = _WORDS.get(status, f"status {status}")
        said = f"{word}: {text.decode('utf-8', 'replace')[:200]}" if text else word
        if status == 401:
            return PeerError(said)
        try:
            self.require(text)
        except PeerError as e:
            return e
        return _Refused(said)


def _bytes(head: Head) -> bytes:
    return wire.hex_field(head.headers.get(wire.SLOT), META_BYTES) or b""


def _described(head: Head) -> SlotMeta:
    return SlotMeta.decode(_bytes(head))


def _check(
    meta: SlotMeta, holder: Holder, nsid: bytes, anchor: Anchor, layout: StateLayout
) -> None:
    """Raises PeerError unless this is the slot that was asked for."""
    if meta.nsid != nsid or not meta.is_for(anchor):
        raise PeerError("the peer answers with a slot of another prefix")
    if meta.layout != layout:
        raise PeerError("the slot has another layout")
    if holder.pool and (meta.pool, meta.generation) != (holder.pool, holder.generation):
        raise PeerError("the peer answers with another generation of the slot")
