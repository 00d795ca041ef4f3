"""How an SGLang engine is brought to run nothing, and to go on: steps of :class:`~.driver.SglangRefit`."""

from __future__ import annotations

import time
from typing import Literal, get_args

from ....integration.colocated.stages import KV_CACHE
from ....integration.errors import RefitError, RefitTimeout
from .callers import EngineCalls
from .standing import Standing

# What becomes of running requests. wait: they end with the old weights first; abort: they end as they are; retract: they go
# back to the queue, and their keys and values are computed anew with the new weights.
PauseMode = Literal["wait", "abort", "retract"]
_POLL_S = 0.05
# For an overlapped batch whose requests have ended, and for aborted requests.
_IDLE_S, DRAIN_S = 1.0, 10.0


class Pauses:
    """Pauses of one engine, which other callers may pause and resume as well.

    Args:
        calls: of the engine.
        timeout_s: for running requests to end, where they are waited for.

    Attributes:
        retracted: whether requests wait that were retracted: their keys and values are gone, and no prefixes are cached.
    """

    def __init__(self, calls: EngineCalls, timeout_s: float) -> None:
        self._calls = calls
        self._timeout_s = timeout_s
        self.retracted = False
        # From before the engine is asked to abort until it is paused in the way that its scheduler tells of.
        self._aborting = False

    def there(self, standing: Standing) -> bool:
        """Whether requests that are given to the engine would wait."""
        return standing.paused or self._aborting

    def quiet(self, mode: PauseMode, standing: Standing) -> bool:
        """Let no batch run until :meth:`resume`, and drop cached prefixes of all but retracted requests.

        Returns:
            Whether the engine was paused before.

        Raises:
            RefitTimeout: its requests don't end.
            RefitError: it can't be paused so. It is as it was.
        """
        paused = self.there(standing)
        if mode not in get_args(PauseMode):
            raise RefitError(
                f"mode: {mode!r} is not one of wait, abort, retract. SGLang's in_place lets running requests go on with keys and "
                "values of the old weights, and their tokens would be no version's",
                stage="settings",
            )
        self.retracted = paused and self.retracted
        if KV_CACHE in standing.released:
            # SGLang released it without requests, so that there is nothing to wait for and nothing to end.
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
                "the engine was paused before, with requests that can't end while it is, and would go on from keys and values of "
                "the old weights. Nothing was written; refit with mode='abort', or have it continue first",
                stage="handshake",
            )
        return paused

    def idle(self, standing: Standing) -> bool:
        """Pause an engine without requests, caches empty; False, and as it was, where it has some."""
        return self._calls.flush(_IDLE_S).success if self.there(standing) else self._pause_idle()

    def resume(self) -> None:
        """Let requests run again."""
        self._calls.step("continue_generation", torch_empty_cache=False)
        self.retracted = self._aborting = False

    def _wait(self) -> None:
        limit = time.monotonic() + self._timeout_s
        while not self._pause_idle():
            if time.monotonic() > limit:
                raise RefitTimeout(
                    f"the engine's requests did not all end within {self._timeout_s:.0f} s, new ones included. Nothing was "
                    "written; take mode='abort', or stop sending requests",
                    stage="handshake",
                )
            time.sleep(_POLL_S)

    def _retract(self) -> None:
        if not self._calls.settings["disable_radix_cache"]:
            raise RefitError(
                "mode='retract' needs an engine without cached prefixes: SGLang flushes none while retracted requests wait, so "
                "that they would go on from keys and values of the old weights. Nothing was written; start SGLang with "
                "disable_radix_cache=True, or use mode='abort' or 'wait'",
                stage="settings",
            )
        self.retracted = True
        self._pause("retract")

    def _abort(self, paused: bool) -> None:
        if paused:
            # SGLang ends a running request with its next batch, which a paused engine never runs, and waits for it for ever;
            # a queued one ends at once, without its tokens.
            self._pause("retract")
        self.retracted = False
        self._aborting = True
        self._pause("abort")
        # No request comes in any more, and what is left of the last batch ends.
        if not self._calls.flush(DRAIN_S).success:
            if not paused:
                self.resume()
            raise RefitError(
                "SGLang aborted the engine's requests, and some are left. Nothing was written; try again, or start the engine "
                "anew",
                stage="handshake",
            )
        # Of an abort the scheduler knows nothing; so the next driver hears of this pause.
        self._pause("in_place")
        self._aborting = False

    def _pause_idle(self) -> bool:
        # Mostly there are none. Where there are, nothing ends while the engine is paused: it goes on, to be paused once idle.
        return self._paused_empty() or (self._calls.flush(_IDLE_S).success and self._paused_empty())

    def _paused_empty(self) -> bool:
        """Pause first, so that no request can come between the look and the pause; False, and not paused, with requests."""
        self._pause("in_place")
        # Only an engine without requests is flushed.
        if not self._calls.flush().success:
            self.resume()
            return False
        return True

    def _pause(self, mode: str) -> None:
        self._calls.step("pause_generation", mode=mode)
