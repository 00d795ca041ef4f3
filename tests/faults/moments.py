"""The points at which Python lets a signal's handler run, in the library's code and on the main thread: counted, and hit.

CPython looks for signals as a function begins, after a call of a C function and on a jump backwards; ``sys.monitoring``
tells of exactly these. So an interrupt can be put at each of them, and found there again, however fast the machine is.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import rlrefit.integration

_LIBRARY = tuple(rlrefit.integration.__path__)
_TOOL = 4
_EVENTS = sys.monitoring.events

# (Part of the session, window in it): the opening is part 0, refits count from 1.
Place = tuple[int, str]


@dataclass
class _Armed:
    place: Place | None
    left: int
    strike: Callable[[str], None]


class Moments:
    """Where this process's main thread is, in parts of a session and windows of them."""

    def __init__(self) -> None:
        self.part, self.window = 0, "open"
        self.seen: Counter[Place] = Counter()
        self._armed: _Armed | None = None
        self._watches = False
        self._thread = threading.get_ident()
        sys.monitoring.use_tool_id(_TOOL, "faults")
        callbacks: dict[int, Callable[..., Any]] = {
            _EVENTS.PY_START: self._on_start,
            _EVENTS.CALL: self._on_call,
            _EVENTS.C_RETURN: self._on_c_return,
            _EVENTS.JUMP: self._on_jump,
        }
        for event, callback in callbacks.items():
            sys.monitoring.register_callback(_TOOL, event, callback)

    @contextmanager
    def within(self, window: str) -> Iterator[None]:
        """What runs inside belongs to a window."""
        before, self.window = self.window, window
        try:
            yield
        finally:
            self.window = before

    def begin(self, part: int, window: str) -> None:
        """The next part of a session begins."""
        self.part, self.window = part, window

    def watch(
        self, place: Place | None = None, at: int = 0, strike: Callable[[str], None] | None = None
    ) -> None:
        """Count the points from now on; once ``at`` of them have passed, call ``strike`` at the next, with where it is.

        What it raises is raised there."""
        self._armed = _Armed(place, at, strike) if strike is not None else None
        self._watches = True
        events = _EVENTS.PY_START | _EVENTS.CALL | _EVENTS.C_RETURN | _EVENTS.C_RAISE | _EVENTS.JUMP
        sys.monitoring.set_events(_TOOL, events)

    def rest(self) -> None:
        """Count no more."""
        self._watches, self._armed = False, None
        sys.monitoring.set_events(_TOOL, 0)

    def _on_start(self, code: CodeType, offset: int) -> Any:
        if not _in_library(code):
            return sys.monitoring.DISABLE
        return self._pass()

    def _on_call(self, code: CodeType, offset: int, function: object, argument: object) -> Any:
        # Where calls are not told of, neither are returns from C.
        return None if _in_library(code) else sys.monitoring.DISABLE

    def _on_c_return(self, code: CodeType, offset: int, function: object, argument: object) -> Any:
        # Or the traceback would keep them: a communicator, say, which the library then could not close.
        del function, argument
        return self._pass() if _in_library(code) else None

    def _on_jump(self, code: CodeType, offset: int, destination: int) -> Any:
        if not _in_library(code) or destination > offset:
            return sys.monitoring.DISABLE
        return self._pass()

    def _pass(self) -> None:
        if not self._watches or threading.get_ident() != self._thread:
            return
        place = self.part, self.window
        self.seen[place] += 1
        armed = self._armed
        if armed is None or armed.place not in (None, place):
            return
        armed.left -= 1
        if armed.left >= 0:
            return
        self.rest()
        armed.strike(where(sys._getframe(2)))


def where(frame: FrameType | None, most: int = 6) -> str:
    """The library's innermost frames, innermost first."""
    found: list[str] = []
    while frame is not None and len(found) < most:
        if _in_library(frame.f_code):
            found.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(found)


def _in_library(code: CodeType) -> bool:
    return code.co_filename.startswith(_LIBRARY)
