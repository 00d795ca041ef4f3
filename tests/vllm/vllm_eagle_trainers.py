"""Trainers of a policy with an EAGLE head beside it: whole on each rank of a Megatron trainer, sharded under FSDP2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm_checkpoints import read_checkpoint

from tests.megatron_trainers import CONFIG, MegatronTrainer


def module_of(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """A module with these parameters, and buffers of what is no floating-point number."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        holder = root
        for part in path:
            if not hasattr(holder, part):
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        if tensor.is_floating_point():
            holder.register_parameter(last, nn.Parameter(tensor.clone()))
        else:
            holder.register_buffer(last, tensor.clone())
    return root


class MegatronWithHead(MegatronTrainer):
    """With a head of a plain module.

    Args:
        heads: checkpoints of the head, beside those of the model.
    """

    dtype = torch.bfloat16

    def __init__(
        self, rank: int, models: dict[str, Sequence[str]], built_with: dict[str, Any], heads: Sequence[str]
    ) -> None:
        super().__init__(rank, models, built_with)
        self._heads = heads
        for worker in self._workers.values():
            worker.refit_drafter = module_of(read_checkpoint(heads[0])).to(self.dtype)

    def _take_on(self, model: str, index: int) -> None:
        super()._take_on(model, index)
        self._workers[model].refit_drafter.load_state_dict(read_checkpoint(self._heads[index]))


class MegatronWithWideHead(MegatronWithHead):
    """In FP32, which the engine does not keep, so that its loader has to take the head."""

    dtype = torch.float32


class FsdpWithHead(MegatronWithHead):
    """The same under FSDP2, model and head."""

    def __init__(
        self, rank: int, models: dict[str, Sequence[str]], built_with: dict[str, Any], heads: Sequence[str]
    ) -> None:
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoModelForCausalLM

        from rlrefit.integration.config import RefitConfig
        from rlrefit.workers.trainers.fsdp.mixin import FSDPRefitMixin

        class Worker(FSDPRefitMixin):
            refit_config = RefitConfig(**CONFIG)
            # Of the engine; the optimizer's are in FP32.
            refit_dtype = torch.bfloat16

            def __init__(self, path: str) -> None:
                self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
                fully_shard(self.model)
                self.refit_drafter = module_of(read_checkpoint(heads[0])).float()
                fully_shard(self.refit_drafter)

        self._rank, self._models, self._heads = rank, models, heads
        self._workers = {name: Worker(paths[0]) for name, paths in models.items()}

    def _take_on(self, model: str, index: int) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        worker = self._workers[model]
        paths = {worker.model: self._models[model][index], worker.refit_drafter: self._heads[index]}
        for module, path in paths.items():
            state = {n: t.float() if t.is_floating_point() else t for n, t in read_checkpoint(path).items()}
            set_model_state_dict(module, state, options=StateDictOptions(full_state_dict=True))
