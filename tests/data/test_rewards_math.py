"""The reward that reads the last box of a completion."""

from __future__ import annotations

import importlib.util

import pytest

from rlrefit.recipes.rewards.answers import boxed_math, last_boxed, reference_answer
from rlrefit.recipes.rewards.scorer import RewardError, load_reward


def score(completion: str, answer: str) -> float:
    return boxed_math(prompt="", completion=completion, answer=answer, finished=True)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"6 times 12 is \boxed{72}.", "6 * 12 = <<6*12=72>>72\n#### 72"),
        (r"\boxed{1,234}", "1234"),
        (r"\boxed{72.0}", "72"),
        (r"\boxed{\frac{1}{2}}", "0.5"),
        (r"\boxed{\dfrac34}", r"\frac{3}{4}"),
        (r"\boxed{-\frac{3}{4}}", r"-\frac{3}{4}"),
        (r"\boxed{90^\circ}", "90"),
        (r"\boxed{\text{Evelyn}}", "Evelyn"),
        (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"(3,\frac{\pi}{2})"),
        (r"first \boxed{1}, no: \boxed{x_{1}^{2}}", r"so it is \boxed{x_{1}^{2}}"),
        (r"\boxed{7} and then \boxed{8, cut off", "7"),
        (r"\boxed{1\frac{1}{2}}", r"\frac{3}{2}"),
        (r"\boxed{-1 \dfrac12}", "-1.5"),
        (r"\boxed{1 2/3}", r"\frac53"),
        (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt3}{2}"),
        (r"\boxed{\dfrac{\sqrt 3}2}", r"\frac{\sqrt{3}}{2}"),
        (r"\boxed{10,\!000}", "10000"),
        (r"\boxed{10{,}000}", r"10\,000"),
        (r"\boxed{\$1,234,567.50}", "1234567.5"),
        (r"\boxed{x=1,234}", "x = 1234"),
        (r"\boxed{(0.5,1{,}200)}", r"\left(\frac12,1200\right)"),
        (r"\boxed{[1, 200)}", r"[1,200)"),
        (r"\boxed{\{1,\tfrac{2}{4}\}}", r"\{1,0.5\}"),
        (r"\boxed{3\text{ cm}}", r"3 \mathrm{cm}"),
    ],
)
def test_equal_answers_are_found_equal_however_they_are_typeset(completion: str, answer: str) -> None:
    assert score(completion, answer) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("72", "72"),  # no box
        (r"\boxed{72} or rather \boxed{73}", "72"),
        (r"\boxed{12}", "1 2/3"),
        (r"\boxed{}", "0"),
        (r"\boxed{}", ""),
        (r"\boxed{1/0}", "0"),
        (r"\boxed{1,23}", "123"),
        (r"\boxed{1\frac{1}{2}}", r"\frac{11}{2}"),
        (r"\boxed{\frac{1}{2}3}", r"\frac{1}{23}"),
        (r"\boxed{3\frac{5}{2}}", "5.5"),
        (r"\boxed{1 2}", "12"),
        (r"\boxed{1\ 2}", "12"),
        (r"\boxed{1$2$}", "12"),
        (r"\boxed{90^\circ5}", "905"),
        (r"\boxed{(1,200)}", "(1200)"),
        (r"\boxed{\{1,200\}}", r"\{1200\}"),
        (r"\boxed{1, 200}", "1200"),
        (r"\boxed{0.5,123}", "0.5123"),
        (r"\boxed{12345,678}", "12345678"),
        (r"\boxed{[1,2)}", "(1,2)"),
        (r"\boxed{(1,2)}", "(1,2,3)"),
        (r"\boxed{x^\frac{1}{2}}", "x^1/2"),
        (r"\boxed{\sqrt{3}4}", r"\sqrt{34}"),
        (r"\boxed{x+1}", "1+x"),  # symbolic equality is math_verify's
    ],
)
def test_other_answers_are_not(completion: str, answer: str) -> None:
    assert score(completion, answer) == 0.0


def test_braces_inside_a_box_are_balanced() -> None:
    assert last_boxed(r"\boxed{\frac{a}{b_{1}}} is it") == r"\frac{a}{b_{1}}"
    assert last_boxed(r"\boxed{a") is None
    assert reference_answer("5 apples\n#### 1,000") == "1,000"


def test_what_a_policy_repeats_is_judged_in_time() -> None:
    assert score(r"\boxed{" + "9" * 20_000 + "}", "9") == 0.0
    assert score(r"\boxed{" * 20_000 + "7}", "7") == 1.0
    assert score(r"\boxed{" + "(" * 20_000 + ")" * 20_000 + "}", "7") == 0.0
    assert score(r"\boxed{" + "1 " * 20_000 + "}", "7") == 0.0


def test_a_reward_whose_package_is_not_installed_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    with pytest.raises(RewardError, match=r"pip install 'rlrefit\[math\]'"):
        load_reward("math_verify")
    assert load_reward("boxed_math")
