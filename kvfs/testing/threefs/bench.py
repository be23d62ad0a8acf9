"""What the rings cost: reads through a stand-in, beside plain preadv of the files behind it.

    python -m kvfs.testing.threefs.bench [--json]

Prints a line for each size of I/O: GB/s of preadv, GB/s through the ring and their ratio; then for
one I/O, in microseconds, where the time goes: the copy, the stand-in (processor time, without the
copy), our own code, and the rest, which is waiting and switching between processes. Our own is
measured by itself: the ring with a daemon that answers at once, the backend with a ring that does.
Last, how soon a read ends when the daemon is killed under it, and how soon one succeeds again.
Needs root, /dev/fuse and /dev/shm; leaves nothing behind.
"""

from __future__ import annotations

import ast
import contextlib
import json
import mmap
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvfs.arena import Arena
from kvfs.backend import usrbio_layout as layout
from kvfs.backend.semaphores import Semaphore
from kvfs.backend.threefs import ThreefsBackend
from kvfs.backend.usrbio_layout import RingShape, ring_name
from kvfs.backend.usrbio_ring import Io, Ring
from kvfs.backend.usrbio_session import address_of
from kvfs.testing.threefs.host import Host, cluster, may_serve
from kvfs.testing.threefs.rings import ServedRing, Shared

FILE_BYTES = 64 << 20
BATCH = 16
SIZES = (4 << 10, 112 << 10, 1 << 20)
ROUNDS = 15


class _AtOnce(Semaphore):
    """The daemon's semaphore, of one that has done all I/O when it is posted."""

    def __init__(self) -> None:
        self.posts = 0
        self.outside = 0.0
        self.served: ServedRing | None = None

    def post(self) -> None:
        began = time.perf_counter()
        self.posts += 1
        assert self.served is not None
        while jobs := self.served.jobs():
            for first, count in jobs:
                self.served.finish(first, [4096] * count)
        self.outside += time.perf_counter() - began


def own_seconds(batch: int = BATCH, rounds: int = 500) -> tuple[float, float]:
    """(seconds of our own code for one I/O, posts for one batch), nobody else running."""
    posted = _AtOnce()
    with tempfile.NamedTemporaryFile(dir=layout.SHM, prefix="kvfs-bench-") as file:
        file.truncate(RingShape.size_for(255))
        memory = memoryview(mmap.mmap(file.fileno(), 0))
        name = ring_name(uuid.uuid4(), read=True, depth=0, flags=3)
        posted.served = ServedRing(Shared(file.name, name, 1, 0))
    ring = Ring(memory, address_of(memory), posted, lambda: True, lambda key: 1 << 40)
    ios = [Io(bytes(16), i << 20, 7, i << 20, 4096) for i in range(batch)]
    times = []
    for _ in range(rounds):
        posted.outside, began = 0.0, time.perf_counter()
        ring.run(ios, 1.0)
        times.append(time.perf_counter() - began - posted.outside)
    return statistics.median(times) / batch, posted.posts / rounds


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@contextmanager
def _reading(host: Host) -> Any:
    """(backend, its open file, the descriptor behind it, lent memory)."""
    backend = ThreefsBackend(str(host.point))
    arena = Arena.create(BATCH * max(SIZES), directory=layout.SHM, tag="bench")
    try:
        backend.unlink("data")
        made = backend.create("data")
        data = memoryview(os.urandom(FILE_BYTES))
        for at in range(0, FILE_BYTES, 1 << 20):
            backend.writev(made, [data[at : at + (1 << 20)]], at)
        backend.close(made)
        backend.lend(arena)
        fd = os.open(host.backing / "data", os.O_RDONLY)
        file = backend.open("data")
        yield backend, file, fd, arena
        with contextlib.suppress(OSError):  # of a daemon that is gone
            backend.close(file)
        os.close(fd)
    finally:
        backend.release()
        arena.close()


def backend_seconds(host: Host, batch: int = BATCH, rounds: int = 500) -> float:
    """Seconds of the backend's own code for one I/O of a read into lent memory, beside the ring."""
    with _reading(host) as (backend, file, _, arena):
        session = backend.session()
        session.run = lambda ios: [io.length for io in ios]
        views = [arena.view[i << 12 : (i + 1) << 12] for i in range(batch)]
        backend.readv(file, views, 0)
        times = [_timed(lambda: backend.readv(file, views, 0)) for _ in range(rounds)]
        for view in views:
            view.release()
        del session.run
    return statistics.median(times) / batch


