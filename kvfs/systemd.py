"""What systemd wants to hear from a service of type notify (sd_notify(3)); no dependency needed."""

from __future__ import annotations

import contextlib
import os
import socket


def notify(state: str) -> None:
    """Tells systemd, if it started this process, how far it is: "READY=1", "STOPPING=1"."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.sendto(state.encode(), address)
