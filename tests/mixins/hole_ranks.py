"""Two trainer ranks with models of which Megatron-Bridge exports a part: what they log, and the names of the export."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

LACKING = "model.layers.0.self_attn.q_norm.weight"


def told_of_holes(rank: int, untied: str, tied: str) -> dict[str, tuple[list[str], list[str]]]:
    """By case the log of this rank and the names that it exports."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    from rlrefit.workers.trainers.megatron import enumeration
    from rlrefit.workers.trainers.megatron.model import MegatronLayout, MegatronModel, build_megatron

    told: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    enumeration.logger.addHandler(Ear())

    def built(path: str, **layout: Any) -> MegatronModel:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        return build_megatron(path, MegatronLayout(**layout), wrap_with_ddp=False)

    def exported(made: MegatronModel) -> tuple[list[str], list[str]]:
        told.clear()
        stages = parallel_state.get_pipeline_model_parallel_group()
        found = enumeration.enumerate_export(made.bridge, made.model, stages)
        return list(told), [spec.name for spec in found.specs]

    answers = {"tied": exported(built(tied, pipeline_parallel=2))}
    made = built(untied, pipeline_parallel=2)
    answers["untied"] = exported(made)
    if rank == 1:
        layer = unwrap_model(made.model)[0].decoder.layers[0]
        layer.register_parameter("gain", torch.nn.Parameter(torch.ones(3)))
    answers["unmapped"] = exported(made)
    made = built(untied, tensor_parallel=2)
    source = made.bridge.hf_pretrained.state.source
    known = [name for name in source.get_all_keys() if name != LACKING]
    with mock.patch.object(source, "get_all_keys", return_value=known):
        answers["lacking"] = exported(made)
    return answers