def measure(host: Host, size: int) -> dict[str, float]:
    """One size of I/O, batches of BATCH; ring and preadv in turns."""
    with _reading(host) as (backend, file, fd, arena):
        session = backend.session()
        _, handle = backend._using(file)
        places = session.places([arena.view[i * size : (i + 1) * size] for i in range(BATCH)])
        ios = [Io(key, at, handle.file, i * (1 << 20), n) for i, (key, at, n) in enumerate(places)]
        views = [arena.view[i * size : (i + 1) * size] for i in range(BATCH)]

        def plain() -> None:
            for i, view in enumerate(views):
                os.preadv(fd, [view], i * (1 << 20))

        def ring() -> None:
            assert session.run(ios) == [size] * BATCH

        pairs = [(_timed(plain), _timed(ring)) for _ in range(ROUNDS + 3)][3:]
        for view in views:
            view.release()
    return {
        "size": size,
        "preadv": statistics.median(a for a, _ in pairs) / BATCH,
        "ring": statistics.median(b for _, b in pairs) / BATCH,
    }


def outage(host: Host) -> dict[str, float]:
    """Seconds from the daemon's death until it is known, until a read that was under way ends (into
    memory of whose next owner the daemon's last threads must not write), and from its return to a
    read that succeeds."""
    with _reading(host) as (backend, file, _, arena):
        view = arena.view[: 1 << 20]
        host.set(delay_ms=60_000)
        session = backend.session()
        dead: list[float] = []

        def kill() -> None:
            host.end(signal.SIGKILL)
            dead.append(time.monotonic())
            while not session.dead:
                time.sleep(0.005)
            dead.append(time.monotonic())

        killer = threading.Timer(0.3, kill)
        killer.start()
        with contextlib.suppress(OSError):
            backend.readv(file, [view], 0)
        ended = time.monotonic()
        killer.join()
        host.unmount()
        host.start()
        back = time.monotonic()
        while True:
            with contextlib.suppress(OSError):
                reopened = backend.open("data")
                got = backend.readv(reopened, [view], 0)
                backend.close(reopened)
                if got == len(view):
                    break
            time.sleep(0.01)
        view.release()
        again = time.monotonic() - back
        return {"noticed": dead[1] - dead[0], "ended": ended - dead[0], "again": again}


def rows() -> Iterator[dict[str, float]]:
    """One for each size. Times are seconds of one I/O; posts are of a batch."""
    own, posts = own_seconds()
    with tempfile.TemporaryDirectory() as root:
        for size in SIZES:
            with cluster(Path(root) / str(size)) as (host,):
                backend = backend_seconds(host)
                row = measure(host, size)
                host.end(signal.SIGTERM)
                totals = ast.literal_eval(host.said.removeprefix("totals "))
            daemon = totals["read_cpu"] / max(1, totals["reads"]) - row["preadv"]
            rest = row["ring"] - row["preadv"] - daemon - own - backend
            yield {
                **row, "ratio": row["preadv"] / row["ring"], "daemon": max(0.0, daemon),
                "own_ring": own, "own_backend": backend, "rest": max(0.0, rest),
                "posts": posts,
            }  # fmt: skip


def _line(row: dict[str, float]) -> str:
    size, copy, all_ = row["size"], row["preadv"], row["ring"]
    parts = {
        "copy": copy, "stand-in": row["daemon"], "our ring": row["own_ring"],
        "our backend": row["own_backend"], "waiting": row["rest"],
    }  # fmt: skip
    told = ", ".join(f"{name} {seconds * 1e6:.1f}" for name, seconds in parts.items())
    return (
        f"{int(size) >> 10:5} KiB: preadv {size / copy / 1e9:6.2f} GB/s, ring "
        f"{size / all_ / 1e9:6.2f} GB/s, ratio {row['ratio']:.2f}; {all_ * 1e6:.1f} us: {told}"
    )


def main() -> None:
    if reason := may_serve():
        raise SystemExit(reason)
    for row in rows():
        print(json.dumps(row) if "--json" in sys.argv[1:] else _line(row), flush=True)
    if "--json" not in sys.argv[1:]:
        own = row["own_ring"] + row["own_backend"]
        print(f"our own: {own * 1e6:.2f} us an I/O, {row['posts']:.0f} post a batch of {BATCH}")
    with tempfile.TemporaryDirectory() as root, cluster(Path(root)) as (host,):
        told = outage(host)
    if "--json" in sys.argv[1:]:
        print(json.dumps(told))
    else:
        print(f"a daemon killed: noticed after {told['noticed']:.2f} s, the read under it ends "
              f"after {told['ended']:.2f} s; reads again {told['again']:.2f} s after its return"
              )  # fmt: skip


if __name__ == "__main__":
    main()
