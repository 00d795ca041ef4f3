"""What the ranks of these tests do: several policies one after another, as starting a rank takes long."""

from __future__ import annotations

import sys
import zlib
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlrefit.workers.trainers.qat.config import QATConfig
from tests import policy_scenes as scenes
from tests.digests import digest_of
from tests.fsdp_policy import ranks as fsdp


@dataclass(frozen=True)
class Case:
    """One policy: a checkpoint in a layout, and the steps that it is trained."""

    model_path: str
    layout: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    distributed_optimizer: bool = True
    micro_batch: int = 2
    kl_coef: float = 0.0
    aggregation: str = "token"
    trimmed: bool = True
    recompute: dict[str, Any] | None = None
    eps: float = scenes.ADAM.eps
    lr_decay: str = "constant"
    qat: QATConfig | None = None
    lora: dict[str, Any] | None = None
    steps: int = 2


def make_policy(case: Case) -> Any:
    from rlrefit.recipes.policy.megatron import MegatronPolicy, MegatronPolicyConfig
    from rlrefit.workers.trainers.megatron.model import Lora, MegatronLayout, Recompute

    decay = {"lr_decay": case.lr_decay, "lr_decay_steps": 3, "min_lr": 4e-3}
    config = MegatronPolicyConfig(
        case.model_path,
        MegatronLayout(**case.layout),
        loss=scenes.loss_config(case.kl_coef, case.aggregation),
        optimizer=replace(scenes.ADAM, eps=case.eps, **decay),
        micro_batch=case.micro_batch,
        temperature=scenes.TEMPERATURE,
        dtype=getattr(torch, case.dtype),
        max_skipped_steps=scenes.MOST_SKIPPED,
        qat=case.qat,
        distributed_optimizer=case.distributed_optimizer,
        recompute=None if case.recompute is None else Recompute(**case.recompute),
        lora=None if case.lora is None else Lora(**case.lora),
    )
    policy = MegatronPolicy(config) if case.qat is None else scenes.make_in_four_bits(config)
    if case.lora is not None:
        draw_factors(policy)
    return policy


def draw_factors(policy: Any) -> None:
    """Give first factors values that don't depend on the layout, as Megatron's own do."""
    from megatron.core.utils import unwrap_model

    tasks = policy.bridge._model_bridge.build_adapter_conversion_tasks(unwrap_model(policy.model))
    for task in (one.linear_in_task for found in tasks.values() for one in found):
        if (part := task.param_weight) is None:
            continue
        mapping, shape = task.mapping, list(part.shape)
        axis = -1 if type(mapping).__name__ == "RowParallelMapping" else -2
        shape[axis] *= mapping.tp_size
        if part.ndim == 3:
            shape[0] *= mapping.ep_size
        generator = torch.Generator().manual_seed(zlib.crc32(task.global_param_name.encode()))
        whole = torch.randn(shape, generator=generator) * 0.2
        if part.ndim == 3:
            whole = whole.chunk(mapping.ep_size)[mapping.ep_rank]
        part.data.copy_(whole.chunk(mapping.tp_size, axis)[mapping.tp_rank])
    policy._optimizer.reload_model_params()


def leave_layout() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def digest(policy: Any) -> str:
    """Of this rank's parameters and of the optimizer's masters, and of the scales of a policy in NVFP4."""
    tensors = [p for chunk in policy.model for p in chunk.parameters()]
    tensors += [p for group in policy._optimizer.param_groups for p in group["params"]]
    tensors += scenes.input_scales(policy)
    return digest_of(tensors)


def exported(policy: Any) -> dict[str, torch.Tensor]:
    """The weights as a Hugging Face checkpoint would hold them, on each rank."""
    tensors = policy.bridge.export_hf_weights(policy.model, cpu=True, show_progress=False)
    return {name: tensor.float().clone() for name, tensor in tensors}


