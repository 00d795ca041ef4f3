"""Ranks of an actor with verl's Megatron engine, by the attributes that a refit takes of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import OmegaConf

from rlrefit.integration.config import RefitConfig
from rlrefit.workers.frameworks.verl.options import EXTENSION
from tests.meeting import meeting_in, tell_meeting
from tests.nemo_rl_adapter.megatron_ranks import CONFIG, TRAIN_RANKS

_ASKED = {
    "actor": {"strategy": "megatron"},
    "rollout": {
        "name": "vllm",
        "dtype": "bfloat16",
        "engine_kwargs": {"vllm": {"worker_extension_cls": EXTENSION}},
    },
    "model": {},
}


def actor(rank: int, models: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """At TP2, under Megatron's ``DistributedDataParallel`` as in verl's training: the routes, then each refit's record."""
    from rlrefit.workers.frameworks.verl.source import MegatronSide, source_of
    from rlrefit.workers.trainers.megatron.model import MegatronLayout, build_megatron

    built = build_megatron(models[0], MegatronLayout(tensor_parallel=TRAIN_RANKS))
    engine = SimpleNamespace(
        module=built.model, bridge=built.bridge, is_param_offload_enabled=False, vanilla_bridge=False
    )
    worker = SimpleNamespace(actor=SimpleNamespace(engine=engine), config=OmegaConf.create(_ASKED))
    side = source_of(worker, RefitConfig(**CONFIG))
    assert isinstance(side, MegatronSide)
    if rank == 0:
        tell_meeting(folder, side.open_refit_rendezvous("127.0.0.1", TRAIN_RANKS, 1, 1))
    answers = [side.join_refit(meeting_in(folder), rank)]
    for version, path in enumerate(models[1:], start=1):
        type(built.bridge).from_hf_pretrained(path).load_hf_weights(built.model)
        answers.append(side.refit(version))
    side.close_refit()
    return answers
