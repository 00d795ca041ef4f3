"""Ranks of a Megatron policy and of an engine, which meet by what NeMo-RL's workers are asked to run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.meeting import meeting_in, tell_meeting

CONFIG = {"bucket_mb": 1, "timeout_s": 120.0, "verify": "full"}
TRAIN_RANKS = 2


def policy(rank: int, models: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """What of ``MegatronPolicyWorker`` a refit meets, at TP2; the answers to all calls."""
    from rlrefit.workers.frameworks.nemo_rl import policy_worker
    from rlrefit.workers.trainers.megatron.model import MegatronLayout, build_megatron

    built = build_megatron(models[0], MegatronLayout(tensor_parallel=2))
    [model] = built.model
    worker = SimpleNamespace(rank=rank, model=model, megatron_bridge=built.bridge, draft_model=None, cfg={})
    answers = [policy_worker.prepare(worker, CONFIG)]
    if rank == 0:
        tell_meeting(folder, policy_worker.open_rendezvous(worker, TRAIN_RANKS, 1, 1))
    answers.append(policy_worker.join(worker, meeting_in(folder), "nccl_xfer"))
    for version, path in enumerate(models[1:], start=1):
        type(built.bridge).from_hf_pretrained(path).load_hf_weights(built.model)
        answers.append(policy_worker.refit(worker, version, None))
    return [*answers, policy_worker.close(worker)]


def engine(rank: int, models: Sequence[str], folder: Path) -> list[list[str]]:
    """What is wrong with an engine's parameters after each refit into NaN."""
    from tests.nemo_rl_adapter.run_workers import TransformersRank
    from tests.vllm.vllm_checkpoints import read_checkpoint

    served = TransformersRank(models[0])
    answers = [served.rlrefit_join(meeting_in(folder), TRAIN_RANKS, CONFIG, "nccl_xfer")]
    wrong = []
    for version, path in enumerate(models[1:], start=1):
        served.probe_poison()
        answers.append(served.rlrefit_refit(version))
        wrong.append(served.probe_wrong(read_checkpoint(path)))
    served.rlrefit_close()
    return [[str(a) for a in answers if "refit_error" in a], *wrong]
