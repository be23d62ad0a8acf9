"""What the commands that talk to other hosts share."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from kvfs.peers.client import PeerClient

F = TypeVar("F", bound=Callable[..., Any])

secret_option = click.option(
    "--secret-file", metavar="FILE", envvar="KVFS_PEER_SECRET_FILE", show_envvar=True,
    help="The secret that the hosts share, in a file that others cannot read. Default: "
         "$KVFS_PEER_SECRET.",
)  # fmt: skip
slots_directory_option = click.option(
    "--slots", metavar="DIR", default="/dev/shm", show_default=True,
    help="Where the slot pools of this host are.",
)  # fmt: skip


def client(secret_file: str | None) -> PeerClient:
    """A client with the secret that the options name. Raises ConfigError."""
    from kvfs.peers.auth import Secret
    from kvfs.peers.client import PeerClient

    return PeerClient(Secret.load(secret_file))


def client_if_any(secret_file: str | None) -> PeerClient | None:
    """The same; None if no secret is named, so that no other host can be asked."""
    from kvfs.peers.auth import SECRET_VARIABLE

    named = secret_file is not None or os.environ.get(SECRET_VARIABLE)
    return client(secret_file) if named else None


def resolved(text: str) -> str:
    """`IP:port` of `host:port`, a name looked up now. Raises InputError."""
    import socket

    from kvfs.errors import InputError
    from kvfs.peers.wire import join_address, split_address

    try:
        split_address(text)
        return text
    except InputError:
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdecimal():
            raise
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, OverflowError, ValueError) as e:
        raise InputError(f"{text}: {e}") from None
    address = found[0][4]
    return join_address(str(address[0]), int(address[1]))
