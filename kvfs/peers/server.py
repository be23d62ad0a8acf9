"""The socket that other hosts ask for slots, and the thread that answers: hypercorn on trio.

Binds the one address it is given, never all of them unless told so. What may be read, waited for
and kept is bounded: heads of a few KiB, an end for connections that do nothing, one for peers that
take nothing, a few requests at once (kvfs.peers.app), and a number of connections, which leaves the
process files for everything else.

Threads: `start` and `stop` from the one that owns it; the loop has a thread of its own.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import resource
import socket
import threading
from functools import partial

import trio
from hypercorn.config import Config

from kvfs.errors import BackendError, ConfigError
from kvfs.peers.app import SlotApp
from kvfs.peers.connection import Connections
from kvfs.peers.pools import Pools
from kvfs.peers.wire import IDLE_SECONDS, MAX_HEAD, join_address, split_address

log = logging.getLogger(__name__)
STUCK_SECONDS = 10.0
"""How long a peer may take nothing of what was sent, or send nothing of what it announced."""
STOP_SECONDS = 2.0
_TIDY_SECONDS = 1.0
_BACKLOG = 1024
_FILES = 65536
_MOST = 4096


class SlotServer:
    """Answers other hosts until it is stopped. A context manager."""

    def __init__(
        self, app: SlotApp, pools: Pools, listener: socket.socket, *, idle: float = IDLE_SECONDS,
        most: int = _MOST,
    ) -> None:  # fmt: skip
        """listener: of `bound`; closed with the server. idle: seconds, see IDLE_SECONDS; most:
        connections, fewer where the process may not open twice as many files."""
        self.app = app
        self.pools = pools
        self._listener = listener
        self._idle = idle
        self._most = most
        self._thread = threading.Thread(target=self._run, name="kvfs-peers", daemon=True)
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._ended = trio.Event()

    @property
    def address(self) -> str:
        return address_of(self._listener)

    def start(self) -> SlotServer:
        """Returns when it answers. Raises BackendError if it cannot."""
        _raise_file_limit()
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise BackendError(f"{self.address}: {self._failure}") from self._failure
        return self

    def stop(self) -> None:
        """Lets what is under way end, for a moment, and leaves."""
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._ended.set)
        self._thread.join()
        self._listener.close()

    def __enter__(self) -> SlotServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except Exception as e:
            self._failure = e
            if self._started.is_set():
                log.exception("the server of slots ended; this is a bug of kvfs")
        finally:
            self._started.set()

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        connections = Connections(self.app, _config(self._idle), min(self._most, _share()))
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._listener.dup()))
        async with trio.open_nursery() as under_way:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._tidy, connections)
                listening = partial(
                    trio.serve_listeners, connections.serve, handler_nursery=under_way
                )
                await nursery.start(listening, [listener])
                self._started.set()
                await self._ended.wait()
                nursery.cancel_scope.cancel()
            under_way.cancel_scope.deadline = trio.current_time() + STOP_SECONDS
            await connections.leave()

    async def _tidy(self, connections: Connections) -> None:
        while True:
            await trio.sleep(_TIDY_SECONDS)
            await connections.close_idle()
            self.pools.let_go()


def bound(
    address: str, *, any_interface: bool = False, stuck: float = STUCK_SECONDS
) -> socket.socket:
    """A socket that listens on `IP:port`; port 0: any free one. Raises InputError, ConfigError.

    stuck: seconds, see STUCK_SECONDS.
    """
    host, port = split_address(address)
    if is_any(address) and not any_interface:
        raise ConfigError(
            f"{address} is every interface of this host; name one address, or say "
            "--any-interface if that is meant"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit it: one whose peer takes nothing ends, frozen or cut off.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stuck * 1000))
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as e:
        listener.close()
        raise ConfigError(f"{address}: {e.strerror}") from e
    return listener


def is_any(address: str) -> bool:
    """Whether it stands for every interface of this host."""
    return ipaddress.ip_address(split_address(address)[0]).is_unspecified


def address_of(listener: socket.socket) -> str:
    return join_address(*listener.getsockname()[:2])


def _config(idle: float) -> Config:
    config = Config()
    config.accesslog = config.errorlog = None
    config.loglevel = "CRITICAL"  # it logs what strangers send; the application counts
    config.keep_alive_timeout = idle
    config.keep_alive_max_requests = 1 << 62
    config.read_timeout = None
    config.h11_max_incomplete_size = MAX_HEAD
    config.h2_max_concurrent_streams = 1
    config.h2_max_header_list_size = MAX_HEAD
    config.max_app_queue_size = 4
    config.include_server_header = config.include_date_header = False
    return config


def _share() -> int:
    """Connections that leave the process as many files again."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else soft // 2


def _raise_file_limit() -> None:
    """Idle connections of strangers must not use up the files that the store needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
