"""Streams and events: the order of copies, the same on a GPU and without one.

A stream runs what is submitted to it one after the other; two streams know nothing of each other
but through events. `CudaDevice` uses torch.cuda; `CpuDevice` has a worker thread for each stream,
so that code whose order is wrong is wrong on a machine without a GPU as well.

Work that fails keeps its error and raises nowhere: streams go on, and whoever submitted looks.
Streams and events may be used from any thread; what one thread submits stays in its order.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

_POLL_SECONDS = 0.0002


class Work(ABC):
    """Something a stream does. `error` is None until it failed, and final once an event that was
    recorded behind it has come."""

    __slots__ = ("error",)

    def __init__(self) -> None:
        self.error: Exception | None = None

    @abstractmethod
    def run(self) -> None:
        """Does it, or on a GPU: enqueues it in the current stream. May raise anything."""

    def attempt(self) -> None:
        """For streams: runs it and keeps what it raises."""
        try:
            self.run()
        except Exception as e:  # whatever it is, the submitter has to deal with it
            self.error = e


class Event(Protocol):
    """A point in a stream."""

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks the calling thread until the stream has come here, at most `timeout` seconds;
        says whether it has."""


class Stream(Protocol):
    """See the module docstring."""

    def submit(self, work: Work) -> None: ...

    def record(self) -> Event:
        """An event behind all that was submitted so far."""

    def wait_for(self, event: Event) -> None:
        """What is submitted from now on runs after the event."""

    def close(self) -> None:
        """Ends it when all work is done. Nothing may be submitted any more."""


class Device(Protocol):
    """Where paged KV tensors live."""

    name: str

    def stream(self) -> Stream:
        """A new stream beside the one the engine computes in."""

    def fence(self) -> Event | None:
        """An event behind what the calling thread has enqueued for the engine's own computation;
        None where that runs at once."""

    def upload(self, tensor: Any, stream: Stream) -> Any:
        """A small tensor of host memory for work of that stream."""

    def entered(self) -> AbstractContextManager[object]:
        """Within it the calling thread works for this device: to pin memory, a new thread would
        else open the first GPU, whichever the engine's is."""


def device_of(tensor: Any, *, inline: bool = False) -> Device:
    """The device of a tensor's memory; inline: as CpuDevice has it, of no matter on a GPU."""
    return CudaDevice(tensor.device) if tensor.is_cuda else CpuDevice(inline=inline)


# without a GPU


class CpuEvent:
    """Comes when a worker thread gets to it."""

    def __init__(self) -> None:
        self._come = threading.Event()
        self.set = self._come.set

    def wait(self, timeout: float | None = None) -> bool:
        return self._come.wait(timeout)


class CpuStream:
    """A worker thread that keeps order."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvfs-stream", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (step := self._queue.get()) is not None:
            step()

    def submit(self, work: Work) -> None:
        self._queue.put(work.attempt)

    def record(self) -> Event:
        event = CpuEvent()
        self._queue.put(event.set)
        return event

    def wait_for(self, event: Event) -> None:
        self._queue.put(event.wait)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


class InlineStream:
    """Does what is submitted in the thread that submits it: no other one has to be woken, which on
    a busy host takes longer than many copies. For whoever waits for the end of them anyway."""

    def submit(self, work: Work) -> None:
        work.attempt()

    def record(self) -> Event:
        event = CpuEvent()
        event.set()
        return event

    def wait_for(self, event: Event) -> None:
        event.wait()

    def close(self) -> None:
        """There is nothing to end."""


class CpuDevice:
    """The engine computes on the thread that calls, so there is nothing to wait for."""

    name = "cpu"

    def __init__(self, *, inline: bool = False) -> None:
        """inline: with streams that have no thread."""
        self.inline = inline

    def stream(self) -> Stream:
        return InlineStream() if self.inline else CpuStream()

    def fence(self) -> Event | None:
        return None

    def upload(self, tensor: Any, stream: Stream) -> Any:
        return tensor

    def entered(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()


# with one


class CudaEvent:
    """A torch.cuda.Event that was recorded."""

    def __init__(self, stream: Any) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is None:
            self.event.synchronize()
            return True
        until = time.monotonic() + timeout
        while not self.event.query():
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_SECONDS)
        return True


class CudaStream:
    """A torch.cuda.Stream; `submit` enqueues at once, in the thread that calls."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def submit(self, work: Work) -> None:
        with torch.cuda.stream(self.stream):
            work.attempt()

    def record(self) -> Event:
        return CudaEvent(self.stream)

    def wait_for(self, event: Event) -> None:
        if isinstance(event, CudaEvent):
            self.stream.wait_event(event.event)
        else:
            event.wait()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # a device that has failed has said so before
            self.stream.synchronize()


class CudaDevice:
    """A GPU. Its streams have a higher priority than the default one: copies are short."""

    def __init__(self, device: Any) -> None:
        self.device = torch.device(device)
        self.name = str(self.device)

    def stream(self) -> Stream:
        return CudaStream(torch.cuda.Stream(device=self.device, priority=-1))

    def fence(self) -> Event | None:
        return CudaEvent(self.current().stream)

    def upload(self, tensor: Any, stream: Stream) -> Any:
        # In any other stream it would wait for what the engine computes, or nobody for it.
        assert isinstance(stream, CudaStream)
        with torch.cuda.stream(stream.stream):
            return tensor.to(self.device, non_blocking=True)

    def entered(self) -> AbstractContextManager[object]:
        device: AbstractContextManager[object] = torch.cuda.device(self.device)
        return device

    def current(self) -> CudaStream:
        """The stream the calling thread computes in, for `SwapIn.wait_layer`."""
        return CudaStream(torch.cuda.current_stream(self.device))
