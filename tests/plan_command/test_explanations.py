"""What ``--explain`` says of a weight beside the plans that the ranks really compile."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

import pytest

from rlrefit.recipes.plan.arguments import add_arguments
from rlrefit.recipes.plan.explain import explain
from rlrefit.recipes.plan.options import PlanOptions, PlanProblems, read_options
from rlrefit.recipes.plan.render import ranges
from rlrefit.recipes.plan.study import study
from rlrefit.recipes.terminal import size
from tests.catalog.shrunken import CONFIGS


@pytest.mark.parametrize("topology", ["gpus_per_host=1", "gpus_per_host=4,nic=0.0001"])
@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.2.mlp.experts.5.down_proj.weight",
        "model.layers.3.input_layernorm.weight",
    ],
)
def test_the_explanation_is_what_the_ranks_do(name: str, topology: str, tmp_path: Path) -> None:
    planned = study(_options(tmp_path, topology))
    explanation = explain(planned, name)
    said = {(s.source, target, s.box) for s in explanation.sendings for target in s.targets}
    passed_on = {
        (target, other, s.box) for s in explanation.sendings for target in s.targets for other in s.relayed_to
    }
    done, relayed = set(), set()
    for rank in range(planned.analysis.train_ranks + planned.analysis.gen_ranks):
        for messages in planned.analysis.compile(rank).sends:
            for message in messages:
                found = {
                    (message.source, message.destination, segment.box)
                    for segment in message.segments
                    if segment.name == name
                }
                (relayed if message.is_relay else done).update(found)
    assert said == done
    assert passed_on == relayed
    assert bool(relayed) == (topology != "gpus_per_host=1")


def test_a_bucket_that_is_too_small_and_a_part_of_a_name_are_violations(tmp_path: Path) -> None:
    options = _options(tmp_path, "")
    with pytest.raises(PlanProblems, match="bucket"):
        study(replace(options, bucket_bytes=64))
    with pytest.raises(PlanProblems) as refused:
        study(replace(options, explain="q_proj"))
    [problem] = refused.value.violations
    assert "model.layers.0.self_attn.q_proj.weight" in problem


def _options(folder: Path, topology: str) -> PlanOptions:
    (folder / "config.json").write_text(json.dumps(CONFIGS["qwen3_moe"]))
    parser = ArgumentParser()
    add_arguments(parser)
    layouts = ["--train", "tp=2,ep=2,dp=4", "--gen", "tp=2,dp=4"]
    return read_options(parser.parse_args(["--model", str(folder), *layouts, "--topology", topology]))


def test_ranks_are_told_as_runs_and_sizes_with_three_digits() -> None:
    runs = {
        "0-3": [0, 1, 2, 3],
        "": [],
        "0-12 by 4, 13": [0, 4, 8, 12, 13],
        "1-2, 9": [1, 2, 9],
        "1, 5": [1, 5],
    }
    assert {text: ranges(ranks) for text, ranks in runs.items()} == {text: text for text in runs}
    sizes = {"0 B": 0, "999 B": 999, "1 kB": 1000, "15.3 GB": 15_260_000_000, "2.05 TB": 2.05e12}
    assert {text: size(n) for text, n in sizes.items()} == {text: text for text in sizes}
