"""Rewards for mathematics: the last boxed expression of a completion against the reference answer."""

from __future__ import annotations

import re
from fractions import Fraction

_BOX = r"\boxed{"
# GSM8K writes its answers behind the worked solution.
_GSM8K_MARK = "####"
# Typesetting that does not change what is said. It leaves a space: what stands on its two sides is not one number.
_NOISE = re.compile(r"\\(?:left|right)(?![A-Za-z])|\\[,; $%]|[$%~]|\^\{?\\circ\}?")
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}")
_SPACE_NOT_IN_NUMBERS = re.compile(r"(?<![\d.]) | (?![\d.])")
# TeX takes a single character for an argument with braces and without.
_SINGLE = re.compile(r"(?<!\\)\{([0-9A-Za-z])\}")
# 1{,}234 and 1\,234 are one number anywhere; 1,234 is two in a tuple or a set.
_TYPESET_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\{,\}|\\,)\d{3})+(?!\d)")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_BRACE = re.compile(r"[{}]")
_BRACKET = re.compile(r"[()\[\]{}]")
_TUPLE = re.compile(r"(\(|\[|\\\{)(.*)(\)|\]|\\\})")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+|\d+/\d+)")
_ARGUMENT = r" ?(?:\{(-?\d+)\}|(\d))"
# A fraction, alone or behind a whole number: 1\frac{1}{2}, 1 1/2.
_FRACTION = re.compile(rf"([-+]?)(\d*)(?:\\frac{_ARGUMENT}{_ARGUMENT}|(?<=\d) (\d+)/(\d+))")
# Python refuses to read much longer ones, and a policy that repeats itself writes them.
_LONGEST_NUMBER = 1000


def boxed_math(*, prompt: str, completion: str, answer: str, finished: bool) -> float:
    r"""1 if the completion's last ``\boxed{…}`` says what ``answer`` says, else 0.

    Equal are equal texts without typesetting (spaces but for those between digits, ``\left``, ``\text``, ``$``,
    thousands' commas outside of brackets, degree and percent signs), equal rational numbers in any notation (mixed
    ones too), and tuples of such. Symbolic equality is :func:`math_verify`'s.

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
    thread, which is where the recipes call rewards, in processes of their own too.

    Raises:
        ValueError: it makes nothing of the reference answer, so no completion could be right.
    """
    from math_verify import parse, verify  # type: ignore[import-not-found]

    wanted = parse(f"{_BOX}{reference_answer(answer)}}}")
    if not wanted:
        raise ValueError("math-verify can't parse the reference answer; drop the record, or correct it")
    return float(verify(wanted, parse(completion)))


def reference_answer(answer: str) -> str:
    """The final answer of a record: what follows GSM8K's mark, the last box's content, or else the whole text."""
    behind = answer.rpartition(_GSM8K_MARK)[2].strip()
    return last_boxed(behind) or behind


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete ``\boxed{…}``, braces balanced; None if there is none."""
    # From the end, where an answer stands. What follows a box that is never closed closes none before it, so that no part
    # is read twice, whatever a policy repeats.
    end = len(text)
    while (start := text.rfind(_BOX, 0, end)) >= 0:
        begin, depth = start + len(_BOX), 1
        for brace in _BRACE.finditer(text, begin, end):
            depth += 1 if brace[0] == "{" else -1
            if not depth:
                return text[begin : brace.start()]
        end = start
    return None


def _same(found: str, wanted: str) -> bool:
    ours, theirs = _plain(found), _plain(wanted)
    if _equal(ours, theirs):
        return bool(ours)
    parts, others = _parts(ours), _parts(theirs)
    return bool(parts) and len(parts) == len(others) and all(map(_equal, parts, others))


def _equal(ours: str, theirs: str) -> bool:
    return ours == theirs or (None is not _number(ours) == _number(theirs))


def _plain(text: str) -> str:
    text = _WRAPPED.sub(r"\1", text).replace(r"\!", "")
    text = _TYPESET_THOUSANDS.sub(_digits, text)
    text = " ".join(_NOISE.sub(" ", text).split())
    if not _BRACKET.search(text):
        text = _THOUSANDS.sub(_digits, text)
    text = _SPACE_NOT_IN_NUMBERS.sub("", text)
    text = text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    return _SINGLE.sub(r"\1", text).rstrip(". ")


def _digits(number: re.Match[str]) -> str:
    return re.sub(r"\D", "", number[0])


def _parts(text: str) -> list[str]:
    """A tuple's, interval's or set's brackets and members; nothing for other texts."""
    whole = _TUPLE.fullmatch(text)
    if whole is None:
        return []
    members, depth = [""], 0
    for character in whole[2]:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return []
        if character == "," and depth == 0:
            members.append("")
        else:
            members[-1] += character
    return [whole[1], *members, whole[3]]


def _number(text: str) -> Fraction | None:
    if len(text) > _LONGEST_NUMBER:
        return None
    try:
        if _NUMBER.fullmatch(text):
            return Fraction(text)
        fraction = _FRACTION.fullmatch(text)
        return _fraction(fraction) if fraction is not None else None
    except ZeroDivisionError:
        return None


def _fraction(found: re.Match[str]) -> Fraction | None:
    sign, whole, *arguments = found.groups()
    above, below = (int(argument) for argument in arguments if argument is not None)
    part = Fraction(above, below)
    # 3\frac{5}{2} is no mixed number, and may be a product.
    if whole and not (0 < above < below):
        return None
    return (int(whole or 0) + part) * (-1 if sign == "-" else 1)
