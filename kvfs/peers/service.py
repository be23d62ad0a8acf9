"""What a host does for the others: answers for its slots, and tells which they are.

For kvfs.serve, or a few lines in an engine's process. Threads: `start` and `stop` from the one that
owns it; the work has threads of its own.
"""

from __future__ import annotations

import contextlib

from kvfs.errors import ConfigError
from kvfs.peers.announce import INTERVAL_SECONDS, Announcer
from kvfs.peers.app import TURNS, SlotApp
from kvfs.peers.auth import Secret
from kvfs.peers.pools import Pools
from kvfs.peers.server import SlotServer, address_of, bound, is_any
from kvfs.peers.wire import split_address
from kvfs.state.poolfile import DIRECTORY
from kvfs.store import Store


class PeerService:
    """Serves the slots of one store on this host. A context manager."""

    def __init__(
        self, store: Store, listen: str, secret: Secret, *, any_interface: bool = False,
        advertise: str | None = None, directory: str = DIRECTORY, turns: int = TURNS,
        interval: float = INTERVAL_SECONDS,
    ) -> None:  # fmt: skip
        """listen: `IP:port`; advertise: the address that the others are told, default the same;
        directory: of the slot pools; turns: requests for slots at once. Raises InputError,
        ConfigError.
        """
        if advertise is None and is_any(listen) and any_interface:
            raise ConfigError(f"{listen} is no address for other hosts: give --advertise, too")
        if advertise is not None:
            split_address(advertise)
        listener = bound(listen, any_interface=any_interface)
        self.address = advertise or address_of(listener)
        self.pools = Pools(lambda: [ns.identity for ns in store.namespaces()], directory)
        self.app = SlotApp(self.pools, secret, self.address, turns=turns)
        self._server = SlotServer(self.app, self.pools, listener)
        self.announcer = Announcer(store, self.pools, self.address, interval=interval)

    def __enter__(self) -> PeerService:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.pools)
            stack.enter_context(self._server)
            stack.enter_context(self.announcer)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
