"""Rewards for mathematics: the last boxed expression of a completion against the reference answer."""

from __future__ import annotations

import re
from fractions import Fraction

_BOX = r"\boxed{"
# GSM8K writes its answers behind the worked solution.
_GSM8K_MARK = "####"
# Typesetting that does not change what is said.
_NOISE = re.compile(r"\\left|\\right|\\!|\\,|\\;|\\ |\\\$|\$|\\%|%|\^\{?\\circ\}?|\s")
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dt]?frac\{?(-?\d+)\}?\{?(\d+)\}?")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\})(?=\d{3}(?:\D|$))")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+|\d+/\d+)")


def boxed_math(*, prompt: str, completion: str, answer: str, finished: bool) -> float:
    r"""1 if the completion's last ``\boxed{…}`` says what ``answer`` says, else 0.

    Equal are equal texts without typesetting (spaces, ``\left``, ``\text``, ``$``, thousands' commas, degree and
    percent signs), and equal rational numbers in any notation. Symbolic equality is :func:`math_verify`'s.

    Args:
        prompt: not read.
        completion: what was generated.
        answer: the reference: an expression, a text that ends in a boxed one, or GSM8K's ``… #### 72``.
        finished: not read; a box that was closed before the length limit counts.
    """
    box = last_boxed(completion)
    return float(box is not None and _same(box, reference_answer(answer)))


def math_verify(*, prompt: str, completion: str, answer: str, finished: bool) -> float:
    r"""1 if the package math-verify finds the completion's answer equal to ``answer``, else 0.

    It compares symbolically, and also finds answers outside of ``\boxed{…}``. Its time limits need the main
    thread, which is where the recipes call rewards.

    Raises:
        ValueError: it makes nothing of the reference answer, so no completion could be right.
    """
    from math_verify import parse, verify  # type: ignore[import-not-found]

    wanted = parse(f"{_BOX}{reference_answer(answer)}}}")
    if not wanted:
        raise ValueError("math-verify can't parse the reference answer; drop the record, or correct it")
    return float(verify(wanted, parse(completion)))


def reference_answer(answer: str) -> str:
    """What a record's answer comes to: behind GSM8K's mark, in the last box, or as it is."""
    behind = answer.rpartition(_GSM8K_MARK)[2].strip()
    return last_boxed(behind) or behind


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete ``\boxed{…}``, braces balanced; None if there is none."""
    start = len(text)
    while (start := text.rfind(_BOX, 0, start)) >= 0:
        depth = 1
        begin = start + len(_BOX)
        for end in range(begin, len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return text[begin:end]
    return None


def _same(found: str, wanted: str) -> bool:
    ours, theirs = _plain(found), _plain(wanted)
    if ours == theirs:
        return bool(ours)
    numbers = _number(ours), _number(theirs)
    return None not in numbers and numbers[0] == numbers[1]


def _plain(text: str) -> str:
    text = _WRAPPED.sub(r"\1", text)
    text = _FRACTION.sub(r"\1/\2", _NOISE.sub("", text))
    return _THOUSANDS.sub("", text).rstrip(".")


def _number(text: str) -> Fraction | None:
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return Fraction(text)
    except ZeroDivisionError:
        return None