def train_all(cases: dict[str, Case]) -> dict[str, scenes.Report]:
    reports = {}
    for name, case in cases.items():
        more = {"has_reference": case.kl_coef > 0, "trimmed": case.trimmed}
        reports[name] = scenes.train(make_policy(case), case.steps, digest, exported, **more)
        leave_layout()
    return reports


def four_ranks(rank: int, trained: dict[str, Case]) -> dict[str, scenes.Report]:
    """Layouts that two ranks can't have."""
    return train_all(trained)


def two_ranks(
    rank: int, trained: dict[str, Case], resumed: dict[str, Case], other: Case, bad: dict[str, str], root: str
) -> dict[str, Any]:
    """All that needs two ranks; only rank 1's folder of ``bad`` is damaged."""
    from rlrefit.recipes.policy.megatron import _check_takes_parts_of_rows
    from rlrefit.workers.trainers.megatron.hf_checkpoint import CheckpointMismatch
    from rlrefit.workers.trainers.megatron.model import MegatronLayout, build_megatron

    found: dict[str, Any] = {"trained": train_all(trained), "resumed": {}}
    for name, case in resumed.items():
        make = partial(make_policy, case)
        found["resumed"][name] = scenes.resume(make, digest, Path(root) / name, leave_layout)
    first = Path(root) / next(iter(resumed))
    found["other layout"] = scenes.load_fails(make_policy(other), digest, first, leave_layout)
    try:
        build_megatron(bad["bad" if rank == 1 else "good"], MegatronLayout(tensor_parallel=2))
    except CheckpointMismatch as error:
        found["one bad rank"] = str(error)
    build_megatron(other.model_path, MegatronLayout(tensor_parallel=2), wrap_with_ddp=False)
    try:
        build_megatron(other.model_path, MegatronLayout(), wrap_with_ddp=False)
    except ValueError as error:
        found["second layout"] = str(error)
    leave_layout()
    try:
        _check_takes_parts_of_rows([torch.nn.Linear(1, 1)])
    except ValueError as error:
        found["another model"] = str(error)
    return found


def first_steps(model_path: str) -> list[dict[str, float]]:
    """What both trainers report of the same one."""
    policies: tuple[Any, ...] = (make_policy(Case(model_path)), fsdp.make_policy(fsdp.Case(model_path)))
    steps = [policy.train_step(scenes.batch_for(policy)) for policy in policies]
    leave_layout()
    return steps


def one_rank(rank: int, trained: dict[str, Case], tiny: str) -> dict[str, Any]:
    """The same policies on a single rank, and what only a single rank needs; ``tiny`` is a checkpoint of the tiny recipes."""
    from rlrefit.workers.trainers.megatron import cpu_standins
    from tests import loaded_megatron

    reports = train_all(trained)
    cpu_standins.install()
    policy = make_policy(next(iter(trained.values())))
    rejected = []
    for batch in (scenes.plain_batch(), scenes.batch_for(policy)):
        try:
            policy.train_step(replace(batch, loss_mask=batch.loss_mask * 0))
        except ValueError as error:
            rejected.append(str(error))
    try:
        policy.compute_reference_logprobs(scenes.plain_batch())
    except RuntimeError as error:
        rejected.append(str(error))
    try:
        torch.cuda.current_device()
        current_device = True
    except (AssertionError, RuntimeError):
        current_device = False
    changed = {
        "factories": (torch.zeros, torch.tensor) != loaded_megatron.FACTORIES,
        "tensor methods": (torch.Tensor.type, torch.Tensor.cuda) != loaded_megatron.METHODS,
        "modules": any(name.startswith("transformer_engine") for name in sys.modules),
        "current_device outside Megatron": current_device,
        # As Bridge moves a model that was not asked for initialisation on CPUs.
        "a model's device": next(policy.model[0].cuda().parameters()).device.type != "cpu",
    }
    return {
        "trained": reports,
        "first steps": first_steps(tiny),
        "warnings": loaded_megatron.ANNOUNCED,
        "rejected": rejected,
        "changed": changed,
    }
