import math
import sys

import pytest

from rlrefit.recipes.data.prompts import Prompt
from rlrefit.recipes.rewards.scorer import RewardError, RewardResult, RewardScorer, arithmetic, load_reward

PROMPT = Prompt("max(3,8)=", (1, 2), "8", "train.jsonl line 7")
PLUGIN = """
from rlrefit.recipes.rewards.scorer import RewardResult

def length(*, prompt, completion, answer, finished, scale=1.0):
    return RewardResult(scale * len(completion), {"length": len(completion)})

def positional(prompt, completion, answer, finished):
    return finished

def too_few(*, prompt, completion):
    return 0.0

number = 3
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    (tmp_path / "plugin_rewards.py").write_text(PLUGIN)
    (tmp_path / "plugin_broken.py").write_text("1 / 0")
    (tmp_path / "plugin_ending.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("completion", "finished", "value"),
    [
        ("8", True, 1.2),  # exact 1.0, a number and then the end 0.1, a digit first 0.1
        ("3", True, 0.2),
        ("08", True, 0.2),
        ("8", False, 0.1),
        ("8=", True, 0.1),
        ("8 ", True, 0.1),
        ("=8", True, 0.0),
        ("", True, 0.0),
        ("8<reserved_0>", True, 0.1),
        ("\u0668", True, 0.0),  # a digit, but not a decimal one of ASCII
    ],
)
def test_the_arithmetic_reward_adds_exact_answer_format_and_leading_digit(completion, finished, value):
    result = arithmetic(prompt="max(3,8)=", completion=completion, answer="8", finished=finished)
    assert result.value == pytest.approx(value)


def test_the_arithmetic_rewards_weights_are_settings():
    reward = load_reward("arithmetic", {"exact_weight": 2.0, "format_weight": 0.5, "digit_weight": 0.0})
    result = RewardScorer(reward).score(PROMPT, "8", True)
    assert result == RewardResult(2.5, {"exact": 1.0, "format": 1.0, "digit": 1.0})


@pytest.mark.parametrize("spec", ["plugin_rewards:length", "plugin_rewards.length"])
def test_a_plug_in_is_loaded_by_its_path_and_gets_its_settings(plugin, spec):
    result = RewardScorer(load_reward(spec, {"scale": 0.5})).score(PROMPT, "abc", True)
    assert result == RewardResult(1.5, {"length": 3})
    boolean = RewardScorer(load_reward("plugin_rewards:positional"))(PROMPT, "x", True)
    assert (boolean, type(boolean)) == (1.0, float)


@pytest.mark.parametrize(
    ("spec", "kwargs", "message"),
    [
        ("arithmetics", {}, "neither bundled"),
        ("no_such_module:f", {}, "ModuleNotFoundError"),
        ("plugin_broken:f", {}, "ZeroDivisionError"),
        ("plugin_ending:f", {}, "SystemExit"),
        ("plugin_rewards:absent", {}, "has no such name"),
        ("plugin_rewards:number", {}, "type int"),
        ("plugin_rewards:too_few", {}, "unexpected keyword argument"),
        ("plugin_rewards:length", {"scales": 2}, "unexpected keyword argument 'scales'"),
        ("arithmetic", {"answer": "8"}, "sets answer"),
    ],
)
def test_a_reward_that_cannot_be_called_is_refused_before_training(plugin, spec, kwargs, message):
    with pytest.raises(RewardError, match=message):
        load_reward(spec, kwargs)


def test_a_compiled_reward_that_tells_no_parameters_is_loaded():
    assert load_reward("builtins:dict", {"scale": 2})(prompt="1+1=")["scale"] == 2


def raising(**_):
    raise KeyError("gone")


def exiting(**_):
    sys.exit(3)


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        (raising, "KeyError: 'gone'"),
        (exiting, "SystemExit: 3"),
        (lambda **_: math.nan, "nan, which is not finite"),
        (lambda **_: RewardResult(math.inf), "inf, which is not finite"),
        (lambda **_: None, "type NoneType"),
        (lambda **_: "1", "type str"),
    ],
)
def test_a_reward_that_fails_names_function_record_and_completion(reward, problem):
    with pytest.raises(RewardError) as caught:
        RewardScorer(reward)(PROMPT, "x" * 500, True)
    message = str(caught.value)
    assert f"{reward.__module__}.{reward.__qualname__}" in message
    assert problem in message
    assert "train.jsonl line 7 (answer '8')" in message
    assert repr("x" * 200 + "…") in message
    assert isinstance(caught.value.__cause__, KeyError) is (reward is raising)
