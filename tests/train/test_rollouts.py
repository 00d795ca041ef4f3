"""What the actors make of what engines generate: what ends a completion, and what a rollout's draw hangs on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from rlrefit.integration.errors import RefitError
from rlrefit.recipes.config.load import load_config
from rlrefit.recipes.loop import step_metrics
from rlrefit.recipes.rollout.base import Sampling
from rlrefit.recipes.rollout.vllm import VllmActor
from rlrefit.recipes.run.inputs import RunInputs
from rlrefit.recipes.tiny.checkpoints import make_checkpoint
from rlrefit.recipes.tiny.make_tokenizer import PAD, vocabulary
from rlrefit.workers.checkpoint_folder import ending_tokens
from rlrefit.workers.engines.transformers.engine import TransformersEngine

STOP = (7, 1)


def test_the_tokens_that_end_a_completion_are_those_that_the_checkpoint_generates_with(
    tmp_path: Path,
) -> None:
    def of(**files: Any) -> tuple[int, ...]:
        for name in ("config", "generation_config"):
            (tmp_path / f"{name}.json").unlink(missing_ok=True)
            if name in files:
                (tmp_path / f"{name}.json").write_text(json.dumps(files[name]))
        return ending_tokens(tmp_path)

    assert of(config={"eos_token_id": 3}, generation_config={"eos_token_id": [8, 3]}) == (8, 3)
    assert of(config={"eos_token_id": [3, 4]}, generation_config={}) == (3, 4)
    assert of(config={"eos_token_id": 3}) == (3,)
    assert of(config={}) == ()


def test_transformers_ends_a_completion_at_the_first_of_its_ending_tokens(tmp_path: Path) -> None:
    torch.manual_seed(0)
    engine = TransformersEngine(str(make_checkpoint("qwen3", tmp_path / "model")), torch.float32)
    engine.refit_state.commit(0)
    prompts = [[2 + i % 9] for i in range(64)]
    sampling = {"max_new_tokens": 6, "temperature": 1.0, "seed": 1, "pad_token_id": 0}
    free = engine.generate(prompts, stop_token_ids=[], **sampling)
    assert {(len(c.token_ids), c.finished) for c in free} == {(6, False)}
    ended = engine.generate(prompts, stop_token_ids=STOP, **sampling)
    assert {c.token_ids[-1] for c in ended if c.finished} == set(STOP)
    for completion in ended:
        assert completion.finished == (completion.token_ids[-1] in STOP)
        assert not set(completion.token_ids[:-1]) & set(STOP)
        assert completion.finished or len(completion.token_ids) == 6
        assert len(completion.logprobs) == len(completion.token_ids)


def test_a_tokenizer_without_a_padding_token_and_one_with_a_token_behind_the_embedding_pad_with_one_that_the_model_knows(
    tmp_path: Path,
) -> None:
    def padding(**changes: Any) -> tuple[int, Any]:
        folder = make_checkpoint("qwen3", tmp_path / f"model{len(list(tmp_path.iterdir()))}")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        for name, value in changes.items():
            setattr(tokenizer, name, value)
        tokenizer.save_pretrained(folder)
        inputs = RunInputs(load_config("grpo_tiny", [f"model.path={folder}"]), str(folder))
        first = inputs.first_prompts(8)
        assert first.input_ids.max() < len(vocabulary())
        return inputs.pad_token_id, inputs.tokenizer.pad_token_id

    assert padding() == (vocabulary()[PAD],) * 2
    assert padding(pad_token=None) == (0, None)
    assert padding(pad_token="[behind]") == (0, len(vocabulary()))


class Driver:
    """Answers as vLLM does; keeps the parameters."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def serving_version(self) -> int:
        return 3

    def seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def generate(self, prompts: list[Any], parameters: list[Any]) -> list[Any]:
        self.parameters = parameters
        found = []
        for tokens in ([4, 7], [4, 1], [4, 4]):
            logprobs = [{token: SimpleNamespace(logprob=-1.0)} for token in tokens]
            completion = SimpleNamespace(
                token_ids=tokens, logprobs=logprobs, finish_reason="length" if tokens == [4, 4] else "stop"
            )
            found.append(SimpleNamespace(output=SimpleNamespace(outputs=[completion])))
        return found


@pytest.mark.parametrize("seeded", [False, True])
def test_vllm_is_asked_to_end_at_any_of_the_tokens_and_draws_by_the_seed_of_the_call_or_of_its_requests(
    seeded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **given: SimpleNamespace(**given))
    )
    actor, driver = VllmActor(), Driver()
    actor._driver, actor._stop, actor._seeded = driver, STOP, seeded
    found = actor.generate([[1], [2], [3]], Sampling(2, 1.0, 5))
    assert [c.finished for c in found] == [True, True, False]
    assert [p.stop_token_ids for p in driver.parameters] == [list(STOP)] * 3
    assert len({p.seed for p in driver.parameters}) == (3 if seeded else 1)
    assert (None in {p.seed for p in driver.parameters}) is not seeded
    actor.generate([[1], [2], [3]], Sampling(2, 1.0, 6))
    assert len(set(driver.seeds)) == (0 if seeded else 2)


@pytest.mark.parametrize(
    ("reason", "longest"), [("abort", 2), ("error", 2), ("repetition", 2), ("length", 3)]
)
def test_a_completion_that_vllm_cut_off_is_none_that_ran_out_of_tokens(reason: str, longest: int) -> None:
    actor = VllmActor()
    actor._stop = STOP
    logprobs = [{4: SimpleNamespace(logprob=-1.0)}] * 2
    output = SimpleNamespace(token_ids=[4, 4], logprobs=logprobs, finish_reason=reason)
    with pytest.raises(RefitError) as caught:
        actor._completion(output, Sampling(longest, 1.0, 5), 3)
    assert caught.value.stage == "generate"


def test_means_of_a_step_leave_out_the_optimizer_steps_that_were_skipped() -> None:
    good, better = {"loss": 1.0, "skipped": 0.0}, {"loss": 3.0, "skipped": 0.0}
    bad = {"loss": float("nan"), "skipped": 1.0}
    assert step_metrics([good, bad, better]) == {"loss": 2.0, "skipped": 1}
    assert step_metrics([bad, bad]) == {"loss": None, "skipped": 2}
