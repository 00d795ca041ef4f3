"""Streams and marks of a transport: CUDA's on GPUs; on CPUs the calling thread, and what it has to wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol

import torch

from ..records.clock import StageClock


class Span(Protocol):
    """A stretch of work on a line; ``with line.timed(…)`` measures it."""

    def query(self) -> bool:
        """Whether it has ended."""


class Line(Protocol):
    """Work that is done in order."""

    def enter(self) -> None:
        """What follows belongs to this line."""

    def begin(self) -> None:
        """Hold this line up until what the caller has enqueued so far is done."""

    def after(self, span: Span) -> None:
        """Hold this line up until ``span``, which was begun before, has ended."""

    def after_line(self, line: Line) -> None:
        """Hold this line up until all that was begun on another one has ended."""

    def mark(self, span: Span) -> None:
        """End ``span`` behind all that this line has been given so far."""

    def timed(
        self, clock: StageClock, stage: str, span: Span, rest: Callable[[str], None] | None = None
    ) -> Timed:
        """A context in which work on this line makes up ``span``, billed to ``stage``.

        ``rest`` is called with the stage where the calling thread has to wait for what the work began.
        """


class Timed(Protocol):
    """A context manager."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class HostSpan:
    """Work of the calling thread, and the end of what it began, which is waited for when it is asked for."""

    def __init__(self) -> None:
        self._rest: tuple[StageClock, str, Callable[[str], None]] | None = None

    def query(self) -> bool:
        if self._rest is not None:
            clock, stage, rest = self._rest
            self._rest = None
            with clock.stage(stage):
                rest(stage)
        return True

    def ends_with(self, clock: StageClock, stage: str, rest: Callable[[str], None]) -> None:
        """It has ended once ``rest`` returns."""
        self._rest = clock, stage, rest


class HostLine:
    """The calling thread."""

    def enter(self) -> None:
        return None

    def begin(self) -> None:
        return None

    def after(self, span: Span) -> None:
        span.query()

    def after_line(self, line: Line) -> None:
        return None

    def mark(self, span: Span) -> None:
        return None

    def timed(
        self, clock: StageClock, stage: str, span: Span, rest: Callable[[str], None] | None = None
    ) -> Timed:
        return _host_timed(clock, stage, span, rest)  # type: ignore[return-value]  # contextlib's classes are no Protocol's subtypes


@contextmanager
def _host_timed(
    clock: StageClock, stage: str, span: Span, rest: Callable[[str], None] | None
) -> Iterator[None]:
    with clock.stage(stage):
        yield
    if rest is not None:
        assert isinstance(span, HostSpan)
        span.ends_with(clock, stage, rest)


class CudaSpan:
    """Two timing events, recorded again in every refit."""

    def __init__(self) -> None:
        self.start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)

    def query(self) -> bool:
        return bool(self.end.query())


class CudaLine:
    """A CUDA stream."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)

    def enter(self) -> None:
        torch.cuda.set_stream(self.stream)

    def begin(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def after(self, span: Span) -> None:
        assert isinstance(span, CudaSpan)
        self.stream.wait_event(span.end)

    def after_line(self, line: Line) -> None:
        assert isinstance(line, CudaLine)
        self.stream.wait_stream(line.stream)

    def mark(self, span: Span) -> None:
        assert isinstance(span, CudaSpan)
        span.end.record(self.stream)

    def timed(
        self, clock: StageClock, stage: str, span: Span, rest: Callable[[str], None] | None = None
    ) -> Timed:
        assert isinstance(span, CudaSpan)
        return _CudaTimed(self.stream, clock, stage, span)


class _CudaTimed:
    def __init__(self, stream: torch.cuda.Stream, clock: StageClock, stage: str, span: CudaSpan):
        self._stream, self._clock, self._stage, self._span = stream, clock, stage, span

    def __enter__(self) -> None:
        if self._clock.wants_start(self._stage, self._stream.cuda_stream):
            self._span.start.record(self._stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._span.end.record(self._stream)
        self._clock.mark(self._stage, self._stream.cuda_stream, self._span.start, self._span.end)


def make_line(device: torch.device) -> Line:
    """A line of work on ``device``."""
    return CudaLine(device) if device.type == "cuda" else HostLine()


def make_span(device: torch.device) -> Span:
    """A span of a line on ``device``."""
    return CudaSpan() if device.type == "cuda" else HostSpan()
