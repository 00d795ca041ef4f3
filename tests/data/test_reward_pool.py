"""Rewards in processes of their own: the values of one process, within a limit, and errors that name the record."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from rlrefit.recipes.data.prompts import Prompt
from rlrefit.recipes.rewards.pool import RewardPool
from rlrefit.recipes.rewards.scorer import Answer, RewardError, RewardScorer, Scores, load_reward

PLUGIN = """
import os, threading, time

def judged(*, prompt, completion, answer, finished, scale):
    assert threading.current_thread() is threading.main_thread()
    if completion == "for ever":
        time.sleep(1000)
    if completion == "the end":
        os._exit(7)
    return scale * float(completion) + finished
"""
SPEC, KWARGS = "plugin_judge:judged", {"scale": 0.5}


def answers(*completions: str) -> list[Answer]:
    prompts = [Prompt(f"prompt {n}", (1, 2), "8", f"train.jsonl line {n}") for n, _ in enumerate(completions)]
    return [Answer(p, c, n % 2 == 0) for n, (p, c) in enumerate(zip(prompts, completions, strict=True))]


@pytest.fixture
def make_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RewardPool]]:
    (tmp_path / "plugin_judge.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    made: list[RewardPool] = []

    def make(processes: int, spec: str = SPEC) -> RewardPool:
        made.append(RewardPool(spec, KWARGS, processes, timeout_s=4.0))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def test_values_are_those_of_one_process_but_for_answers_that_take_too_long_and_interrupts_change_nothing(
    make_pool: Callable[..., RewardPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As where nothing has started multiprocessing's tracker yet, which unblocks interrupts as it starts.
    for name in ("_fd", "_pid"):
        monkeypatch.setattr(resource_tracker._resource_tracker, name, None)
    pool = make_pool(2)
    # As they load, and as they serve.
    for worker in pool._workers:
        os.kill(worker.process.pid, signal.SIGINT)
    many = answers(*(str(n) for n in range(50)))
    alone = RewardScorer(load_reward(SPEC, KWARGS)).score_all(many)
    assert pool.score_all(many) == alone
    for worker in pool._workers:
        os.kill(worker.process.pid, signal.SIGINT)
    processes = {worker.process.pid for worker in pool._workers}
    late = answers("3", "for ever", "5", "7")
    assert pool.score_all(late) == Scores([2.5, 0.0, 3.5, 3.5], overtime=1)
    # One was replaced, and serves.
    assert len(processes & {worker.process.pid for worker in pool._workers}) == 1
    assert pool.score_all(many) == alone
    assert pool.score_all([]) == Scores([])


def test_a_function_that_raises_or_cannot_be_loaded_and_a_process_that_ends_are_errors_that_name_their_cause(
    make_pool: Callable[..., RewardPool],
) -> None:
    raising, ending, missing = make_pool(2), make_pool(1), make_pool(1, "no_such_module:function")
    for pool, given, named in (
        (raising, answers("1", "x"), r"plugin_judge.* train\.jsonl line 1 "),
        (ending, answers("the end"), r"plugin_judge.*exit code 7.* train\.jsonl line 0 "),
        (missing, answers("1"), "no_such_module"),
    ):
        with pytest.raises(RewardError, match=named):
            pool.score_all(given)
        assert not pool._workers
