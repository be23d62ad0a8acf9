"""The protocol between hosts, for both sides: HTTP/1.1, fixed paths, slots as raw bytes.

  GET /1/slots/NSID/HASH/POSITION/LINEAGE[?of=POOL.GENERATION]
        200: header Kvfs-Slot, the slot's description (kvfs.state.slot); body: its data
        404: it is not here    412: it is, but another one than `of` names
  PUT /1/slots/NSID/HASH/POSITION/LINEAGE, header Kvfs-Slot, body: the data
        201: stored    200: there was one, which was kept; header Kvfs-Slot: the one that is here
        404: no pool for this namespace here
  GET /1/slots/NSID   200: the descriptions of all slots here, one behind the other
  GET /1/status       200: JSON: pools, a list of objects nsid, pool, slots, used, slot_bytes

NSID, HASH, POOL and LINEAGE are 32 hex digits, LINEAGE may be "-": not known. Every request has the
headers Host, Kvfs-Time (milliseconds since 1970), Kvfs-Nonce and Kvfs-Mac; every answer has
Kvfs-Instance, another one each time a server starts, and those to requests whose MAC was right have
a Kvfs-Mac of their own (kvfs.peers.auth). The MACs cover the description of a slot, and its
checksum covers the data. Others: 400 malformed, 401 no right MAC, 408 too slow, 413 too long,
503 busy (Retry-After), body: why, in words. Immutable data, no I/O.
"""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

from kvfs.errors import InputError
from kvfs.state.slot import META_BYTES, Anchor

SLOT = "kvfs-slot"
TIME = "kvfs-time"
NONCE = "kvfs-nonce"
MAC = "kvfs-mac"
INSTANCE = "kvfs-instance"
STATUS_PATH = "/1/status"
SLOTS_PATH = "/1/slots/"
INSTANCE_BYTES = 16
IDLE_SECONDS = 30.0
"""How long a server keeps a connection that asks nothing, or half a head."""
MAX_HEAD = 8192
"""Bytes of a request's or an answer's head at most."""


class Holder(NamedTuple):
    """Who is said to have a slot: a hint, right or plainly stale.

    address: `IP:port`; pool, generation: which slot exactly, b"" and 0: any of the anchor.
    """

    address: str
    pool: bytes = b""
    generation: int = 0


class Target(NamedTuple):
    """What the path of a request for slots says. anchor is None where it is about all of them."""

    nsid: bytes
    anchor: Anchor | None
    pool: bytes = b""
    generation: int = 0


def slot_path(nsid: bytes, anchor: Anchor, pool: bytes = b"", generation: int = 0) -> str:
    lineage = anchor.lineage.hex() or "-"
    path = f"{SLOTS_PATH}{nsid.hex()}/{anchor.hash.hex()}/{anchor.position}/{lineage}"
    return f"{path}?of={pool.hex()}.{generation}" if pool else path


def parse_target(path: str, query: str) -> Target | None:
    """The inverse; None for anything else than such a path."""
    parts = path.removeprefix(SLOTS_PATH).split("/")
    if not path.startswith(SLOTS_PATH) or len(parts) not in (1, 4):
        return None
    try:
        nsid = _id(parts[0])
        if len(parts) == 1:
            return None if query else Target(nsid, None)
        lineage = b"" if parts[3] == "-" else _id(parts[3])
        anchor = Anchor(_id(parts[1]), _number(parts[2]), lineage)
        if not query:
            return Target(nsid, anchor)
        pool, _, generation = query.removeprefix("of=").partition(".")
        return Target(nsid, anchor, _id(pool), _number(generation))
    except ValueError:
        return None


def _id(text: str) -> bytes:
    if len(text) != 32:
        raise ValueError(text)
    return bytes.fromhex(text)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 19):
        raise ValueError(text)
    return int(text)


def hex_field(text: str | None, length: int) -> bytes | None:
    """A header of so many bytes in hex; None if it is none."""
    if text is None or len(text) != 2 * length:
        return None
    try:
        return bytes.fromhex(text)
    except ValueError:
        return None


def descriptions(body: bytes) -> list[bytes]:
    """The descriptions one behind the other, apart."""
    return [body[at : at + META_BYTES] for at in range(0, len(body), META_BYTES)]


def split_address(text: str) -> tuple[str, int]:
    """("IP", port) of `IP:port` or `[IP]:port`. Raises InputError: names are not looked up here,
    since that cannot be bounded in time."""
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        if not colon or not port.isdecimal() or not 0 <= int(port) <= 65535:
            raise ValueError(port)
        address = ipaddress.ip_address(bare)
        if (address.version == 6) != (bare != host):
            raise ValueError(host)
    except ValueError:
        raise InputError(f"{text!r}: an address is IP:PORT or [IP]:PORT") from None
    return bare, int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
