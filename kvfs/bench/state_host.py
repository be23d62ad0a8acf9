"""The host that `state.*` pulls from: a process with one slot, which also sends it plainly.

    python -m kvfs.bench.state_host IP DIRECTORY

Prints a JSON object: slots (address of the server of slots), plain (address of a server that
answers REQUEST_BYTES with the bytes of a slot, and does nothing else). Ends when its standard input
does.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading

from kvfs import presets
from kvfs.layout import Identity
from kvfs.peers.app import SlotApp
from kvfs.peers.auth import Secret
from kvfs.peers.pools import Pools
from kvfs.peers.server import SlotServer, address_of, bound
from kvfs.state.poolfile import Geometry
from kvfs.state.slot import Anchor
from kvfs.state.slots import SlotPool

SECRET = Secret(b"for measuring, between two processes of one machine")
REQUEST_BYTES = 302
"""As long as the request for a slot."""
ANCHOR = Anchor(b"anchor of a slot", 130_816, b"and its lineage.")


def identity() -> Identity:
    return presets.get("deepseek-v4.1-flash", weights="bench", tokenizer="bench")


def main() -> None:
    ip, directory = sys.argv[1:]
    made = identity()
    assert made.state is not None
    size = made.state.slot_bytes
    data = os.urandom(size)
    plain = bound(f"{ip}:0")
    threading.Thread(target=_send_plainly, args=(plain, data), daemon=True).start()
    listener = bound(f"{ip}:0")
    with (
        SlotPool.open(made, Geometry(4, size).file_bytes, directory=directory) as pool,
        Pools(lambda: [made], directory) as pools,
    ):
        pool.write(ANCHOR, data)
        with SlotServer(SlotApp(pools, SECRET, address_of(listener)), pools, listener) as server:
            print(json.dumps({"slots": server.address, "plain": address_of(plain)}), flush=True)
            sys.stdin.read()


def _send_plainly(listener: socket.socket, data: bytes) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_send_to, args=(connection, data), daemon=True).start()


def _send_to(connection: socket.socket, data: bytes) -> None:
    with connection, contextlib.suppress(ConnectionError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while connection.recv(REQUEST_BYTES, socket.MSG_WAITALL):
            connection.sendall(data)


if __name__ == "__main__":
    main()
