"""The clock of a refit: seconds by stage on the host and on the device, measured without waiting for either."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

STAGES = (
    "handshake",
    "bind",
    "export",
    "pack",
    "transfer",
    "unpack",
    "misc",
    "verify",
    "post_load",
    "commit",
)


class Interval(NamedTuple):
    """One stretch of a stage: ``start`` and ``end`` in seconds after the refit's start."""

    stage: str
    start: float
    end: float


class _Stretch(NamedTuple):
    """What one block left: host times (seconds of ``perf_counter``) and, on a GPU, its events."""

    stage: str
    host_start: float
    host_end: float
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None


class StageClock:
    """Adds up seconds by stage.

    On a CPU the time of a stage is the host's wall time in its blocks. On a GPU a block also leaves a pair of
    events on the current stream, and its time is the longer of the host's time in the block (it may wait for
    peers) and the device's time between the events (the host may run ahead). Nothing waits for the device
    before :attr:`seconds`, :meth:`intervals` are read, when the work is long done.

    Work that is marked (:meth:`mark`: thousands of spans in a refit) counts from its stage's first start to its
    last end, on whatever stream they are: reading every pair of events would take longer than to enqueue the
    work. Such stages overlap, and the sum of all may be more than the refit took.

    One clock serves all refits of a session: :meth:`restart` gives its events back for the next one.

    Args:
        device: of the parameters; a CUDA device gets events.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._spare: list[torch.cuda.Event] = []
        self._origin: torch.cuda.Event | None = None
        self.restart()

    def restart(self, *, timeline: bool = False) -> None:
        """Begin a refit: forget the last one's stretches and take the time.

        Args:
            timeline: keep every marked span for :meth:`intervals`, not only its stage's first and last.
        """
        self._spare += [e for s in getattr(self, "_stretches", []) for e in (s.events or ())]
        self._stretches: list[_Stretch] = []
        self._timeline = timeline
        self._marked: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        # By stage and stream, on which work is done in order: the first span's start and the last one's end.
        self._edges: dict[tuple[str, int], tuple[torch.cuda.Event, torch.cuda.Event]] = {}
        self._waits = 0.0
        if self._device.type == "cuda":
            if self._origin is None:
                self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record(torch.cuda.current_stream(self._device))
        self._start = time.perf_counter()
        self._thread_start = time.thread_time()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a block under ``name``, one of ``STAGES``, on the current stream; a block that raises leaves nothing."""
        start = time.perf_counter()
        before = self._event()
        yield
        after = self._event()
        events = (before, after) if before is not None and after is not None else None
        self._stretches.append(_Stretch(name, start, time.perf_counter(), events))

    def wants_start(self, name: str, stream: int) -> bool:
        """Whether the start of the next span to :meth:`mark` is read; else it needs not be recorded."""
        return self._timeline or (name, stream) not in self._edges

    def mark(self, name: str, stream: int, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Add the device's time between two events of ``stream`` (its handle, ``cuda_stream``) to ``name``.

        Both are timing events (``enable_timing=True``) that stay the caller's: it may record them again in the
        next refit. ``end`` has been recorded, and ``start`` where :meth:`wants_start` asked for it. The stream
        joins the current one before the refit ends.
        """
        first, _ = self._edges.get((name, stream), (start, end))
        self._edges[name, stream] = (first, end)
        if self._timeline:
            self._marked.append((name, start, end))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait (for peers, the wire, the device): its polling is left out of :attr:`host_seconds`."""
        start = time.thread_time()
        try:
            yield
        finally:
            self._waits += time.thread_time() - start

    @contextmanager
    def helping(self) -> Iterator[None]:
        """Around a refit's work in another thread, for whose end the refit's own one waits: it is part of :attr:`host_seconds`."""
        start = time.thread_time()
        try:
            yield
        finally:
            self._waits -= time.thread_time() - start

    @property
    def host_seconds(self) -> float:
        """CPU time that this thread and those :meth:`helping` it spent since the start, in seconds, without their waits."""
        return time.thread_time() - self._thread_start - self._waits

    @property
    def wall_seconds(self) -> float:
        """Wall time since the start, in seconds."""
        return time.perf_counter() - self._start

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by stage so far. On a GPU it waits for the events: read it when the refit is done."""
        total: dict[str, float] = {}
        for stage, start, end in map(self._interval, self._stretches):
            total[stage] = total.get(stage, 0.0) + end - start
        for stage, (start, end) in self._marked_edges().items():
            total[stage] = total.get(stage, 0.0) + end - start
        return total

    def intervals(self) -> list[Interval]:
        """All stretches, and all marked spans if this refit keeps a timeline, in the order of their starts.

        Waits as :attr:`seconds` does.
        """
        found = [self._interval(stretch) for stretch in self._stretches]
        for name, start, end in self._marked:
            found.append(Interval(name, self._since_origin(start), self._since_origin(end)))
        return sorted(found, key=lambda interval: interval.start)

    def _marked_edges(self) -> dict[str, tuple[float, float]]:
        """By stage the first start and the last end of what was marked, over all streams."""
        found: dict[str, tuple[float, float]] = {}
        for (stage, _), events in self._edges.items():
            start, end = map(self._since_origin, events)
            known = found.get(stage, (start, end))
            found[stage] = (min(start, known[0]), max(end, known[1]))
        return found

    def _interval(self, stretch: _Stretch) -> Interval:
        start, end = stretch.host_start - self._start, stretch.host_end - self._start
        if stretch.events is not None:
            on_device = tuple(self._since_origin(event) for event in stretch.events)
            if on_device[1] - on_device[0] > end - start:
                start, end = on_device
        return Interval(stretch.stage, start, end)

    def _event(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _since_origin(self, event: torch.cuda.Event) -> float:
        assert self._origin is not None, "events exist only on a CUDA device, whose clock has an origin"
        event.synchronize()
        milliseconds: float = self._origin.elapsed_time(event)
        return milliseconds / 1e3
