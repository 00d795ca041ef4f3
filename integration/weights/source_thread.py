"""What a trainer's source does in collectives of the trainer's own, in a thread beside the refit's.

gloo waits in them for as long as the trainer's process group allows, often half an hour, and can't be interrupted. So they run in
a thread, and the refit's waits for it as it waits for all else: within its limit, and with a look at the other ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import torch

from ..comm.waiting import wait_until
from ..errors import PeerLost, RefitError, RefitTimeout

# Seconds, and share of the limit, for which a call may go on after a trainer rank has given up: that rank draws its own export to the
# end if it can, and what waits for it then ends by itself.
_GRACE_S, _GRACE_SHARE = 5.0, 0.25


@dataclass
class _Call:
    """A call in the thread: whether it has ended, and how if it failed."""

    ended: threading.Event = field(default_factory=threading.Event)
    failures: list[BaseException] = field(default_factory=list)


# Of this process, which the refit's thread left: the trainer's groups may be out of step, and would take what one rank gathers for
# what another one does.
_LEFT: list[_Call] = []


def left_behind() -> bool:
    """Whether a refit of this process has left a collective of the trainer's own process groups, so that another one in them may
    meet it.

    One that ended with an error has broken its process group, whose other collectives then fail by themselves.
    """
    _LEFT[:] = [call for call in _LEFT if not call.failures]
    return bool(_LEFT)


def require_in_step(rank: int) -> None:
    """Check that no refit of this process has left a collective of the trainer (:func:`left_behind`).

    Raises:
        RefitError: one has, which is still waiting, or met another collective.
    """
    if left_behind():
        raise RefitError(
            "an earlier refit ended while this trainer rank waited for others in a collective of the trainer's own process groups, "
            "in which it still is, or which met another one of theirs: what is gathered in them now may be parts of different "
            "weights. Nothing was sent. Restart the trainer's processes, from a checkpoint",
            stage="export",
            rank=rank,
        )


class SourceThread:
    """Runs calls of one trainer rank's source, one at a time.

    Args:
        device: of the parameters.
        timeout_s: limit of a call, in seconds.
        rank: of this trainer rank, for errors.
        trainers: number of trainer ranks, which are first in the refit world.
        watch: given the stage; raises PeerLost if the epoch has ended.

    Attributes:
        left: whether a call was left that had not ended.
    """

    def __init__(
        self,
        device: torch.device,
        timeout_s: float,
        rank: int,
        trainers: int,
        watch: Callable[[str], object],
    ):
        self.left = False
        self._device, self._timeout_s, self._rank, self._trainers = device, timeout_s, rank, trainers
        self._watch = watch
        self._work: SimpleQueue[Callable[[], None] | None] | None = None

    def run[T](self, call: Callable[[], T], stage: str) -> T:
        """Make a call in the thread, and wait for it.

        It goes on after the end of an engine's rank, since all trainer ranks do, so that none is left in a collective. After that of a
        trainer rank it has some seconds.

        Args:
            call: may wait for other trainer ranks.
            stage: for errors.

        Raises:
            PeerLost: a trainer rank has given up or died, for which the call may wait.
            RefitTimeout: it did not end in time.
        """
        made: list[T] = []
        running = _Call()
        self._queue().put(partial(_make, call, made, running, _modes_here(self._device)))
        until = float("inf")

        def look(stage: str) -> None:
            nonlocal until
            try:
                self._watch(stage)
            except PeerLost as error:
                if error.blamed >= self._trainers:
                    return
                until = min(until, time.monotonic() + min(_GRACE_S, _GRACE_SHARE * self._timeout_s))
                if time.monotonic() >= until:
                    raise

        try:
            wait_until(
                running.ended.is_set,
                self._timeout_s,
                stage,
                look,
                partial(self._late, stage),
                running.ended.wait,
            )
        except BaseException:  # an interrupt, too
            if not running.ended.is_set():
                self.left = True
                _LEFT.append(running)
            raise
        if running.failures:
            raise running.failures.pop()  # it would hold itself by this frame, and all that was gathered
        return made[0]

    def draw(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of an export, each drawn as :meth:`run`."""
        while (weight := self.run(partial(next, weights, None), "export")) is not None:
            yield weight

    def close(self) -> None:
        """End the thread, once what it does has ended. A later call starts another one."""
        work, self._work = self._work, None
        if work is not None:
            work.put(None)

    def _queue(self) -> SimpleQueue[Callable[[], None] | None]:
        if self._work is None:
            self._work = SimpleQueue()
            # Python waits for no such thread as it ends: gloo may keep it for half an hour.
            threading.Thread(target=_serve, args=(self._work,), name="rlrefit-export", daemon=True).start()
        return self._work

    def _late(self, stage: str) -> RefitTimeout:
        return RefitTimeout(
            f"the trainer's own collectives did not end within {self._timeout_s:.0f} s: another trainer rank is late, stuck or gone, or does not "
            "take part in them. Raise policy.refit.timeout_s if it is only slow",
            stage=stage,
            rank=self._rank,
        )


def _serve(work: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := work.get()) is not None:
        call()
        del call  # with the tensors that it holds


def _make[T](
    call: Callable[[], T], made: list[T], running: _Call, modes: AbstractContextManager[None]
) -> None:
    try:
        with modes:
            made.append(call())
    except BaseException as error:  # raised again by who waits for it
        running.failures.append(error)
    finally:
        running.ended.set()


def _modes_here(device: torch.device) -> AbstractContextManager[None]:
    """What torch keeps for each thread, as it is in this one, to be entered in another."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    return _modes(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), stream)


@contextmanager
def _modes(grad: bool, inference: bool, stream: torch.cuda.Stream | None) -> Iterator[None]:
    with (
        torch.inference_mode(inference),
        torch.set_grad_enabled(grad),
        nullcontext() if stream is None else torch.cuda.stream(stream),
    ):
        yield
