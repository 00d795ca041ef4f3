"""What a user is told about a recipe that cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlrefit.recipes.config.load import ConfigError, load_config


def test_six_mistakes_of_six_kinds_are_all_told_at_once(violations) -> None:
    found = violations(
        "algorithm.group_sise=4",
        "trainer.optimizer.lr=fast",
        "a=b=c",
        "trainer.ranks=3",
        "generation.temperature=0",
        "model.dtype=fp8",
    )
    assert len(found) == 6
    text = "\n".join(found)
    assert "override 'a=b=c' is not in Hydra's grammar" in text
    assert "algorithm.group_sise: there is no such key; did you mean algorithm.group_size?" in text
    assert "trainer.optimizer.lr: 'fast' is not a number" in text
    assert "trainer.ranks: 3 is no multiple of 2" in text
    assert "give 4 ranks or smaller parallel sizes" in text
    assert "generation.temperature: 0 makes the rollouts of a group equal" in text
    assert "model.dtype: 'fp8' is not one of auto, bfloat16, float32" in text


def test_the_error_counts_its_violations_and_names_the_recipe(data) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("grpo_tiny", [*data, "lr=1", "seed=x"])
    assert str(caught.value).startswith("recipe grpo_tiny: 2 violations; nothing was started\n  1. ")
    assert caught.value.recipe == "grpo_tiny"
    assert all(violation in str(caught.value) for violation in caught.value.violations)


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("algorithm.group_sise=4", "did you mean algorithm.group_size?"),
        ("trainr.ranks=4", "did you mean trainer?"),
        ("lr=1e-4", "did you mean trainer.optimizer.lr?"),
        ("optimizer.lr=1e-4", "did you mean trainer.optimizer?"),
        ("generation.max_model_len=9", "did you mean generation.vllm.max_model_len?"),
        ("model.quantum=1", "the keys of model are path, catalog, dtype"),
    ],
)
def test_an_unknown_key_suggests_the_nearest_one(violations, override: str, suggestion: str) -> None:
    (found,) = violations(override)
    assert suggestion in found


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("seed=1.5", "seed: 1.5 is not a whole number"),
        ("resume=3", "resume: 3 is not true or false"),
        ("seed=null", "seed: null is not a whole number"),
        ("algorithm.tis_cap=high", "algorithm.tis_cap: 'high' is not a number or null"),
        ("algorithm.tis_cap=nan", "algorithm.tis_cap: nan is not finite"),
        ("reward.kwargs=3", "reward.kwargs: 3 is not a mapping"),
        ("model=tiny", "model: 'tiny' stands for a whole section; give its keys, model.KEY"),
        ("name=${nowhere}", "name: '${nowhere}' does not resolve"),
        ("name=???", "name: is ???, a value that is still to be given"),
        ("name.first=x", "name: {'first': 'x'} is not a string"),
    ],
)
def test_a_value_of_the_wrong_type_is_told_with_the_wanted_one(
    violations, override: str, problem: str
) -> None:
    (found,) = violations(override)
    assert problem in found


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("seed=1,2", "is a sweep"),
        ("~name", "deletes a key"),
        ("hydra.run.dir=/tmp", "configures Hydra"),
        ("cluster/net=slow", "config group that is not there"),
        ("name=[1", "not in Hydra's grammar"),
    ],
)
def test_hydra_syntax_without_a_meaning_here_is_refused(violations, override: str, problem: str) -> None:
    (found,) = violations(override)
    assert problem in found
    assert override in found


def test_a_violation_names_the_line_of_the_users_file_or_the_override(data, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "defaults: [grpo_tiny, _self_]\nname: mine\ntrainer:\n  ranks: 3\nalgorithm:\n  stepps: 1\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(str(recipe), [*data, "trainer.tensor_parallel=4"])
    unknown, layout = caught.value.violations
    assert f"[{recipe}:6]" in unknown
    assert f"{recipe}:4; override 'trainer.tensor_parallel=4'" in layout


def test_a_mistyped_section_names_the_overrides_that_wrote_it(violations) -> None:
    (found,) = violations("trainr.ranks=4", "trainr.tensor_parallel=2")
    assert found.endswith("[override 'trainr.ranks=4'; override 'trainr.tensor_parallel=2']")


def test_an_index_into_a_list_that_is_too_short_cannot_be_applied(violations) -> None:
    (found,) = violations("reward.kwargs={tags: [a]}", "reward.kwargs.tags.3=b")
    assert found.startswith("reward.kwargs.tags.3: override 'reward.kwargs.tags.3=b' cannot be applied")


def test_values_of_which_no_refit_can_be_made_are_told_with_all_else_and_where_they_come_from(
    violations,
) -> None:
    found = violations("policy.refit.bucket_mb=-1", "policy.refit.timeout_s=nan", "algorithm.steps=0")
    assert [text.partition(":")[0] for text in found] == [
        "policy.refit.bucket_mb",
        "policy.refit.timeout_s",
        "algorithm.steps",
    ]
    assert found[0].endswith("[override 'policy.refit.bucket_mb=-1']")


def test_a_refused_value_does_not_blame_its_default(violations) -> None:
    # The default of 1 rank is no multiple of 4, but nobody asked for 1 rank.
    (found,) = violations("trainer.ranks=many", "trainer.tensor_parallel=4")
    assert found.startswith("trainer.ranks: 'many'")


def test_a_mistyped_recipe_suggests_the_bundled_one() -> None:
    with pytest.raises(ConfigError, match=r"grpo_tiny\? The bundled ones are dapo_qwen3_32b, dapo_tiny"):
        load_config("grpo_tny")


def test_a_recipe_file_that_is_not_there_is_told_by_its_full_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"there is no file {tmp_path}/gone.yaml"):
        load_config(f"{tmp_path}/gone.yaml")


def test_a_file_with_the_suffix_yml_is_told_to_be_renamed(tmp_path: Path) -> None:
    (tmp_path / "mine.yml").write_text("name: mine\n")
    with pytest.raises(ConfigError, match=r"does not end in \.yaml"):
        load_config(f"{tmp_path}/mine.yml")


def test_broken_yaml_names_its_line_and_the_overrides_are_checked_as_well(data, tmp_path: Path) -> None:
    recipe = tmp_path / "broken.yaml"
    recipe.write_text("name: x\ntrainer: [1\nseed: 3\n")
    with pytest.raises(ConfigError) as caught:
        load_config(str(recipe), [*data, "a=b=c"])
    grammar, broken = caught.value.violations
    assert "a=b=c" in grammar
    assert f"{recipe}:3: not YAML" in broken


def test_a_base_that_is_not_there_is_reported_with_the_file(data, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("defaults: [grpo_huge, _self_]\n")
    with pytest.raises(ConfigError, match=r"mine.yaml: Hydra cannot compose it: .*grpo_huge"):
        load_config(str(recipe), data)


def test_a_file_named_like_its_base_is_told_to_be_renamed(data, tmp_path: Path) -> None:
    recipe = tmp_path / "grpo_tiny.yaml"
    recipe.write_text("defaults: [grpo_tiny, _self_]\n")
    with pytest.raises(ConfigError, match="its defaults lead back to itself"):
        load_config(str(recipe), data)
