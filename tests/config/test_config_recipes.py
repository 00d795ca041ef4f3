"""Bundled recipes, users' files on top of them, and overrides."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from rlrefit.recipes.config.load import TrainConfig, bundled_recipes, load_config, resolve_data_path
from rlrefit.recipes.configs import BUNDLED


def test_the_bundled_recipes_are_listed_without_their_bases() -> None:
    assert bundled_recipes() == [
        "dapo_qwen3_32b",
        "dapo_tiny",
        "grpo_deepseek_v3",
        "grpo_nemotron_nano",
        "grpo_qwen3_235b_a22b",
        "grpo_qwen3_30b_a3b",
        "grpo_qwen3_30b_a3b_fp8",
        "grpo_qwen3_4b",
        "grpo_qwen3_4b_fp8_kv",
        "grpo_qwen3_8b_colocated",
        "grpo_tiny",
        "grpo_tiny_moe",
        "grpo_tiny_pp",
        "grpo_tiny_sglang",
        "grpo_tiny_vllm",
    ]


@pytest.mark.parametrize("recipe", bundled_recipes())
def test_every_bundled_recipe_runs_as_it_is_and_is_named_like_its_file(recipe: str) -> None:
    config = load_config(recipe)
    assert isinstance(config, TrainConfig)
    assert config.name == recipe
    # Tiny ones bring their data, the others name data sets of the hub.
    assert Path(resolve_data_path(config.data.train)).is_file() == ("tiny" in recipe)


def test_the_recipes_differ_in_what_their_names_say(data) -> None:
    recipes = {name: load_config(name, data) for name in bundled_recipes() if "tiny" in name}
    assert recipes["dapo_tiny"].algorithm.dynamic_sampling
    assert recipes["dapo_tiny"].algorithm.aggregation == "token"
    assert recipes["grpo_tiny_moe"].trainer.expert_parallel == 2
    assert recipes["grpo_tiny_moe"].model.path == "tiny:qwen3-moe"
    assert recipes["grpo_tiny_pp"].trainer.pipeline_parallel == 2
    assert recipes["grpo_tiny_sglang"].generation.backend == "sglang"
    assert recipes["grpo_tiny_vllm"].generation.backend == "vllm"


def test_overrides_reach_typed_values_in_hydras_grammar(data) -> None:
    overrides = [
        "trainer.optimizer.lr=2e-4",
        "+seed=7",
        "++resume=yes",
        "algorithm.tis_cap=null",
        "reward.kwargs={format: 0.5, tags: [a, b]}",
        "name='a=b, c'",
        "run_root=${name}/runs",
        "algorithm.minibatches=${trainer.ranks}",
    ]
    config = load_config("grpo_tiny", [*data, *overrides])
    assert config.trainer.optimizer.lr == 2e-4
    assert (config.seed, config.resume, config.algorithm.tis_cap) == (7, True, None)
    assert config.reward.kwargs == {"format": 0.5, "tags": ["a", "b"]}
    assert (config.name, config.run_root) == ("a=b, c", "a=b, c/runs")
    assert config.algorithm.minibatches == 2


def test_the_last_of_two_overrides_wins(data) -> None:
    assert load_config("grpo_tiny", [*data, "seed=1", "seed=2"]).seed == 2


def test_a_value_may_refer_to_a_key_that_only_the_schema_has(data) -> None:
    assert load_config("grpo_tiny", [*data, "algorithm.max_sampling_rounds=${generation.replicas}"])


def test_a_users_file_builds_on_a_bundled_recipe(data, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("defaults:\n  - grpo_tiny_moe\n  - _self_\nname: mine\nalgorithm:\n  steps: 3\n")
    config = load_config(str(recipe), data)
    assert (config.name, config.algorithm.steps, config.trainer.expert_parallel) == ("mine", 3, 2)


def test_a_users_config_groups_are_selected_on_the_command_line(data, tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    for name, replicas in (("small", 1), ("large", 4)):
        text = f"# @package _global_\ngeneration:\n  replicas: {replicas}\n"
        (tmp_path / "cluster" / f"{name}.yaml").write_text(text)
    (tmp_path / "mine.yaml").write_text("defaults: [grpo_tiny, cluster: small, _self_]\n")
    path = f"{tmp_path}/mine.yaml"
    assert load_config(path, data).generation.replicas == 1
    assert load_config(path, [*data, "cluster=large"]).generation.replicas == 4


def test_a_users_own_search_path_is_kept(data, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "site.yaml").write_text("seed: 11\n")
    recipe = tmp_path / "mine.yaml"
    search = f"hydra:\n  searchpath: ['file://{tmp_path}/shared']\n"
    recipe.write_text(f"defaults: [grpo_tiny, site, _self_]\n{search}")
    assert load_config(str(recipe), data).seed == 11


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
