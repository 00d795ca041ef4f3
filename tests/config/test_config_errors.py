"""What a user is told about a recipe that cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlrefit.recipes.config.load import ConfigError, load_config


def test_mistakes_of_all_kinds_are_told_at_once_and_the_error_counts_them_and_names_the_recipe(data) -> None:
    mistakes = {
        "a=b=c": "not in Hydra's grammar",
        "algorithm.group_sise=4": "did you mean algorithm.group_size?",
        "trainer.optimizer.lr=fast": "'fast' is not a number",
        "trainer.ranks=3": "give 4 ranks or smaller parallel sizes",
        "generation.temperature=0": "give at least 0.01",
        "model.dtype=fp8": "one of auto, bfloat16, float32",
        "policy.refit.bucket_mb=-1": "policy.refit.bucket_mb",
        "policy.refit.timeout_s=nan": "policy.refit.timeout_s",
    }
    with pytest.raises(ConfigError) as caught:
        load_config("grpo_tiny", [*data, *mistakes])
    assert caught.value.recipe == "grpo_tiny"
    assert str(caught.value).startswith("recipe grpo_tiny: 8 violations; nothing was started\n  1. ")
    found = caught.value.violations
    assert len(found) == len(mistakes)
    for override, told in mistakes.items():
        (text,) = [text for text in found if told in text]
        assert override in text
        assert text in str(caught.value)


def test_unknown_keys_suggest_the_nearest_ones(violations) -> None:
    suggestions = {
        "trainr.ranks=4": "did you mean trainer?",
        "lr=1e-4": "did you mean trainer.optimizer.lr?",
        "optimizer.lr=1e-4": "did you mean trainer.optimizer?",
        "generation.max_model_len=9": "did you mean generation.vllm.max_model_len?",
        "model.quantum=1": "the keys of model are path, catalog, dtype",
    }
    found = violations(*suggestions)
    for override, suggestion in suggestions.items():
        section = override.partition("=")[0].partition(".")[0]
        assert [suggestion in text for text in found if text.startswith(section)] == [True]


@pytest.mark.parametrize(
    "problems",
    [
        {
            "seed=1.5": "seed: 1.5 is not a whole number",
            "resume=3": "resume: 3 is not true or false",
            "algorithm.tis_cap=high": "algorithm.tis_cap: 'high' is not a number or null",
            "reward.kwargs=3": "reward.kwargs: 3 is not a mapping",
            "trainer.recompute.modules=moe": "trainer.recompute.modules: 'moe' is not a list of strings",
            "name=${nowhere}": "name: '${nowhere}' does not resolve",
        },
        {
            "seed=null": "seed: null is not a whole number",
            "algorithm.tis_cap=nan": "algorithm.tis_cap: nan is not finite",
            "model=tiny": "model: 'tiny' stands for a whole section",
            "name=???": "name: is ???",
        },
        {"name.first=x": "name: {'first': 'x'} is not a string"},
        {
            "trainer.recompute.modules='${seed}'": "trainer.recompute.modules: '${seed}' does not resolve",
            "trainer.lora.target_modules='${model.dtype}'": "trainer.lora.target_modules: '${model.dtype}' does not",
            "reward.kwargs='${name}'": "reward.kwargs: '${name}' does not resolve",
        },
    ],
)
def test_a_value_of_the_wrong_type_is_told_with_the_wanted_one(violations, problems: dict[str, str]) -> None:
    found = violations(*problems)
    assert len(found) == len(problems)
    assert [told for told in problems.values() if not any(told in text for text in found)] == []


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("seed=1,2", "is a sweep"),
        ("~name", "deletes a key"),
        ("hydra.run.dir=/tmp", "configures Hydra"),
        ("cluster/net=slow", "config group that is not there"),
        ("name=[1", "not in Hydra's grammar"),
        ("=3", "names no key"),
        ("reward.kwargs.tags.3=b", "cannot be applied"),
    ],
)
def test_hydra_syntax_without_a_meaning_here_is_refused(violations, override: str, problem: str) -> None:
    (found,) = violations("reward.kwargs={tags: [a]}", override)
    assert problem in found
    assert override in found


def test_a_key_of_an_override_that_the_run_does_not_read_is_told_and_one_of_the_recipe_is_not(
    violations,
) -> None:
    unread = {
        "generation.vllm.kv_cache_dtype": "fp8",
        "generation.sglang.server_args.log_level": "info",
        "trainer.lora.alpha": "8",
        "algorithm.max_sampling_rounds": "3",
        "algorithm.overlong_penalty": "0.5",
        "reward.timeout_s": "5",
        "trainer.optimizer.min_lr": "1e-5",
        "policy.refit.transport": "p2p",
        "policy.refit.streams": "1",
        "policy.refit.delta": "always",
    }
    constant = "trainer.optimizer.lr_decay=constant"
    broadcast = "policy.nccl_xfer_refit=false"
    found = violations(constant, broadcast, *(f"{key}={value}" for key, value in unread.items()))
    assert len(found) == len(unread)
    assert [key for key in unread if not any(text.startswith(key[:22]) for text in found)] == []
    assert len(violations("policy.refit.delta_base=host")) == 1
    # As it is without: the recipe's own lr_decay_steps, and a server argument of another one's engine.
    assert violations(constant, "generation.vllm.enforce_eager=false") == ()
    assert violations("generation.backend=transformers", recipe="grpo_tiny_sglang") == ()


def test_a_violation_names_the_line_of_the_users_file_or_the_overrides(data, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "defaults: [grpo_tiny, _self_]\nname: mine\ntrainer:\n  ranks: 3\nalgorithm:\n  stepps: 1\n"
    )
    overrides = ["trainer.tensor_parallel=4", "optimzer.lr=4", "optimzer.eps=2"]
    with pytest.raises(ConfigError) as caught:
        load_config(str(recipe), [*data, *overrides])
    found = caught.value.violations
    assert len(found) == 3
    for place in (
        f"[{recipe}:6]",
        f"{recipe}:4; override 'trainer.tensor_parallel=4'",
        "[override 'optimzer.lr=4'; override 'optimzer.eps=2']",
    ):
        assert sum(place in text for text in found) == 1


def test_a_refused_value_does_not_blame_its_default(violations) -> None:
    # The default of 1 rank is no multiple of 4, but nobody asked for 1 rank.
    (found,) = violations("trainer.ranks=many", "trainer.tensor_parallel=4")
    assert found.startswith("trainer.ranks: 'many'")


@pytest.mark.parametrize(
    ("recipe", "text", "told"),
    [
        ("grpo_tny", None, r"grpo_tiny\? The bundled ones are dapo_qwen3_32b, "),
        ("{folder}/gone.yaml", None, "there is no file {folder}/gone.yaml"),
        ("{folder}/mine.yml", "name: mine\n", r"does not end in \.yaml"),
        ("{folder}/mine.yaml", "name: x\ntrainer: [1\nseed: 3\n", "mine.yaml:3: not YAML"),
        ("{folder}/mine.yaml", "defaults: [grpo_huge, _self_]\n", "mine.yaml: .*grpo_huge"),
        ("{folder}/grpo_tiny.yaml", "defaults: [grpo_tiny, _self_]\n", "lead back to itself"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_told_beside_what_is_wrong_with_the_overrides(
    data, tmp_path: Path, recipe: str, text: str | None, told: str
) -> None:
    name = recipe.format(folder=tmp_path)
    if text is not None:
        Path(name).write_text(text)
    with pytest.raises(ConfigError, match=told.format(folder=tmp_path)) as caught:
        load_config(name, [*data, "a=b=c"])
    assert "a=b=c" in str(caught.value) or text is None or name.endswith("yml")
