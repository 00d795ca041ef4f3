"""One call at a time of a cycle whose calls may come from several threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from .stages import Stage, StageBusy


class UnderWay:
    """Which call is under way; another one is refused, and not kept waiting.

    A row of moves is a call too: between its moves, only the thread that makes them may go on. While a move is under way
    nothing else is let in, not even from within it: the move's work counts on the stage.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Outermost first.
        self._names: list[str] = []
        self._moving = False
        self._thread: threading.Thread | None = None
        self._since = 0.0

    @contextmanager
    def row(self, name: str, stage: Stage) -> Iterator[None]:
        """Hold a row of moves together; ``stage`` is the present one.

        Raises:
            StageBusy: a move is under way, or a row of another thread's.
        """
        self._enter(name, stage, moving=False)
        try:
            yield
        finally:
            self._leave(moving=False)

    @contextmanager
    def move(self, name: str, stage: Stage) -> Iterator[None]:
        """Make one move; as :meth:`row`."""
        self._enter(name, stage, moving=True)
        try:
            yield
        finally:
            self._leave(moving=True)

    def _enter(self, name: str, stage: Stage, *, moving: bool) -> None:
        thread = threading.current_thread()
        with self._lock:
            if self._moving or (self._names and self._thread is not thread):
                raise self._refusal(name, stage, thread)
            if not self._names:
                self._thread, self._since = thread, time.perf_counter()
            self._names.append(name)
            self._moving = moving

    def _leave(self, *, moving: bool) -> None:
        with self._lock:
            self._names.pop()
            if moving:
                self._moving = False

    def _refusal(self, asked: str, stage: Stage, thread: threading.Thread) -> StageBusy:
        row, call = self._names[0], self._names[-1]
        told = call if row == call else f"{call} of {row}"
        seconds = time.perf_counter() - self._since
        if self._thread is thread:
            where, remedy = "it was asked for from within that call", "Ask once that call has returned"
        else:
            name = self._thread.name if self._thread is not None else ""
            where = f"for {seconds:.1f} s, in thread {name!r}"
            remedy = "Wait for that call to return (join its thread, await its result), and ask then"
        return StageBusy(
            f"{asked} was asked for while {told} is under way ({where}): both would use the same memory. {asked} has changed "
            f"nothing, and {told} goes on. {remedy}",
            stage=stage,
        )
