"""Streams and events of a transport: CUDA's on GPUs. On CPUs the calling thread, and what it has to wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Protocol

import torch

from ..comm.waiting import gpu_ends_within, leave_running
from ..records.clock import StageClock

# Seconds for which a failed refit waits for its own kernels.
_DRAIN_WITHIN = 5.0


class Event(Protocol):
    """The begin and end of some work on a stream; ``with stream.timed(…)`` measures it."""

    def query(self) -> bool:
        """Whether it has ended."""


class Stream(Protocol):
    """Work that is done in order."""

    def enter(self) -> None:
        """What follows is enqueued on this stream."""

    def wait_caller(self) -> None:
        """Hold this stream up until what the caller has enqueued so far is done."""

    def wait_event(self, event: Event) -> None:
        """Hold this stream up until ``event``, which was recorded before, has ended."""

    def wait_stream(self, stream: Stream) -> None:
        """Hold this stream up until all that was enqueued on another one has ended."""

    def record(self, event: Event) -> None:
        """End ``event`` behind all that this stream has been given so far."""

    def timed(
        self, clock: StageClock, stage: str, event: Event, finish: Callable[[str], None] | None = None
    ) -> Timed:
        """A context in which work on this stream makes up ``event``, billed to ``stage``.

        ``finish`` is called with the stage where the calling thread has to wait for what the work began.
        """


class Timed(Protocol):
    """A context manager."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class _HostEvent:
    """Work of the calling thread, and the end of what it began, which is waited for when it is asked for."""

    def __init__(self) -> None:
        self._finish: tuple[StageClock, str, Callable[[str], None]] | None = None

    def query(self) -> bool:
        if self._finish is not None:
            clock, stage, finish = self._finish
            self._finish = None
            with clock.stage(stage):
                finish(stage)
        return True

    def finish_with(self, clock: StageClock, stage: str, finish: Callable[[str], None]) -> None:
        """It has ended once ``finish`` returns."""
        self._finish = clock, stage, finish


class _HostStream:
    """The calling thread."""

    def enter(self) -> None:
        return None

    def wait_caller(self) -> None:
        return None

    def wait_event(self, event: Event) -> None:
        event.query()

    def wait_stream(self, stream: Stream) -> None:
        return None

    def record(self, event: Event) -> None:
        return None

    def timed(
        self, clock: StageClock, stage: str, event: Event, finish: Callable[[str], None] | None = None
    ) -> Timed:
        return _host_timed(clock, stage, event, finish)  # type: ignore[return-value]  # contextlib's classes are no Protocol's subtypes


@contextmanager
def _host_timed(
    clock: StageClock, stage: str, event: Event, finish: Callable[[str], None] | None
) -> Iterator[None]:
    with clock.stage(stage):
        yield
    if finish is not None:
        assert isinstance(event, _HostEvent)
        event.finish_with(clock, stage, finish)


class _CudaEvents:
    """Two timing events, recorded again in every refit."""

    def __init__(self) -> None:
        self.start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)

    def query(self) -> bool:
        return bool(self.end.query())


class _CudaStream:
    """A CUDA stream."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)

    def enter(self) -> None:
        torch.cuda.set_stream(self.stream)

    def wait_caller(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, _CudaEvents)
        self.stream.wait_event(event.end)

    def wait_stream(self, stream: Stream) -> None:
        assert isinstance(stream, _CudaStream)
        self.stream.wait_stream(stream.stream)

    def record(self, event: Event) -> None:
        assert isinstance(event, _CudaEvents)
        event.end.record(self.stream)

    def timed(
        self, clock: StageClock, stage: str, event: Event, finish: Callable[[str], None] | None = None
    ) -> Timed:
        assert isinstance(event, _CudaEvents)
        return _CudaTimed(self.stream, clock, stage, event)


class _CudaTimed:
    def __init__(self, stream: torch.cuda.Stream, clock: StageClock, stage: str, event: _CudaEvents):
        self._stream, self._clock, self._stage, self._events = stream, clock, stage, event

    def __enter__(self) -> None:
        if self._clock.wants_start(self._stage, self._stream.cuda_stream):
            self._events.start.record(self._stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._events.end.record(self._stream)
        self._clock.mark(self._stage, self._stream.cuda_stream, self._events.start, self._events.end)


def make_stream(device: torch.device) -> Stream:
    """A stream of ``device``."""
    return _CudaStream(device) if device.type == "cuda" else _HostStream()


def make_event(device: torch.device) -> Event:
    """An event of ``device``."""
    return _CudaEvents() if device.type == "cuda" else _HostEvent()


def drain(streams: Sequence[Stream], device: torch.device, *used: object) -> bool:
    """After a failure: wait for some seconds until all that streams were given has ended, and return whether it has. Until then it may
    use any of its memory, which torch's allocator would hand to others on the stream that it was allocated on; if it does not end,
    ``used`` is kept."""
    ends: list[Event] = []

    def ended() -> bool:
        if not ends:  # at the first look: a lost GPU takes no event either
            ends.extend(make_event(device) for _ in streams)
            for stream, end in zip(streams, ends, strict=True):
                stream.record(end)
        return all(end.query() for end in ends)

    if gpu_ends_within(ended, _DRAIN_WITHIN):
        return True
    leave_running("kernels of a failed refit", *used)
    return False


def working_on(device: torch.device) -> AbstractContextManager[object]:
    """A context in which kernels run on ``device``, whatever device the calling thread is set to: torch goes by its tensors, but
    Triton's launches go by the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
