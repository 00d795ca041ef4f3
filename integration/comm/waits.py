"""How ranks of a process group wait: within a limit, with a look at the other ranks, and how they give up."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from ..errors import PeerLost, RefitError, RefitTimeout
from .waiting import wait_until

logger = logging.getLogger(__name__)

# Seconds that giving up a communicator may itself take; it can be stuck in its set-up.
_ABORT_WITHIN = 10.0


class Event(Protocol):
    """What :meth:`Group.wait_for` waits for: a CUDA event, say."""

    def query(self) -> bool:
        """Whether it has happened."""


class GroupWaits:
    """The communicators of a rank, and its waits for what they do.

    Attributes:
        wire: what a GPU waits for, in errors.
        rank: in the group.
        size: of the group.
        device: of what travels.
        lanes: communicators, whose exchanges may be under way at the same time.
        timeout: limit of any exchange.
    """

    wire = "NCCL"

    def _configure(
        self,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
        watch: Callable[[str], None],
        lanes: int,
    ) -> None:
        self._watch = watch
        self.rank = rank
        self.size = size
        self.device = device
        self.lanes = lanes
        self.timeout = timedelta(seconds=timeout_s)
        self._connected: set[int] = set()
        self._greeted = False
        self._backends: list[Any] = []  # torch's stubs leave out the methods of the backend classes

    def backend(self, lane: int) -> Any:
        """The communicator of a lane.

        Raises:
            RefitError: the group is closed.
        """
        if lane >= len(self._backends):
            raise RefitError("the process group is closed", stage="process group", rank=self.rank)
        return self._backends[lane]

    def wait_for(self, events: Sequence[Event], stage: str) -> None:
        """Wait on the host until all events have happened, which come after exchanges of this group.

        Raises:
            PeerLost: a connection broke, or another rank gave up.
            RefitTimeout: they did not happen in time. The communicators are given up then.
        """
        pending = list(reversed(events))

        def happened() -> bool:
            while pending and pending[-1].query():
                pending.pop()
            return not pending

        self._wait_until(happened, stage)
        self._raise_nccl_errors(stage)

    def abort(self) -> bool:
        """Give up all that is under way, without waiting for peers.

        Returns:
            Whether it has ended. If not, the device may still write to what was being received.
        """
        if self.device.type != "cuda":
            return True
        wrong = in_thread([backend.abort for backend in self._backends], _ABORT_WITHIN)
        if wrong:
            logger.warning("rank %d could not give up its communicators: %s", self.rank, wrong)
        return not wrong

    def _wait_for_stream(self, stage: str) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            self.wait_for([event], stage)

    def _guarded[T](self, call: Callable[[], T], stage: str) -> T:
        """Run a call that can block without limit in a thread, and wait for it as for an exchange."""
        made: list[T] = []
        failures: list[BaseException] = []

        def run() -> None:
            try:
                made.append(call())
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._wait_until(lambda: not thread.is_alive(), stage, thread.join)
        self._raise_nccl_errors(stage)
        for failure in failures:
            raise failure
        return made[0]

    def _wait_until(
        self, done: Callable[[], bool], stage: str, pause: Callable[[float], object] | None = None
    ) -> None:
        limit = self.timeout.total_seconds()

        def late() -> RefitTimeout:
            # Or the kernel would spin on, and the next synchronisation of the device never return.
            self.abort()
            what = f"{self.wire} did not finish within {limit:.0f} s; a peer is late, stuck or gone"
            return RefitTimeout(what, stage=stage, rank=self.rank)

        wait_until(done, limit, stage, self._look_around, late, pause)

    def _look_around(self, stage: str) -> None:
        self._raise_nccl_errors(stage)
        try:
            self._watch(stage)
        except RefitError:
            self.abort()
            raise

    def _raise_nccl_errors(self, stage: str) -> None:
        """Raise what torch's watchdog has found wrong with a communicator."""
        if self.device.type != "cuda":
            return
        for backend in self._backends:
            state = backend.get_error()
            if state != torch._C._distributed_c10d.ErrorType.SUCCESS:
                self.abort()
                raise PeerLost(
                    f"NCCL reports {state.name.lower().replace('_', ' ')} on the refit's communicator; a peer's process "
                    "ended or its network broke. NCCL_DEBUG=WARN says more",
                    stage=stage,
                    rank=self.rank,
                )


def in_thread(calls: Sequence[Callable[[], object]], limit_s: float) -> str:
    """Make calls that can block without limit, in a thread of their own; returns what went wrong, or nothing."""
    wrong: list[str] = []

    def run() -> None:
        for call in calls:
            try:
                call()
            except Exception as error:
                wrong.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return f"not done after {limit_s:.0f} s" if thread.is_alive() else "; ".join(wrong)
