"""Rewards: the bundled rule for arithmetic, plug-ins by dotted path, and the scorer that guards them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

from ..data.prompts import Prompt
from .answers import boxed_math, math_verify

_SHOWN = 200  # characters of a completion that an error shows
_GIVEN = ("prompt", "completion", "answer", "finished")


class RewardError(RuntimeError):
    """A reward function can't be loaded, raised, or returned no finite number."""


@dataclass(frozen=True)
class RewardResult:
    """A reward and what it is made of.

    Attributes:
        value: the reward.
        parts: by name, for logs; they need not add up to ``value``.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """A completion to be scored.

    Attributes:
        prompt: that it answers.
        completion: its text, without the token that ended it.
        finished: whether the model ended it itself.
    """

    prompt: Prompt
    completion: str
    finished: bool


@dataclass(frozen=True)
class Scores:
    """Rewards of a number of answers.

    Attributes:
        values: in the order of the answers.
        overtime: answers that took longer than allowed and are worth 0.
    """

    values: list[float]
    overtime: int = 0


class Scorer(Protocol):
    """Judges answers; raises :class:`RewardError` as :meth:`RewardScorer.score` does."""

    def score_all(self, answers: Sequence[Answer]) -> Scores: ...


class Reward(Protocol):
    """Judges one completion; pure, and called once for each completion with keywords only.

    Args:
        prompt: the text that the model was given.
        completion: the text that it generated, without the end-of-sequence token.
        answer: of the data record.
        finished: whether the model ended the completion itself, and wasn't cut off by the length limit.

    Returns:
        The reward, or a :class:`RewardResult` that also tells its parts.
    """

    def __call__(
        self, *, prompt: str, completion: str, answer: str, finished: bool
    ) -> RewardResult | float: ...


def arithmetic(
    *,
    prompt: str,
    completion: str,
    answer: str,
    finished: bool,
    exact_weight: float = 1.0,
    format_weight: float = 0.1,
    digit_weight: float = 0.1,
) -> RewardResult:
    """Rule-based reward for prompts with one number as the answer, with credit for the form.

    The form comes first in training from random weights: a completion that ends after one number is hit
    by chance far more often than the right number, and a leading digit more often still.

    Args:
        exact_weight: for the answer, character by character, and then the end.
        format_weight: for a number in decimal digits, whichever, and then the end.
        digit_weight: for a digit as the first character, whatever follows.

    Returns:
        The weighted sum; the parts ``exact``, ``format`` and ``digit`` are 0 or 1.
    """
    parts = {
        "exact": float(finished and completion == answer),
        "format": float(finished and re.fullmatch("[0-9]+", completion) is not None),
        "digit": float(re.match("[0-9]", completion) is not None),
    }
    weights = {"exact": exact_weight, "format": format_weight, "digit": digit_weight}
    return RewardResult(sum(weights[name] * part for name, part in parts.items()), parts)


BUNDLED: dict[str, Reward] = {
    "arithmetic": arithmetic,
    "boxed_math": boxed_math,
    "math_verify": math_verify,
}


def load_reward(spec: str, kwargs: Mapping[str, Any] | None = None) -> Reward:
    """The reward function that a recipe names.

    Args:
        spec: a name of ``BUNDLED``, or a plug-in's path: ``package.module:function`` or
            ``package.module.function``.
        kwargs: keyword arguments that it gets on every call, beside a reward's own four.

    Raises:
        RewardError: there is no such module or function, it doesn't take these arguments, or needs a package
            that is not installed.
    """
    if spec == "math_verify" and importlib.util.find_spec("math_verify") is None:
        raise RewardError(
            "reward math_verify needs the package math-verify where the run is started: pip install "
            "'rlrefit[math]'; or set reward.function=boxed_math, which compares texts and numbers without it"
        )
    function = BUNDLED.get(spec) or _import(spec)
    settings = dict(kwargs or {})
    if taken := sorted(set(settings) & set(_GIVEN)):
        raise RewardError(
            f"reward.kwargs sets {', '.join(taken)}, which the recipe passes to reward {spec} itself for each "
            "completion; rename the function's setting"
        )
    try:
        inspect.signature(function).bind(**dict.fromkeys(_GIVEN), **settings)
    except TypeError as error:
        raise RewardError(
            f"reward {spec} can't be called with keywords {', '.join([*_GIVEN, *settings])}: {error}; correct "
            "reward.kwargs or the function's parameters"
        ) from error
    except ValueError:  # a compiled function may not tell its parameters; the first call does
        pass
    return functools.partial(function, **settings)


def _import(spec: str) -> Reward:
    module_name, _, name = spec.rpartition(":" if ":" in spec else ".")
    if not module_name or not name:
        raise RewardError(
            f"reward {spec!r} is neither bundled ({', '.join(BUNDLED)}) nor a path of the form package.module:function"
        )
    try:
        module = importlib.import_module(module_name)
    # A plug-in's module may raise anything while it is imported, and sys.exit() would end the run as if the user had.
    except (Exception, SystemExit) as error:
        raise RewardError(
            f"reward {spec!r}: importing {module_name} failed with {type(error).__name__}: {error}; correct the "
            "path, or put the module's folder on PYTHONPATH of the driver"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        what = (
            "has no such name" if function is None else f"has a value of type {type(function).__name__} there"
        )
        raise RewardError(
            f"reward {spec!r}: module {module_name} ({module.__file__}) {what}; name a function of it"
        )
    return function  # type: ignore[no-any-return]


class RewardScorer:
    """Calls a reward and holds it to its contract.

    Args:
        reward: from :func:`load_reward`, or any callable of that form.
    """

    def __init__(self, reward: Reward) -> None:
        self._reward = reward
        function = reward.func if isinstance(reward, functools.partial) else reward
        self._name = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"

    def __call__(self, prompt: Prompt, completion: str, finished: bool) -> float:
        """The reward of a completion of ``prompt``; errors as for :meth:`score`."""
        return self.score(prompt, completion, finished).value

    def score_all(self, answers: Sequence[Answer]) -> Scores:
        """The rewards of all answers, one after another; errors as for :meth:`score`."""
        return Scores([self(answer.prompt, answer.completion, answer.finished) for answer in answers])

    def score(self, prompt: Prompt, completion: str, finished: bool) -> RewardResult:
        """The reward with its parts.

        Raises:
            RewardError: the function raised, or returned something other than a finite real number; names the
                function, the data record and the completion.
        """
        try:
            returned = self._reward(
                prompt=prompt.text, completion=completion, answer=prompt.answer, finished=finished
            )
        # A plug-in may raise anything, as its module may; what it raised stays as the cause.
        except (Exception, SystemExit) as error:
            raise self._error(f"raised {type(error).__name__}: {error}", prompt, completion) from error
        result = returned if isinstance(returned, RewardResult) else RewardResult(returned)
        value: Any = result.value
        if not isinstance(value, Real):
            problem = f"returned {value!r} of type {type(value).__name__}, which is not a number"
            raise self._error(problem, prompt, completion)
        if not math.isfinite(value):
            raise self._error(f"returned {value}, which is not finite", prompt, completion)
        return RewardResult(float(value), result.parts)

    def _error(self, problem: str, prompt: Prompt, completion: str) -> RewardError:
        shown = completion if len(completion) <= _SHOWN else completion[:_SHOWN] + "…"
        return RewardError(
            f"reward {self._name} {problem}, for the record at {prompt.origin} (answer {prompt.answer!r}) and the "
            f"completion {shown!r}. The step was given up: an advantage from it would be wrong for the whole "
            "group. Make the function return a finite float for every completion"
        )
