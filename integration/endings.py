"""How things end that were opened: every step is taken, and none of them hides the error that ended them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)


def end_all(steps: Iterable[Callable[[], object]], cause: BaseException | None = None) -> None:
    """Take all steps in their order, whichever of them fail.

    Args:
        steps: that close or give back one thing each.
        cause: the error that these steps follow, which the caller raises afterwards; what fails here is logged, and noted on
            it.

    Raises:
        BaseException: without a cause, what the first step that failed has raised, with the others' errors noted on it. An
            interrupt of a step in any case, with the cause noted on it: it is no consequence of that.
    """
    failures: list[BaseException] = []
    for step in steps:
        try:
            step()
        except BaseException as error:  # an interrupt, too: what is still open would stay so
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
