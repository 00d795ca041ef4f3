"""What ``generation.colocated`` asks of a recipe, all of it told at once."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import pytest
from rich.console import Console

from rlrefit.recipes.config.engines import ENABLED, needs_bfloat16
from rlrefit.recipes.config.load import load_config
from rlrefit.recipes.config.machine import gpu_violations
from rlrefit.recipes.plan.arguments import add_arguments
from rlrefit.recipes.plan.heat_map import write_heat_map
from rlrefit.recipes.plan.options import PlanOptions, PlanProblems, read_options
from rlrefit.recipes.plan.render import show_study
from rlrefit.recipes.plan.study import study

ON = f"{ENABLED}=true"


def planned(recipe: str, *arguments: str) -> PlanOptions:
    """What ``rlrefit plan`` makes of a recipe."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return read_options(parser.parse_args(["--recipe", recipe, *arguments]))


@pytest.mark.parametrize("trainer", ["megatron", "fsdp"])
@pytest.mark.parametrize("recipe", ["grpo_tiny", "dapo_tiny", "grpo_tiny_moe", "grpo_tiny_pp"])
def test_either_trainer_and_algorithm_can_share_its_gpus(violations, recipe: str, trainer: str) -> None:
    assert violations(ON, f"trainer={trainer}", recipe=recipe) == ()


def test_ranks_that_do_not_match_get_the_replicas_that_do(violations) -> None:
    (found,) = violations(ON, recipe="grpo_tiny_vllm")
    assert found.startswith("trainer.ranks: 2 trainer ranks and 1 generation ranks")
    assert "give generation.replicas=2" in found
    assert violations(ON, "generation.replicas=2", recipe="grpo_tiny_vllm") == ()
    (found,) = violations(ON, "trainer.ranks=3", "trainer.tensor_parallel=1", "algorithm.prompts_per_step=48")
    assert "give trainer.ranks=2" in found


def test_all_that_can_not_share_gpus_is_told_at_once_with_its_remedy(violations) -> None:
    found = violations(
        ON,
        "generation.tensor_parallel=4",
        "generation.vllm.distributed_executor_backend=ray",
        "policy.refit.transport=ipc",
        "ray.generation_env={PYTORCH_CUDA_ALLOC_CONF: 'expandable_segments:True'}",
        "trainer.distributed_optimizer=false",
        "model.dtype=float32",
        recipe="grpo_tiny_vllm",
    )
    told = {text.partition(":")[0]: text for text in found}
    assert told.keys() == {
        "trainer.ranks",
        "generation.vllm.distributed_executor_backend",
        "policy.refit.transport",
        "ray.generation_env.PYTORCH_CUDA_ALLOC_CONF",
        "trainer.distributed_optimizer",
        "model.dtype",
    }
    assert "give trainer.ranks=4" in told["trainer.ranks"]
    assert "give mp" in told["generation.vllm.distributed_executor_backend"]
    assert "give auto" in told["policy.refit.transport"]
    assert "leave expandable_segments out" in told["ray.generation_env.PYTORCH_CUDA_ALLOC_CONF"]
    assert "give true" in told["trainer.distributed_optimizer"]
    assert "give bfloat16 or auto, or train with trainer=fsdp" in told["model.dtype"]


def test_an_optimizer_that_is_half_in_host_memory_is_refused(violations) -> None:
    (found,) = violations(ON, "trainer.optimizer.cpu_offload_fraction=0.5")
    assert "give 0: all of the optimizer is in host memory while an engine generates" in found


def test_stages_without_shared_gpus_have_no_effect_and_are_refused(violations) -> None:
    (found,) = violations("generation.colocated.multi_stage_wake_up=false")
    assert f"give true, or {ENABLED}=true" in found
    assert violations(ON, "generation.colocated.multi_stage_wake_up=false") == ()


def test_shared_gpus_are_counted_once_and_the_transformers_engine_needs_its_own(data) -> None:
    config = load_config("grpo_tiny", [*data, ON])
    assert [*gpu_violations(config, 0)] == []
    (engine,) = gpu_violations(config, 2)
    assert "give generation.backend=vllm or sglang, or false here" in engine.text
    served = load_config("grpo_tiny_vllm", [*data, ON, "generation.replicas=2"])
    assert [*gpu_violations(served, 2)] == []
    (ranks,) = gpu_violations(served, 1)
    assert "2 ranks share a GPU each with an engine's, all on one host" in ranks.text
    assert "this machine has 1; use fewer ranks" in ranks.text


def test_the_plan_of_a_recipe_that_shares_its_gpus_has_both_sides_on_the_same_hosts() -> None:
    shared = planned("grpo_qwen3_8b_colocated")
    assert shared.hosts.topology(8, 8).host_of == (0,) * 16
    apart = planned("grpo_qwen3_8b_colocated", f"{ENABLED}=false")
    assert apart.hosts.topology(8, 8).host_of == (0,) * 8 + (1,) * 8


def test_a_recipe_that_needs_more_than_one_host_for_both_sides_can_not_be_planned() -> None:
    with pytest.raises(
        PlanProblems, match=r"32 ranks share a GPU each.*a host of this topology has 8"
    ) as found:
        planned("dapo_qwen3_32b", ON)
    assert f"--topology gpus_per_host=…), or {ENABLED}=false" in str(found.value)
    assert planned("dapo_qwen3_32b", ON, "--topology", "gpus_per_host=32").hosts.topology(32, 32).hosts == 1


def test_the_plan_of_shared_gpus_predicts_what_stays_by_the_copy_rate(tmp_path: Path) -> None:
    made = study(planned("grpo_qwen3_8b_colocated", "--compile-ranks", "1"))
    found = made.as_json("", "")
    assert made.analysis.manifest.bytes_of("bulk") > 16e9
    # Every shard is on the engine's own GPU: 8.19 GB at 1,500 GB/s, where NVLink would take 23 ms.
    assert [link.name for link in made.analysis.links] == [f"GPU {i} copy" for i in range(8)]
    assert 0.0054 < made.analysis.links[0].seconds <= found["predicted_seconds"] < 0.007
    show_study(Console(file=(file := io.StringIO()), width=200), made)
    said = " ".join(file.getvalue().split())
    assert "copies on a GPU 1500 GB/s; each trainer rank on the GPU of an engine's" in said
    assert "straight into the engines' parameters" in said
    assert "bytes go through buckets" in said
    assert "buckets: 2 x" in said
    for name in ("map.html", "map.png"):
        write_heat_map(made, tmp_path / name)
    assert (tmp_path / "map.png").stat().st_size > 0
    page = (tmp_path / "map.html").read_text()
    assert "8 trainer ranks to 8 engine ranks on the same GPUs, shard to shard T =" in page
    assert "GPU 0 copy" in page


def test_only_megatrons_optimizer_asks_for_bfloat16(data) -> None:
    assert needs_bfloat16(load_config("grpo_tiny", [*data, ON]))
    assert not needs_bfloat16(load_config("grpo_tiny", [*data, ON, "trainer=fsdp"]))
    assert not needs_bfloat16(load_config("grpo_tiny", data))
