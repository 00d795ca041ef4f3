"""Pauses of an SGLang engine: steps of :class:`~.driver.SglangRefit`."""

from __future__ import annotations

import time
from typing import Literal, get_args

from ....integration.colocated.stages import KV_CACHE
from ....integration.errors import RefitError, RefitTimeout
from .callers import EngineCalls
from .engine_state import EngineState

# What becomes of running requests. wait: they first end with the old weights; abort: they end as they are; retract: they go
# back to the queue, and their keys and values are computed again with the new weights.
PauseMode = Literal["wait", "abort", "retract"]
_POLL_S = 0.05
# Seconds for an overlapped batch whose requests have ended, and for aborted requests.
_IDLE_S, DRAIN_S = 1.0, 10.0


class Pauses:
    """Pauses of one engine, which other callers may pause and resume too.

    Args:
        calls: of the engine.
        timeout_s: for running requests to end, where they are waited for.

    Attributes:
        retracted: whether retracted requests wait: their keys and values are gone, and no prefixes are cached.
    """

    def __init__(self, calls: EngineCalls, timeout_s: float) -> None:
        self._calls = calls
        self._timeout_s = timeout_s
        self.retracted = False
        # True from before the engine is asked to abort until it is paused in a way that its scheduler reports.
        self._aborting = False

    def there(self, state: EngineState) -> bool:
        """Whether new requests would wait."""
        return state.paused or self._aborting

    def quiet(self, mode: PauseMode, state: EngineState) -> bool:
        """Let no batch run until :meth:`resume`, and drop cached prefixes of all but retracted requests.

        Returns:
            Whether the engine was paused before.

        Raises:
            RefitTimeout: its requests don't end.
            RefitError: it can't be paused in this mode. It is as it was.
        """
        paused = self.there(state)
        if mode not in get_args(PauseMode):
            raise RefitError(
                f"mode: {mode!r} is not one of wait, abort, retract. SGLang's in_place lets running requests continue with keys and "
                "values of the old weights, so their tokens would mix two versions",
                stage="settings",
            )
        self.retracted = paused and self.retracted
        if KV_CACHE in state.released:
            # SGLang released it while there were no requests, so there is nothing to wait for or to end.
            if not paused:
                self._pause("in_place")
        elif mode == "abort":
            self._abort(paused)
        elif mode == "retract":
            self._retract()
        elif not paused:
            self._wait()
        elif not self.retracted and not self._calls.flush(_IDLE_S).success:
            raise RefitError(
                "the engine was paused before the refit, with requests that can't end while it is paused and would continue from "
                "keys and values of the old weights. Nothing was written; refit with mode='abort', or resume the engine first",
                stage="handshake",
            )
        return paused

    def idle(self, state: EngineState) -> bool:
        """Pause an engine that has no requests, with empty caches; False, and nothing changed, if it has some."""
        return self._calls.flush(_IDLE_S).success if self.there(state) else self._pause_idle()

    def resume(self) -> None:
        """Let requests run again."""
        self._calls.step("continue_generation", torch_empty_cache=False)
        self.retracted = self._aborting = False

    def _wait(self) -> None:
        limit = time.monotonic() + self._timeout_s
        while not self._pause_idle():
            if time.monotonic() > limit:
                raise RefitTimeout(
                    f"the engine's requests, including new ones, did not all end within {self._timeout_s:.0f} s. Nothing was "
                    "written; use mode='abort', or stop sending requests",
                    stage="handshake",
                )
            time.sleep(_POLL_S)

    def _retract(self) -> None:
        if not self._calls.settings["disable_radix_cache"]:
            raise RefitError(
                "mode='retract' needs an engine without cached prefixes: SGLang flushes none while retracted requests wait, so they "
                "would continue from keys and values of the old weights. Nothing was written; start SGLang with "
                "disable_radix_cache=True, or use mode='abort' or 'wait'",
                stage="settings",
            )
        self.retracted = True
        self._pause("retract")

    def _abort(self, paused: bool) -> None:
        if paused:
            # SGLang ends a running request with its next batch, which a paused engine never runs, so it would wait for ever. A
            # queued request ends at once, without its tokens.
            self._pause("retract")
        self.retracted = False
        self._aborting = True
        self._pause("abort")
        # No new request is accepted, and the rest of the last batch ends.
        if not self._calls.flush(DRAIN_S).success:
            if not paused:
                self.resume()
            raise RefitError(
                "SGLang aborted the engine's requests, but some are left. Nothing was written; try again, or restart the engine",
                stage="handshake",
            )
        # The scheduler does not know of an abort, so this pause is what the next driver sees.
        self._pause("in_place")
        self._aborting = False

    def _pause_idle(self) -> bool:
        # Usually there are no requests. If there are, they do not end while the engine is paused: it resumes, and is paused once idle.
        return self._paused_empty() or (self._calls.flush(_IDLE_S).success and self._paused_empty())

    def _paused_empty(self) -> bool:
        """Pause, then check, so that no request can come between; False, and not paused, if there are requests."""
        self._pause("in_place")
        # SGLang flushes only an engine without requests.
        if not self._calls.flush().success:
            self.resume()
            return False
        return True

    def _pause(self, mode: str) -> None:
        self._calls.step("pause_generation", mode=mode)
