"""The one way in which a rank waits: it polls, within a limit, and looks at the other ranks meanwhile. And what becomes of a GPU's work
that comes to no end."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

import torch

logger = logging.getLogger(__name__)

# Seconds between two looks at what is waited for, and between two looks at the other ranks.
PAUSE_S = 2e-5
# Seconds for which a wait looks without a pause: most of a refit's waits are for some microseconds of a GPU's work, and the
# kernel lets a thread sleep for 50 µs more than it was told.
_SPIN_S = 2e-4
_WATCH_EVERY = 0.5
# What a GPU's work that did not end may still use. Nobody can tell when it is free.
_left_running: list[object] = []
_gpu_is_stuck = False


def wait_until(
    done: Callable[[], bool],
    timeout_s: float,
    stage: str,
    watch: Callable[[str], object],
    late: Callable[[], Exception],
    pause: Callable[[float], object] | None = None,
) -> None:
    """Wait until ``done()`` is true.

    CUDA's, gloo's and Python's own waits have no limit, or do not see that another rank has given up.

    Args:
        done: polled; it may do a part of the work each time.
        timeout_s: limit of the whole wait, in seconds from this call.
        stage: given to ``watch``.
        watch: called twice a second, and once the limit has passed; raises if another rank has given up.
        late: called once the limit has passed; its error is raised.
        pause: waits between two polls, for the given number of seconds at most. Without it the thread looks again at once for the first
            0.2 ms, and then sleeps for 20 µs each time.
    """
    start = time.monotonic()
    next_watch = start + _WATCH_EVERY
    while not done():
        now = time.monotonic()
        over = now - start > timeout_s
        # Once more at the end: a rank that gave up meanwhile is the cause, and not the time.
        if over or now >= next_watch:
            watch(stage)
            next_watch = now + _WATCH_EVERY
        if over:
            raise late()
        if pause is None:
            if now - start < _SPIN_S:
                os.sched_yield()
            else:
                time.sleep(PAUSE_S)
        else:
            pause(max(0.0, min(next_watch, start + timeout_s) - now))


def guarded[T](
    call: Callable[[], T],
    timeout_s: float,
    stage: str,
    watch: Callable[[str], object],
    late: Callable[[], Exception],
    ended: Callable[[str], object] | None = None,
) -> T:
    """Make a call that can block without a limit in a thread of its own, and wait for it as :func:`wait_until`.

    Args:
        call: is left to itself once the time is up.
        timeout_s, stage, watch, late: as there.
        ended: called with the stage once the call has ended, before what came of it; may raise.

    Returns:
        What the call returned. Its exception is raised here.
    """
    made: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            made.append(call())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    wait_until(lambda: not thread.is_alive(), timeout_s, stage, watch, late, thread.join)
    if ended is not None:
        ended(stage)
    for failure in failures:
        raise failure
    return made[0]


def done_within(calls: Sequence[Callable[[], object]], limit_s: float) -> str:
    """Make calls that can block without a limit, in a thread of their own; returns what went wrong, or nothing."""
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


def ends_within(done: Callable[[], bool], limit_s: float) -> bool:
    """Whether ``done()`` becomes true within ``limit_s`` seconds; for a rank that gives up and looks at no other."""
    deadline = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(PAUSE_S)
    return True


def gpu_ends_within(done: Callable[[], bool], limit_s: float) -> bool:
    """As :func:`ends_within`, of work of a GPU. It never ends where the GPU is lost, which is logged."""
    try:
        return ends_within(done, limit_s)
    except torch.AcceleratorError as error:
        logger.warning("the GPU is lost: %s", error)
        return False


def leave_running(whose: str, *used: object) -> None:
    """Keep until the process ends what a GPU may still use, since :func:`gpu_ends_within` has not seen its work end.

    To unmap it would break this process's CUDA context, and the trainer with it. What came to lie in its place would be read or
    written by that work.

    Args:
        whose: who has left the work running, for the log.
        used: memory, tables and communicators; the caller forgets them.
    """
    logger.warning(
        "%s: the GPU does not end its work; what this may use stays mapped and allocated until the process ends",
        whose,
    )
    _left_running.append(used)


def note_stuck_gpu() -> None:
    """Note that this process's GPU waits for what nothing brings to an end, giving communicators up neither.

    The driver's calls that wait for the whole GPU, as freeing memory and giving up a communicator of NCCL do, would never return, and
    hold up all other calls meanwhile.
    """
    global _gpu_is_stuck
    _gpu_is_stuck = True


def gpu_is_stuck() -> bool:
    """Whether :func:`note_stuck_gpu` was called in this process."""
    return _gpu_is_stuck
