"""Plans of trainers and engines that share GPUs: by ``--topology shared_gpus=true``, and of recipes."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from rlrefit.recipes.config.engines import ENABLED
from rlrefit.recipes.plan.arguments import add_arguments
from rlrefit.recipes.plan.options import PlanOptions, PlanProblems, read_options
from rlrefit.recipes.plan.study import study


def planned(recipe: str, *arguments: str) -> PlanOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return read_options(parser.parse_args(["--recipe", recipe, *arguments]))


def test_copies_within_a_gpu_set_the_time_at_the_rate_that_is_given(plan, moe: str) -> None:
    def bound(train: str, gen: str, rate: str) -> float:
        topology = f"shared_gpus=true,copy={rate},nvlink=400"
        found = plan(moe, train, gen, "--topology", topology, "--json").json
        assert found["bound_seconds"] <= found["predicted_seconds"]
        return float(found["bound_seconds"])

    # On one GPU all bytes stay there, those of the misc path too.
    assert bound("tp=1", "tp=1", "1000") == pytest.approx(2 * bound("tp=1", "tp=1", "2000"))
    # Between two, the experts of the other GPU cross NVLink, which a faster copy does not change.
    assert bound("ep=2", "tp=2", "1000000") == pytest.approx(bound("ep=2", "tp=2", "2000000"))


@pytest.mark.parametrize(
    ("train", "topology", "told"),
    [
        (
            "ep=2",
            "shared_gpus=true,gpus_per_host=1",
            ["2 trainer and 1 engine ranks can't share GPUs", "on one host, and gpus_per_host is 1; raise it"],
        ),
        ("tp=1", "shared_gpus=1,copy=0", ["shared_gpus is '1'; give true or false", "copy is '0'"]),
    ],
)  # fmt: skip
def test_worlds_of_two_sizes_and_more_than_one_host_can_not_share_gpus(
    plan, moe: str, train: str, topology: str, told: list[str]
) -> None:
    code, _, err = plan(moe, train, "tp=1", "--topology", topology)
    assert code == 2
    assert [text for text in told if text not in err] == []


def test_a_recipe_that_shares_its_gpus_has_both_sides_on_one_host_or_can_not_be_planned() -> None:
    shared = planned("grpo_qwen3_8b_colocated")
    assert shared.hosts.topology(8, 8).host_of == (0,) * 16
    apart = planned("grpo_qwen3_8b_colocated", f"{ENABLED}=false")
    assert apart.hosts.topology(8, 8).host_of == (0,) * 8 + (1,) * 8
    with pytest.raises(PlanProblems, match=r"32 ranks share a GPU each.*gpus_per_host"):
        planned("dapo_qwen3_32b", f"{ENABLED}=true")
    larger = planned("dapo_qwen3_32b", f"{ENABLED}=true", "--topology", "gpus_per_host=32")
    assert larger.hosts.topology(32, 32).hosts == 1


def test_the_plan_of_shared_gpus_predicts_what_stays_by_the_copy_rate(plan, tmp_path: Path) -> None:
    made = study(planned("grpo_qwen3_8b_colocated", "--compile-ranks", "1"))
    found = made.as_json("", "")
    assert made.analysis.manifest.bytes_of("bulk") > 16e9
    # Every shard is on the engine's own GPU: 8.19 GB at 1,500 GB/s, where NVLink would take 23 ms.
    assert [link.name for link in made.analysis.links] == [f"GPU {i} copy" for i in range(8)]
    assert 0.0054 < made.analysis.links[0].seconds <= found["predicted_seconds"] < 0.007
    page = tmp_path / "map.html"
    layouts = ("--recipe", "grpo_tiny_moe", f"{ENABLED}=true", "generation.tensor_parallel=2")
    code, out, _ = plan(None, "", "", *layouts, "--heat-map", str(page))
    assert code == 0
    assert "each trainer rank on the GPU of an engine's" in out
    assert "GPU 0 copy" in page.read_text()
