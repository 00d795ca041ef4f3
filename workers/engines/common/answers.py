"""Errors of other processes, which reach the caller with their type through calls that carry plain data."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Concatenate

from ....integration import errors
from ....integration.errors import PeerLost, RefitError

logger = logging.getLogger(__name__)

# The key of an error in an answer.
REFIT_ERROR = "refit_error"
# What an error tells of its place beside its text.
_PLACE = ("stage", "rank", "parameter", "blamed")
# Before that place in a text, and the stage as a RefitError's own text ends with it.
_MARK = f" ({REFIT_ERROR} "
_TOLD_STAGE = re.compile(r"\[stage ([^\],]+)[^\]]*\]")
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


def failure(error: BaseException) -> dict[str, Any]:
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
    raise _rebuilt(described, f"{worker} {index}: {_text(described)}")


def told(found: dict[str, Any]) -> str:
    """The error of an answer as text, for calls that carry nothing else; :func:`heard` reads it."""
    described = dict(found[REFIT_ERROR])
    text = described.pop("text")
    return f"{described['type']}: {text}{_MARK}{json.dumps(described)})"


def heard(text: str, whose: str) -> RefitError | None:
    """The error that a text tells, whatever others have put around it.

    Args:
        text: of :func:`told`, or of an error that was passed on as text alone.
        whose: what the error's own text begins with.

    Returns:
        Of the type that was raised; a :class:`RefitError` with its stage, if only its text was passed on; None, if the text tells
        none.
    """
    before, _, after = text.partition(_MARK)
    # Whoever passed it on may have cut it.
    with suppress(json.JSONDecodeError):
        described, _ = json.JSONDecoder().raw_decode(after)
        said = before.partition(f"{described['type']}: ")[2]
        return _rebuilt(described, whose + _text(described | {"text": said}))
    place = _TOLD_STAGE.search(text)
    return _rebuilt({"type": RefitError.__name__, "stage": place[1]}, whose + text) if place else None


def extended(error: RefitError, more: str) -> RefitError:
    """The same error, with more to tell."""
    return _placed(type(error)(f"{error}. {more}"), vars(error))


def _text(described: dict[str, Any]) -> str:
    """What happened; of errors that are not rlrefit's also their kind."""
    known = described["type"] in _TYPES
    return str(described["text"]) if known else f"{described['type']}: {described['text']}"


def _rebuilt(described: Mapping[str, Any], text: str) -> RefitError:
    return _placed(_TYPES.get(described["type"], RefitError)(text), described)


def _placed[Error: RefitError](error: Error, place: Mapping[str, Any]) -> Error:
    # Not by the constructor, which would name the place a second time.
    for name in _PLACE:
        setattr(error, name, place.get(name, getattr(error, name)))
    return error
