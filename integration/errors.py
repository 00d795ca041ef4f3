"""Errors of a refit, and what closes all that is open after one.

Each error says what happened, where, what it means for the engine, and what to do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

logger = logging.getLogger(__name__)


class RefitError(RuntimeError):
    """Base of all refit errors.

    Attributes:
        stage: the part of the refit that failed (``rendezvous``, ``handshake``, ``transfer``, ``misc``, …).
        rank: the refit-world rank that reports, or -1 if it is not known.
        parameter: Hugging Face name of the parameter concerned, or an empty string.
        blamed: the refit-world rank that died, gave up or did not answer first, or -1 if it is not known.
    """

    def __init__(
        self, message: str, *, stage: str = "", rank: int = -1, parameter: str = "", blamed: int = -1
    ) -> None:
        place = ", ".join(
            part
            for part in (
                f"stage {stage}" if stage else "",
                f"rank {rank}" if rank >= 0 else "",
                f"parameter {parameter}" if parameter else "",
            )
            if part
        )
        super().__init__(f"{message} [{place}]" if place else message)
        self.stage = stage
        self.rank = rank
        self.parameter = parameter
        self.blamed = blamed


class RefitMismatch(RefitError):
    """The two sides disagree on names, shapes, dtypes, the plan or the version. Nothing was written."""


class RefitTimeout(RefitError):
    """A wait ran out. An engine that was being written is dirty and refuses to generate."""


class PeerLost(RefitError):
    """A peer closed its connection or died during a refit."""


class PlanError(RefitError):
    """Bytes that nobody sends, or that two senders would write: found while planning, before any transfer."""


class TransportUnavailable(RefitError):
    """A transport cannot carry these weights between these ranks. Nothing was written; another one can."""


class VerificationError(RefitError):
    """Checksums of sent and landed bytes differ."""


class EngineDirty(RefitError):
    """The engine holds partly written weights and must not generate before a refit commits."""


def end_all(steps: Iterable[Callable[[], object]], cause: BaseException | None = None) -> None:
    """Run all steps in order, even if some of them fail.

    Args:
        steps: each closes one thing.
        cause: the error that made the caller close, which the caller raises afterwards. What fails here is logged, and noted
            on it.

    Raises:
        BaseException: without a cause, the error of the first step that failed, with the errors of the others noted on it. An
            interrupt is raised in any case, with the cause noted on it, since it does not follow from the cause.
    """
    failures: list[BaseException] = []
    for step in steps:
        try:
            step()
        except BaseException as error:  # an interrupt too: else the remaining steps would not run
            failures.append(error)
    if not failures:
        return
    interrupts = [error for error in failures if not isinstance(error, Exception)]
    raised = interrupts[0] if interrupts else cause or failures[0]
    for other in (cause, *failures):
        if other is not None and other is not raised:
            raised.add_note(f"As this ended: {type(other).__name__}: {other}")
            logger.warning("%s as another error ended what was open", type(other).__name__, exc_info=other)
    if raised is not cause:
        raise raised


class Closable(Protocol):
    """A group, or what has taken one over."""

    def close(self, *, failed: bool) -> None:
        """End it; ``failed``: peers may be gone."""


@contextmanager
def closed_on_error(opened: Closable) -> Iterator[None]:
    """Close ``opened`` as failed if the block ends with an error, an interrupt too, which is raised."""
    try:
        yield
    except BaseException as error:
        end_all([partial(opened.close, failed=True)], error)
        raise
