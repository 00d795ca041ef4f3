"""What the trainer's ranks do: several policies one after another, as starting a rank takes long."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests import policy_scenes as scenes
from tests.digests import digest_of

from .models import STEPS


@dataclass(frozen=True)
class Case:
    """One policy; ``options`` are further fields of its configuration."""

    checkpoint: str
    layout: dict[str, int] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    kl_coef: float = 0.0
    micro_batch: int = 1
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Kept:
    """What one rank keeps of the parameters: elements, and their dtypes."""

    count: int
    dtypes: set[torch.dtype]


def make_policy(case: Case) -> Any:
    from rlrefit.recipes.policy.fsdp import FSDPPolicy, FSDPPolicyConfig
    from rlrefit.workers.trainers.fsdp.model import FSDPLayout

    config = FSDPPolicyConfig(
        case.checkpoint,
        FSDPLayout(**case.layout),
        loss=scenes.loss_config(case.kl_coef),
        optimizer=scenes.ADAM,
        micro_batch=case.micro_batch,
        temperature=scenes.TEMPERATURE,
        dtype=case.dtype,
        max_skipped_steps=scenes.MOST_SKIPPED,
        **case.options,
    )
    return FSDPPolicy(config) if config.qat is None else scenes.make_in_four_bits(config)


def whole_weights(policy: Any) -> dict[str, torch.Tensor]:
    """Every parameter whole, by torch's and transformers' own means; a collective."""
    from transformers.integrations.tensor_parallel import gather_state_dict_for_save

    whole = {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
        for name, tensor in policy.model.state_dict().items()
    }
    size = policy.config.layout.tensor_parallel
    if size > 1:
        # The ranks' own groups of TP stand side by side.
        whole = gather_state_dict_for_save(whole, policy.model.tp_plan, policy.model._device_mesh, size)
    return {name: whole[name].cpu() for name, _ in policy.model.named_parameters()}


def digest(policy: Any) -> str:
    """Of this rank's parameters and of Adam's state, and of the scales of a policy in NVFP4."""
    tensors = [*policy.model.parameters(), *scenes.input_scales(policy)]
    for values in policy._optimizer.state.values():
        tensors += [values[name] for name in sorted(values)]
    return digest_of(t.to_local() if isinstance(t, DTensor) else t for t in tensors)


def everything(
    rank: int,
    trained: dict[str, Case],
    resumed: dict[str, Case],
    other: Case,
    references: tuple[Case, Case],
    routed: Case,
    root: str,
) -> dict[str, Any]:
    """All cases but those of :func:`more`, and what becomes of saved states.

    Args:
        rank: this one.
        trained: to train.
        resumed: to save and resume.
        other: the first of ``resumed`` in another layout.
        references: one with a reference policy, and the same with another one.
        routed: one whose routers transformers keeps in FP32.
        root: folder of all states.
    """
    first, case = next(iter(resumed.items()))
    policies = {name: make_policy(case) for name, case in trained.items()}
    return {
        "kept": {name: _kept(policy) for name, policy in policies.items()},
        "trained": {name: train(policy, trained[name]) for name, policy in policies.items()},
        "resumed": resume_all(resumed, root),
        "other layout": scenes.load_fails(_trained(other), digest, Path(root) / first),
        "cut off": _cut_off(rank, case, Path(root) / first),
        "routers": _routers(routed),
        "unused": _unused(Path(root) / "unused"),
        "references": _references(*references, Path(root) / "references"),
    }


def more(rank: int, trained: dict[str, Case], resumed: dict[str, Case], root: str) -> dict[str, Any]:
    """Further cases to train, and to save and resume."""
    return {
        "trained": {name: train(make_policy(case), case) for name, case in trained.items()},
        "resumed": resume_all(resumed, root),
    }


def _routers(case: Case) -> dict[str, Any]:
    """In what routers compute, and which parameters are not trained."""
    policy, computed = make_policy(case), set()
    for name, module in policy.model.named_modules():
        if name.endswith("gate"):
            module.register_forward_pre_hook(lambda gate, _: computed.add(gate.weight.dtype))
    policy.compute_logprobs(scenes.plain_batch())
    frozen = [name for name, parameter in policy.model.named_parameters() if not parameter.requires_grad]
    return {"computed": computed, "frozen": frozen}


def _references(case: Case, other: Case, folder: Path) -> list[str]:
    """What is said of a state with its own reference policy, with another one, and with none."""
    make_policy(case).save(folder)
    dist.barrier()
    cases = (case, other, replace(other, kl_coef=0.0))
    return [scenes.load_fails(make_policy(each), digest, folder)["text"] for each in cases]


def _unused(folder: Path) -> bool:
    """Whether a state comes back of which one module never had a gradient and another one is frozen."""
    from rlrefit.recipes.policy.state_fsdp import load_sharded, save_sharded

    def make() -> tuple[Any, torch.optim.Optimizer]:
        model = torch.nn.ModuleDict({name: torch.nn.Linear(8, 8) for name in ("used", "unused", "frozen")})
        model["frozen"].requires_grad_(False)
        for module in model.values():
            fully_shard(module)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return model, torch.optim.AdamW(trained, foreach=True)

    (model, optimizer), (other, others) = make(), make()
    model["used"](torch.ones(2, 8)).sum().backward()
    optimizer.step()
    save_sharded(folder, model, optimizer, 0)
    load_sharded(folder, other, others, 0)
    pairs = list(zip(model.parameters(), other.parameters(), strict=True))
    weights = all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)
    steps = [(optimizer.state[a]["step"], others.state[b]["step"]) for a, b in pairs if a.requires_grad]
    return weights and all(a == b for a, b in steps) and [float(a) for a, _ in steps] == [1, 1, 0, 0]


def train(policy: Any, case: Case) -> scenes.Report:
    """Of a policy made by :func:`make_policy`."""
    return scenes.train(
        policy, STEPS, digest, whole_weights, has_reference=case.kl_coef > 0, looks_again=True
    )


def _kept(policy: Any) -> Kept:
    parameters = list(policy.model.parameters())
    return Kept(sum(p.to_local().numel() for p in parameters), {p.dtype for p in parameters})


def resume_all(cases: dict[str, Case], root: str) -> dict[str, dict[str, Any]]:
    return {
        name: scenes.resume(partial(make_policy, case), digest, Path(root) / name)
        for name, case in cases.items()
    }


def _trained(case: Case) -> Any:
    policy = make_policy(case)
    policy.train_step(scenes.batch_for(policy))
    return policy


def _cut_off(rank: int, case: Case, folder: Path) -> dict[str, Any]:
    """A checkpoint of which one rank's shards end early."""
    if rank == 0:
        largest = max((folder / "fsdp").iterdir(), key=lambda path: path.stat().st_size)
        with largest.open("r+b") as file:
            file.truncate(largest.stat().st_size // 2)
    dist.barrier()
    return scenes.load_fails(_trained(case), digest, folder)
