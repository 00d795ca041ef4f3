"""Errors of other processes, which reach the caller with their type through calls that carry plain data."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Concatenate

from ....integration import errors
from ....integration.errors import PeerLost, RefitError

logger = logging.getLogger(__name__)

# The key of an error in an answer.
REFIT_ERROR = "refit_error"
# What an error tells of its place beside its text.
_PLACE = ("stage", "rank", "parameter", "blamed")
_TYPES = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, RefitError)
}


def answer(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``call`` returns, or its error as plain data under :data:`REFIT_ERROR`."""
    try:
        return call()
    # Any exception: the loader may raise whatever the engine raises, and the caller has to learn of it.
    except Exception as error:
        logger.exception("the refit failed in this process")
        return failure(error)


def failure(error: Exception) -> dict[str, Any]:
    """An error as plain data under :data:`REFIT_ERROR`."""
    described: dict[str, Any] = {"type": type(error).__name__, "text": str(error)}
    if isinstance(error, RefitError):
        described |= {name: getattr(error, name) for name in _PLACE}
    return {REFIT_ERROR: described}


def answered[Owner, **Parameters](
    method: Callable[Concatenate[Owner, Parameters], dict[str, Any]],
) -> Callable[Concatenate[Owner, Parameters], dict[str, Any]]:
    """A worker's method that returns its error as :func:`answer` does."""

    @functools.wraps(method)
    def answering(worker: Owner, *args: Parameters.args, **kwargs: Parameters.kwargs) -> dict[str, Any]:
        return answer(lambda: method(worker, *args, **kwargs))

    return answering


def raise_refit_errors(
    answers: Sequence[dict[str, Any]], worker: str = "vLLM worker"
) -> list[dict[str, Any]]:
    """The answers, if none is an error.

    Args:
        answers: of all workers, in the order of their ranks.
        worker: what an error calls one of them.

    Raises:
        RefitError: a worker failed; of the type that it raised. If several failed, the first that did not merely lose
            its peers, because that one has the cause.
    """
    failed = [(index, found[REFIT_ERROR]) for index, found in enumerate(answers) if REFIT_ERROR in found]
    if not failed:
        return list(answers)
    causes = [entry for entry in failed if entry[1]["type"] != PeerLost.__name__]
    index, described = (causes or failed)[0]
    kind = _TYPES.get(described["type"])
    text = described["text"] if kind else f"{described['type']}: {described['text']}"
    error = (kind or RefitError)(f"{worker} {index}: {text}")
    # Set here and not by the constructor, which would name the place a second time.
    for name in _PLACE:
        setattr(error, name, described.get(name, getattr(error, name)))
    raise error
