"""Which Megatron trainers can leave their GPU; that they do is tested on one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rlrefit.recipes.tiny.checkpoints import make_checkpoint
from tests.spawn import run_ranks

CASES = {"plain": ("bfloat16", True), "wrong": ("float32", False)}


def answers(rank: int, model_path: str) -> dict[str, str]:
    """Why each trainer is refused, as it is and under CUDA graphs; nothing where it is not."""
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1] / "megatron_policy"))
    from policy_ranks import Case, leave_layout, make_policy

    from rlrefit.integration.errors import RefitError
    from rlrefit.workers.trainers.colocated import MegatronRank

    def refusal(model: list[Any]) -> str:
        try:
            MegatronRank(model, policy._optimizer, torch.device("cpu"), rank)
        except RefitError as error:
            return str(error)
        return ""

    found = {}
    for name, (dtype, distributed) in CASES.items():
        policy = make_policy(Case(model_path, dtype=dtype, distributed_optimizer=distributed))
        config = policy.model[0].config
        for graphs in ({}, {"cuda_graph_impl": "local"}, {"enable_cuda_graph": True}):
            kept = {key: getattr(config, key) for key in graphs}
            vars(config).update(graphs)
            found[" ".join([name, *graphs])] = refusal(policy.model)
            vars(config).update(kept)
        frozen = next(policy.model[0].parameters())
        frozen.requires_grad_(False)
        found[f"{name} frozen"] = refusal(policy.model)
        frozen.requires_grad_(True)
        found[f"{name} bare"] = refusal([chunk.module for chunk in policy.model])
        leave_layout()
    return found


def test_a_trainer_that_can_not_leave_is_refused_with_all_that_is_in_the_way(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path / "qwen3")
    (told,) = run_ranks(answers, 1, str(path))
    assert told["plain"] == ""
    for name in CASES:
        assert "model chunk 0 is not under Megatron's DistributedDataParallel" in told[f"{name} bare"]
    # A base model under LoRA.
    assert "is not trained (1 parameters)" in told["plain frozen"]
    # They would replay on freed memory.
    assert "model chunk 0 runs under CUDA graphs (cuda_graph_impl=local)" in told["plain cuda_graph_impl"]
    assert "(enable_cuda_graph=True)" in told["plain enable_cuda_graph"]
    for name in ("wrong", "wrong cuda_graph_impl", "wrong enable_cuda_graph"):
        for part in ("set use_distributed_optimizer", "weight itself", "train in BF16 or FP16"):
            assert part in told[name]
        assert ("CUDA graphs" in told[name]) is (name != "wrong")
