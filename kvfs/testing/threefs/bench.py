"""What the rings cost: reads through a stand-in, beside plain preadv of the files behind it.

    python -m kvfs.testing.threefs.bench

Prints a line for each size of I/O: GB/s of preadv, GB/s through the ring and their ratio; then for
one I/O, in microseconds, where the time goes: the copy, the stand-in (processor time, with the
copy), in our code, measured by itself with a daemon that answers at once, and in waiting and
switching, which is the rest. Needs root, /dev/fuse and /dev/shm; leaves nothing behind.
"""

from __future__ import annotations

import json
import mmap
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
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
        made = backend.create("data")
        data = memoryview(os.urandom(FILE_BYTES))
        for at in range(0, FILE_BYTES, 1 << 20):
            backend.writev(made, [data[at : at + (1 << 20)]], at)
        backend.close(made)
        backend.lend(arena)
        fd = os.open(host.backing / "data", os.O_RDONLY)
        file = backend.open("data")
        yield backend, file, fd, arena
        backend.close(file)
        os.close(fd)
    finally:
        backend.release()
        arena.close()


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


def main() -> None:
    if reason := may_serve():
        raise SystemExit(reason)
    own, posts = own_seconds()
    with tempfile.TemporaryDirectory() as root:
        for size in SIZES:
            with cluster(Path(root) / str(size)) as (host,):
                row = measure(host, size)
                host.end(15)
                totals = json.loads(host.said.replace("totals ", "").replace("'", '"'))
            daemon = totals["read_cpu"] / max(1, totals["reads"])
            print(
                f"{size >> 10:5} KiB: preadv {size / row['preadv'] / 1e9:6.2f} GB/s, ring "
                f"{size / row['ring'] / 1e9:6.2f} GB/s, ratio {row['preadv'] / row['ring']:.2f}; "
                f"an I/O: copy {row['preadv'] * 1e6:.1f} us, stand-in {daemon * 1e6:.1f} us with "
                f"it, ours {own * 1e6:.2f} us, all {row['ring'] * 1e6:.1f} us",
                flush=True,
            )
    print(f"our own time for an I/O, batches of {BATCH}: {own * 1e6:.2f} us; {posts:.0f} post")


if __name__ == "__main__":
    main()
