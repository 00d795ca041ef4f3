"""Ranks of a Megatron model and of an engine, which meet by what the workers of NeMo-RL and of verl are asked to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.ahead import keeping_time
from tests.meeting import meeting_in, tell_meeting
from tests.refit.models import make_model
from tests.spawn import run_ranks, run_together

CONFIG = {"bucket_mb": 1, "timeout_s": 120.0, "verify": "full"}
TRAIN_RANKS = 2
FRAMEWORKS = ("nemo_rl", "verl")


@keeping_time  # each side waits only so long for the other
def refit_twice_by_each(folder: Path) -> dict[str, tuple[list[Any], list[list[str]]]]:
    """By framework, all answers of each trainer rank, and what :func:`engine` says."""
    models = [make_model("qwen3", folder / f"model{seed}", seed) for seed in range(3)]
    trainers, [engines] = run_together(
        lambda: run_ranks(trainer, TRAIN_RANKS, models, folder, timeout_s=250.0),
        lambda: run_ranks(engine, 1, models, folder, timeout_s=250.0),
    )
    return {name: ([t[i] for t in trainers], engines[i]) for i, name in enumerate(FRAMEWORKS)}


def trainer(rank: int, models: Sequence[str], folder: Path) -> list[list[Any]]:
    """Under Megatron's ``DistributedDataParallel`` at TP2."""
    from rlrefit.workers.trainers.megatron.model import MegatronLayout, build_megatron

    built = build_megatron(models[0], MegatronLayout(tensor_parallel=TRAIN_RANKS))

    def refits(refit: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
        answers = []
        for version, path in enumerate(models[1:], start=1):
            type(built.bridge).from_hf_pretrained(path).load_hf_weights(built.model)
            answers.append(refit(version))
        return answers

    return [side(rank, built, folder, refits) for side in (_nemo_rl_policy, _verl_actor)]


def _nemo_rl_policy(rank: int, built: Any, folder: Path, refits: Callable[..., list[Any]]) -> list[Any]:
    """What of ``MegatronPolicyWorker`` a refit meets."""
    from rlrefit.workers.frameworks.nemo_rl import policy_worker

    [model] = built.model
    worker = SimpleNamespace(rank=rank, model=model, megatron_bridge=built.bridge, draft_model=None, cfg={})
    answers = [policy_worker.prepare(worker, CONFIG)]
    if rank == 0:
        tell_meeting(folder, policy_worker.open_rendezvous(worker, TRAIN_RANKS, 1, 1), 0)
    answers.append(policy_worker.join(worker, meeting_in(folder, 0), "nccl_xfer"))
    answers += refits(lambda version: policy_worker.refit(worker, version, None))
    return [*answers, policy_worker.close(worker)]


def _verl_actor(rank: int, built: Any, folder: Path, refits: Callable[..., list[Any]]) -> list[Any]:
    """An actor with verl's Megatron engine, by the attributes that a refit takes of it."""
    from omegaconf import OmegaConf

    from rlrefit.integration.config import RefitConfig
    from rlrefit.workers.frameworks.verl.options import EXTENSION
    from rlrefit.workers.frameworks.verl.source import MegatronSide, source_of

    vllm = {"worker_extension_cls": EXTENSION}
    rollout = {"name": "vllm", "dtype": "bfloat16", "engine_kwargs": {"vllm": vllm}}
    asked = {"actor": {"strategy": "megatron"}, "rollout": rollout, "model": {}}
    engine = SimpleNamespace(
        module=built.model,
        bridge=built.bridge,
        is_param_offload_enabled=False,
        vanilla_bridge=False,
        engine_config=SimpleNamespace(use_megatron_fsdp=False),
    )
    worker = SimpleNamespace(actor=SimpleNamespace(engine=engine), config=OmegaConf.create(asked))
    side = source_of(worker, RefitConfig(**CONFIG))
    assert isinstance(side, MegatronSide)
    if rank == 0:
        tell_meeting(folder, side.open_refit_rendezvous("127.0.0.1", TRAIN_RANKS, 1, 1), 1)
    answers = [side.join_refit(meeting_in(folder, 1), rank), *refits(side.refit)]
    side.close_refit()
    return answers


def engine(rank: int, models: Sequence[str], folder: Path) -> list[list[list[str]]]:
    """By framework its errors, and what is wrong with an engine's parameters after each refit into NaN."""
    from tests.nemo_rl_adapter.run_workers import TransformersRank
    from tests.vllm.vllm_checkpoints import read_checkpoint

    found = []
    for number in range(len(FRAMEWORKS)):
        served = TransformersRank(models[0])
        answers = [served.rlrefit_join(meeting_in(folder, number), TRAIN_RANKS, CONFIG, "nccl_xfer")]
        wrong = []
        for version, path in enumerate(models[1:], start=1):
            served.probe_poison()
            answers.append(served.rlrefit_refit(version))
            wrong.append(served.probe_wrong(read_checkpoint(path)))
        served.rlrefit_close()
        found.append([[str(answer) for answer in answers if "refit_error" in answer], *wrong])
    return found
