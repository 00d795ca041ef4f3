"""Bundled recipes, users' files on top of them, and overrides."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from rlrefit.recipes.config.load import TrainConfig, bundled_recipes, load_config, resolve_data_path
from rlrefit.recipes.configs import BUNDLED


@pytest.mark.parametrize("recipe", bundled_recipes())
def test_every_bundled_recipe_runs_as_it_is_and_is_named_like_its_file(recipe: str) -> None:
    config = load_config(recipe)
    assert isinstance(config, TrainConfig)
    assert config.name == recipe
    # Tiny ones bring their data, the others name data sets of the hub.
    assert Path(resolve_data_path(config.data.train)).is_file() == ("tiny" in recipe)


def test_overrides_reach_typed_values_in_hydras_grammar(data) -> None:
    overrides = [
        "trainer.optimizer.lr=2e-4",
        "seed=1",
        "+seed=7",  # the last one wins
        "++resume=yes",
        "algorithm.tis_cap=null",
        "reward.kwargs={format: 0.5, tags: [a, b]}",
        "name='a=b, c'",
        "run_root=${name}/runs",
        "algorithm.minibatches=${trainer.ranks}",
        "reward.processes=${generation.replicas}",  # a key that only the schema has
    ]
    config = load_config("grpo_tiny", [*data, *overrides])
    assert config.trainer.optimizer.lr == 2e-4
    assert (config.seed, config.resume, config.algorithm.tis_cap) == (7, True, None)
    assert config.reward.kwargs == {"format": 0.5, "tags": ["a", "b"]}
    assert (config.name, config.run_root) == ("a=b, c", "a=b, c/runs")
    assert (config.algorithm.minibatches, config.reward.processes) == (2, 1)


def test_a_users_file_builds_on_a_bundled_recipe_with_config_groups_and_a_search_path_of_its_own(
    data, tmp_path: Path
) -> None:
    for folder, name, text in (
        ("cluster", "small", "# @package _global_\ngeneration:\n  replicas: 1\n"),
        ("cluster", "large", "# @package _global_\ngeneration:\n  replicas: 4\n"),
        ("shared", "site", "seed: 11\n"),
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{name}.yaml").write_text(text)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "defaults: [grpo_tiny_moe, site, cluster: small, _self_]\nname: mine\nalgorithm:\n  steps: 3\n"
        f"hydra:\n  searchpath: ['file://{tmp_path}/shared']\n"
    )
    config = load_config(str(recipe), data)
    assert (config.name, config.algorithm.steps, config.trainer.expert_parallel) == ("mine", 3, 2)
    assert (config.seed, config.generation.replicas) == (11, 1)
    assert load_config(str(recipe), [*data, "cluster=large"]).generation.replicas == 4


def test_what_is_changed_in_a_configuration_is_in_no_other_one(data) -> None:
    first = load_config("grpo_tiny", [*data, "reward.kwargs.format=0.5", "ray.trainer_env.ONE=1"])
    first.trainer.lora.target_modules.append("q_proj")
    first.reward.kwargs["answer"] = 2.0
    assert load_config("grpo_tiny", data) == load_config("grpo_tiny", data) != first
    again = load_config("grpo_tiny", data)
    assert again.trainer.lora.target_modules == TrainConfig().trainer.lora.target_modules
    assert (again.reward.kwargs, again.ray.trainer_env) == (TrainConfig().reward.kwargs, {})


def test_reading_a_recipe_inside_a_hydra_application_leaves_its_state_alone(data) -> None:
    with initialize_config_dir(config_dir=str(BUNDLED), version_base="1.3"):
        load_config("grpo_tiny", data)
        assert compose(config_name="grpo_tiny_pp").trainer.pipeline_parallel == 2


def test_a_configuration_written_as_yaml_reads_back_equal(data, tmp_path: Path) -> None:
    config = load_config("dapo_tiny", [*data, "seed=5", "reward.kwargs={a: 1}"])
    file = tmp_path / "again.yaml"
    file.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    assert load_config(str(file)) == config


def test_a_package_path_is_a_file_of_the_recipes_and_others_stay_as_they_are() -> None:
    assert resolve_data_path("package:configs/_tiny.yaml") == str(BUNDLED / "_tiny.yaml")
    assert resolve_data_path("data/train.jsonl") == "data/train.jsonl"
    with pytest.raises(ValueError, match="leads out of rlrefit's recipes"):
        resolve_data_path("package:../pyproject.toml")
