"""Reads many records of one segment, in order: the next stretch while one is looked at.

For those who read whole segments (rebuild, fsck); a fetch has its plan and its own buffers. One
helper thread and two buffers of some MiB, whatever the segment's size. A RecordReader belongs to
one caller at a time; close it, or use it as a context manager.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

from kvfs.backend import Backend, read_into
from kvfs.geometry import Geometry

# Large enough for the full speed of one buffered reader, small enough for two buffers anywhere.
READ_BYTES = 8 << 20

_Pending = tuple[int, int, Future[memoryview]]


class RecordReader:
    """A segment opened for reading stretches of records."""

    def __init__(self, backend: Backend, path: str, geometry: Geometry) -> None:
        """Opens the file. Raises OSError."""
        self.backend = backend
        self.geometry = geometry
        self._at_once = max(1, min(READ_BYTES // geometry.stride, geometry.in_extent))
        self._buffers: list[memoryview] = []
        self._file = backend.open(path)
        self._pool = ThreadPoolExecutor(1, "kvfs-read-ahead")

    def __enter__(self) -> RecordReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._pool.shutdown()
        self.backend.close(self._file)

    def pieces(self, slot: int, count: int) -> Iterator[tuple[int, memoryview]]:
        """Yields (first slot, whole records) for `count` slots from `slot` on, in order.

        Each view is n * stride bytes and valid until the next is asked for. Ends early where the
        file does. Raises OSError where a read fails.
        """
        plan = enumerate(self._plan(slot, count))
        pending: deque[_Pending] = deque()
        try:
            while True:
                while len(pending) < 2 and (step := next(plan, None)) is not None:
                    pending.append(self._submit(*step))
                if not pending:
                    return
                first, records, future = pending.popleft()
                data = future.result()
                whole = len(data) // self.geometry.stride
                if whole:
                    yield first, data[: whole * self.geometry.stride]
                if whole < records:
                    return
        finally:
            wait([future for _, _, future in pending])

    def _plan(self, slot: int, count: int) -> Iterator[tuple[int, int, int]]:
        """(slot, offset, records) of each read: never across a gap between extents."""
        for offset, n in self.geometry.pieces(slot, count):
            for done in range(0, n, self._at_once):
                records = min(self._at_once, n - done)
                yield slot + done, offset + done * self.geometry.stride, records
            slot += n

    def _submit(self, n: int, step: tuple[int, int, int]) -> _Pending:
        slot, offset, records = step
        if len(self._buffers) < 2:
            self._buffers.append(memoryview(bytearray(self._at_once * self.geometry.stride)))
        buffer = self._buffers[n % 2][: records * self.geometry.stride]
        return slot, records, self._pool.submit(self._fill, buffer, offset)

    def _fill(self, buffer: memoryview, offset: int) -> memoryview:
        return buffer[: read_into(self.backend, self._file, [buffer], offset)]
