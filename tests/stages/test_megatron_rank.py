"""Which Megatron trainers can leave their GPU; that they do is tested on one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlrefit.recipes.tiny.checkpoints import make_checkpoint
from tests.spawn import run_ranks

CASES = {
    "BF16, distributed": ("bfloat16", True),
    "FP32, not distributed": ("float32", False),
}


def answers(rank: int, model_path: str) -> dict[str, str]:
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1] / "megatron_policy"))
    from policy_ranks import Case, leave_layout, make_policy

    from rlrefit.integration.errors import RefitError
    from rlrefit.workers.trainers.colocated import MegatronRank

    found = {}
    for name, (dtype, distributed) in CASES.items():
        policy = make_policy(Case(model_path, dtype=dtype, distributed_optimizer=distributed))
        try:
            MegatronRank(policy.model, policy._optimizer, torch.device("cpu"), rank)
            found[name] = ""
        except RefitError as error:
            found[name] = str(error)
        for graphs in ({"cuda_graph_impl": "local"}, {"enable_cuda_graph": True}):
            config = policy.model[0].config
            kept = {key: getattr(config, key) for key in graphs}
            vars(config).update(graphs)
            try:
                MegatronRank(policy.model, policy._optimizer, torch.device("cpu"), rank)
            except RefitError as error:
                found[f"{name}, {next(iter(graphs))}"] = str(error)
            vars(config).update(kept)
        leave_layout()
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = make_checkpoint("qwen3", tmp_path_factory.mktemp("model") / "qwen3")
    return run_ranks(answers, 1, str(path))[0]


def test_a_distributed_optimizer_with_masters_can_leave(told: dict[str, str]) -> None:
    assert told["BF16, distributed"] == ""


def test_cuda_graphs_would_replay_on_freed_memory_and_are_refused_by_name(told: dict[str, str]) -> None:
    text = told["BF16, distributed, cuda_graph_impl"]
    assert "model chunk 0 runs under CUDA graphs (cuda_graph_impl=local)" in text
    assert "(enable_cuda_graph=True)" in told["BF16, distributed, enable_cuda_graph"]
    assert "CUDA graphs" in told["FP32, not distributed, cuda_graph_impl"]
    assert "use_distributed_optimizer" in told["FP32, not distributed, cuda_graph_impl"]


def test_all_that_is_in_the_way_is_told_at_once(told: dict[str, str]) -> None:
    text = told["FP32, not distributed"]
    assert "set use_distributed_optimizer" in text
    assert "weight itself" in text
    assert "train in BF16 or FP16" in text
